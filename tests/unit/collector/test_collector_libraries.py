"""Libraries that are found, attached once, tried again when something did not answer, and let go when unused."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Container, Iterator
from pathlib import Path
from typing import Any

import pytest

from probing.api.errors import AttachError, ProbingError, TargetTimeout, UnsupportedTarget
from probing.daemon.clock import FakeClock
from probing.daemon.collector.libraries import files as library_files
from probing.daemon.collector.libraries import watch as libraries
from probing.daemon.collector.libraries.files import MAX_FILES, MAX_FILES_OF_USER, Files
from probing.daemon.collector.libraries.probes import LibraryProbes
from probing.daemon.collector.libraries.watch import LibraryWatch
from probing.daemon.collector.row_buffer import RowBuffer
from probing.daemon.ipc import Message
from probing.daemon.processes.liveness import OwnProcesses, is_alive, process_now
from probing.daemon.processes.procfs import parse_stat
from probing.daemon.source_state import MAX_NAMED, first_of

Until = Callable[..., object]


class Readers:
    """Processes as ``mapped`` says: pid -> the files that it maps. Those in ``blocked`` answer when it is set."""

    def __init__(self) -> None:
        self.mapped: dict[int, list[Path]] = {}
        self.blocked: dict[int, threading.Event] = {}
        self.read: set[int] = set()

    def call(self, op: str, *, pid: int, start: int = 0, **_: Any) -> Message:
        self.read.add(pid)
        if op == "open":
            return Message({}, fds=[os.open(self._files()[start >> 12], os.O_RDONLY)])
        if pid in self.blocked:
            self.blocked[pid].wait()
        return Message({}, b"".join(self._line(path) for path in self.mapped.get(pid, ())))

    def _files(self) -> list[Path]:
        return list(dict.fromkeys(path for paths in list(self.mapped.values()) for path in paths))

    def _line(self, path: Path) -> bytes:
        start = self._files().index(path) << 12
        return b"%x-%x r-xp 00000000 00:00 %d %s\n" % (start, start + 4096, path.stat().st_ino, os.fsencode(path))


class Session:
    """``probed`` are files that have probes, ``ended`` those whose probes were ended."""

    def __init__(self, *adopted: Path) -> None:
        self.probed = {self.of(path) for path in adopted}
        self.ended: list[tuple[int, int]] = []

    def of(self, path: Path) -> tuple[int, int]:
        return path.stat().st_dev, path.stat().st_ino

    def identity(self, fd: int) -> tuple[int, int]:
        return os.fstat(fd).st_dev, os.fstat(fd).st_ino

    def probed_files(self) -> set[tuple[int, int]]:
        return set(self.probed)

    def end_file(self, identity: tuple[int, int]) -> None:
        self.probed.discard(identity)
        self.ended.append(identity)


class Source:
    """Raises what it is given, one at each attachment, and then attaches."""

    name = "collectives"
    table = "comm.ops"
    files = (b"libnccl.so",)
    awaited = True

    def __init__(self, session: Session, *errors: ProbingError) -> None:
        self.session = session
        self.errors = list(errors)
        self.attached = threading.Event()
        self.paths: list[bytes] = []
        self.forgotten: list[tuple[int, int]] = []

    def interesting(self, path: bytes) -> bool:
        return b"libnccl" in path

    def attach(self, fd: int, path: bytes) -> int:
        self.paths.append(path)
        if self.errors:
            raise self.errors.pop(0)
        self.session.probed.add(self.session.identity(fd))
        self.attached.set()
        return 1

    def forget(self, identity: tuple[int, int]) -> None:
        self.forgotten.append(identity)


class SlowSource(Source):
    """Attaches once it is ``released``, and the start does not wait for that."""

    name = "optimizer"
    awaited = False

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self.released = threading.Event()

    def attach(self, fd: int, path: bytes) -> int:
        self.released.wait()
        return super().attach(fd, path)


class Watch:
    def __init__(
        self,
        *errors: ProbingError,
        adopted: tuple[Path, ...] = (),
        now_ns: int = 1 << 60,
        own: Container[int] = (),
        slow: bool = False,
    ) -> None:
        """``now_ns``: since boot, for ever. ``slow``: the files are also a library that the start does not wait for."""
        clock = FakeClock(mono_ns=now_ns, real_ns=now_ns)
        self.readers, self.outbox, self.session = Readers(), RowBuffer("n1", clock), Session(*adopted)
        self.source, self.slow = Source(self.session, *errors), SlowSource(self.session)
        probes = LibraryProbes(self.session, [self.slow, self.source] if slow else [self.source], self.outbox, clock)
        self.libraries = LibraryWatch(self.readers, probes, own=own)  # type: ignore[arg-type]

    def start(self) -> None:
        self.libraries.start()
        assert self.libraries.scanned(30)

    def stop(self) -> list[tuple[int, str]]:
        """(pid, reason) of what was lost."""
        self.libraries.stop()
        batches = self.outbox.take().get("probing.losses", [])
        return [
            row for batch in batches for row in zip(batch["pid"].to_pylist(), batch["reason"].to_pylist(), strict=True)
        ]


@pytest.fixture
def library(tmp_path: Path) -> Path:
    path = tmp_path / "libnccl.so.2"
    path.touch()
    return path


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", "input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def test_a_file_is_attached_once_and_each_older_process_is_a_gap(library: Path) -> None:
    watch = Watch()
    watch.readers.mapped = {os.getpid(): [library], os.getppid(): [library]}
    watch.start()
    assert {pid for pid, _ in watch.stop()} == {os.getpid(), os.getppid()}
    assert len(watch.source.paths) == 1


def test_a_process_that_began_after_the_probes_is_no_gap_however_late_it_is_found(
    library: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    began = process_now(sleeper.pid)
    assert began is not None
    watch = Watch(now_ns=began.start_ns)
    watch.readers.mapped = {os.getpid(): [library], sleeper.pid: [library]}
    watch.start()
    # A scan found both, as no event reported the mapping.
    assert watch.libraries._files.holders.keys() == {os.getpid(), sleeper.pid}
    assert [pid for pid, _ in watch.stop()] == [os.getpid()]


def test_the_daemons_own_processes_are_not_looked_at(library: Path) -> None:
    watch = Watch(own=OwnProcesses(frozenset({os.getuid()})))
    watch.readers.mapped = {os.getpid(): [library]}
    watch.start()
    watch.stop()
    assert watch.source.paths == []
    assert os.getpid() not in watch.readers.read


def test_what_did_not_answer_is_tried_again(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library_files, "FIRST_SILENT_PAUSE_S", 0.01)
    monkeypatch.setattr(libraries, "SILENT_REST_S", 0.001)
    watch = Watch(TargetTimeout("no answer"), TargetTimeout("no answer"))
    watch.readers.mapped = {os.getpid(): [library]}
    watch.start()
    assert watch.source.attached.wait(30)
    watch.stop()
    assert watch.libraries.reasons == []
    assert len(watch.source.paths) == 3


def test_a_file_that_is_refused_is_a_row_and_is_not_tried_again(library: Path) -> None:
    watch = Watch(UnsupportedTarget("no such library"))
    watch.readers.mapped = {os.getpid(): [library], os.getppid(): [library]}
    watch.start()
    assert sorted(watch.stop()) == sorted((pid, "no such library") for pid in (os.getpid(), os.getppid()))
    assert len(watch.source.paths) == 1
    assert "no such library" in watch.libraries.reasons[0]
    assert watch.outbox.lost_rows["collectives"] == 0


def test_probes_end_with_the_last_process_that_maps_the_file(
    library: Path, sleeper: subprocess.Popen[bytes], until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libraries, "SCAN_INTERVAL_S", 0.01)
    monkeypatch.setattr(libraries, "LOOK_S", 0.01)
    watch = Watch()
    watch.readers.mapped = {os.getpid(): [library], sleeper.pid: [library]}
    watch.start()
    identity = watch.session.of(library)
    # One unmaps it, and the other one stays.
    del watch.readers.mapped[os.getpid()]
    watch.libraries.changed(os.getpid())
    until(lambda: os.getpid() not in watch.libraries._files.holders)
    assert watch.session.probed == {identity}
    sleeper.kill()
    sleeper.wait()
    watch.libraries.changed(sleeper.pid)
    until(lambda: watch.session.ended == [identity])
    # Mapped again, it has probes again.
    watch.source.attached.clear()
    watch.readers.mapped[os.getpid()] = [library]
    watch.libraries.seen(os.getpid())
    assert watch.source.attached.wait(30)
    watch.stop()
    assert watch.source.forgotten == [identity]


def test_of_the_probes_of_the_daemon_before_those_of_unused_files_end(
    library: Path, tmp_path: Path, until: Until
) -> None:
    unused = tmp_path / "unused"
    unused.touch()
    watch = Watch(adopted=(library, unused))
    watch.readers.mapped = {os.getpid(): [library]}
    watch.start()
    until(lambda: watch.session.ended)
    watch.stop()
    assert watch.session.ended == [watch.session.of(unused)]
    assert watch.session.probed == {watch.session.of(library)}


def test_nobody_waits_for_a_process_that_does_not_answer(
    library: Path, sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libraries, "SCAN_INTERVAL_S", 0.01)
    watch = Watch()
    release = watch.readers.blocked[sleeper.pid] = threading.Event()
    watch.readers.mapped = {os.getpid(): [library]}
    watch.libraries.start()
    assert not watch.libraries.scanned(0.1)
    release.set()
    assert watch.libraries.scanned(30)
    assert watch.source.attached.wait(30)
    watch.stop()


def test_the_start_waits_for_awaited_libraries_only(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libraries, "LATE_S", 0.0)
    unused = tmp_path / "libnccl.so.1"
    unused.touch()
    watch = Watch(adopted=(unused,), slow=True)
    watch.readers.mapped = {os.getpid(): [library]}
    watch.start()
    assert watch.source.attached.is_set()
    assert not watch.slow.attached.is_set()
    # An earlier daemon's probes of the other library could be on files that were not looked at for it.
    assert not watch.session.ended
    watch.slow.released.set()
    assert watch.slow.attached.wait(30)
    watch.stop()


def test_many_refused_names_are_a_few_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # His user would rest in between.
    monkeypatch.setattr(libraries, "REFUSED_LOOKS", 0)
    paths = [tmp_path / f"libnccl.so.{n}{'x' * 200}" for n in range(60)]
    for path in paths:
        path.touch()
    watch = Watch(*(UnsupportedTarget("no such library") for _ in paths))
    watch.readers.mapped = {os.getpid(): paths}
    watch.start()
    assert watch.stop() == [(os.getpid(), "no such library")]
    assert len(watch.libraries.reasons) == 60
    told = first_of(watch.libraries.reasons)
    assert told.endswith(f"and {60 - MAX_NAMED} more")
    assert len(told) < 5_000


def test_a_process_that_waits_for_its_parent_has_ended(until: Until) -> None:
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


def test_files_with_probes_are_bounded_by_user_and_in_sum() -> None:
    files = Files()
    for number in range(MAX_FILES):
        uid = 1000 + number // MAX_FILES_OF_USER
        files.admit((1, number), uid)
        files.attached_to((1, number), (2, number), uid, "libnccl.so.2")
    with pytest.raises(AttachError, match="of user 1000"):
        files.admit((1, MAX_FILES), 1000)
    with pytest.raises(AttachError, match=f"{MAX_FILES} libraries"):
        files.admit((1, MAX_FILES), 1)
    # One that has probes is no further one.
    files.admit((1, 0), 1)
    files.drop(files.idle()[0])
    files.admit((1, MAX_FILES), 1)


def test_the_pause_of_a_refused_file_grows_and_is_of_one_user(monkeypatch: pytest.MonkeyPatch) -> None:
    files = Files()
    pauses = [files.refuse("cuda", (1, 2), 1000, "x", "no", silent=False).pause for _ in range(8)]
    assert pauses == [60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 3600.0, 3600.0]
    assert files.refusal("cuda", (1, 2), 1000) is not None
    assert files.refusal("cuda", (1, 2), 1001) is None
    monkeypatch.setattr(library_files, "SHOWN_S", -1.0)
    assert files.refused() == []


def test_probes_of_the_daemon_before_wait_for_a_user_who_rests(
    library: Path, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that may not have files attached yet may map what was probed."""
    monkeypatch.setattr(libraries, "SCAN_INTERVAL_S", 0.01)
    monkeypatch.setattr(libraries, "LOOK_S", 0.01)
    watch = Watch(adopted=(library,))
    watch.readers.mapped = {os.getpid(): [library]}
    turns = watch.libraries._turns
    turns.rest(os.getuid(), 60.0)
    watch.start()
    assert watch.session.ended == []
    turns._users[os.getuid()].rests_until = 0.0
    assert watch.source.attached.wait(30)
    until(lambda: not watch.libraries._adopted_scans)
    watch.stop()
    assert watch.session.ended == []


def test_scans_that_never_end_keep_no_library_from_its_probes(
    library: Path, sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libraries, "SCAN_INTERVAL_S", 0.01)
    monkeypatch.setattr(libraries, "SCAN_LIMIT_S", 0.05)
    # GIVEN a process that is never examined
    watch = Watch(slow=True)
    watch.readers.mapped = {os.getpid(): [library]}
    add = watch.libraries._turns.add
    monkeypatch.setattr(
        watch.libraries._turns, "add", lambda pids, *, fresh: add(set(pids) - {sleeper.pid}, fresh=fresh)
    )
    watch.libraries.start()
    watch.slow.released.set()
    # THEN a library that the start does not wait for gets its probes in another process
    assert watch.slow.attached.wait(30)
    watch.stop()


def test_a_scan_that_does_not_end_is_begun_anew(
    library: Path, sleeper: subprocess.Popen[bytes], until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libraries, "SCAN_INTERVAL_S", 0.01)
    monkeypatch.setattr(libraries, "SCAN_LIMIT_S", 0.05)
    watch = Watch()
    watch.readers.mapped = {os.getpid(): [library]}
    add = watch.libraries._turns.add
    refused = []

    def refuses_once(pids: Any, *, fresh: bool) -> None:
        pids = set(pids)
        if sleeper.pid in pids:
            if not refused:
                pids.discard(sleeper.pid)
            else:
                # The second scan may take as long as it needs.
                monkeypatch.setattr(libraries, "SCAN_LIMIT_S", 120.0)
            refused.append(sleeper.pid)
        add(pids, fresh=fresh)

    monkeypatch.setattr(watch.libraries._turns, "add", refuses_once)
    watch.libraries.start()
    until(lambda: len(refused) > 1 and watch.libraries._scanning is None)
    assert watch.libraries.scanned(30)
    watch.stop()
