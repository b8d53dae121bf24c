"""Files that cost a parser time: each ends at a bound of work, in the same parser, which then serves the next."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hostile import elf_files
from processes_helpers import Listener, listening

from probing.api.errors import InternalError, UnsupportedTarget
from probing.daemon.processes.pool import ParserPool

PATIENCE = 60.0


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[Listener]:
    with listening(tmp_path / "parser.sock", "probing.daemon.parser") as made:
        yield made


@pytest.fixture
def pool(listener: Listener) -> Iterator[ParserPool]:
    made = ParserPool(listener.path)
    yield made
    made.close()


@pytest.mark.parametrize("make", [elf_files.many_symbols, elf_files.many_names, elf_files.many_tables])
def test_a_small_file_with_endless_tables_is_refused(
    make: Callable[[Path], Path], pool: ParserPool, listener: Listener, tmp_path: Path
) -> None:
    with make(tmp_path / "libnccl.so.2").open("rb") as file:
        assert os.fstat(file.fileno()).st_blocks * 512 < 32 << 20
        with pytest.raises(UnsupportedTarget):
            pool.symbols(file.fileno(), ["ncclAllReduce", "ncclBroadcast*"], timeout=PATIENCE)
    (parser,) = listener.processes
    assert parser.poll() is None
    memory = Path(f"/proc/{parser.pid}/status").read_text().split("VmHWM:")[1].split()[0]
    assert int(memory) < 300_000


def test_a_refused_file_is_not_parsed_again(pool: ParserPool, tmp_path: Path) -> None:
    with elf_files.many_symbols(tmp_path / "libnccl.so.2", rows=1 << 20).open("rb") as file:
        for _ in range(2):
            with pytest.raises(UnsupportedTarget):
                pool.symbols(file.fileno(), ["ncclAllReduce"], timeout=PATIENCE)
            pool.close()
        os.utime(file.fileno(), ns=(1, 1))
        with pytest.raises(InternalError):
            pool.symbols(file.fileno(), ["ncclAllReduce"], timeout=PATIENCE)
