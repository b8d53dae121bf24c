"""Parsers: what they answer, and what they may not do."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import pytest
from processes_helpers import Listener
from waiting import until

from probing.api.errors import UnsupportedTarget
from probing.daemon.confined.sandbox import landlock_abi
from probing.daemon.elf.symbols import FileSymbols
from probing.daemon.processes import parsers
from probing.daemon.processes.parsers import ParserPool

PATIENCE = 30.0


def symbols_of(parser_pool: ParserPool, path: Path, *patterns: str) -> FileSymbols:
    fd = os.open(path, os.O_RDONLY)
    try:
        return parser_pool.symbols(fd, patterns, timeout=PATIENCE)
    finally:
        os.close(fd)


def libc() -> Path:
    with open("/proc/self/maps") as maps:
        return Path(next(line.split()[5] for line in maps if "/libc.so" in line or "/libc-" in line))


def test_symbols_of_a_library(parser_pool: ParserPool) -> None:
    answer = symbols_of(parser_pool, libc(), "getenv", "no_such_symbol")
    (symbol,) = answer.symbols
    assert symbol.name == "getenv"
    with libc().open("rb") as file:
        file.seek(symbol.file_offset)
        assert file.read(32) == symbol.head
    assert answer.relocated is True


def test_an_answer_is_kept_until_the_file_changes(parser_pool: ParserPool, tmp_path: Path) -> None:
    copy = tmp_path / "copy.so"
    copy.write_bytes(libc().read_bytes())
    first = symbols_of(parser_pool, copy, "getenv")
    assert symbols_of(parser_pool, copy, "getenv") is first
    assert symbols_of(parser_pool, copy, "getpid") is not first
    os.utime(copy, ns=(1, 1))
    assert symbols_of(parser_pool, copy, "getenv") is not first


def test_a_refused_file_is_read_again_later(
    parser_pool: ParserPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, data = tmp_path / "copy.so", libc().read_bytes()

    def write(begin: bytes) -> None:
        copy.write_bytes(begin + data[len(begin) :])
        os.utime(copy, ns=(1, 1))

    # A file of a server that failed for a moment has the same size and time later.
    write(b"damaged")
    with pytest.raises(UnsupportedTarget):
        symbols_of(parser_pool, copy, "getenv")
    write(b"")
    with pytest.raises(UnsupportedTarget):
        symbols_of(parser_pool, copy, "getenv")
    monkeypatch.setattr(parsers, "REFUSED_S", 0.0)
    write(b"damaged")
    with pytest.raises(UnsupportedTarget):
        symbols_of(parser_pool, copy, "getpid")
    write(b"")
    assert [symbol.name for symbol in symbols_of(parser_pool, copy, "getpid").symbols] == ["getpid"]


def test_files_that_make_no_sense(parser_pool: ParserPool, tmp_path: Path) -> None:
    good = libc().read_bytes()
    for number, data in enumerate(
        (b"", b"#!/bin/sh\n", good[:100], good[: len(good) // 2], good[:64] + os.urandom(5000))
    ):
        bad = tmp_path / str(number)
        bad.write_bytes(data)
        with pytest.raises(UnsupportedTarget):
            symbols_of(parser_pool, bad, "getenv")
    # The same parser goes on.
    assert symbols_of(parser_pool, libc(), "getenv").symbols


def test_it_gave_up_its_rights(parser_listener: Listener, parser_pool: ParserPool) -> None:
    symbols_of(parser_pool, libc(), "getenv")
    (process,) = parser_listener.processes
    status = Path(f"/proc/{process.pid}/status").read_text()
    assert "NoNewPrivs:\t1" in status
    assert resource.prlimit(process.pid, resource.RLIMIT_AS)[1] == 3 << 30
    assert resource.prlimit(process.pid, resource.RLIMIT_FSIZE)[1] == 0


def test_landlock_leaves_it_no_files(tmp_path: Path) -> None:
    if landlock_abi() < 1:
        pytest.skip("the kernel has no Landlock")
    secret = tmp_path / "secret"
    secret.write_text("x")
    program = (
        "import sys; from probing.daemon.confined.sandbox import confine; confine(());\n"
        "try: open(sys.argv[1])\n"
        "except PermissionError: sys.exit(7)"
    )
    assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", program, str(secret)]) == 7


def test_it_ends_with_its_connection(parser_listener: Listener, parser_pool: ParserPool) -> None:
    symbols_of(parser_pool, libc(), "getenv")
    parser_pool.close()
    assert until(lambda: parser_listener.processes[0].poll() is not None)
    assert parser_listener.processes[0].wait(10) == 0
