"""The gatherer over a collector that is made up, without stored rows."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pytest

from probing.api.errors import NotFound, PeerError, QueryTimeout
from probing.daemon.arrow import batch_of, ipc_bytes
from probing.daemon.diagnose.gather.gatherer import Gatherer
from probing.daemon.query.answer import Item
from probing.daemon.stack_wire import ProcessStacks

S = 1_000_000_000
NOW = 1_700_000_000 * S


class Node:
    """The collector. ``calls_ago_s``: when the newest operation was called."""

    def __init__(self, calls_ago_s: float) -> None:
        who = {"node": "n", "ts": NOW, "job": "j", "run": "r", "pid": 100, "start_ns": 7, "rank": 0}
        progress = {**who, "comm": "c", "calls": 9, "last_call": NOW - round(calls_ago_s * S)}
        self.rows: dict[str, list[dict[str, Any]]] = {
            "process.processes": [{**who, "role": "trainer", "state": "running", "world_size": 1}],
            "comm.progress": [progress],
            "comm.inflight": [],
            "gpu.devices": [],
            "rdma.qps": [],
            "net.sockets": [
                {**who, "state": state, "local_address": "10.0.0.1", "local_port": port, "seen": NOW}
                for state, port in (("open", 7), ("closed", 8), ("closed", 9), ("listens", 9), ("closed", 7))
            ],
            "process.envs": [{**who, "name": "MASTER_PORT", "value": "1"}, {**who, "name": "HOME", "value": "/"}],
        }
        self.cpu_ns = 0
        self.broken = False
        self.paused = False
        self.read: Callable[[], tuple[list[ProcessStacks], list[dict[str, Any]]]] | None = None

    def live(self, table: str, timeout: float) -> bytes:
        del timeout
        if table not in self.rows:
            raise PeerError(f"{table} does not answer")
        return ipc_bytes(batch_of(table, self.rows[table]))

    def status(self, timeout: float) -> Mapping[str, Any]:
        del timeout
        state, reason = ("paused", "paused since 03:12:07Z") if self.paused else ("running", "")
        return {"started_ns": 5, "state": state, "reason": reason}

    def stacks(self, *_: Any, **__: Any) -> tuple[list[ProcessStacks], list[dict[str, Any]]]:
        if self.read is not None:
            return self.read()
        if self.broken:
            return [ProcessStacks("j", "r", 0, 100, 7, 100, b'{"threads": [{}]}')], []
        raise PeerError("it does not answer")

    def conditions(self, pids: Sequence[int], job: str, timeout: float) -> Mapping[str, Any]:
        del pids, job, timeout
        if self.broken:
            return {"processes": [{"pid": 100}], "loads": None, "failures": []}
        self.cpu_ns += 10
        one = {"pid": 100, "start_ns": 7, "mono_ns": time.monotonic_ns(), "cpu_ns": self.cpu_ns}
        return {"processes": [one], "loads": None, "failures": []}


class Nothing:
    """The engine: it has stored no row."""

    def run_all(self, statements: Sequence[str], *, timeout: float, max_bytes: int, rows_only: bool) -> Iterable[Item]:
        del statements, timeout, max_bytes, rows_only
        return []


def gatherer(node: Node) -> Gatherer:
    return Gatherer("n", Nothing(), node, stall_s=10.0, now_ns=lambda: NOW)


def test_of_many_sockets_those_that_were_closed_are_kept() -> None:
    """An error of a peer names them."""
    node = Node(1.0)
    (first, *_) = node.rows["net.sockets"]
    opened = [{**first, "state": "open", "local_port": 1000 + number} for number in range(197)]
    node.rows["net.sockets"] = [*opened, {**first, "state": "closed", "local_port": 23}]
    [facts] = gatherer(node).facts("j", timeout=20.0)
    ends = facts.ranks[0].endpoints
    assert (ends[0].text, ends[0].closed, len(ends)) == ("10.0.0.1:23", True, 128)


def test_a_job_has_its_live_rows_and_conditions() -> None:
    [facts] = gatherer(Node(1.0)).facts("j", timeout=20.0)
    assert (facts.job, facts.run, facts.world_size, facts.stall_s) == ("j", "r", 1, 10.0)
    assert (facts.nodes[0].watching_since_ns, facts.nodes[0].advanced_ns) == (5, NOW - S)
    [rank] = facts.ranks
    assert rank.env == (("MASTER_PORT", "1"),)
    assert rank.condition is not None
    assert rank.condition.cpu_ns == 10
    # A port that is in use again is not closed.
    assert [(end.text, end.closed) for end in rank.endpoints] == [
        ("10.0.0.1:9", False),
        ("10.0.0.1:8", True),
        ("10.0.0.1:7", False),
    ]
    # Both readings failed, and the failure is named once.
    assert [one.text for one in facts.missing] == [
        "no stacks of job j: it does not answer",
        "no native stacks of job j: it does not answer",
    ]


def test_a_pause_is_a_gap_in_the_facts_of_a_job_that_lives() -> None:
    node = Node(1.0)
    node.paused = True
    [facts] = gatherer(node).facts("j", deep=False, timeout=20.0)
    [gap] = facts.missing
    assert (gap.kind, gap.node, gap.text) == ("pause", "n", "PAUSED on n since 03:12:07Z: nothing newer is seen")
    node.paused = False
    assert [one.missing for one in gatherer(node).facts("j", deep=False, timeout=20.0)] == [()]


def test_helpers_are_listed_with_their_trainer() -> None:
    node = Node(1.0)
    [trainer] = node.rows["process.processes"]
    others = {101: ("data_loader", 100), 102: ("launcher", 1), 103: ("other", 1)}
    node.rows["process.processes"] += [
        {**trainer, "pid": pid, "rank": None, "role": role, "ppid": ppid, "start_ns": 9}
        for pid, (role, ppid) in others.items()
    ]
    [facts] = gatherer(node).facts("j", deep=False, timeout=20.0)
    assert [one.pid for one in facts.ranks[0].helpers] == [101]
    assert [one.pid for one in facts.processes] == [102, 103]


def test_all_jobs_are_those_that_run() -> None:
    assert [facts.job for facts in gatherer(Node(1.0)).facts(deep=False, timeout=20.0)] == ["j"]


class Late:
    """The engine while no worker starts in time."""

    def run_all(self, statements: Sequence[str], *, timeout: float, max_bytes: int, rows_only: bool) -> Iterable[Item]:
        del statements, timeout, max_bytes, rows_only
        raise QueryTimeout("no worker was free")


def test_jobs_that_may_be_there_are_not_said_to_be_absent() -> None:
    node = Node(1.0)
    late = Gatherer("n", Late(), node, stall_s=10.0, now_ns=lambda: NOW)
    [facts] = late.facts(deep=False, timeout=20.0)
    assert "the stored rows cannot be read: no worker was free" in [one.text for one in facts.missing]
    # Jobs that failed lately are known from stored rows alone.
    node.rows["process.processes"] = []
    with pytest.raises(QueryTimeout, match="the list of jobs cannot be read: the stored rows"):
        late.facts(deep=False, timeout=20.0)
    del node.rows["process.processes"]
    with pytest.raises(QueryTimeout, match=r"the list of jobs cannot be read: process\.processes"):
        gatherer(node).facts(deep=False, timeout=20.0)


@pytest.mark.parametrize(("calls_ago_s", "cpu_ns"), [(1.0, 20), (30.0, 10), (None, 10)])
def test_readings_ahead_count_for_a_job_that_advances(
    calls_ago_s: float | None, cpu_ns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One that has called nothing yet: its imports a while ago are no progress of now.
    node = Node(calls_ago_s or 0.0)
    if calls_ago_s is None:
        node.rows["comm.progress"] = []
    found = gatherer(node)
    real = time.monotonic_ns
    with monkeypatch.context() as patch:
        patch.setattr(time, "monotonic_ns", lambda: real() - 5 * S)
        found.read_ahead("j", timeout=1.0)
    [facts] = found.facts("j", timeout=20.0)
    condition = facts.ranks[0].condition
    assert condition is not None
    assert condition.cpu_ns == cpu_ns


def test_ranks_stand_where_they_stood_until_one_moves_or_waits_in_another_operation() -> None:
    node = Node(1.0)
    frame = {"func": "f", "file": "train.py", "lineno": 7, "frame_type": "Python"}
    threads = [{"tid": 100, "frames": [frame]}, {"tid": 101, "frames": [frame]}]

    def stands() -> object:
        return gatherer(node).standing("j", timeout=20.0)

    def packed() -> bytes:
        return json.dumps({"threads": threads}).encode()

    node.read = lambda: ([ProcessStacks("j", "r", 0, 100, 7, 100, packed())], [])
    first = stands()
    assert first is not None
    # A thread that does not train may move.
    threads[1]["frames"] = []
    assert stands() == first
    frame["lineno"] = 8
    moved = stands()
    assert moved not in (None, first)
    node.rows["comm.inflight"] = [{**node.rows["comm.progress"][0], "seq": 10, "op": "all_reduce"}]
    assert stands() not in (None, moved)


def test_ranks_that_cannot_be_read_stand_nowhere() -> None:
    node = Node(1.0)
    assert gatherer(node).standing("j", timeout=20.0) is None
    node.broken = True
    assert gatherer(node).standing("j", timeout=20.0) is None
    node.read = lambda: ([], [{"pid": 100, "error": {}}])
    assert gatherer(node).standing("j", timeout=20.0) is None


def test_answers_that_make_no_sense_are_named() -> None:
    node = Node(1.0)
    node.broken = True
    [facts] = gatherer(node).facts("j", timeout=20.0)
    assert [one.text for one in facts.missing if "malformed" in one.text] == [
        "the conditions are malformed: KeyError",
        "the stacks are malformed: KeyError",
    ]


def test_jobs_and_runs_that_are_not_there() -> None:
    found = gatherer(Node(1.0))
    for job, run in (("k", ""), ("j", "s")):
        with pytest.raises(NotFound):
            found.facts(job, run=run, deep=False, timeout=20.0)
