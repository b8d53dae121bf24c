"""Builds of NCCL that the table lacks, through a real parser as the collector has it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from waiting import until

from probing.api.errors import UnsupportedTarget
from probing.daemon.nccl_uprobes.layouts.finder import LayoutFinder
from probing.daemon.nccl_uprobes.layouts.nccl import ABSENT, NCCL_LAYOUTS
from probing.daemon.processes.parsers import ParserPool

PATIENCE = 60.0
SOURCE = r"""
struct ncclComm {
    unsigned long startMagic, pad[SIZE], commHash;
    int rank, nRanks, cudaDev, nvmlDev;
    int node, nNodes;
    unsigned *abortFlag;
    unsigned long endMagic;
} the_comm;
"""


class Map:
    def __init__(self) -> None:
        self.values: dict[int, bytes] = {}

    def lookup(self, _: int) -> None:
        """As after a boot: no daemon before has written anything."""

    def update(self, key: int, value: bytes) -> None:
        self.values[key] = value


def library(folder: Path, size: int, *flags: str) -> Path:
    source, path = folder / "library.c", folder / f"libnccl-{size}.so"
    source.write_text(SOURCE)
    command = ["cc", f"-DSIZE={size}", "-shared", "-fPIC", "-Wl,--build-id=sha1", *flags, "-o", path, source]
    subprocess.run(command, check=True)
    return path


def attach(finder: LayoutFinder, path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        finder.attach(fd)
    finally:
        os.close(fd)


def test_an_unknown_build_is_added_and_kept(parser_pool: ParserPool, tmp_path: Path) -> None:
    layouts, cache = Map(), tmp_path / "layouts.json"
    finder = LayoutFinder(parser_pool, layouts, cache)
    finder.start()
    try:
        attach(finder, library(tmp_path, 100, "-g"))
        until(lambda: finder.added)
        attach(finder, library(tmp_path, 50))
        attach(finder, Path(__file__))
        until(lambda: len(finder.reasons) == 2)
    finally:
        finder.stop()
    (layout,) = finder.added
    assert (layout.comm_hash, layout.node, layout.nnodes, layout.abort_flag) == (808, 832, 836, 840)
    assert (layout.end_magic, layout.bus_id) == (848, ABSENT)
    assert layouts.values[len(NCCL_LAYOUTS)] == layout.pack()
    stripped, no_library = finder.reasons.values()
    assert "unknown and stripped" in stripped
    assert "not a 64-bit" in no_library
    again = LayoutFinder(parser_pool, Map(), cache)
    again.start()
    again.stop()
    assert again.added == finder.added


def test_the_pool_passes_answers_and_refusals(parser_pool: ParserPool, tmp_path: Path) -> None:
    with library(tmp_path, 10, "-g").open("rb") as file:
        found = parser_pool.call("nccl_layout", fds=[file.fileno()], timeout=PATIENCE, known=[])
        assert found["comm"]["comm_hash"] == 88
        known = [found["build_id"]]
        assert parser_pool.call("nccl_layout", fds=[file.fileno()], timeout=PATIENCE, known=known)["known"] is True
    with open(__file__, "rb") as text, pytest.raises(UnsupportedTarget):
        parser_pool.call("nccl_layout", fds=[text.fileno()], timeout=PATIENCE, known=[])
