"""Discovery against readers that are made up: order, loss, late imports, restarts, and what cannot be read."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pyarrow as pa
import pytest
import waiting
from fakes import Sink

from probing.api.errors import NotPython, ProcessGone, TargetTimeout
from probing.daemon.arrow import batch_of
from probing.daemon.clock import FakeClock
from probing.daemon.ipc import Message
from probing.daemon.processes import discovery as discovery_module
from probing.daemon.processes import identification, registry, schedule, target
from probing.daemon.processes.discovery import Discovery
from probing.daemon.processes.facts import Facts
from probing.daemon.processes.identity import Ranks
from probing.daemon.processes.liveness import OwnProcesses, process_now
from probing.daemon.processes.ranking import Membership, ModuleState
from probing.daemon.processes.registry import MAX_DEAD
from probing.daemon.processes.schedule import next_look_s, retry_s
from probing.daemon.source import Identity, ProcessKey, Source

TORCHRUN = ["python3", "/venv/bin/torchrun", "train.py"]
RANK = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RESTART_COUNT": "0"}
SECOND = 1_000_000_000


class FakeReaders:
    """Answers for processes that a test puts in, as they are when it is asked; ``stuck`` ones never answer, ``late``
    ones when their event is set, ``quarantined`` ones after that time. ``unlisted``: so many next lists fail."""

    size = 3

    def __init__(self) -> None:
        self.processes: dict[int, dict[str, Any]] = {}
        self.stuck: set[int] = set()
        self.late: dict[int, threading.Event] = {}
        self.quarantined: dict[int, float] = {}
        self.asked: list[int] = []
        self.listed: list[Any] = []
        self.unlisted = 0

    def add(self, pid: int, start_s: int, *above: int, **more: Any) -> tuple[int, int]:
        ancestors = [[a, self.processes[a]["start_ns"], "python3"] for a in above]
        self.processes[pid] = {
            "pid": pid,
            "start_ns": start_s * SECOND,
            "ppid": above[0] if above else 1,
            "state": "S",
            "uid": 0,
            "owner": 0,
            "comm": "python3",
            "exe": "/usr/bin/python3.11",
            "cmdline": ["python3", "train.py"],
            "environ": {},
            "variables": None,
            "cgroup": ["/"],
            "libraries": [],
            "threads": ["python3"],
            "ancestors": ancestors,
            **more,
        }
        return pid, start_s * SECOND

    def call(self, op: str, *, pid: int = 0, start_ns: int = 0, timeout: float = 2.0, **args: Any) -> Message:
        if op == "list":
            self.listed.append(args["pids"])
            if self.unlisted:
                self.unlisted -= 1
                raise TargetTimeout("no reader was free in time")
            pids = args["pids"] if args["pids"] is not None else list(self.processes)
            return Message({}, json.dumps([self._listed(p) for p in pids if p in self.processes]).encode())
        if op == "state":
            return Message(
                {}, json.dumps([self._state(*each) for each in args["targets"][: target.MAX_TARGETS]]).encode()
            )
        seen = self.processes.get(pid)
        self.asked.append(pid)
        if pid in self.late:
            self.late[pid].wait(20)
        if pid in self.stuck or self.quarantine_s(pid, start_ns):
            raise TargetTimeout("stuck")
        if seen is None or seen["start_ns"] != start_ns:
            raise ProcessGone("gone")
        return Message(dict(seen))

    def quarantine_s(self, pid: int, start_ns: int) -> float:
        return max(0.0, self.quarantined.get(pid, 0.0) - time.monotonic())

    def forget(self, pid: int, start_ns: int) -> None:
        pass

    def _listed(self, pid: int) -> list[Any]:
        return [self.processes[pid][name] for name in ("pid", "start_ns", "ppid", "state", "comm", "exe")]

    def _state(self, pid: int, start_ns: int) -> dict[str, Any] | None:
        seen = self.processes.get(pid)
        return {name: seen[name] for name in ("state", "ppid", "threads")} if seen else None


class Following:
    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def process_identified(self, who: Identity) -> None:
        self.seen.append((who.role, who.pid))

    def process_replaced(self, pid: int, start_ns: int) -> None:
        self.seen.append(("replaced", pid))

    def program_ended(self, pid: int, start_ns: int, mono_ns: int) -> None:
        self.seen.append((f"ended {mono_ns}", pid))

    def process_exited(self, who: Identity) -> None:
        self.seen.append(("exited", who.pid))


Make = Callable[..., Discovery]


@pytest.fixture
def readers() -> FakeReaders:
    return FakeReaders()


@pytest.fixture
def sink() -> Sink:
    return Sink("process.events")


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(mono_ns=100 * SECOND, real_ns=1_000_000 * SECOND)


@pytest.fixture
def make(readers: FakeReaders, sink: Sink, clock: FakeClock) -> Iterator[Make]:
    made: list[Discovery] = []

    def start(*, restored: pa.Table | None = None, listener: Following | None = None, **options: Any) -> Discovery:
        options = {"rescan_s": 3600.0, "grace_s": 0.1, **options}
        discovery = Discovery(readers, sink, clock, "n1", **options)
        if restored is not None:
            discovery.restore(restored)
        if listener is not None:
            discovery.listeners.append(listener)
        made.append(discovery)
        discovery.start()
        assert discovery.scanned(20)
        return discovery

    yield start
    for event in readers.late.values():
        event.set()
    for discovery in made:
        discovery.stop()


def identified(discovery: Discovery, pid: int, start_ns: int) -> Identity | None:
    """Who it is, once that is known."""
    discovery.on_mapping(pid)
    waiting.until(lambda: not discovery.expected(pid, start_ns))
    return discovery.identity(pid, start_ns)


def torchrun(readers: FakeReaders, base: int = 10, start_s: int = 50) -> list[tuple[int, int]]:
    keys = [readers.add(base, start_s, cmdline=TORCHRUN, libraries=["torch"])]
    for rank in range(2):
        environ = {**RANK, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        keys.append(readers.add(base + 1 + rank, start_s + 1, base, environ=environ))
    return keys


def table(sink: Sink) -> pa.Table:
    return pa.Table.from_batches(sink.batches)


def test_a_job_that_runs_already(make: Make, readers: FakeReaders, sink: Sink, until: Any) -> None:
    launcher, *ranks = torchrun(readers)
    discovery = make()
    who = [identified(discovery, *key) for key in ranks]
    assert [(w.job, w.role, w.rank, w.local_rank, w.world_size) for w in who if w] == [
        ("n1/127.0.0.1:29500", "trainer", 0, 0, 2),
        ("n1/127.0.0.1:29500", "trainer", 1, 1, 2),
    ]
    above = discovery.identity(*launcher)
    assert above is not None
    assert (above.role, above.job, above.run, above.rank) == ("launcher", who[0].job, who[0].run, None)  # type: ignore[union-attr]
    # Its start is reported at its time: 51 s after boot, with the boot at 999,900 s.
    starts = [row for row in sink.rows if row["event"] == "start"]
    assert [row["ts"] for row in starts] == [999_950 * SECOND, 999_951 * SECOND, 999_951 * SECOND]


def test_a_process_that_starts_later(make: Make, readers: FakeReaders, sink: Sink) -> None:
    discovery = make()
    for pid, start_ns in torchrun(readers):
        discovery.on_exec(pid, start_ns, start_ns)
    assert identified(discovery, 11, 51 * SECOND)
    assert len({w.run for w in discovery.live()}) == 1


def test_a_kill_for_lack_of_memory_is_an_event_before_the_exit(
    make: Make, readers: FakeReaders, sink: Sink, until: Any
) -> None:
    _, first, second = torchrun(readers)
    discovery = make()
    assert identified(discovery, *second)
    discovery.on_oom(*first, 101 * SECOND)
    # Kernels before 6.10 give the pid alone; of a process that is none of ours there is no row.
    discovery.on_oom(second[0], 0, 102 * SECOND)
    discovery.on_oom(4, 0, 102 * SECOND)
    discovery.on_exit(*first, 103 * SECOND, 9)
    until(lambda: len(sink.events("exit")) == 1)
    events = [row for row in sink.rows if row["event"] in ("oom_kill", "exit")]
    assert [(r["event"], r["pid"], r["ts"]) for r in events] == [
        ("oom_kill", first[0], 1_000_001 * SECOND),
        ("oom_kill", second[0], 1_000_002 * SECOND),
        ("exit", first[0], 1_000_003 * SECOND),
    ]


def test_exits_are_reported_once_with_reason(make: Make, readers: FakeReaders, sink: Sink, until: Any) -> None:
    _, first, second = torchrun(readers)
    following = Following()
    discovery = make(listener=following)
    assert identified(discovery, *second)
    discovery.on_exit(*first, 101 * SECOND, 9)
    discovery.on_exit(*first, 101 * SECOND, 9)
    discovery.on_exit(*second, 102 * SECOND, 3 << 8)
    until(lambda: len(sink.events("exit")) == 2)
    exits = [row for row in sink.rows if row["event"] == "exit"]
    assert [(r["pid"], r["signal"], r["exit_code"], r["ts"]) for r in exits] == [
        (first[0], 9, None, 1_000_001 * SECOND),
        (second[0], None, 3, 1_000_002 * SECOND),
    ]
    assert following.seen[-2:] == [("exited", first[0]), ("exited", second[0])]
    # A dead process keeps its identity.
    assert discovery.identity(*first)


def test_a_rank_that_is_lost_stays_visible_while_its_run_lives(
    make: Make, readers: FakeReaders, clock: FakeClock, until: Any
) -> None:
    _, first, second = torchrun(readers)
    discovery = make()
    assert identified(discovery, *second)

    def states() -> dict[int, str]:
        batch = discovery.rows(clock.pair())
        return dict(zip(batch.column("pid").to_pylist(), batch.column("state").to_pylist(), strict=True))

    assert states() == {10: "running", 11: "running", 12: "running"}
    readers.processes[12]["state"] = "T"
    del readers.processes[11]
    discovery.on_exit(*first, 101 * SECOND, 9)
    until(lambda: states() == {10: "running", 11: "exited", 12: "stopped"})
    discovery.on_exit(*second, 101 * SECOND, 9)
    until(lambda: states() == {10: "running"})


def test_torch_is_imported_later(make: Make, readers: FakeReaders, sink: Sink) -> None:
    key = readers.add(20, 60)
    discovery = make()
    assert discovery.identity(*key) is None
    readers.processes[20]["libraries"] = ["python", "torch"]
    discovery.on_mapping(20)
    who = identified(discovery, *key)
    assert who is not None
    assert (who.role, who.job, who.rank) == ("trainer", "pid:20", None)
    # The communicator tells the rank that the environment does not.
    discovery.on_communicator(*key, Membership("0", "default_pg", "gloo", 1, 4))
    who = waiting.until(lambda: (found := discovery.identity(*key)) and found.rank is not None and found)
    assert who
    assert (who.rank, who.world_size) == (1, 4)


def test_a_process_is_found_without_any_event(make: Make, readers: FakeReaders) -> None:
    discovery = make(rescan_s=0.05)
    keys = torchrun(readers)
    assert all(identified(discovery, *key) for key in keys[1:])


def test_a_process_that_vanished_without_an_event(make: Make, readers: FakeReaders, sink: Sink, until: Any) -> None:
    torchrun(readers)
    make(rescan_s=0.05)
    until(lambda: len(sink.events("start")) == 3)
    del readers.processes[12]
    until(lambda: sink.events("exit") == [("exit", 12)])
    assert [(r["exit_code"], r["signal"]) for r in sink.rows if r["event"] == "exit"] == [(None, None)]


def test_a_process_that_a_list_leaves_out_has_not_ended(
    make: Make, readers: FakeReaders, sink: Sink, until: Any
) -> None:
    # GIVEN a rank that lives, and one that does not
    torchrun(readers)
    now = process_now(os.getpid())
    assert now is not None
    readers.add(*now, start_ns=now.start_ns, libraries=["torch"])
    make(rescan_s=0.05)
    until(lambda: len(sink.events("start")) == 4)
    # WHEN a list has neither, as when there are more processes than it may have
    del readers.processes[now.pid], readers.processes[12]
    # THEN only one has ended
    until(lambda: ("exit", 12) in sink.events("exit"))
    assert sink.events("exit") == [("exit", 12)]


def test_exit_while_it_is_read(make: Make, readers: FakeReaders, sink: Sink, until: Any) -> None:
    discovery = make()
    _, first, _ = torchrun(readers)
    readers.late[11] = threading.Event()
    for key in ((10, 50 * SECOND), first):
        discovery.on_exec(*key, key[1])
    until(lambda: 11 in readers.asked)
    discovery.on_exit(*first, 101 * SECOND, 6)
    # A marker behind the exit in the queue tells that it was dealt with.
    marker = readers.add(30, 70, environ={**RANK, "RANK": "0"})
    assert identified(discovery, *marker)
    readers.late[11].set()
    until(lambda: sink.events("exit") == [("exit", 11)])
    assert [event for event, pid in sink.events() if pid == 11] == ["start", "identified", "exit"]


def test_an_error_of_a_listener_keeps_no_process_from_the_others(
    make: Make, readers: FakeReaders, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN a listener that fails at each process, before one that follows all of them
    class Failing(Source):
        def _fail(self, *_: Any) -> None:
            raise RuntimeError("no")

        process_identified = process_replaced = program_ended = process_exited = _fail

    following = Following()
    discovery = make()
    discovery.listeners += [Failing(), following]  # type: ignore[list-item]
    keys = torchrun(readers)
    for key in keys:
        discovery.on_exec(*key, 0)
    assert all(identified(discovery, *key) for key in keys)
    discovery.on_exec(*keys[2], 7)
    for key in keys[1:]:
        discovery.on_exit(*key, 8, 0)
    # THEN that one hears of all
    until(lambda: following.seen[-1:] == [("exited", 12)])
    assert set(following.seen) >= {
        ("trainer", 11),
        ("trainer", 12),
        ("launcher", 10),
        ("replaced", 12),
        ("ended 7", 12),
    }
    assert ("exited", 11) in following.seen


def test_exec_while_it_is_read(make: Make, readers: FakeReaders, until: Any) -> None:
    discovery = make()
    launcher, first, _ = torchrun(readers)
    discovery.on_exec(*launcher, launcher[1])
    assert identified(discovery, *launcher)
    # GIVEN a child that is read while it is still a copy of its launcher
    rank = readers.processes[11]
    readers.add(11, 51, 10, cmdline=TORCHRUN, libraries=["torch"])
    late = readers.late[11] = threading.Event()
    discovery.on_fork(*first, first[1], 10)
    until(lambda: 11 in readers.asked)
    # WHEN it becomes a rank before the answer is there
    readers.processes[11] = rank
    discovery.on_exec(*first, first[1])
    assert identified(discovery, *readers.add(30, 70, environ={**RANK, "RANK": "0"}))
    late.set()
    # THEN it is the rank
    until(lambda: (who := discovery.identity(*first)) is not None and (who.role, who.rank) == ("trainer", 0))


def test_what_cannot_be_read_holds_nobody_up(make: Make, readers: FakeReaders) -> None:
    readers.add(5, 40)
    readers.stuck.add(5)
    readers.add(6, 40)
    readers.late[6] = threading.Event()
    keys = torchrun(readers)
    discovery = make()
    assert all(identified(discovery, *key) for key in keys)


def test_a_restarted_daemon_names_the_run_as_before(make: Make, readers: FakeReaders, sink: Sink, until: Any) -> None:
    # GIVEN ranks without a launcher, named after the oldest
    keys = [readers.add(11 + rank, 51 + rank, environ={**RANK, "RANK": str(rank)}) for rank in range(2)]
    first = make()
    run = {who.run for key in keys if (who := identified(first, *key))}
    assert len(run) == 1
    first.stop()
    # WHEN the oldest ends while no daemon is there
    del readers.processes[11]
    before = len(sink.rows)
    second = make(restored=table(sink))
    # THEN the other keeps its run, the end is reported, and nothing is reported twice
    who = identified(second, *keys[1])
    assert who is not None
    assert {who.run} == run
    until(lambda: sink.events()[before:] == [("exit", 11)])
    assert second.identity(*keys[0]) is not None
    # AND a third rank joins it
    third = readers.add(13, 70, environ={**RANK, "WORLD_SIZE": "3", "RANK": "2"})
    second.on_exec(*third, third[1])
    joined = identified(second, *third)
    assert joined is not None
    assert {joined.run} == run


def other_row(ts: int, pid: int, event: str) -> dict[str, Any]:
    """A stored row of a process that is none of the job."""
    return {"ts": ts, "pid": pid, "start_ns": 7, "event": event, "detail": "{}"}


@pytest.mark.parametrize(
    "others",
    [
        [other_row(i, 10_000 + i // 2, ("identified", "exit")[i % 2]) for i in range(8 * MAX_DEAD)],
        [other_row(1 << 62, 10_000 + i // 2, ("identified", "exit")[i % 2]) for i in range(8 * MAX_DEAD + 2)],
        [other_row(1 << 62, 10_000, "identified")] * (4 * MAX_DEAD),
    ],
    ids=["ended before", "ended since", "changed its identity very often"],
)
def test_a_process_that_lives_is_restored_whatever_rows_others_have(
    readers: FakeReaders, sink: Sink, make: Make, clock: FakeClock, others: list[dict[str, Any]]
) -> None:
    keys = torchrun(readers)
    first = make()
    assert identified(first, *keys[2])
    first.stop()
    rows = table(sink)
    more = pa.Table.from_pylist(others).cast(pa.schema([rows.schema.field(name) for name in others[0]]))
    both = pa.concat_tables([rows.select(more.column_names), more]).unify_dictionaries()
    second = Discovery(readers, sink, clock, "n1")
    assert second.restore(both) == len(keys)
    assert second.identity(*keys[2]) is not None


def test_another_boot_restores_nothing(readers: FakeReaders, sink: Sink, make: Make, clock: FakeClock) -> None:
    keys = torchrun(readers)
    first = make()
    assert identified(first, *keys[2])
    first.stop()
    other = Discovery(readers, sink, FakeClock(boot_id="another"), "n1")
    assert other.restore(table(sink)) == 0
    assert other.identity(*keys[2]) is None


def test_the_daemons_own_processes_are_not_read(make: Make, readers: FakeReaders) -> None:
    """Each reader that starts would be read by the others."""
    own = readers.add(os.getpid(), 60, environ={**RANK, "RANK": "0"})
    other = readers.add(1 << 30, 60, environ={**RANK, "RANK": "1"})
    discovery = make(own=OwnProcesses(frozenset({os.getuid()})))
    for pid, start_ns in (own, other):
        discovery.on_exec(pid, start_ns, 1)
    # The own one, whose exec came first, was looked at by then.
    waiting.until(lambda: readers.asked.count(other[0]) >= 2)
    assert identified(discovery, *other) is not None
    assert discovery.identity(*own) is None
    assert own[0] not in readers.asked

    readers.listed.clear()
    for pid, _ in (own, other):
        discovery.on_mapping(pid)
    waiting.until(lambda: any(pids and other[0] in pids for pids in readers.listed))
    assert not any(pids and own[0] in pids for pids in readers.listed)


def test_hostile_detail_restores_nothing(readers: FakeReaders, sink: Sink, make: Make, clock: FakeClock) -> None:
    texts = [
        "",
        "{",
        "[]",
        '{"boot_id":"00000000-test"}',
        '{"boot_id":"00000000-test","job":1,"run":2,"role":[]}',
        "9" * 99,
    ]
    rows = [{"ts": 1, "pid": 1, "start_ns": 1, "event": "identified", "detail": text} for text in texts]
    stored = pa.Table.from_batches([batch_of("process.events", rows)])
    assert Discovery(readers, sink, clock, "n1").restore(stored) == 0


def test_exec_replaces_the_program(make: Make, readers: FakeReaders, until: Any) -> None:
    key = readers.add(20, 60, exe="/bin/bash", cmdline=["bash"], environ={**RANK, "RANK": "0"})
    following = Following()
    discovery = make(listener=following)
    assert discovery.identity(*key) is None
    readers.processes[20] |= {"exe": "/usr/bin/python3.11", "cmdline": ["python3", "train.py"]}
    discovery.on_exec(*key, key[1])
    assert identified(discovery, *key)
    discovery.on_exec(*key, 71 * SECOND)
    until(lambda: ("replaced", 20) in following.seen and (f"ended {71 * SECOND}", 20) in following.seen)


def test_a_trainer_that_calls_exec_trains_no_more(make: Make, readers: FakeReaders, until: Any) -> None:
    environ = {**RANK, "RANK": "0"}
    key = readers.add(20, 60, environ=environ, libraries=["torch"])
    discovery = make()
    before = discovery.identity(*key)
    assert before is not None
    assert (before.role, before.rank) == ("trainer", 0)
    python = dict(readers.processes[20])
    readers.processes[20] |= {"exe": "/bin/bash", "cmdline": ["bash"], "libraries": [], "comm": "bash"}
    discovery.on_exec(*key, key[1])
    until(lambda: (found := discovery.identity(*key)) and (found.role, found.rank) == ("other", None))
    # The shell starts a training again.
    readers.processes[20] = python
    discovery.on_exec(*key, key[1])
    until(lambda: (found := discovery.identity(*key)) and (found.role, found.rank) == ("trainer", 0))


def test_a_user_with_very_many_processes_crowds_out_nobody(
    make: Make, readers: FakeReaders, sink: Sink, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "MAX_OF_OWNER", 3)
    many = [readers.add(100 + n, 60, owner=7, libraries=["torch"]) for n in range(10)]
    other = readers.add(20, 61, owner=8, libraries=["torch"])
    discovery = make()
    assert discovery.identity(*other) is not None
    watched = [key for key in many if discovery.identity(*key) is not None]
    assert len(watched) == 3
    assert [(loss.stage, loss.count) for loss in sink.losses] == [("identity", 7)]
    # There is room again.
    del readers.processes[watched[0][0]]
    discovery.on_exit(*watched[0], 101 * SECOND, 0)
    until(lambda: len([who for who in discovery.live() if who.owner == 7]) == 3)
    assert len(sink.losses) == 1


def test_plain_pythons_keep_no_training_out(make: Make, readers: FakeReaders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "MAX_OF_OWNER", 3)
    for n in range(5):
        readers.add(100 + n, 60)
    training = readers.add(20, 61, libraries=["torch"])
    assert make().identity(*training) is not None


def test_sources_with_little_room_are_fair_to_the_users(make: Make, readers: FakeReaders) -> None:
    older = [readers.add(100 + n, 50 + n, owner=7, libraries=["torch"]) for n in range(5)]
    newer = [readers.add(20 + n, 70 + n, owner=8, libraries=["torch"]) for n in range(2)]
    found = [who.key for who in make().live()]
    assert found == [older[0], newer[0], older[1], newer[1], *older[2:]]


def test_dead_processes_of_a_user_crowd_out_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "MAX_DEAD", 4)
    found = registry.Registry("n1", "boot")
    keys = [(20, 8), *((100 + n, 7) for n in range(10))]
    for pid, owner in keys:
        facts = Facts(pid, pid, owner=owner, exe="/usr/bin/python3", libraries=frozenset({"torch"}))
        found.update([facts])
        found.end(facts.key)
    kept = [pid for pid, _ in keys if found.get(ProcessKey(pid, pid)) is not None]
    assert kept == [20, 107, 108, 109]


def test_slow_reads_of_one_user_hold_up_no_other(
    make: Make, readers: FakeReaders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identification, "owner_now", lambda pid: 7 if pid >= 100 else 8)
    for n in range(readers.size + 5):
        pid, _ = readers.add(100 + n, 60, libraries=["torch"])
        readers.late[pid] = threading.Event()
    readers.add(20, 61, libraries=["torch"])
    make()
    # All readers are busy; then one of them answers, and the next read is not the same user's.
    readers.late[next(pid for pid in readers.asked if pid >= 100)].set()
    waiting.until(lambda: 20 in readers.asked)
    assert len(readers.asked) <= readers.size + 2


def test_forked_loaders(make: Make, readers: FakeReaders) -> None:
    _, rank, _ = torchrun(readers)
    readers.processes[11]["libraries"] = ["torch"]
    discovery = make()
    trainer = identified(discovery, *rank)
    assert trainer is not None
    loader = readers.add(40, 70, 11, 10, environ={**RANK, "RANK": "0"}, libraries=["torch"])
    discovery.on_fork(*loader, loader[1], 11)
    who = identified(discovery, *loader)
    assert who is not None
    assert (who.role, who.job, who.run, who.rank) == ("data_loader", trainer.job, trainer.run, None)
    # It stays one when its trainer dies first.
    discovery.on_exit(*rank, 101 * SECOND, 9)
    discovery.on_mapping(40)
    readers.asked.clear()
    while 40 not in readers.asked:
        discovery.on_mapping(40)
        time.sleep(0.01)
    assert discovery.identity(*loader) == who


def test_python_versions_and_backends(make: Make, readers: FakeReaders, clock: FakeClock, until: Any) -> None:
    torchrun(readers)
    readers.processes[11]["threads"] = ["python3", "pt_gloo_runloop"]

    asked: list[int] = []

    def version(pid: int, start_ns: int) -> str:
        asked.append(pid)
        # One never shows its version, another only when it is asked again.
        if pid == 10 or asked.count(pid) == 1:
            raise NotPython("no")
        return "3.11.7"

    discovery = make(python_version=version, backends=lambda pid, start_ns: {"nccl"} if pid == 12 else ())

    def seen() -> dict[int, tuple[str, str]]:
        rows = discovery.rows(clock.pair())
        values = zip(*(rows.column(name).to_pylist() for name in ("pid", "python", "backends")), strict=True)
        return {pid: (python, backends) for pid, python, backends in values}

    until(lambda: seen() == {10: ("3.11", ""), 11: ("3.11.7", "gloo"), 12: ("3.11.7", "nccl")})


def test_more_processes_than_a_reader_takes_at_once_are_all_shown(
    make: Make, readers: FakeReaders, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = torchrun(readers)
    discovery = make()
    assert all(identified(discovery, *key) for key in keys)
    for module in (target, discovery_module):
        monkeypatch.setattr(module, "MAX_TARGETS", 2, raising=False)
    rows = discovery.rows(clock.pair())
    assert (rows.num_rows, rows.column("state").null_count) == (3, 1)


def test_environments(make: Make, readers: FakeReaders, clock: FakeClock) -> None:
    keys = torchrun(readers)
    discovery = make()
    assert identified(discovery, *keys[2])
    rows = discovery.envs(clock.pair())
    values = zip(*(rows.column(name).to_pylist() for name in ("pid", "name", "value")), strict=True)
    assert (11, "RANK", "0") in list(values)


def test_a_flood_of_events_is_a_loss(
    make: Make, readers: FakeReaders, sink: Sink, until: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr("probing.daemon.processes.identification.MAX_QUEUE", 0)
    discovery = make()
    keys = torchrun(readers)
    discovery.on_exec(*keys[0], 0)
    monkeypatch.undo()
    until(lambda: [loss.table for loss in sink.losses] == ["process.events"])
    # The scan that follows finds what the lost events would have reported.
    assert all(identified(discovery, *key) for key in keys)


def test_an_error_with_one_process_loses_no_read_of_another(make: Make, readers: FakeReaders) -> None:
    # GIVEN processes that are read together, one of which cannot be identified for a fault of this program
    keys = torchrun(readers)

    def backends(pid: int, start_ns: int) -> Iterable[str]:
        if pid == 10:
            raise OverflowError("int too large to convert to float")
        return ()

    # THEN the others are identified
    discovery = make(backends=backends)
    assert all(identified(discovery, *key) for key in keys[1:])
    assert discovery.identity(*keys[0]) is None


def test_a_shell_that_becomes_a_rank_during_a_flood_of_events_is_found(
    make: Make, readers: FakeReaders, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = readers.add(21, 50, exe="/bin/bash")
    discovery = make()
    readers.processes[21] |= {"exe": "/usr/bin/python3.11", "libraries": ["torch"], "environ": RANK | {"RANK": "1"}}
    monkeypatch.setattr(identification, "MAX_QUEUE", 0)
    discovery.on_exec(*key, 0)
    until(lambda: (who := discovery.identity(*key)) is not None and who.rank == 1)


def test_a_flood_of_events_loses_no_process_that_is_being_read(
    make: Make, readers: FakeReaders, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN a rank whose read is slow, and ends while no further event is queued
    key = readers.add(21, 50, libraries=["torch"], environ=RANK | {"RANK": "1"})
    readers.late[21] = threading.Event()
    discovery = make()
    monkeypatch.setattr(identification, "MAX_QUEUE", 0)
    readers.late[21].set()
    # THEN it is identified
    until(lambda: (who := discovery.identity(*key)) is not None and who.rank == 1)


def test_a_rank_that_was_read_between_fork_and_exec_is_no_launcher(
    make: Make, readers: FakeReaders, until: Any
) -> None:
    launcher, first, _ = torchrun(readers)
    discovery = make()
    assert identified(discovery, *first)
    # GIVEN a child of torchrun that is read before it calls exec, with the program of its parent
    key = readers.add(21, 60, launcher[0], cmdline=TORCHRUN, libraries=["torch"])
    discovery.on_fork(*key, key[1], launcher[0])
    until(lambda: (who := discovery.identity(*key)) is not None and who.role == "launcher")
    environ = {**RANK, "RANK": "1", "LOCAL_RANK": "1"}
    readers.processes[21] |= {"cmdline": ["python3", "train.py"], "environ": environ}
    discovery.on_exec(*key, key[1] + 1)
    until(lambda: (who := discovery.identity(*key)) is not None and (who.role, who.rank) == ("trainer", 1))


def test_a_read_that_fails_once_is_made_again_soon(
    make: Make, readers: FakeReaders, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedule, "RETRY_S", 0.01)
    # GIVEN a Python that was read many times while it started, and once when the machine was too busy
    key = readers.add(21, 50)
    discovery = make()
    for _ in range(23):
        looks = len(readers.asked)
        discovery.on_mapping(21)
        until(lambda looks=looks: len(readers.asked) > looks)
    readers.stuck.add(21)
    looks = len(readers.asked)
    discovery.on_mapping(21)
    until(lambda: len(readers.asked) > looks)
    readers.processes[21] |= {"libraries": ["torch"], "environ": RANK | {"RANK": "1"}}
    readers.stuck.clear()
    # THEN its next read does not wait for as long as if all reads had failed
    until(lambda: (who := discovery.identity(*key)) is not None and who.rank == 1)


def test_processes_that_cannot_be_listed_are_read_later(
    make: Make, readers: FakeReaders, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedule, "RETRY_S", 0.01)
    # GIVEN a Python that was read, and maps torch while no reader is free
    key = readers.add(21, 50)
    discovery = make()
    readers.processes[21] |= {"libraries": ["torch"], "environ": RANK | {"RANK": "1"}}
    readers.unlisted = 1
    discovery.on_mapping(21)
    until(lambda: not readers.unlisted)
    # THEN it is read again without another event
    until(lambda: (who := discovery.identity(*key)) is not None and who.rank == 1)


def test_reads_that_a_quarantine_refuses_put_off_no_read(make: Make, readers: FakeReaders, until: Any) -> None:
    # GIVEN a process that maps libraries again and again while it is in quarantine
    key = readers.add(21, 50, libraries=["torch"], environ=RANK | {"RANK": "1"})
    readers.quarantined[21] = time.monotonic() + 0.5
    discovery = make()
    for _ in range(23):
        looks = len(readers.asked)
        discovery.on_mapping(21)
        until(lambda looks=looks: len(readers.asked) > looks or discovery.identity(*key))
    # THEN it is read after its quarantine
    until(lambda: (who := discovery.identity(*key)) is not None and who.rank == 1)


def test_forks_of_strangers_do_not_list_the_processes(
    make: Make, readers: FakeReaders, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed: list[int] = []
    alive = registry.Registry.alive
    monkeypatch.setattr(registry.Registry, "alive", lambda self: listed.append(1) or alive(self))
    keys = torchrun(readers)
    discovery = make()
    before = len(listed)
    # GIVEN many short processes of others, and then a child of a rank
    for pid in range(1_000, 3_000):
        discovery.on_fork(pid, 60 * SECOND, 60 * SECOND, 900)
        discovery.on_exit(pid, 60 * SECOND, 61 * SECOND, 0)
    child = readers.add(40, 70, keys[1][0], 10, cmdline=["python3", "train.py"])
    discovery.on_fork(*child, child[1], keys[1][0])
    # THEN the child is read, and the processes were listed a few times at most
    waiting.until(lambda: discovery.identity(*child) is not None and not discovery.expected(*child))
    assert len(listed) - before < 9
    # A process that has ended is nobody's parent.
    discovery.on_exit(*keys[1], 80 * SECOND, 0)
    waiting.until(lambda: keys[1] not in [who.key for who in discovery.live()])
    assert not discovery._registry.lives(keys[1][0])
    assert discovery._registry.lives(keys[2][0])


def test_an_exit_event_that_comes_after_the_listing(make: Make, readers: FakeReaders, sink: Sink, until: Any) -> None:
    # GIVEN a process that a listing lacks before its exit event is drained from the ring
    _, first, _ = torchrun(readers)
    discovery = make(rescan_s=0.02, grace_s=60.0)
    assert identified(discovery, *first)
    del readers.processes[11]
    listings = len(readers.listed)
    until(lambda: len(readers.listed) >= listings + 2)
    # THEN the listing does not end it, and the event's reason is what is reported
    discovery.on_exit(*first, 101 * SECOND, 9)
    until(lambda: sink.events("exit") == [("exit", 11)])
    assert [row["signal"] for row in sink.rows if row["event"] == "exit"] == [9]


def test_communicators_of_processes_that_have_ended_are_not_kept(make: Make, readers: FakeReaders) -> None:
    keys = torchrun(readers)
    discovery = make()
    kept = discovery._registry._ranking._communicators._of
    # GIVEN a rank and a process that was never read, which have ended
    stranger = (4_711, 60 * SECOND)
    for key in (keys[1], stranger):
        discovery.on_exit(*key, 80 * SECOND, 0)
    # WHEN their communicators are assembled from records that a ring still had
    for key in (keys[1], stranger, keys[2]):
        discovery.on_communicator(*key, Membership("default_pg", "default_pg", "gloo", 1, 2))
    # THEN only that of the living rank is kept
    waiting.until(lambda: keys[2] in kept)
    assert list(kept) == [keys[2]]


def test_a_child_that_is_gone_before_it_is_read_belongs_to_its_parents_job(
    make: Make, readers: FakeReaders, until: Any
) -> None:
    _, rank, _ = torchrun(readers)
    readers.processes[rank[0]]["owner"] = 1007
    discovery = make()
    trainer = identified(discovery, *rank)
    assert trainer is not None
    # GIVEN a child and a grandchild that no reader finds any more
    child, grandchild, program = (40, 70 * SECOND), (41, 71 * SECOND), (42, 71 * SECOND)
    discovery.on_fork(*child, child[1], rank[0])
    discovery.on_fork(*grandchild, grandchild[1], child[0])
    discovery.on_fork(*program, program[1], rank[0])
    discovery.on_exec(*program, program[1])
    assert discovery.expected(*child)
    for key in (child, grandchild, program):
        discovery.on_exit(*key, key[1] + 1, 0)
    until(lambda: not any(discovery.expected(*key) for key in (child, grandchild, program)))
    # THEN both are of the job, with no rank; one that ran another program is not
    for key in (child, grandchild):
        who = discovery.identity(*key)
        assert who is not None
        assert (who.pid, who.start_ns, who.job, who.run, who.rank) == (*key, trainer.job, trainer.run, None)
        assert who.owner == trainer.owner == 1007
    assert discovery.identity(*program) is None
    # nor is another process with the same pid
    assert discovery.identity(child[0], child[1] + SECOND) is None


def test_who_asks_does_not_wait_for_discovery(make: Make, readers: FakeReaders, until: Any) -> None:
    # GIVEN a thread of discovery that is held up in a listener
    _, rank, other = torchrun(readers)
    held, entered = threading.Event(), threading.Event()

    class Listener(Following):
        def process_exited(self, who: Identity) -> None:
            entered.set()
            held.wait()

    discovery = make(listener=Listener())
    assert identified(discovery, *rank)
    discovery.on_exit(*rank, 0, 0)
    assert entered.wait(20)
    # THEN what is known is answered, and what is not is expected
    with discovery._known:
        assert discovery.identity(*other)
        assert discovery.identity(77, 5) is None
        assert discovery.expected(77, 5)
    held.set()


def test_modules_are_read_where_nothing_else_names_a_rank(make: Make, readers: FakeReaders, until: Any) -> None:
    asked: list[int] = []

    def module_state(pid: int, _: int) -> ModuleState | None:
        asked.append(pid)
        if len(asked) == 1:
            raise TargetTimeout("slow")
        # The framework has not initialized yet at the second look.
        return ModuleState(Ranks(3, 8), "10.0.0.1:1234") if len(asked) > 2 else None

    key = readers.add(21, 50, libraries=["jax"])
    _, ranked, _ = torchrun(readers)
    discovery = make(module_state=module_state)
    until(lambda: (who := discovery.identity(*key)) is not None and (who.rank, who.job) == (3, "10.0.0.1:1234"))
    assert set(asked) == {21}
    assert discovery.identity(*ranked)


def test_a_title_that_hides_the_environment_hides_nobody(make: Make, readers: FakeReaders, until: Any) -> None:
    environ = {**RANK, "RANK": "1", "MASTER_ADDR": "10.0.0.1"}
    key = readers.add(21, 50, environ=environ)
    discovery = make()
    before = identified(discovery, *key)
    looks = len(readers.asked)
    readers.processes[21] |= {"environ": {}, "cmdline": ["a title"], "libraries": ["torch"]}
    discovery.on_mapping(21)
    until(lambda: len(readers.asked) > looks)
    discovery.on_exit(99, 1, 1)
    assert discovery.identity(*key) == before
    # Another program has nothing of it.
    discovery.on_exec(*key, 1)
    until(lambda: (who := discovery.identity(*key)) is not None and who.rank is None and who.job == "pid:21")


def test_titles_of_two_servers_in_one_job_hide_no_other_job(make: Make, readers: FakeReaders) -> None:
    # GIVEN a job whose two trainers have titles with different numbers of coordinates
    place = {"MASTER_ADDR": "gn6", "MASTER_PORT": "4711"}
    for pid, title in ((31, "VLLM::Worker_TP0"), (32, "sglang::scheduler_TP1")):
        readers.add(pid, 50, cmdline=[title], environ=place, libraries=["torch"])
    rank = readers.add(33, 60, libraries=["torch"], environ=RANK | {"RANK": "1"})
    discovery = make()
    # THEN a rank of another job is identified
    who = identified(discovery, *rank)
    assert who is not None
    assert (who.role, who.rank) == ("trainer", 1)


def test_the_thread_that_trains_is_one_that_runs_python(make: Make, readers: FakeReaders, until: Any) -> None:
    _, first, second = torchrun(readers)
    discovery = make(runs_python=lambda _pid, _start_ns, tid: tid == 77)
    assert identified(discovery, *first)
    discovery.on_issuer(*second, 78)
    discovery.on_issuer(*first, 77)
    until(lambda: (who := discovery.identity(*first)) is not None and who.trains == 77)
    discovery.on_issuer(*first, first[0])
    until(lambda: (who := discovery.identity(*first)) is not None and who.trains == first[0])
    who = discovery.identity(*second)
    assert who is not None
    assert who.trains == second[0]


def test_stacks_of_trainers_from_before_the_daemon_are_read_together(
    make: Make, readers: FakeReaders, until: Any
) -> None:
    _, first, second = torchrun(readers)
    for pid in (first[0], second[0]):
        readers.processes[pid]["libraries"] = ["torch"]
    asked: list[set[tuple[int, int]]] = []

    def training_threads(keys: Iterable[tuple[int, int]]) -> dict[tuple[int, int], int]:
        asked.append(set(keys))
        return {first: 77}

    discovery = make(training_threads=training_threads)
    until(lambda: (who := discovery.identity(*first)) is not None and who.trains == 77)
    assert asked == [{first, second}]


def test_a_process_is_looked_at_ever_more_rarely() -> None:
    often = (1, 11, 12, 13, 14, 15, 10_000)
    assert [next_look_s(looks, near=False) for looks in often] == [0.2, 15, 30, 60, 120, 120, 120]
    assert [next_look_s(looks, near=True) for looks in (1, 11, 22, 23, 10_000)] == [0.2, 5, 5, 15, 15]
    # A process can be unreadable for weeks.
    assert [retry_s(failures) for failures in (0, 1, 6, 7, 10_000)] == [2.5, 5, 160, 300, 300]
