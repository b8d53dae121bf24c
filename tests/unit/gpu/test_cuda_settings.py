"""Changed settings of the CUDA source: which libraries get the probes of a group that is wanted now."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fakes import Processes, Readers, Sink

from probing.api.errors import CorruptTarget
from probing.daemon.clock import FakeClock
from probing.daemon.config import CudaConfig
from probing.daemon.elf.symbols import Symbol
from probing.daemon.gpu.cuda.rows import COUNTS
from probing.daemon.gpu.cuda.source import CudaSource

PUSH = bytes.fromhex("554889e5415641554154534881eca000")


class Settings:
    """The map of the settings."""

    def update(self, key: int, value: Any) -> None:
        assert (key, len(value)) == (0, 3)


class Session:
    """A session that attaches to any file. ``probed``: the programs of each file."""

    features = SimpleNamespace(uprobe_multi=True)

    def __init__(self) -> None:
        self.maps = {"cuda_settings": Settings(), COUNTS: None}
        self.probed: dict[int, set[str]] = {}

    def identity(self, fd: int) -> tuple[int, int]:
        found = os.fstat(fd)
        return found.st_dev, found.st_ino

    def attach_uprobe(self, program: str, fd: int, *_: Any, **__: Any) -> Any:
        self.probed.setdefault(os.fstat(fd).st_ino, set()).add(program)
        return SimpleNamespace(adopted=False)

    def detach(self, link: Any) -> None:
        raise AssertionError(link)


def symbols(fd: int, patterns: Sequence[str]) -> list[Symbol]:
    if os.pread(fd, 7, 0) == b"spoiled":
        raise CorruptTarget("it is no library any more")
    found = [
        SimpleNamespace(name=name, address=0x1000 * n, file_offset=0x1000 * n, size=100, head=PUSH)
        for n, name in enumerate(patterns, 1)
    ]
    return cast("list[Symbol]", found)


def test_a_library_that_its_owner_spoils_keeps_no_other_from_its_probes(tmp_path: Path) -> None:
    session = Session()
    config = CudaConfig(memory=False)
    made = (session, Processes(), "node", symbols, Sink(), Readers(), FakeClock(), config)
    source = CudaSource(*cast("Any", made))
    files = [tmp_path / f"libcudart.so.{number}" for number in range(3)]
    for file in files:
        file.write_text("a library")
        with file.open("rb") as opened:
            assert source.attach(opened.fileno(), str(file).encode()) > 0
    files[0].write_text("spoiled")
    with pytest.raises(CorruptTarget):
        source.configure(config._replace(launches=True))
    launches = ["cuda_launch" in session.probed[file.stat().st_ino] for file in files]
    assert launches == [False, True, True]
    source.stop()
