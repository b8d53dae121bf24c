"""What gloo's probes expect of torch, against the published wheels that ``packaging/dev/torch-wheels.sh`` fetched."""

from __future__ import annotations

import os
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from probing.daemon.elf.symbols import Symbol, find_symbols
from probing.daemon.nccl_uprobes.layouts.gloo import GLOO_LAYOUTS, UNKNOWN_BUILD, gloo_layout_index
from probing.daemon.nccl_uprobes.layouts.make_gloo import offsets_of
from probing.daemon.nccl_uprobes.operations.symbols import GLOO
from probing.daemon.nccl_uprobes.records import names

WHEELS = Path(__file__).parents[2] / ".build" / "wheels"
FOUND = sorted(WHEELS.glob("torch-*"))
NEEDED = ("torch-2.12.1", "torch-2.14.0", "torch-2.14.1", "torch-2.15.0")
# What a build may do without: the names of before and since 2.14, and what came with 2.12.
RENAMED = [
    ("31allgather_into_tensor_coalescedE", "27all_gather_single_coalescedE"),
    ("31reduce_scatter_tensor_coalescedE", "31reduce_scatter_single_coalescedE"),
    ("13alltoall_baseE", "17all_to_all_singleE"),
]
CAME = "8alltoallE"


@cache
def symbols_of(wheel: Path) -> tuple[Symbol, ...]:
    fd = os.open(wheel / "lib" / "libtorch_cpu.so", os.O_RDONLY)
    try:
        return tuple(find_symbols(fd, [*GLOO.patterns, *GLOO.marks]))
    finally:
        os.close(fd)


def test_the_wheels_are_here() -> None:
    assert set(NEEDED) <= {wheel.name for wheel in FOUND}


@pytest.mark.parametrize("wheel", FOUND, ids=lambda wheel: wheel.name)
def test_every_function_has_its_program(wheel: Path) -> None:
    placements = GLOO.placements(symbols_of(wheel))
    found = Counter(placement.program for placement in placements)
    assert set(found) == {probe.program for probe in GLOO.probes} - _absent(wheel)
    names = [placement.symbol for placement in placements]
    for names_of_one in RENAMED:
        assert sum(any(name in symbol for symbol in names) for name in names_of_one) == 1
    # A class has two constructors, for itself and as a base; they may share their address.
    for program in ("gloo_work", "gloo_send_work", "gloo_recv_work"):
        assert 1 <= found[program] <= 2
    for program in ("gloo_broadcast", "gloo_reduce", "gloo_gather", "gloo_scatter", "gloo_barrier", "gloo_execute"):
        assert found[program] == 1


def _absent(wheel: Path) -> set[str]:
    return set() if any(CAME in symbol.name for symbol in symbols_of(wheel)) else {"gloo_alltoall"}


@pytest.mark.parametrize("wheel", FOUND, ids=lambda wheel: wheel.name)
def test_the_layout_is_that_of_the_headers_or_none(wheel: Path) -> None:
    index = gloo_layout_index(symbol.name for symbol in symbols_of(wheel))
    shipped = GLOO_LAYOUTS[index]
    assert shipped in (UNKNOWN_BUILD, offsets_of(wheel))
    assert shipped != UNKNOWN_BUILD or wheel.name not in NEEDED


@pytest.mark.parametrize("wheel", FOUND, ids=lambda wheel: wheel.name)
def test_numbers_are_those_of_the_headers(wheel: Path) -> None:
    types = (wheel / "include/torch/headeronly/core/ScalarType.h").read_text()
    numbers = sorted(int(number) for number in re.findall(r", \w+\) /\* (\d+) \*/", types))
    assert numbers == list(range(len(numbers)))
    assert len(numbers) <= len(names.DTYPES)
    assert len(numbers) == len(names.DTYPES) or wheel.name != NEEDED[-1]
    body = re.search(r"enum class OpType[^{]*{([^}]*)}", _header(wheel, "Work.hpp"))
    assert body
    operations = {name.lower(): int(number) for name, number in re.findall(r"(\w+) = (\d+)", body[1])}
    found = {name: names.codes("op")[names.GLOO * 256 + number] for name, number in operations.items()}
    # What stands for several calls, or for none.
    unnamed = {name for name, index in found.items() if index < 0}
    assert unnamed <= {"coalesced", "unknown"}
    for name in ("broadcast", "reduce", "gather", "scatter", "send", "recv", "barrier"):
        assert names.OPS[found[name]] == name


def _header(wheel: Path, name: str) -> str:
    return (wheel / "include/torch/csrc/distributed/c10d" / name).read_text()
