"""The watch for dumps: which are read, when, and to which process they belong."""

from __future__ import annotations

import json
import os
import pickle
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import Now, Processes, Sink

from probing.api.errors import CorruptTarget, PrivilegeError, ProcessGone, TargetTimeout, UnsupportedTarget
from probing.daemon.clock import FakeClock
from probing.daemon.ipc import Message
from probing.daemon.nccl_uprobes.flight_recorder import known_dumps
from probing.daemon.nccl_uprobes.flight_recorder import watch as flight_recorder
from probing.daemon.nccl_uprobes.flight_recorder.dump import handlers
from probing.daemon.nccl_uprobes.flight_recorder.watch import FlightRecorderWatch, candidates
from probing.daemon.source import Identity

START_NS = 5_000_000_000
UTC = 1_700_000_000_000_000_000
DUMP = {"version": "2.9", "entries": [{"record_id": 1}, {"record_id": 2}], "pg_config": {"0": {"ranks": "[0, 1]"}}}


def trainer(pid: int = 100, rank: int | None = 0, job: str = "job") -> Identity:
    return Identity(pid, START_NS, job, "run", "trainer", rank, rank, 2, 0)


class DumpReaders:
    """Readers that see ``environ`` and ``files``, which are by (pid, path), of the processes that live."""

    def __init__(self, directory: Path, processes: Processes) -> None:
        self.directory = directory
        self.processes = processes
        self.environ: dict[str, str] = {"TORCH_FR_DUMP_TEMP_FILE": "/dumps/r"}
        self.files: dict[tuple[int, str], Path] = {}
        self.asked: list[str] = []
        self.shared_root = True
        self.failing: Exception | None = None
        # The owners of dumps other than user 7, by path, and the users of processes, by pid.
        self.uids: dict[str, int] = {}
        self.users: dict[int, int] = {}
        self.mtime_ns = UTC + START_NS + 60_000_000_000

    def write(self, pid: int, content: Any = DUMP, path: str = "/dumps/r0") -> Path:
        """Another content at another time; the file is process 1's as well."""
        file = self.directory / f"{pid}{path.replace('/', '_')}"
        file.write_bytes(content if isinstance(content, bytes) else pickle.dumps(content))
        self.mtime_ns += 1_000_000_000
        os.utime(file, ns=(self.mtime_ns, self.mtime_ns))
        self.files[pid, path] = file
        if self.shared_root:
            self.files[1, path] = file
        return file

    def call(self, op: str, **args: Any) -> Message:
        self.asked.append(op)
        if self.failing is not None:
            raise self.failing
        if op == "identity":
            return Message({"environ": self.environ})
        pid = args["process"][0]
        if pid != 1 and all(one.pid != pid for one in self.processes.who):
            raise ProcessGone(f"process {pid} exited")
        if op == "files":
            found = [self._described(pid, path) for path in args["paths"]]
            uid = self.users.get(pid, self.uids.get(args["paths"][0], 7))
            return Message(
                {"files": found, "paths": list(args["paths"]), "uid": uid, "witness": 1 if self.shared_root else None}
            )
        described = self._described(pid, args["path"])
        if described is None:
            raise UnsupportedTarget("not there")
        assert args["uid"] == described["uid"]
        return Message(described, fds=[os.open(self.files[pid, args["path"]], os.O_RDONLY)])

    def _described(self, pid: int, path: str) -> dict[str, Any] | None:
        file = self.files.get((pid, path))
        if file is None:
            return None
        found = file.stat()
        return {
            "path": path,
            "dev": found.st_dev,
            "inode": found.st_ino,
            "size": found.st_size,
            "mtime_ns": found.st_mtime_ns,
            "uid": self.uids.get(path, 7),
        }


class DumpParsers:
    """Parsers that decode dumps in this process. ``asked`` counts their calls."""

    def __init__(self) -> None:
        self.asked = 0

    def call(self, op: str, **args: Any) -> Any:
        self.asked += 1
        return json.loads(handlers()[op](Message({}, fds=list(args["fds"]))))


class World:
    def __init__(self, directory: Path) -> None:
        self.processes = Processes(trainer())
        self.readers = DumpReaders(directory, self.processes)
        self.parsers = DumpParsers()
        self.sink = Sink("python.torch_nccl_flight_record")


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dumps that are written again are read at the next look."""
    monkeypatch.setattr(flight_recorder, "FIRST_PAUSE_S", 0.0)


@pytest.fixture
def watch(world: World) -> FlightRecorderWatch:
    return watching(world)


def watching(world: World, remembered: Path | None = None, interval_s: float = 0.0) -> FlightRecorderWatch:
    clock = FakeClock(real_ns=UTC)
    clock.advance(3600 * 1_000_000_000)
    return FlightRecorderWatch(
        world.processes,
        world.readers,
        world.parsers,
        world.sink,
        clock,
        "node",
        remembered=remembered,
        interval_s=interval_s,
    )


def test_a_dump_is_read_once_and_only_when_it_no_longer_changes(world: World, watch: FlightRecorderWatch) -> None:
    assert watch.look() == 0
    world.readers.write(100, b"half")
    assert watch.look() == 0
    world.readers.write(100)
    assert watch.look() == 0
    assert watch.look() == 1
    assert watch.look() == 0
    assert [row["record_id"] for row in world.sink.rows] == [1, 2]
    row = world.sink.rows[0]
    assert (row["job"], row["run"], row["pid"], row["start_ns"], row["rank"]) == ("job", "run", 100, START_NS, 0)
    assert (row["world_size"], row["dump"], row["version"], row["node"]) == (2, "/dumps/r0", "2.9", "node")
    assert row["ts"] == world.readers.mtime_ns
    world.readers.write(100, {**DUMP, "entries": [{"record_id": 9}]})
    assert [watch.look(), watch.look()] == [0, 1]
    assert world.sink.rows[-1]["record_id"] == 9
    assert world.sink.rows[-1]["snapshot_id"] != row["snapshot_id"]
    assert not world.sink.losses


def test_a_dump_that_appears_at_the_end_is_read_after_it(world: World, watch: FlightRecorderWatch) -> None:
    watch.look()
    world.readers.write(100)
    (who,) = world.processes.who
    world.processes.who = []
    watch.process_exited(who)
    assert watch.look() == 1
    assert {row["pid"] for row in world.sink.rows} == {100}
    assert watch.look() == 0


def test_a_dump_lost_with_its_container_is_a_loss(world: World, watch: FlightRecorderWatch) -> None:
    world.readers.shared_root = False
    watch.look()
    world.readers.write(100)
    watch.look()
    world.processes.who = []
    assert watch.look() == 0
    (loss,) = world.sink.losses
    assert loss.pid == 100
    assert "ended" in loss.reason


@pytest.mark.parametrize("path", ["/dumps/r0", "dumps/r0"])
def test_a_dump_that_was_seen_and_is_not_there_at_the_end_is_a_loss(
    world: World, watch: FlightRecorderWatch, path: str
) -> None:
    world.readers.environ = {"TORCH_FR_DUMP_TEMP_FILE": path[:-1]}
    watch.look()
    world.readers.write(100, path=path)
    watch.look()
    # A path in the working directory of a process ends with it, and the other file is removed.
    del world.readers.files[1, path]
    world.processes.who = []
    assert watch.look() == 0
    (loss,) = world.sink.losses
    assert (loss.pid, loss.reason.startswith("the process ended")) == (100, True)


def test_a_dump_of_an_earlier_process_is_ignored(world: World, watch: FlightRecorderWatch) -> None:
    world.readers.mtime_ns = UTC + START_NS - 10_000_000_000
    world.readers.write(100)
    assert [watch.look(), watch.look()] == [0, 0]
    world.processes.who = []
    assert watch.look() == 0
    assert not world.sink.rows


def test_a_dump_that_two_jobs_claim_is_of_neither(world: World, watch: FlightRecorderWatch) -> None:
    world.processes.who.append(trainer(200, job="other"))
    world.readers.files[200, "/dumps/r0"] = world.readers.write(100)
    assert [watch.look(), watch.look(), watch.look()] == [0, 1, 0]
    assert {(row["job"], row["pid"], row["rank"]) for row in world.sink.rows} == {(None, None, 0)}


@pytest.mark.parametrize("both", [False, True])
def test_a_dump_at_the_end_of_one_of_two_jobs_is_of_neither(
    world: World, watch: FlightRecorderWatch, *, both: bool
) -> None:
    first, second = trainer(), trainer(200, job="other")
    world.processes.who = [first, second]
    watch.look()
    world.readers.files[200, "/dumps/r0"] = world.readers.write(200)
    world.processes.who = [] if both else [second]
    assert sum(watch.look() for _ in range(4)) == 1
    assert {(row["job"], row["pid"]) for row in world.sink.rows} == {(None, None)}


def test_a_dump_at_the_end_is_of_no_other_user(world: World, watch: FlightRecorderWatch) -> None:
    world.processes.who.append(trainer(200, job="other"))
    world.readers.users[200] = 8
    watch.look()
    world.readers.write(100)
    world.processes.who = world.processes.who[1:]
    assert watch.look() == 1
    assert {row["pid"] for row in world.sink.rows} == {100}


def test_a_dump_from_before_the_next_process_is_of_the_one_that_ended(world: World, watch: FlightRecorderWatch) -> None:
    watch.look()
    world.readers.write(100)
    later = START_NS + 120_000_000_000
    world.processes.who.append(trainer(200)._replace(start_ns=later))
    world.readers.files[200, "/dumps/r0"] = world.readers.files[100, "/dumps/r0"]
    watch.look()
    world.processes.who = world.processes.who[1:]
    assert watch.look() == 1
    assert {row["pid"] for row in world.sink.rows} == {100}


def test_a_spoilt_dump_is_a_loss_once(world: World, watch: FlightRecorderWatch) -> None:
    world.readers.write(100, pickle.dumps(print))
    assert [watch.look() for _ in range(4)] == [0] * 4
    (loss,) = world.sink.losses
    assert "plain data" in loss.reason
    assert world.parsers.asked == 1


def test_a_parser_that_has_no_time_is_asked_three_times(
    world: World, watch: FlightRecorderWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(op: str, **args: Any) -> Any:
        world.parsers.asked += 1
        raise TargetTimeout("busy")

    monkeypatch.setattr(world.parsers, "call", call)
    world.readers.write(100)
    for _ in range(8):
        watch.look()
    assert world.parsers.asked == 3
    assert len(world.sink.losses) == 1


def test_a_directory_that_does_not_answer_is_left_alone(world: World, watch: FlightRecorderWatch) -> None:
    world.readers.failing = TargetTimeout("slow")
    watch.look()
    assert watch.reason == "slow"
    asked = len(world.readers.asked)
    watch.look()
    assert len(world.readers.asked) == asked
    world.processes.who = []
    watch.look()
    assert watch.reason == ""


def test_processes_of_a_user_that_do_not_answer_hold_up_no_other(
    world: World, watch: FlightRecorderWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = Now(1_000.0)
    monkeypatch.setattr(flight_recorder, "time", SimpleNamespace(monotonic=now))
    # GIVEN a user with processes whose directories do not answer, and another user
    world.processes.who = [trainer(pid)._replace(owner=1) for pid in range(200, 210)] + [trainer()]
    asked: list[int] = []

    def call(op: str, **args: Any) -> Message:
        pid = args["process"][0] if "process" in args else args["pid"]
        asked.append(pid)
        if pid >= 200 and op == "files":
            now.now += 2.0
            raise TargetTimeout("slow")
        return DumpReaders.call(world.readers, op, **args)

    monkeypatch.setattr(world.readers, "call", call)
    world.readers.write(100)
    # THEN each look asks one of them, and so the dump of the other user is read at once
    assert [watch.look(), watch.look()] == [0, 1]
    assert [pid for pid in asked if pid >= 200] == [200, 200, 201, 201]
    # and a process that stays silent is asked ever more rarely.
    world.processes.who = [trainer(200)._replace(owner=1)]
    asked.clear()
    for _ in range(200):
        now.now += 5.0
        watch.look()
    assert asked.count(200) == 4


def test_another_program_in_the_process_has_another_environment(world: World, watch: FlightRecorderWatch) -> None:
    watch.look()
    world.readers.environ = {"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/new/x_"}
    watch.process_replaced(100, START_NS)
    world.readers.write(100, path="/new/x_0")
    assert [watch.look(), watch.look()] == [0, 1]


def test_the_next_daemon_reports_no_dump_again(world: World, tmp_path: Path) -> None:
    remembered = tmp_path / "flight.json"
    first = watching(world, remembered)
    world.readers.write(100)
    for _ in range(3):
        first.look()
    second = watching(world, remembered)
    assert [second.look(), second.look()] == [0, 0]
    assert len(world.sink.rows) == 2
    remembered.write_text('{"spoilt": [')
    third = watching(world, remembered)
    assert [third.look(), third.look()] == [0, 1]


def test_dumps_of_a_user_let_no_dump_of_another_be_reported_again(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known_dumps, "MAX_KNOWN", 4)
    remembered = tmp_path / "flight.json"
    many = [trainer(pid, pid)._replace(owner=1007) for pid in range(200, 210)]
    world.processes.who = [trainer(), *many]
    world.readers.write(100)
    watch = watching(world, remembered)
    assert [watch.look(), watch.look()] == [0, 1]
    for who in many:
        world.readers.write(who.pid, path=f"/dumps/r{who.rank}")
    for _ in range(4):
        watch.look()
    of_next = watching(world, remembered)
    for _ in range(4):
        of_next.look()
    assert [row["record_id"] for row in world.sink.rows if row["pid"] == 100] == [1, 2]


def test_looks_that_follow_at_once_are_no_second_look(world: World) -> None:
    watch = watching(world, interval_s=3600.0)
    world.readers.write(100)
    assert [watch.look() for _ in range(3)] == [0, 0, 0]
    assert world.readers.asked.count("files") == 1
    world.processes.who = []
    assert watch.look() == 1


def test_only_trainers_with_a_rank_are_looked_at(world: World, watch: FlightRecorderWatch) -> None:
    world.processes.who = [trainer(rank=None), Identity(300, 1, "job", "run", "launcher")]
    watch.look()
    assert world.readers.asked == ["identity"]


def test_a_file_that_changes_while_it_is_read_is_read_later(
    world: World, watch: FlightRecorderWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(op: str, **args: Any) -> Any:
        answer = DumpParsers.call(world.parsers, op, **args)
        if world.parsers.asked == 1:
            world.readers.write(100, {**DUMP, "entries": []})
        return answer

    monkeypatch.setattr(world.parsers, "call", call)
    world.readers.write(100)
    assert [watch.look(), watch.look(), watch.look(), watch.look()] == [0, 0, 0, 1]
    assert not world.sink.rows


@pytest.mark.parametrize(
    ("environ", "rank", "expected"),
    [
        ({"TORCH_FR_DUMP_TEMP_FILE": "/a/x_"}, 3, ("/a/x_3",)),
        ({"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "rel/x_"}, 12, ("rel/x_12",)),
        ({"TORCH_FR_DUMP_TEMP_FILE": "/a", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/b"}, 0, ("/a0", "/b0")),
        ({"TORCH_FR_DUMP_TEMP_FILE": "/a"}, None, ()),
    ],
)
def test_names_of_dumps(environ: dict[str, str], rank: int | None, expected: tuple[str, ...]) -> None:
    assert candidates(environ, rank) == expected


def test_names_of_dumps_without_an_environment_are_the_defaults() -> None:
    found = candidates({}, 5)
    assert "$HOME/.cache/torch/comm_lib_trace_rank_5" in found
    assert "/tmp/nccl_trace_rank_5" in found


def test_a_reader_that_fails_while_it_opens_is_a_loss(
    world: World, watch: FlightRecorderWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(op: str, **args: Any) -> Any:
        if op == "file":
            raise CorruptTarget("strange")
        return DumpReaders.call(world.readers, op, **args)

    monkeypatch.setattr(world.readers, "call", call)
    world.readers.write(100)
    assert [watch.look(), watch.look(), watch.look()] == [0, 0, 0]
    (loss,) = world.sink.losses
    assert "strange" in loss.reason


def test_a_dump_that_is_written_again_and_again_is_read_ever_more_rarely(
    world: World, watch: FlightRecorderWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flight_recorder, "FIRST_PAUSE_S", 100.0)
    now = [1000.0]
    monkeypatch.setattr(flight_recorder, "time", SimpleNamespace(monotonic=lambda: now[0]))
    read = []
    for _ in range(401):
        world.readers.write(100)
        now[0] += 1.0
        watch.look()
        if watch.look():
            read.append(now[0])
    assert [later - sooner for sooner, later in pairwise(read)] == [100.0, 200.0]
    # The last version is read.
    world.processes.who = []
    world.readers.write(100)
    assert watch.look() == 1


def test_a_user_whose_dump_takes_long_waits(
    world: World, watch: FlightRecorderWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(flight_recorder, "time", SimpleNamespace(monotonic=lambda: now[0]))
    call = world.parsers.call

    def slow(op: str, **args: Any) -> Any:
        now[0] += 7.0
        return call(op, **args)

    monkeypatch.setattr(world.parsers, "call", slow)
    world.readers.write(100)
    assert [watch.look(), watch.look()] == [0, 1]
    world.readers.write(100)
    now[0] += 69.0
    assert [watch.look(), watch.look()] == [0, 0]
    now[0] += 1.0
    assert watch.look() == 1


@pytest.mark.parametrize("ended", [False, True])
def test_dumps_of_a_user_that_take_long_let_the_others_wait_for_one(
    world: World, watch: FlightRecorderWatch, monkeypatch: pytest.MonkeyPatch, *, ended: bool
) -> None:
    now = Now(1_000.0)
    monkeypatch.setattr(flight_recorder, "time", SimpleNamespace(monotonic=now))
    read: list[int] = []
    call = world.parsers.call

    def slow(op: str, **args: Any) -> Any:
        uid = json.loads(os.pread(args["fds"][0], 9_999, 0))["version"]
        read.append(int(uid))
        now.now += 20.0 if uid == "1007" else 0.0
        return call(op, **args)

    monkeypatch.setattr(world.parsers, "call", slow)
    # GIVEN a user with many trainers, each of which writes a dump that takes long, before another user's
    world.processes.who = [trainer(pid, pid) for pid in range(200, 220)] + [trainer()]
    world.readers.uids = {f"/dumps/r{pid}": 1007 for pid in range(200, 220)} | {"/dumps/r0": 7}
    watch.look()
    for who in world.processes.who:
        path = f"/dumps/r{who.rank}"
        world.readers.write(who.pid, json.dumps({**DUMP, "version": str(world.readers.uids[path])}).encode(), path)
    # WHEN all can be read
    if ended:
        world.processes.who = []
    else:
        watch.look()
    assert not read
    watch.look()
    # THEN only one of his is read before that of the other
    assert sorted(read) == [7, 1007]
    # and all the others are read in time.
    while len(read) < 21:
        now.now += 220.0
        count = len(read)
        watch.look()
        assert len(read) == count + 1
    assert not world.sink.losses


def test_dumps_of_a_user_that_do_not_open_let_the_others_wait_for_one(
    world: World, watch: FlightRecorderWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = Now(1_000.0)
    monkeypatch.setattr(flight_recorder, "time", SimpleNamespace(monotonic=now))
    opened: list[int] = []

    def call(op: str, **args: Any) -> Message:
        if op == "file" and args["uid"] == 1007:
            opened.append(args["process"][0])
            now.now += 3.0
            raise TargetTimeout("slow")
        return DumpReaders.call(world.readers, op, **args)

    monkeypatch.setattr(world.readers, "call", call)
    world.processes.who = [trainer(pid, pid) for pid in range(200, 220)] + [trainer()]
    world.readers.uids = {f"/dumps/r{pid}": 1007 for pid in range(200, 220)}
    for who in world.processes.who:
        world.readers.write(who.pid, path=f"/dumps/r{who.rank}")
    assert [watch.look(), watch.look()] == [0, 1]
    assert len(opened) == 1


def test_a_dump_that_may_not_be_read_after_the_end_is_a_loss_of_its_process_only(
    world: World, watch: FlightRecorderWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(op: str, **args: Any) -> Any:
        if op == "file" and args["path"] == "/dumps/r3":
            raise PrivilegeError("it may not be read")
        return DumpReaders.call(world.readers, op, **args)

    monkeypatch.setattr(world.readers, "call", call)
    world.processes.who = [trainer(300, 3), trainer(100), trainer(400, 4)]
    watch.look()
    for who in world.processes.who:
        world.readers.write(who.pid, path=f"/dumps/r{who.rank}")
    world.processes.who = [trainer(400, 4)]
    assert watch.look() == 1
    assert {row["pid"] for row in world.sink.rows} == {100}
    (loss,) = world.sink.losses
    assert (loss.pid, "may not be read" in loss.reason) == (300, True)
    # The process that lives was looked at in the same look.
    assert watch.look() == 1


def test_dumps_of_ended_processes_that_wait_are_bounded(
    world: World, watch: FlightRecorderWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = Now(1_000.0)
    monkeypatch.setattr(flight_recorder, "time", SimpleNamespace(monotonic=now))
    monkeypatch.setattr(flight_recorder, "MAX_ENDED", 3)
    call = world.parsers.call

    def slow(op: str, **args: Any) -> Any:
        now.now += 20.0
        return call(op, **args)

    monkeypatch.setattr(world.parsers, "call", slow)
    world.processes.who = [trainer(pid, pid) for pid in range(200, 210)]
    watch.look()
    for who in world.processes.who:
        world.readers.write(who.pid, path=f"/dumps/r{who.rank}")
    world.processes.who = []
    assert watch.look() == 1
    (loss,) = world.sink.losses
    assert "6 processes" in loss.reason
