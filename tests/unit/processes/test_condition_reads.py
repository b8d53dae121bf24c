"""The condition of a process: a reader looks at nothing that others serve, and reads each table once."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from probing.daemon.ipc import Message
from probing.daemon.processes.conditions.answers import ConditionAnswers
from probing.daemon.processes.conditions.condition import read_condition
from probing.daemon.processes.conditions.counters import read_loads
from probing.daemon.processes.conditions.mounts import Mount, handle_of, plain_path
from probing.daemon.processes.conditions.sockets import SocketTables
from probing.daemon.processes.conditions.waits import ThreadWait, WaitReader, system_call
from probing.daemon.processes.memory import FakeMemory
from probing.daemon.processes.target import Target
from probing.daemon.stack_wire import Load

OPENAT = next(number for number in range(512) if (call := system_call(number)) and call.name == "openat")
LOCAL = Mount(1, b"/", b"/", "ext4", "rw")


@pytest.fixture
def own() -> Iterator[Target]:
    with Target(os.getpid()) as target:
        yield target


class InOpen:
    """This process, with a thread 7 that opens the path at an address."""

    def __init__(self, own: Target) -> None:
        self.dir_fd = own.dir_fd

    def read(self, name: str, limit: int) -> bytes:
        del limit
        return f"{OPENAT} 0xffffff9c 0x1000 0x0 0x0 0x0 0x0 0x7f 0x7f".encode() if name == "task/7/syscall" else b"x"


def opening(own: Target, path: bytes, *mounts: Mount) -> ThreadWait:
    target: Any = InOpen(own)
    memory = FakeMemory({0x1000: path.ljust(512, b"\0")})
    return WaitReader(target, memory, [LOCAL, *mounts]).read(7)


def test_a_file_that_a_thread_opens_is_described(own: Target, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = opening(own, bytes(tmp_path / "file"))
    assert (found["syscall"], found["target"]) == ("openat", str(tmp_path / "file"))
    assert (found["target_kind"], found["file_system"]) == ("file", "ext4 /")
    absent = opening(own, bytes(tmp_path / "absent"))
    assert (absent["target_kind"], absent["file_system"]) == (None, "ext4 /")


def test_a_link_is_not_followed(own: Target, tmp_path: Path) -> None:
    # It may lead to a file system whose server is dead.
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path)
    found = opening(own, bytes(tmp_path / "link" / "file"))
    assert (found["target_kind"], found["file_system"]) == (None, None)
    with pytest.raises(OSError) as e, handle_of(own, bytes(tmp_path / "link")):  # noqa: PT011
        pass
    assert e.value.errno == errno.ELOOP


@pytest.mark.parametrize("path", ["{}/file", "{}//file", "//{}/./file"])
def test_a_file_that_others_serve_is_not_looked_at(path: str, own: Target, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    served = Mount(2, b"/", bytes(tmp_path), "nfs4", "rw")
    found = opening(own, path.format(tmp_path).encode(), served)
    assert (found["target_kind"], found["file_system"]) == (None, f"nfs4 {tmp_path}")


def test_a_plain_path_has_no_dots() -> None:
    paths = (b"//a/./b//", b"/", b"a", b"/a/../b", b"")
    assert [plain_path(path) for path in paths] == [b"/a/b", b"/", None, None, None]


def test_a_table_of_sockets_is_read_once() -> None:
    row = b"   0: 0100007F:1F90 0200000A:01BB 01 00000000:00000000 00:00000000 00000000     0        0 4711 1 0\n"

    class Network:
        def __init__(self) -> None:
            self.names: list[str] = []

        def read(self, name: str, limit: int) -> bytes:
            del limit
            self.names.append(name)
            return row if name == "net/tcp" else b""

    network: Any = Network()
    tables = SocketTables(network)
    found = [
        tables.described(link).text for link in ("socket:[4711]", "socket:[4711]", "socket:[5]", "socket:[6]", "pipe")
    ]
    ends = "socket:[4711] tcp 127.0.0.1:8080 -> 10.0.0.2:443"
    assert found == [ends, ends, "socket:[5]", "socket:[6]", "pipe"]
    assert network.names == ["net/tcp", "net/tcp6", "net/unix"]


def _process(proc: Path, pid: int, ticks: int) -> None:
    (proc / str(pid)).mkdir()
    fields = ["S", *["0"] * 10, str(ticks), "0", *["0"] * 6, "3", *["0"] * 16, "1"]
    (proc / str(pid) / "stat").write_text(f"{pid} (a b) {' '.join(fields)}\n")


def test_loads_are_asked_for_in_the_time_that_is_left() -> None:
    asked: list[str] = []

    class Slow:
        def call_each(self, op: str, *_: Any, **__: Any) -> list[Any]:
            asked.append(op)
            time.sleep(0.02)
            return []

        def call(self, op: str, **_: Any) -> Message:
            asked.append(op)
            return Message({}, b'[[5, 7, "a", 0, 30]]')

    readers: Any = Slow()
    answers = ConditionAnswers(readers, lambda _pids, _job: [])
    assert answers.conditions([], "j", 60.0)["loads"] == [Load(5, 7, "a", 0, 30)]
    assert answers.conditions([], "j", 0.01)["loads"] is None
    assert asked == ["condition", "loads", "condition"]


def test_loads_are_of_all_processes_or_of_none(tmp_path: Path) -> None:
    _process(tmp_path, 5, 7)
    _process(tmp_path, 6, 0)
    (tmp_path / "7").mkdir()
    (tmp_path / "meminfo").touch()
    assert read_loads(time.monotonic() + 60, tmp_path) == [Load(5, 30_000_000, "a b", 1, 70_000_000)]
    # A process that one of two lists lacks would count with all that it used since its start.
    assert read_loads(time.monotonic() - 1, tmp_path) is None


def test_this_process_has_a_condition(own: Target) -> None:
    found = read_condition(own, time.monotonic() + 60)
    assert (found["pid"], found["start_ns"]) == (os.getpid(), own.start_ns)
    assert found["thread_waits"][0]["tid"] == os.getpid()
    assert found["rss_bytes"] > 1 << 20
