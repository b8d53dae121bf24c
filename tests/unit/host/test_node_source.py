"""Rows of host.memory, host.disk, host.pressure and host.file_systems."""

from __future__ import annotations

import json
from typing import Any

from fakes import Processes, Readers, Sink

from probing.api.errors import TargetTimeout
from probing.daemon.clock import FakeClock
from probing.daemon.host.node.rows import Growth
from probing.daemon.host.node.source import FIRST_TURNS, SILENT_TURNS, NodeSource, SpaceSource
from probing.daemon.ipc import Message
from probing.daemon.source import Identity
from probing.daemon.source_state import Totals

SECOND = 1_000_000_000
TOTALS = Totals("running", {}, {})


def who(pid: int, rank: int | None, job: str = "j", role: str = "trainer") -> Identity:
    return Identity(pid, 7, job, "r", role, rank)


def found(at_s: int, **changed: Any) -> dict[str, Any]:
    disk = {
        "reads": 10,
        "read_sectors": 80,
        "read_ms": 50,
        "writes": 3,
        "write_sectors": 24,
        "write_ms": 5,
        "in_flight": 2,
        "busy_ms": 40,
        "queue_ms": 60,
        "life": 9,
    }
    return {
        "mono_ns": at_s * SECOND,
        "memory": {"total_bytes": 1000, "available_bytes": 300, "swap_total_bytes": 50, "swap_free": 20},
        "vm": {"oom_kills": 5, "swap_in_pages": 3},
        "pressure": {"memory": {"some": [1.5, 0.5, 0.25, 1_000.0], "full": [0.0, 0.0, 0.0, 100.0]}},
        "disks": {"nvme0n1": disk},
        "processes": [],
        "memory_groups": {},
        "pressure_groups": {},
        **changed,
    }


class Node:
    def __init__(self, *watched: Identity) -> None:
        self.rows, self.now = Sink(), found(1)
        readers = Readers(node=lambda _: Message({}, json.dumps(self.now).encode()))
        self.source = NodeSource(readers, Processes(*watched), self.rows, FakeClock(real_ns=5_000), "n1", 5.0)
        self.readers = readers

    def look(self, now: dict[str, Any], table: str) -> list[dict[str, Any]]:
        self.now = now
        self.rows.clear()
        self.source.tick()
        return self.rows.take(table)


def only(row: dict[str, Any], *names: str) -> tuple[Any, ...]:
    return tuple(row[name] for name in names)


def test_memory_of_the_node_and_its_differences() -> None:
    node = Node()
    (first,) = node.look(found(1), "host.memory")
    assert only(first, "node", "scope", "total_bytes", "used_bytes", "swap_used_bytes") == ("n1", "node", 1000, 700, 30)
    assert only(first, "oom_kills", "wall_ns", "swap_in_bytes", "major_faults") == (None, None, None, None)
    (row,) = node.look(found(6, vm={"oom_kills": 8, "swap_in_pages": 5}), "host.memory")
    assert only(row, "oom_kills", "wall_ns", "swap_in_bytes") == (3, 5 * SECOND, 2 * 4096)
    (row,) = node.look(found(11, vm={"oom_kills": 1}), "host.memory")
    assert only(row, "oom_kills", "wall_ns", "swap_in_bytes") == (None, 5 * SECOND, None)


def group(inode: int, **values: int) -> dict[str, Any]:
    return {f"{inode}:/a": {"path": "/a", "used_bytes": 900, "limit_bytes": 1000, **values}}


def member(key: str | None) -> dict[str, Any]:
    return {"io": {}, "memory_group": key, "pressure_group": key}


def test_a_group_is_a_row_with_the_job_of_its_processes() -> None:
    node = Node(who(1, 0), who(2, 1), who(3, None, role="data_loader"))
    members = [member("5:/a"), member("5:/a"), None]
    node.look(found(1, processes=members, memory_groups=group(5, oom_kills=1)), "host.memory")
    _, row = node.look(found(6, processes=members, memory_groups=group(5, oom_kills=3, high_bytes=950)), "host.memory")
    assert row["high_bytes"] == 950
    assert only(row, "scope", "cgroup", "job", "processes") == ("cgroup", "/a", "j", 2)
    assert only(row, "total_bytes", "used_bytes", "available_bytes", "oom_kills") == (1000, 900, 100, 2)
    # The same path again is another group.
    members = [member("6:/a"), member("6:/a"), None]
    _, row = node.look(found(11, processes=members, memory_groups=group(6, oom_kills=9)), "host.memory")
    assert only(row, "oom_kills", "wall_ns") == (None, None)


def test_a_group_of_two_jobs_names_none() -> None:
    node = Node(who(1, 0), who(2, 0, "other"))
    members = [member("5:/a"), member("5:/a")]
    _, row = node.look(found(1, processes=members, memory_groups=group(5)), "host.memory")
    assert only(row, "job", "run", "processes") == (None, None, 2)


def disk(**changed: int) -> dict[str, Any]:
    return {"nvme0n1": {**found(1)["disks"]["nvme0n1"], **changed}}


def test_disks_have_rates_and_latencies_and_no_negative_ones() -> None:
    node = Node()
    assert node.look(found(1), "host.disk") == []
    now = disk(reads=17, read_sectors=80 + 56, read_ms=50 + 35, busy_ms=45)
    (row,) = node.look(found(6, disks=now), "host.disk")
    assert only(row, "scope", "device", "reads", "read_bytes", "read_ns", "writes") == (
        "device",
        "nvme0n1",
        7,
        56 * 512,
        35_000_000,
        0,
    )
    assert only(row, "busy_ns", "wall_ns", "in_flight", "flushes") == (5_000_000, 5 * SECOND, 2, None)
    wrapped = disk(reads=18, read_sectors=80 + 64, read_ms=3, busy_ms=46)
    (row,) = node.look(found(11, disks=wrapped), "host.disk")
    assert only(row, "reads", "read_ns") == (1, None)
    another = disk(reads=99, read_sectors=999, life=10)
    assert node.look(found(16, disks=another), "host.disk") == []


def io(**values: int) -> list[dict[str, Any]]:
    return [{"io": values, "io_delay_ns": 5 * values["syscr"], "memory_group": None, "pressure_group": None}]


def test_what_processes_read_and_wrote() -> None:
    node = Node(who(1, 3))
    node.look(found(1, disks={}, processes=io(syscr=1, rchar=10, read_bytes=4096)), "host.disk")
    rows = node.look(found(6, disks={}, processes=io(syscr=8, rchar=23, read_bytes=4096)), "host.disk")
    assert [
        only(row, "scope", "rank", "pid", "reads", "call_read_bytes", "read_bytes", "io_delay_ns") for row in rows
    ] == [("process", 3, 1, 7, 13, 0, 35)]
    assert node.look(found(11, disks={}, processes=io(syscr=8, rchar=23, read_bytes=4096)), "host.disk") == []


def test_pressure_of_the_node_and_of_groups() -> None:
    node = Node(who(1, 3))
    resources = {"io": {"some": [5.0, 1.0, 0.0, 10.0]}}
    groups = {"5:/a": {"path": "/a", "resources": resources}}
    node.look(found(1, processes=[member("5:/a")], pressure_groups=groups), "host.pressure")
    later = {"5:/a": {"path": "/a", "resources": {"io": {"some": [9.0, 1.0, 0.0, 27.0]}}}}
    total = {"memory": {"some": [1.5, 0.5, 0.25, 1_013.0], "full": [0.0, 0.0, 0.0, 90.0]}}
    rows = node.look(found(6, processes=[member("5:/a")], pressure_groups=later, pressure=total), "host.pressure")
    names = ("scope", "cgroup", "job", "resource", "some_avg10_pct", "some_ns", "full_ns")
    assert [only(row, *names) for row in rows] == [
        ("node", None, None, "memory", 1.5, 13_000, None),
        ("cgroup", "/a", "j", "io", 9.0, 17_000, None),
    ]


def test_a_node_without_any_of_it_has_no_rows() -> None:
    node = Node()
    assert node.look(found(1, memory={}, vm={}, pressure={}, disks={}), "host.memory") == []
    assert node.rows.rows == []


def test_a_reader_that_does_not_answer_is_reported() -> None:
    node = Node()
    node.readers.failure = TargetTimeout("no reader was free in time")
    assert node.look(found(1), "host.memory") == []
    assert node.source.states(TOTALS)[0].reason == "no reader was free in time"


def test_growth_forgets_and_is_bounded() -> None:
    growth = Growth(most=2)
    for key in range(5):
        assert growth.since(key, SECOND, {"a": 1}) == {}
    assert len(growth) == 2
    assert growth.since(0, 2 * SECOND, {"a": 4, "b": 1}) == {"a": 3, "wall_ns": SECOND}
    assert growth.since(0, 2 * SECOND, {"a": 9}) == {}
    growth.forget(3_600 * SECOND)
    assert len(growth) == 0


SPACE = {
    "mount_point": "/dev/shm",
    "fs_type": "tmpfs",
    "source": "tmpfs",
    "device": "0:22",
    "size_bytes": 64 << 20,
    "used_bytes": 60 << 20,
    "available_bytes": 4 << 20,
    "inodes": 9,
    "inodes_used": 3,
    "read_only": 0,
}


class Space:
    def __init__(self, *watched: Identity, **answer: Any) -> None:
        self.silent: set[str] = set()
        self.rows = Sink()
        self.answer = {"local": [SPACE], "served": [], "shared": [], **answer}
        self.readers = Readers(space=self._answered)
        self.source = SpaceSource(self.readers, Processes(*watched), self.rows, FakeClock(real_ns=5_000), "n1", 30.0)

    def _answered(self, request: dict[str, Any]) -> Message:
        point = request.get("point")
        if point in self.silent:
            raise TargetTimeout("process 0 could not be read in 1 s (space)")
        return Message({}, json.dumps(SPACE if point else self.answer).encode())

    def look(self) -> list[dict[str, Any]]:
        self.source.tick()
        return self.rows.take("host.file_systems")


def test_shared_memory_of_a_container_is_a_row_of_its_own() -> None:
    space = Space(
        who(1, 0), who(2, 1), who(3, 2), shared=[{**SPACE, "device": "0:77"}, {**SPACE, "device": "0:77"}, SPACE]
    )
    rows = space.look()
    assert [only(row, "scope", "mount_point", "rank", "pid", "answers", "read_only") for row in rows] == [
        ("node", "/dev/shm", None, None, True, False),
        ("process", "/dev/shm", 0, 1, True, False),
    ]


def test_a_server_that_does_not_answer_is_said_and_left_alone() -> None:
    space = Space(served=[["/mnt/a", "nfs4", "s:/a"], ["/mnt/b\x1b", "lustre", "s:/b"]])
    assert [only(row, "mount_point", "answers") for row in space.look()[1:]] == [("/dev/shm", True), ("/dev/shm", True)]
    space.silent = {"/mnt/b\x1b"}
    assert [row["answers"] for row in space.look()[1:]] == [True, None]
    assert [row["answers"] for row in space.look()[1:]] == [True, False]
    assert space.source.states(TOTALS)[0].reason == "/mnt/b\\x1b does not answer"
    asked = len(space.readers.asked)
    assert [row["answers"] for row in space.look()[1:]] == [True, False]
    assert len(space.readers.asked) == asked + 2
    space.silent.clear()
    # A server that was busy for a minute does not count as lost for an hour.
    for _ in range(FIRST_TURNS):
        rows = space.look()
    assert [row["answers"] for row in rows[1:]] == [True, True]
    assert space.source.states(TOTALS)[0].reason == ""


def test_a_server_that_is_lost_is_asked_ever_less_often() -> None:
    space = Space(served=[["/mnt/a", "nfs4", "s:/a"]])
    space.silent = {"/mnt/a"}
    assert [row["answers"] for _ in range(2) for row in space.look()[1:]] == [None, False]

    def asked(turns: int) -> int:
        before = len(space.readers.asked)
        assert {row["answers"] for _ in range(turns) for row in space.look()[1:]} == {False}
        return len(space.readers.asked) - before - turns

    assert asked(SILENT_TURNS) == 4
    assert asked(4 * SILENT_TURNS) == 4
