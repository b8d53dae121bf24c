"""Readers: what they answer, and what a target that cannot be read costs (nothing but its own answer)."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from processes_helpers import Listener, listening, start_ns_of, started
from waiting import until

from probing.api.errors import InternalError, ProcessGone, TargetTimeout, UnsupportedTarget, UsageError
from probing.daemon.ipc import Channel, ChannelClosed, Message
from probing.daemon.pool import Policy, Pool, Process
from probing.daemon.processes import reader_pool
from probing.daemon.processes.procfs import parse_maps
from probing.daemon.processes.reader_pool import ReaderPool
from probing.daemon.processes.target import Target

PROGRAMS = Path(__file__).parents[1] / "processes_programs"
SLEEPER = "import time; print('ready', flush=True); time.sleep(600)"
# Who asks for so long gets an answer on any machine; nothing waits for it to pass.
PATIENCE = 20.0


@dataclass
class Stuck:
    """A process with a page at ``address`` that cannot be read."""

    pid: int
    start_ns: int
    address: int


@pytest.fixture
def pool(listener: Listener) -> Iterator[ReaderPool]:
    made = ReaderPool(listener.path, size=2)
    yield made
    made.close()


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with started([sys.executable, "-c", SLEEPER], until="ready", env={"RANK": "3", "SECRET": "x"}) as process:
        yield process


def test_identity(pool: ReaderPool, sleeper: subprocess.Popen[bytes]) -> None:
    start_ns = start_ns_of(sleeper.pid)
    seen = pool.call("identity", pid=sleeper.pid, start_ns=start_ns, timeout=PATIENCE).header
    assert (seen["pid"], seen["start_ns"], seen["ppid"], seen["uid"]) == (
        sleeper.pid,
        start_ns,
        os.getpid(),
        os.getuid(),
    )
    assert seen["environ"] == {"RANK": "3"}
    assert seen["cmdline"][1:] == ["-c", SLEEPER]
    assert Path(seen["exe"]) == Path(sys.executable).resolve()


def test_a_number_that_belongs_to_another(pool: ReaderPool, sleeper: subprocess.Popen[bytes]) -> None:
    with pytest.raises(ProcessGone):
        pool.call("identity", pid=sleeper.pid, start_ns=start_ns_of(sleeper.pid) + 10_000_000, timeout=PATIENCE)
    sleeper.kill()
    sleeper.wait(10)
    with pytest.raises(ProcessGone):
        pool.call("maps", pid=sleeper.pid, timeout=PATIENCE)


def test_a_zombie_is_gone(pool: ReaderPool, sleeper: subprocess.Popen[bytes]) -> None:
    sleeper.kill()
    until(lambda: b") Z" in Path(f"/proc/{sleeper.pid}/stat").read_bytes())
    with pytest.raises(ProcessGone):
        pool.call("identity", pid=sleeper.pid, timeout=PATIENCE)
    # A process that exits while it is read: it has a number, and no root any more.
    with Target(sleeper.pid) as target, pytest.raises(ProcessGone):
        target.directory("root")


def test_processes_that_exit_while_they_are_read(pool: ReaderPool) -> None:
    # Each either answers as itself or is gone: nothing else may come of it.
    for _ in range(30):
        process = subprocess.Popen(["/bin/true"])
        try:
            seen = pool.call("identity", pid=process.pid, timeout=PATIENCE).header
            assert seen["pid"] == process.pid
        except ProcessGone:
            pass
        process.wait(10)


def test_hostile_command_line_and_environment(pool: ReaderPool) -> None:
    environment = {"RANK": "1\n\x1b[2J", "MASTER_ADDR": "a" * 100_000, "JUNK": "x" * 100_000, "LAST": "y"}
    arguments = [sys.executable, "-c", SLEEPER, "\x1b]0;owned\x07\n", *["z" * 100_000] * 10]
    with started(arguments, until="ready", env=environment) as process:
        seen = pool.call("identity", pid=process.pid, timeout=PATIENCE).header
    assert seen["environ"] == {"RANK": "1\\n\\x1b[2J", "MASTER_ADDR": "a" * 511 + "…"}
    assert seen["cmdline"][3] == "\\x1b]0;owned\\x07\\n"
    assert sum(map(len, seen["cmdline"])) <= 5000


def test_maps_and_open(pool: ReaderPool, sleeper: subprocess.Popen[bytes]) -> None:
    text = pool.call("maps", pid=sleeper.pid, timeout=PATIENCE, files=True).payload
    mapping = next(m for m in parse_maps(text) if m.path == os.fsencode(Path(sys.executable).resolve()))
    answer = pool.call("open", pid=sleeper.pid, timeout=PATIENCE, start=mapping.start)
    fd = answer.take_fd()
    try:
        assert os.fstat(fd).st_ino == mapping.inode == answer.header["inode"]
        assert os.pread(fd, 4, 0) == b"\x7fELF"
    finally:
        os.close(fd)
    with pytest.raises(UnsupportedTarget):
        pool.call("open", pid=sleeper.pid, timeout=PATIENCE, start=4096)


MAPPER = (
    "import mmap, sys, time; f = open(sys.argv[1], 'rb'); m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ);"
    "print('ready', flush=True); time.sleep(600)"
)
# Root without what /proc/PID/map_files takes, as the readers of a daemon are.
LESS = ("setpriv", "--bounding-set", "-sys_admin,-checkpoint_restore") if os.geteuid() == 0 else ()


def replace_by_other(path: Path) -> None:
    path.unlink()
    path.write_bytes(b"other" * 4000)


def replace_by_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def replace_by_device(path: Path) -> None:
    path.unlink()
    os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 5))


def replace_by_link_out(path: Path) -> None:
    path.unlink()
    path.symlink_to("/proc/self/environ")


@pytest.mark.parametrize(
    "change", [Path.unlink, replace_by_other, replace_by_fifo, replace_by_device, replace_by_link_out]
)
def test_a_file_that_is_not_what_is_mapped(tmp_path: Path, change: Callable[[Path], None]) -> None:
    mapped = tmp_path / "mapped"
    mapped.write_bytes(b"mapped" * 4000)
    with (
        listening(tmp_path / "reader.sock", "probing.daemon.confined.reader", LESS) as listener,
        started([sys.executable, "-c", MAPPER, str(mapped)], until="ready") as process,
    ):
        pool = ReaderPool(listener.path, size=1)
        text = pool.call("maps", pid=process.pid, timeout=PATIENCE, files=True).payload
        (mapping,) = [m for m in parse_maps(text) if m.path == os.fsencode(mapped)]
        answer = pool.call("open", pid=process.pid, timeout=PATIENCE, start=mapping.start)
        assert answer.header["identity"] == "exact"
        assert os.pread(answer.fds[0], 6, 0) == b"mapped"
        answer.close_fds()
        change(mapped)
        with pytest.raises(UnsupportedTarget):
            pool.call("open", pid=process.pid, timeout=PATIENCE, start=mapping.start)
        pool.close()


def test_a_deleted_file_with_the_right_for_it(pool: ReaderPool, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs CAP_CHECKPOINT_RESTORE")
    mapped = tmp_path / "mapped"
    mapped.write_bytes(b"mapped" * 4000)
    with started([sys.executable, "-c", MAPPER, str(mapped)], until="ready") as process:
        mapped.unlink()
        text = pool.call("maps", pid=process.pid, timeout=PATIENCE, files=True).payload
        (mapping,) = [m for m in parse_maps(text) if m.path == os.fsencode(mapped)]
        assert mapping.deleted
        answer = pool.call("open", pid=process.pid, timeout=PATIENCE, start=mapping.start)
        assert os.pread(answer.fds[0], 6, 0) == b"mapped"
        answer.close_fds()


def test_memory_state_and_list(pool: ReaderPool, sleeper: subprocess.Popen[bytes]) -> None:
    mapping = parse_maps(pool.call("maps", pid=sleeper.pid, timeout=PATIENCE, files=True).payload)[0]
    answer = pool.call(
        "memory", pid=sleeper.pid, timeout=PATIENCE, ranges=[[mapping.start, 4], [8, 8], [mapping.start + 1, 3]]
    )
    assert answer.header["lengths"] == [4, -1, 3]
    assert answer.payload == b"\x7fELFELF"
    threads = [Path(f"/proc/{sleeper.pid}/comm").read_text().strip()]
    unread = dict.fromkeys(("rss_bytes", "peak_rss_bytes", "anon_bytes", "shmem_bytes", "swap_bytes"))

    def states() -> Any:
        targets = [[sleeper.pid, 0], [sleeper.pid, 7]]
        return json.loads(pool.call("state", timeout=PATIENCE, targets=targets, threads=True).payload)

    # It sleeps soon after it said so.
    asleep = [{"state": "S", "ppid": os.getpid(), "threads": threads, **unread}, None]
    until(lambda: states() == asleep, what=states)
    assert b"[%d, " % sleeper.pid in pool.call("list", timeout=PATIENCE).payload


def test_wrong_requests(pool: ReaderPool) -> None:
    with pytest.raises(UsageError):
        pool.call("maps", pid=0, timeout=PATIENCE)
    with pytest.raises(UsageError):
        pool.call("memory", pid=os.getpid(), timeout=PATIENCE, ranges=[[0, 1]] * 5000)


def test_a_killed_reader_is_replaced(listener: Listener, pool: ReaderPool) -> None:
    pool.call("ping", timeout=PATIENCE)
    for process in list(listener.processes):
        process.kill()
        process.wait(10)
    assert pool.call("identity", pid=os.getpid(), timeout=PATIENCE).header["pid"] == os.getpid()


def test_a_target_that_ends_its_readers_is_in_quarantine(tmp_path: Path) -> None:
    """As a reader does that the kernel kills when its memory runs out."""
    ended: list[str] = []

    def answer(connection: socket.socket) -> None:
        with Channel(connection) as channel, suppress(ChannelClosed):
            while (op := channel.receive().header["op"]) == "ping":
                channel.send({"pid": os.getpid()})
            ended.append(op)

    def accept(listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server(str(tmp_path / "reader.sock"), family=socket.AF_UNIX) as listener:
        threading.Thread(target=accept, args=(listener,), daemon=True).start()
        pool = ReaderPool(str(tmp_path / "reader.sock"))
        with pytest.raises(ChannelClosed):
            pool.call("maps", pid=7, start_ns=8, timeout=PATIENCE)
        assert [(q.pid, q.start_ns, q.op) for q in pool.quarantined()] == [(7, 8, "maps")]
        with pytest.raises(TargetTimeout, match="quarantine"):
            pool.call("maps", pid=7, start_ns=8, timeout=PATIENCE)
        assert ended == ["maps", "maps"]
        pool.close()


@pytest.fixture
def stuck() -> Iterator[list[Stuck]]:
    with ExitStack() as stack:
        yield [_stuck(stack) for _ in range(2)]


def _stuck(stack: ExitStack) -> Stuck:
    process = stack.enter_context(started([sys.executable, str(PROGRAMS / "stuck.py")], until="ready"))
    _, address = process.line.split()  # type: ignore[attr-defined]
    return Stuck(process.pid, start_ns_of(process.pid), int(address))


def read_stuck(pool: ReaderPool, stuck: Stuck, timeout: float) -> None:
    pool.call("memory", pid=stuck.pid, start_ns=stuck.start_ns, timeout=timeout, ranges=[[stuck.address, 8]])


def test_a_target_that_blocks_its_reader(
    listener: Listener, pool: ReaderPool, stuck: list[Stuck], sleeper: subprocess.Popen[bytes]
) -> None:
    target = stuck[0]
    pool.call("ping", timeout=PATIENCE)
    # WHEN it is read with a deadline
    with pytest.raises(TargetTimeout):
        read_stuck(pool, target, 0.5)
    # THEN it is left alone, which costs no reader
    assert [(q.pid, q.start_ns, q.op) for q in pool.quarantined()] == [(target.pid, target.start_ns, "memory")]
    with pytest.raises(TargetTimeout, match="is in quarantine"):
        pool.call("identity", pid=target.pid, start_ns=target.start_ns, timeout=PATIENCE)
    # AND the reader that was stuck ends although its target never answered, and there is another
    until(lambda: any(p.poll() is not None for p in listener.processes))
    until(lambda: len(listener.processes) == 2)
    # AND others are served meanwhile
    for _ in range(10):
        assert pool.call("identity", pid=sleeper.pid, timeout=PATIENCE).header["pid"] == sleeper.pid
    pool.forget(target.pid, target.start_ns)
    assert pool.quarantined() == []


def test_stuck_targets_hold_nobody_up(pool: ReaderPool, stuck: list[Stuck], sleeper: subprocess.Popen[bytes]) -> None:
    failures: list[str] = []

    def read(target: Stuck) -> None:
        try:
            read_stuck(pool, target, 1.0)
        except TargetTimeout as e:
            failures.append(e.kind)

    threads = [threading.Thread(target=read, args=(target,)) for target in stuck]
    for thread in threads:
        thread.start()
    # Both readers are stuck now or soon; an innocent target is answered all the same, and not quarantined.
    assert pool.call("identity", pid=sleeper.pid, timeout=PATIENCE).header["pid"] == sleeper.pid
    for thread in threads:
        thread.join(PATIENCE)
    assert failures == ["TargetTimeout"] * 2
    assert {q.pid for q in pool.quarantined()} <= {target.pid for target in stuck}


def test_no_readers_at_all(tmp_path: Path) -> None:
    pool = ReaderPool(str(tmp_path / "nobody.sock"))
    with pytest.raises(InternalError, match=r"nobody\.sock"):
        pool.call("identity", pid=os.getpid(), timeout=0.3)
    pool.close()


def test_a_close_does_not_wait_for_a_reader_that_starts(tmp_path: Path) -> None:
    """systemd takes connections of a socket that is about to stop, and starts no process for them."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "reader.sock"))
        listener.listen()
        pool = ReaderPool(str(tmp_path / "reader.sock"))
        connection, _ = listener.accept()
        with Channel(connection) as channel:
            assert channel.receive(60).header == {"op": "ping"}
            # Without an answer; the time-out of a test is shorter than that of a start.
            pool.close()
            with pytest.raises(ChannelClosed):
                channel.receive(60)


def test_a_waiting_caller_gets_the_process_that_becomes_free(listener: Listener) -> None:
    """The keeper waits beside it: a wake-up that reached only the keeper would leave the caller asleep."""
    pool = Pool(listener.path, Policy("reader"))
    process = pool.acquire(time.monotonic() + PATIENCE)
    taken: list[Process] = []
    waiter = threading.Thread(target=lambda: taken.append(pool.acquire(time.monotonic() + PATIENCE)), daemon=True)
    waiter.start()
    until(lambda: pool._waiting == 1)
    pool.release(process)
    waiter.join(10)
    assert taken == [process]
    pool.release(process)
    pool.close()


def test_many_at_once_with_some_that_block_their_reader(
    pool: ReaderPool, stuck: list[Stuck], sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The quarantine of the first must last until the others are read, by readers that have to start.
    monkeypatch.setattr(reader_pool, "SHORT_QUARANTINE_S", reader_pool.QUARANTINE_S)
    me, other = (os.getpid(), start_ns_of(os.getpid())), (sleeper.pid, start_ns_of(sleeper.pid))
    gone = (sleeper.pid, start_ns_of(sleeper.pid) + 10_000_000)
    blocked = [(s.pid, s.start_ns) for s in stuck]
    asks = {key: partial(dict, ranges=[[s.address, 8]]) for key, s in zip(blocked, stuck, strict=True)}
    # Those that block come first, and there are as many of them as readers.
    everybody = {**asks, **{key: partial(dict, ranges=[]) for key in (me, gone, other)}}
    answers = dict(pool.call_each("memory", everybody, timeout=PATIENCE, patience=0.04))
    assert answers.keys() == everybody.keys()
    assert [type(answers[key]) for key in blocked] == [TargetTimeout, TargetTimeout]
    assert isinstance(answers[gone], ProcessGone)
    for key in (me, other):
        answer = answers[key]
        assert isinstance(answer, Message)
        assert answer.header == {"lengths": []}
    assert {q.pid for q in pool.quarantined()} == {pid for pid, _ in blocked}
    again = dict(pool.call_each("memory", everybody, timeout=PATIENCE, patience=0.04))
    assert all("is in quarantine" in str(again[key]) for key in blocked)
    assert isinstance(again[other], Message)


def test_many_at_once_when_readers_are_killed(
    listener: Listener, pool: ReaderPool, sleeper: subprocess.Popen[bytes]
) -> None:
    keys = [(sleeper.pid, start_ns_of(sleeper.pid)), (os.getpid(), start_ns_of(os.getpid()))]
    assert len(dict(pool.call_each("maps", dict.fromkeys(keys, dict), timeout=PATIENCE, patience=PATIENCE))) == 2
    for process in list(listener.processes):
        process.kill()
        process.wait(10)
    answers = dict(pool.call_each("maps", dict.fromkeys(keys, dict), timeout=PATIENCE, patience=PATIENCE))
    assert all(isinstance(answers[key], Message) for key in keys)


@pytest.mark.parametrize("kept", [0, 1])
def test_another_process_starts_where_none_is_free_and_ends_when_idle(listener: Listener, kept: int) -> None:
    pool = Pool(listener.path, Policy("reader", 2, kept, idle_s=0.1))
    processes = [pool.acquire(time.monotonic() + PATIENCE) for _ in range(2)]
    assert len({process.pid for process in processes} - {0}) == 2
    for process in processes:
        pool.release(process)
    until(lambda: len([p for p in listener.processes if p.poll() is None]) == kept)
    pool.close()


def test_many_at_once_without_readers(tmp_path: Path) -> None:
    pool = ReaderPool(str(tmp_path / "none.sock"), size=1)
    try:
        answers = dict(pool.call_each("maps", {(1, 1): dict, (2, 2): dict}, timeout=0.2, patience=0.1))
        assert [type(answer) for answer in answers.values()] == [InternalError, InternalError]
    finally:
        pool.close()
