"""What /proc says of processes, whose names and environments are hostile; and signals that reach the right process."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting import until

from probing.launcher import spawn
from probing.launcher.processes import Clock, Handle, Mark, Stat, mark_in, mark_of, send, stat_of, stats
from probing.launcher.shim import NOT_RECORDED


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "1009"], env={"PROBING_GROUP": "g/7", "RANK": "3", "X": "RANK=5"}) as started:
        yield started
        started.kill()


@pytest.mark.parametrize(
    ("environ", "mark"),
    [
        (b"", None),
        (b"A=1\0PROBING_GROUP=g/7\0RANK=3\0PROBING_WORKER=n1-0\0", Mark("g", 7, 3, "n1-0")),
        (b"PROBING_GROUP=g/7", Mark("g", 7, None, "")),
        (b"PROBING_GROUP=a/b/7\0RANK=x", Mark("a/b", 7, None, "")),
        (b"PROBING_GROUP=g/7\0PROBING_GROUP=h/8", Mark("g", 7, None, "")),
        (b"XPROBING_GROUP=g/7", None),
        (b"PROBING_GROUP=g", None),
        (b"PROBING_GROUP=/7", None),
        (b"PROBING_GROUP=g/-7", None),
        (b"PROBING_GROUP=g/\xd9\xa3", None),
        (b"PROBING_GROUP=g/" + b"7" * 17, None),
        (b"PROBING_GROUP=\xff/7\0RANK=" + b"9" * 400, Mark("\ufffd", 7, None, "")),
    ],
)
def test_marks(environ: bytes, mark: Mark | None) -> None:
    assert mark_in(environ) == mark


@given(st.binary(max_size=64), st.binary(max_size=64))
def test_an_environment_may_be_anything(before: bytes, value: bytes) -> None:
    mark_in(before + b"\0PROBING_GROUP=" + value)


def test_a_process_of_this_user(process: subprocess.Popen[bytes]) -> None:
    stat = stat_of(process.pid)
    assert stat is not None
    assert (stat.pid, stat.parent, stat.threads, stat.alive) == (process.pid, os.getpid(), 1, True)
    assert stat.start_ns % 10_000_000 == 0
    assert Clock().boot_ns() - stat.start_ns >= 0
    assert stats()[process.pid].start_ns == stat.start_ns
    until(lambda: mark_of(process.pid) == Mark("g", 7, 3, ""))


def test_a_name_may_have_brackets() -> None:
    seen: list[Stat | None] = []

    def named() -> None:
        # PR_SET_NAME, include/uapi/linux/prctl.h
        ctypes.CDLL(None).prctl(15, b") Z 1 (", 0, 0, 0)
        seen.append(stat_of(threading.get_native_id()))

    thread = threading.Thread(target=named)
    thread.start()
    thread.join()
    assert seen[0] is not None
    assert (seen[0].parent, seen[0].state) == (os.getppid(), "R")


def test_a_process_that_has_ended_is_not_found(process: subprocess.Popen[bytes]) -> None:
    stat = stat_of(process.pid)
    assert stat is not None
    handle = Handle.open(process.pid, stat.start_ns)
    assert handle is not None
    assert not handle.ended()
    assert handle.send(signal.SIGKILL)
    until(handle.ended)
    assert not stat_of(process.pid).alive
    process.wait()
    assert stat_of(process.pid) is None
    assert mark_of(process.pid) is None
    assert Handle.open(process.pid, stat.start_ns) is None
    assert not handle.send(signal.SIGKILL)
    assert not send(stat, signal.SIGKILL)
    handle.close()


@pytest.mark.parametrize("pid", [-1, 0, 1 << 22, 1 << 40])
def test_numbers_that_are_no_pids(pid: int) -> None:
    assert Handle.open(pid, 1) is None
    assert not send(Stat(pid, 1, 1, "S", 1, 1), signal.SIGKILL)


def test_another_process_with_the_pid_gets_no_signal(process: subprocess.Popen[bytes]) -> None:
    stat = stat_of(process.pid)
    assert stat is not None
    assert not send(stat._replace(start_ns=stat.start_ns + 10_000_000), signal.SIGKILL)
    assert send(stat, signal.SIGTERM, signal.SIGCONT)
    assert process.wait() == -signal.SIGTERM


def test_a_lack_of_descriptors_is_not_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    stat = stat_of(os.getpid())
    assert stat is not None

    def no_more(*_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "open", no_more)
    monkeypatch.setattr(os, "pidfd_open", no_more)
    for call in (stats, lambda: stat_of(os.getpid()), lambda: mark_of(os.getpid())):
        with pytest.raises(OSError, match="Too many open files"):
            call()
    with pytest.raises(OSError, match="Too many open files"):
        Handle.open(stat.pid, stat.start_ns)
    assert not send(stat, signal.SIGCONT)


def test_a_process_that_cannot_be_watched_is_not_left_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pids = []

    def fails(pid: int) -> None:
        pids.append(pid)
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(spawn, "stat_of", fails)
    (tmp_path / "logs").mkdir()
    log = tmp_path / "logs" / "g" / "rank0.log"
    plan = spawn.Plan(("touch", str(tmp_path / "ran")), {"PATH": os.environ["PATH"]}, {}, "/", "pid PID", log)
    before = os.listdir("/proc/self/fd")  # noqa: PTH208
    with pytest.raises(OSError, match="Too many open files"):
        spawn.spawn(plan)
    assert os.listdir("/proc/self/fd") == before  # noqa: PTH208
    # It is not released, and sees that it never will be.
    _, status = os.waitpid(pids[0], 0)
    assert os.waitstatus_to_exitcode(status) == NOT_RECORDED
    assert not (tmp_path / "ran").exists()
