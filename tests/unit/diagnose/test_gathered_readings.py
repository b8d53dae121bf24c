"""Two readings of the processes of a job, beside each other, and in time whatever happens."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from probing.api.errors import NotFound, PeerError
from probing.daemon.diagnose.gather.readings import Readings
from probing.daemon.stack_wire import ProcessStacks

STACKS = ProcessStacks("j", "r", 0, 100, 7, 100, b"{}")
FAILURE = {"pid": 101, "rank": 1, "job": "j", "error": {"kind": "TargetTimeout", "message": "it does not answer"}}


class Node:
    """The collector: ``fails`` by request, ``blocks`` until the test ends."""

    def __init__(self, fails: Mapping[str, Exception] | None = None) -> None:
        self.fails = fails or {}
        self.asked: list[tuple[str, tuple[int, ...], str]] = []
        self.blocks: dict[str, threading.Event] = {}

    def _ask(self, op: str, pids: Sequence[int], job: str) -> None:
        self.asked.append((op, tuple(pids), job))
        if op in self.blocks:
            self.blocks[op].wait(60)
        if op in self.fails:
            raise self.fails[op]

    def live(self, table: str, timeout: float) -> bytes:
        raise NotImplementedError

    def status(self, timeout: float) -> Mapping[str, Any]:
        raise NotImplementedError

    def stacks(
        self, pids: Sequence[int], job: str, timeout: float, *, native: bool = False, with_locals: bool = False
    ) -> tuple[list[ProcessStacks], list[dict[str, Any]]]:
        self._ask("native" if native else "locals" if with_locals else "stacks", pids, job)
        return [STACKS], [FAILURE]

    def conditions(self, pids: Sequence[int], job: str, timeout: float) -> Mapping[str, Any]:
        self._ask("conditions", pids, job)
        return {"processes": [], "loads": [], "failures": []}


def within(seconds: float) -> float:
    return time.monotonic() + seconds


def test_stacks_and_conditions_are_read_twice_and_native_stacks_once() -> None:
    node = Node()
    seen = Readings(node, "j", range(100, 123), within(60)).result()
    assert (len(seen.stacks), len(seen.conditions), len(seen.native)) == (2, 2, 1)
    assert sorted(node.asked) == [
        *(("conditions", (), "j"),) * 2,
        ("locals", (), "j"),
        ("native", tuple(range(100, 108)), ""),
        ("stacks", (), "j"),
    ]
    # Failures of the first reading are named, once.
    assert [(one.kind, one.rank, one.text) for one in seen.missing] == [
        ("stacks", 1, "no stacks of pid 101: it does not answer")
    ]


def test_what_cannot_be_read_is_missing_and_the_rest_is_there() -> None:
    seen = Readings(Node({"conditions": PeerError("it is gone")}), "j", [], within(60)).result()
    assert (len(seen.stacks), seen.conditions, seen.native) == (2, [], [])
    texts = {one.text for one in seen.missing if one.kind == "condition"}
    assert texts == {"no condition of job j: it is gone"}


def test_a_reading_that_fails_in_any_way_is_named() -> None:
    seen = Readings(Node({"locals": KeyError("pid")}), "j", [], within(60)).result()
    assert (seen.stacks, len(seen.conditions)) == ([], 2)
    assert [one.text for one in seen.missing] == ["the stacks of job j are malformed: KeyError"]


def test_a_job_that_has_just_ended_lacks_nothing() -> None:
    ended = dict.fromkeys(("conditions", "locals", "stacks", "native"), NotFound("no job"))
    seen = Readings(Node(ended), "j", [100], within(60)).result()
    assert (seen.stacks, seen.conditions, seen.missing) == ([], [], [])


def test_one_that_does_not_answer_costs_no_more_than_the_deadline() -> None:
    node = Node()
    node.blocks = {"native": threading.Event()}
    seen = Readings(node, "j", [100], within(0.7)).result()
    assert (len(seen.stacks), seen.native) == (2, [])
    assert [one.text for one in seen.missing if one.rank is None] == ["the native stacks of job j did not come in time"]
    node.blocks["native"].set()
