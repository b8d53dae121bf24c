"""Files that cost a parser time: each ends at a bound of work, in the same parser, which then serves the next."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hostile import dwarf_files, elf_files, flight_dumps
from processes_helpers import Listener
from waiting import until

from probing.api.errors import CorruptTarget, InternalError, UnsupportedTarget
from probing.daemon.nccl_uprobes.flight_recorder import dump as flight_dump
from probing.daemon.processes.parsers import PARSERS, ParserPool
from probing.diagnosis.flight_recorder.dump import load_dump

PATIENCE = 60.0


def _peak_kb(pid: int) -> int:
    """The most resident memory that a process ever had."""
    return int(Path(f"/proc/{pid}/status").read_text().split("VmHWM:")[1].split()[0])


@pytest.mark.parametrize("make", [elf_files.many_symbols, elf_files.many_names, elf_files.many_tables])
def test_a_small_file_with_endless_tables_is_refused(
    make: Callable[[Path], Path], parser_pool: ParserPool, parser_listener: Listener, tmp_path: Path
) -> None:
    with make(tmp_path / "libnccl.so.2").open("rb") as file:
        assert os.fstat(file.fileno()).st_blocks * 512 < 32 << 20
        with pytest.raises(UnsupportedTarget):
            parser_pool.symbols(file.fileno(), ["ncclAllReduce", "ncclBroadcast*"], timeout=PATIENCE)
    (parser,) = parser_listener.processes
    assert parser.poll() is None
    assert _peak_kb(parser.pid) < 300_000


@pytest.mark.parametrize("make", [flight_dumps.repeated_values, flight_dumps.one_entry_often, flight_dumps.many_groups])
def test_a_dump_that_repeats_itself_costs_what_it_holds(
    make: Callable[[Path], Path], parser_pool: ParserPool, parser_listener: Listener, tmp_path: Path
) -> None:
    with make(tmp_path / "dump").open("rb") as file:
        found = parser_pool.call("flight_dump", fds=[file.fileno()], timeout=PATIENCE)
    assert found["version"] == "2.4"
    assert found["world_size"] is None
    (parser,) = parser_listener.processes
    assert parser.poll() is None


def test_a_refused_file_is_not_parsed_again(parser_pool: ParserPool, tmp_path: Path) -> None:
    with elf_files.many_symbols(tmp_path / "libnccl.so.2", rows=1 << 20).open("rb") as file:
        for _ in range(2):
            with pytest.raises(UnsupportedTarget):
                parser_pool.symbols(file.fileno(), ["ncclAllReduce"], timeout=PATIENCE)
            parser_pool.close()
        os.utime(file.fileno(), ns=(1, 1))
        with pytest.raises(InternalError):
            parser_pool.symbols(file.fileno(), ["ncclAllReduce"], timeout=PATIENCE)


def test_a_parser_for_rare_files_ends_when_it_is_idle(parser_listener: Listener) -> None:
    made = ParserPool(parser_listener.path, PARSERS._replace(kept=0, idle_s=0.1))
    try:
        for number in (1, 2):
            with pytest.raises(CorruptTarget):
                made.call("ras_report", b"{}", form="json", timeout=PATIENCE)
            assert len(parser_listener.processes) == number
            assert until(lambda number=number: parser_listener.processes[number - 1].poll() is not None)
    finally:
        made.close()


def test_what_is_made_of_a_repeated_value_is_made_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made: list[int] = []
    shown = flight_dump._json
    monkeypatch.setattr(flight_dump, "_json", lambda items: made.append(len(items)) or shown(items))
    found = flight_dump.dump_rows(load_dump(flight_dumps.repeated_values(tmp_path / "dump").read_bytes()))
    assert len(found["rows"]) > 500
    assert sorted(made) == [64, 256, 256]


@pytest.mark.parametrize(
    "make",
    [
        dwarf_files.compressed_zeros,
        dwarf_files.siblings_in_a_circle,
        dwarf_files.structs_in_structs,
        dwarf_files.tables_in_tables,
        dwarf_files.types_in_a_circle,
    ],
)
def test_hostile_debugging_information_gives_no_layout(
    make: Callable[[Path], Path], parser_pool: ParserPool, parser_listener: Listener, tmp_path: Path
) -> None:
    with make(tmp_path / "libnccl.so.2").open("rb") as file:
        found = parser_pool.call("nccl_layout", fds=[file.fileno()], timeout=PATIENCE, known=[])
    assert (found["comm"], found["info"]) == (None, None)
    assert found["why"]
    (parser,) = parser_listener.processes
    assert parser.poll() is None
    assert _peak_kb(parser.pid) < 700_000
