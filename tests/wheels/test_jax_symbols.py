"""What the probes of JAX's gloo expect, against the published wheels that ``packaging/dev/jax-wheels.sh`` fetched."""

from __future__ import annotations

import os
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from probing.api.errors import UnsupportedTarget
from probing.daemon.elf.symbols import Symbol, find_symbols
from probing.daemon.nccl_uprobes.operations.symbols import JAX

WHEELS = Path(__file__).parents[2] / ".build" / "wheels"
FOUND = sorted(WHEELS.glob("jaxlib-*"))
# Before 0.5 the class has another name, and before 0.6.2 all_to_all takes other arguments.
UNKNOWN = ("jaxlib-0.4.38",)
WITHOUT_ALL_TO_ALL = ("jaxlib-0.5.3", "jaxlib-0.6.0")
NEEDED = {
    "jaxlib-0.10.2",
    "jaxlib-0.9.2",
    "jaxlib-0.8.3",
    "jaxlib-0.7.2",
    "jaxlib-0.6.2",
    *UNKNOWN,
    *WITHOUT_ALL_TO_ALL,
}
known = pytest.mark.parametrize(
    "wheel", [wheel for wheel in FOUND if wheel.name not in UNKNOWN], ids=lambda wheel: wheel.name
)


def library(wheel: Path) -> Path:
    """The library with the collectives: the largest."""
    return max(wheel.glob("*.so"), key=lambda path: path.stat().st_size)


def symbols_of(wheel: Path) -> list[Symbol]:
    fd = os.open(library(wheel), os.O_RDONLY)
    try:
        return list(find_symbols(fd, JAX.patterns))
    finally:
        os.close(fd)


def code_of(wheel: Path, symbol: Symbol) -> str:
    """The instructions of a function."""
    place = f"--start-address={symbol.address}", f"--stop-address={symbol.address + symbol.size}"
    command = ["objdump", "-d", "-M", "intel", "--no-show-raw-insn", *place, library(wheel)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_the_wheels_are_here() -> None:
    assert {wheel.name for wheel in FOUND} >= NEEDED


@known
def test_every_function_has_its_program(wheel: Path) -> None:
    placements = JAX.placements(symbols_of(wheel))
    calls = 4 if wheel.name in WITHOUT_ALL_TO_ALL else 5
    assert Counter(placement.program for placement in placements) == {
        "jax_done": calls,
        "jax_call": calls,
        "jax_create": 1,
        "jax_created": 1,
        "jax_communicator": 1,
    }
    assert {placement.cost for placement in placements} == {"cheap"}


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_build_that_is_not_known_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedTarget, match="has no function"):
        JAX.placements(symbols_of(WHEELS / name))


@known
def test_arguments_and_fields_are_where_the_programs_read_them(wheel: Path) -> None:
    by_name = {symbol.name: symbol for symbol in symbols_of(wheel)}
    made = next(code_of(wheel, one) for name, one in by_name.items() if "CommunicatorC2" in name)
    assert re.search(r"mov +QWORD PTR \[rdi\+0x18\],rdx\n.*mov +QWORD PTR \[rdi\+0x20\],rcx\n", made)
    call = next(code_of(wheel, one) for name, one in by_name.items() if "9AllReduce" in name)
    entry = call[: call.index("call ")]
    # The result, this, the type, the count and the reduction are kept; the executor is passed on.
    for register in ("rdi", "rsi", "edx", "rcx", "r8d"):
        assert re.search(rf"mov +(?:r\w+|QWORD PTR \[rbp-0x\w+\]|DWORD PTR \[rbp-0x\w+\]),{register}\n", entry), (
            register
        )
    assert re.search(r"mov +rsi,r9\n", entry)
