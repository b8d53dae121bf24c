"""Libraries that are found, attached once, and looked at again when something did not answer."""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from probing.api.errors import ProbingError, TargetTimeout, UnsupportedTarget
from probing.daemon.clock import FakeClock
from probing.daemon.collector import libraries
from probing.daemon.collector.libraries import LibraryWatch, is_alive
from probing.daemon.collector.outbox import Outbox
from probing.daemon.ipc import Message
from probing.daemon.processes.procfs import parse_stat

MAPS = b"7f0000000000-7f0000001000 r-xp 00000000 fe:01 23 /opt/lib/libnccl.so.2\n"


class Readers:
    def call(self, op: str, **_: Any) -> Message:
        if op == "maps":
            return Message({}, MAPS)
        return Message({}, fds=[os.open("/dev/null", os.O_RDONLY)])


class Source:
    """Raises what it is given, one at each attachment, and then attaches."""

    name = "collectives"

    def __init__(self, *errors: ProbingError) -> None:
        self.errors = list(errors)
        self.attached = threading.Event()
        self.count = 0

    def interesting(self, path: bytes) -> bool:
        return b"libnccl" in path

    def attach(self, fd: int, path: bytes) -> int:
        os.fstat(fd)
        self.count += 1
        if self.errors:
            raise self.errors.pop(0)
        self.attached.set()
        return 1


def watch(source: Source) -> tuple[LibraryWatch, Outbox]:
    clock = FakeClock(mono_ns=1, real_ns=2)
    outbox = Outbox("n1", clock)
    made = LibraryWatch(Readers(), [(source, "comm.ops")], outbox, clock)  # type: ignore[arg-type]
    made.start()
    return made, outbox


def test_a_file_is_attached_once_and_each_older_process_is_a_gap() -> None:
    source = Source()
    libraries_watch, outbox = watch(source)
    libraries_watch.scan([os.getpid(), os.getpid(), os.getppid()])
    libraries_watch.stop()
    assert source.count == 1
    (losses,) = outbox.take()["probing.losses"]
    assert set(losses["pid"].to_pylist()) == {os.getpid(), os.getppid()}


def test_what_did_not_answer_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "RETRY_S", 0.01)
    source = Source(TargetTimeout("no answer"), TargetTimeout("no answer"))
    libraries_watch, _ = watch(source)
    libraries_watch.scan([os.getpid()])
    assert source.attached.wait(30)
    libraries_watch.stop()
    assert libraries_watch.reasons == {}
    assert source.count == 3


def test_a_file_that_is_refused_is_not_tried_again() -> None:
    source = Source(UnsupportedTarget("no such library"))
    libraries_watch, outbox = watch(source)
    libraries_watch.scan([os.getpid(), os.getppid()])
    libraries_watch.stop()
    assert source.count == 1
    assert "no such library" in libraries_watch.reasons["/opt/lib/libnccl.so.2"]
    assert outbox.lost_rows["collectives"] == 0


def test_a_process_that_waits_for_its_parent_has_ended(until: Any) -> None:
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    start_ns = parse_stat(Path(f"/proc/{child.pid}/stat").read_bytes()).start_ns
    assert is_alive(child.pid, start_ns)
    assert not is_alive(child.pid, start_ns + 1)
    assert child.stdin is not None
    child.stdin.close()
    until(lambda: not is_alive(child.pid, start_ns))
    assert Path(f"/proc/{child.pid}/stat").exists()
    child.wait()
    assert not is_alive(child.pid, start_ns)
