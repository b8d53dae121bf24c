"""A file system that carried a probed library can be unmounted when the last process that used it has ended."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from doubles.doubles import Doubles, build
from e2e_support import Daemon
from long import long
from waiting import until

# What maps the libraries, in their order, and stays until its input ends.
USER = "import ctypes, sys; [ctypes.CDLL(path) for path in sys.argv[1:]]; print('mapped', flush=True); sys.stdin.read()"
User = subprocess.Popen[Any]


@pytest.fixture(scope="module")
def doubles(tmp_path_factory: pytest.TempPathFactory) -> Doubles:
    return build(tmp_path_factory.mktemp("doubles"))


@pytest.fixture
def disk(open_tmp_path: Path) -> Iterator[Path]:
    """A file system of its own; what is still mounted at the end goes lazily."""
    mount = open_tmp_path / "disk"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=0755", "disk", mount], check=True)
    yield mount
    subprocess.run(["umount", "--lazy", mount], check=False, capture_output=True)


@pytest.fixture
def use(run_job: Callable[..., User]) -> Callable[..., User]:
    def start(*libraries: Path) -> User:
        argv = ("/usr/bin/env", "python3", "-c", USER, *libraries)
        user = run_job(*argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert user.stdout is not None
        assert user.stdout.readline() == b"mapped\n"
        return user

    return start


def copied(doubles: Doubles, disk: Path, number: int = 0) -> list[Path]:
    """Copies of both doubles; libcudart first, since libnccl needs it."""
    folder = disk / str(number)
    folder.mkdir()
    libraries = [folder / doubles.cudart.name, folder / doubles.nccl.name]
    for library, source in zip(libraries, (doubles.cudart, doubles.nccl), strict=True):
        library.write_bytes(source.read_bytes())
        library.chmod(0o755)
    return libraries


def probed(daemon: Daemon, folder: Path) -> int:
    """How many files below ``folder`` are probed for collectives."""
    sources = {source["name"]: source for source in daemon.json("status")["sources"]}
    return str(sources["collectives"]["detail"]).count(f"{folder}/")


def unmounted(disk: Path) -> bool:
    return subprocess.run(["umount", disk], capture_output=True).returncode == 0


def test_after_the_last_process(own_daemon: Daemon, doubles: Doubles, disk: Path, use: Callable[..., User]) -> None:
    """Its own daemon: it counts the files that are probed."""
    first, second = use(*copied(doubles, disk)), use(*copied(doubles, disk, 1))
    until(lambda: probed(own_daemon, disk) == 4, what="probes on both copies")
    for user in (first, second):
        assert not unmounted(disk)
        user.kill()
        user.wait()
    until(lambda: unmounted(disk), what="the file system to be free", poll_s=0.1)
    assert own_daemon.json("status")["state"] == "running"


@long
def test_a_child_that_was_forked_keeps_the_probes(
    own_daemon: Daemon, doubles: Doubles, disk: Path, use: Callable[..., User], run_job: Callable[..., User]
) -> None:
    """It maps what its parent mapped, and nothing says so. Its own daemon: it counts the files that are probed."""
    # Each line in one write: both processes share the pipe.
    program = "import ctypes, os, signal, sys; ctypes.CDLL(sys.argv[1]); "
    program += r"os.write(1, b'%d\n' % os.fork()); signal.pause()"
    (library, _) = copied(doubles, disk)
    parent = run_job("/usr/bin/env", "python3", "-c", program, library, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    child = max(int(parent.stdout.readline()) for _ in range(2))
    try:
        until(lambda: probed(own_daemon, disk) == 1, what="probes")
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
        # One that was used later is let go: all processes were looked at since.
        later = use(copied(doubles, disk, 1)[0])
        until(lambda: probed(own_daemon, disk / "1") == 1, what="probes on the later copy")
        later.kill()
        later.wait()
        until(lambda: probed(own_daemon, disk / "1") == 0, what="the later copy to be let go")
        assert probed(own_daemon, disk / "0") == 1
    finally:
        os.kill(child, signal.SIGKILL)
    until(lambda: unmounted(disk), what="the file system to be free", poll_s=0.1)


@long
def test_after_a_restart(
    make_daemon: Callable[..., Daemon], doubles: Doubles, disk: Path, use: Callable[..., User]
) -> None:
    daemon = make_daemon().start()
    ended, stays = use(*copied(doubles, disk)), use(doubles.cudart, doubles.nccl)
    until(lambda: probed(daemon, disk) == 2 == probed(daemon, doubles.folder), what="probes")
    # The pins stay, as with `probingd restart`.
    daemon.stop(signal.SIGUSR1)
    ended.kill()
    ended.wait()
    assert not unmounted(disk)
    daemon.start()
    until(lambda: unmounted(disk), what="the file system to be free", poll_s=0.1)
    assert probed(daemon, doubles.folder) == 2
    assert stays.poll() is None
