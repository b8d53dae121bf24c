"""Placements of probes from the stable parts of symbol names, and gloo layouts from headers."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import pytest
from long import long

from probing.api.errors import NotFound, UnsupportedTarget
from probing.daemon.nccl_uprobes.layouts.gloo import ABSENT, GLOO_LAYOUTS, UNKNOWN_BUILD, GlooLayout, gloo_layout_index
from probing.daemon.nccl_uprobes.layouts.make_gloo import offsets_of, parse
from probing.daemon.nccl_uprobes.operations.symbols import GLOO, NCCL, library_of


@dataclass(frozen=True)
class Symbol:
    name: str
    address: int
    file_offset: int | None
    size: int = 64
    head: bytes = b"\x55" * 32


def gloo_symbols() -> list[Symbol]:
    names = [probe.pattern.replace("*", "x") for probe in GLOO.probes]
    return [Symbol(name, 4096 * number, 100 * number) for number, name in enumerate(names, 1)]


def test_probes_on_ends_are_attached_before_those_on_begins() -> None:
    placements = GLOO.placements(reversed(gloo_symbols()))
    order = [placement.program for placement in placements]
    assert order.index("gloo_finish") < order.index("gloo_execute") < order.index("gloo_work")
    assert order.index("gloo_work") < min(order.index(call) for call in ("gloo_allreduce", "gloo_barrier"))
    assert len({placement.slot for placement in placements}) == len(GLOO.probes)


def test_aliases_of_one_address_get_one_probe() -> None:
    symbols = nccl_symbols(internal=False)
    symbols.append(Symbol("ncclReduce", 10, 10))
    places = [(placement.offset, placement.on_return) for placement in NCCL.placements(symbols)]
    assert len(places) == len(set(places)) == len(NCCL.probes) - 1


def nccl_symbols(internal: bool) -> list[Symbol]:
    names = sorted({probe.pattern for probe in NCCL.probes if internal or probe.program != "nccl_enqueue"})
    return [Symbol(name, 10 * n, 10 * n) for n, name in enumerate(names, 1)]


def test_operations_are_seen_in_one_place() -> None:
    """ncclEnqueueCheck is probed if its symbol exists, else the public functions; never both."""
    public = {probe.program for probe in NCCL.probes if probe.unless}
    assert public == {"nccl_call"}
    for internal in (True, False):
        placed = {placement.program for placement in NCCL.placements(nccl_symbols(internal))}
        assert ("nccl_enqueue" in placed) is internal
        assert (public & placed) == (set() if internal else public)
        assert {"nccl_group_end", "nccl_made", "nccl_abort"} < placed


def test_an_internal_function_that_is_not_in_the_file_replaces_nothing() -> None:
    symbols = [*nccl_symbols(internal=False), Symbol("_Z16ncclEnqueueCheckP8ncclInfo", 7, None)]
    assert "nccl_call" in {placement.program for placement in NCCL.placements(symbols)}


def test_calls_with_a_configuration_are_probed_as_those_without() -> None:
    symbols = [*nccl_symbols(internal=False), Symbol("ncclReduceConfig", 5, 5), Symbol("ncclSendConfigure", 6, 6)]
    calls = {p.symbol: p for p in NCCL.placements(symbols) if p.program == "nccl_call"}
    assert len(calls) == 11
    plain, configured = calls["ncclReduce"], calls["ncclReduceConfig"]
    assert (plain.slot, plain.operation) == (configured.slot, configured.operation)
    assert plain.operation == 1
    assert len({call.operation for call in calls.values()}) == 10


def test_returns_are_placed_before_their_entries() -> None:
    order = [placement.program for placement in NCCL.placements(nccl_symbols(internal=True))]
    assert order.index("nccl_made") < order.index("nccl_init_rank")
    assert order.index("nccl_async_error_reported") < order.index("nccl_async_error")


def test_probes_of_both_libraries_have_slots_of_their_own() -> None:
    gloo, nccl = (set(library.slots) for library in (GLOO, NCCL))
    assert not gloo & nccl
    assert gloo | nccl <= set(range(64, 128))


def test_a_library_without_a_needed_function_is_not_attached() -> None:
    symbols = [symbol for symbol in gloo_symbols() if "finishWorkGlooEv" not in symbol.name]
    with pytest.raises(UnsupportedTarget, match="finishWorkGloo"):
        GLOO.placements(symbols)


def test_a_function_that_is_not_in_the_file_gets_no_probe() -> None:
    symbols = [*gloo_symbols(), Symbol(GLOO.probes[0].pattern + "", 1, None)]
    assert all(placement.offset > 0 for placement in GLOO.placements(symbols))


@pytest.mark.parametrize(
    ("path", "library"),
    [
        (b"/x/torch/lib/libtorch_cpu.so", GLOO),
        (b"/x/nvidia/nccl/lib/libnccl.so.2", NCCL),
        (b"/usr/lib/libnccl.so.2.28.9", NCCL),
        (b"libnccl.so.2 (deleted)", NCCL),
        (b"/x/libnccl.so.2/libother.so", None),
        (b"/x/libtorch_python.so", None),
        (b"", None),
        (b"/x/\xff\xfe", None),
    ],
)
def test_libraries_are_known_by_their_names(path: bytes, library: object) -> None:
    assert library_of(path) is library


def test_the_layout_of_an_unknown_build_is_empty() -> None:
    marks = ["_ZN4c10d16ProcessGroupGloo5splitERKN3c10", "_ZN4c10d16ProcessGroupGloo5mergeERKN3c10"]
    assert GLOO_LAYOUTS[gloo_layout_index(marks)] != UNKNOWN_BUILD
    assert GLOO_LAYOUTS[gloo_layout_index(marks[:1])] == UNKNOWN_BUILD
    older = GLOO_LAYOUTS[gloo_layout_index([*marks, "_ZN2at4impl9has_namesEPKN3c1010TensorImplE"])]
    newer = GLOO_LAYOUTS[gloo_layout_index(marks)]
    assert (older.tensor_numel - newer.tensor_numel, older.backend_uid - newer.backend_uid) == (8, 0)
    assert UNKNOWN_BUILD.pack()[:4] == b"\x01\x00\xff\xff"


DUMP = """
*** Dumping AST Record Layout
         0 | class c10d::Backend
         0 |   class torch::CustomClassHolder (primary base)
        16 |   const int rank_
        20 |   const int size_
        32 |   class std::basic_string<char> pg_uid_
        40 |     std::basic_string<char>::size_type _M_string_length
           | [sizeof=136, dsize=132, align=8,
*** Dumping AST Record Layout
         0 | struct c10::TensorImpl
       152 |   int64_t numel_
   165:0-0 |   _Bool is_contiguous_
"""


def test_a_dump_of_the_compiler_gives_offsets() -> None:
    found = parse(DUMP)
    assert (found.backend_rank, found.backend_size, found.backend_uid, found.tensor_numel) == (16, 20, 32, 152)
    assert (found.backend_desc, found.barrier_async) == (ABSENT, ABSENT)
    assert parse("") == GlooLayout()


@long
def test_the_table_agrees_with_the_headers_of_this_torch() -> None:
    """The compiler takes long for them; the tests of operations of gloo read the fields of this torch."""
    spec = importlib.util.find_spec("torch")
    assert spec
    assert spec.origin
    assert offsets_of(Path(spec.origin).parent) in GLOO_LAYOUTS[1:]


def test_missing_headers_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(NotFound) as caught:
        offsets_of(tmp_path)
    assert "error" in caught.value.hint


def test_the_programs_read_all_fields_of_a_group_and_of_a_tensor_at_once() -> None:
    """GROUP_BYTES and TENSOR_BYTES of collectives.bpf.h."""
    for layout in GLOO_LAYOUTS:
        if layout == UNKNOWN_BUILD:
            continue
        group = [layout.backend_size, layout.backend_uid + 32, layout.backend_desc + 32]
        assert layout.backend_size == layout.backend_rank + 4
        assert max(group) - layout.backend_rank <= 96
        tensor = [layout.tensor_numel + 8, layout.tensor_dtype + 8]
        assert layout.tensor_sizes < min(tensor)
        assert max(tensor) - layout.tensor_sizes <= 112
        assert not {(offset - layout.tensor_sizes) % 8 for offset in (layout.tensor_numel, layout.tensor_dtype)} - {0}
