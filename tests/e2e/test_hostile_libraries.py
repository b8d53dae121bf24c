"""Files and processes of a hostile user beside those of another: the daemon starts, answers, and probes the other's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from doubles.doubles import Doubles, build
from e2e_support import Daemon
from hostile import elf_files, mapping, silent_fuse
from long import long
from waiting import until

Attack = Callable[..., subprocess.Popen[Any]]


@pytest.fixture(scope="module")
def doubles(tmp_path_factory: pytest.TempPathFactory) -> Doubles:
    return build(tmp_path_factory.mktemp("doubles"))


@pytest.fixture
def attack() -> Iterator[Attack]:
    """``hostile.mapping.mapping``, ended with the test."""
    started: list[subprocess.Popen[Any]] = []

    def start(*args: Any, **options: Any) -> subprocess.Popen[Any]:
        started.append(mapping.mapping(*args, **options))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def source(daemon: Daemon, name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(s for s in daemon.json("status")["sources"] if s["name"] == name)
    return found


def copied(doubles: Doubles, folder: Path) -> Path:
    """A library of the other user, which nobody has mapped before."""
    folder.mkdir()
    path = folder / doubles.nccl.name
    path.write_bytes(doubles.nccl.read_bytes())
    return path


def losses(daemon: Daemon, where: str) -> list[dict[str, Any]]:
    return daemon.rows(f"SELECT DISTINCT pid, reason FROM probing.losses WHERE stage = 'attach' AND {where}")


@long
def test_a_start_beside_hostile_files(
    make_daemon: Callable[..., Daemon], open_tmp_path: Path, doubles: Doubles, attack: Attack
) -> None:
    """400 refused names, tables without end, and processes that map and unmap without a pause."""
    names = attack(mapping.long_names(open_tmp_path))
    attack([elf_files.many_symbols(open_tmp_path / f"libnccl.so.{n}") for n in range(5)], copies=30)
    attack([elf_files.many_names(open_tmp_path / "libcudart.so.12")], how="loop")
    victim = attack([copied(doubles, open_tmp_path / "first")], user=None)
    daemon = make_daemon().start()
    until(lambda: f"{open_tmp_path}/first/" in source(daemon, "collectives")["detail"], what="the victim's library")
    later = attack([copied(doubles, open_tmp_path / "later")], user=None)
    until(lambda: f"{open_tmp_path}/later/" in source(daemon, "collectives")["detail"], what="a later library")
    assert later.poll() is None
    assert victim.poll() is None
    until(lambda: losses(daemon, f"pid = {names.pid}"), what="the refusals as rows")
    status = daemon.ctl("-f", "json", "status").stdout
    assert "cannot be probed" in status
    assert len(status) < 20_000
    # Parsers that were given up would have been replaced.
    assert len(daemon.children()["probing.daemon.confined.parser"]) <= 3


def test_a_library_on_a_file_system_that_does_not_answer(
    own_daemon: Daemon, open_tmp_path: Path, doubles: Doubles, attack: Attack
) -> None:
    """Its own daemon: a library keeps a parser or a reader busy."""
    silent = open_tmp_path / "silent"
    silent.mkdir()
    server = subprocess.Popen([sys.executable, silent_fuse.__file__, silent], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        hostile = attack([silent / "libnccl.so.2"])
        until(lambda: "FUSE" in (source(own_daemon, "collectives")["reason"] or ""), what="the refusal")
        (row,) = until(lambda: losses(own_daemon, f"pid = {hostile.pid}"), what="its row")
        assert "FUSE" in row["reason"]
        attack([copied(doubles, open_tmp_path / "other")], user=None)
        other = f"{open_tmp_path}/other/"
        until(lambda: other in (source(own_daemon, "collectives")["detail"] or ""), what="another library")
    finally:
        os.kill(server.pid, signal.SIGKILL)
        server.wait()
        if server.stdout is not None:
            server.stdout.close()
        subprocess.run(["umount", "-l", silent], check=False, capture_output=True)
