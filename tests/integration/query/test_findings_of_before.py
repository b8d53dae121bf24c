"""The findings that a daemon stored before: the newest row of each, through the gate and a worker."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest
from query_helpers import NOW_NS, Machine

from probing.api.errors import InternalError, PeerError
from probing.daemon.diagnose.findings_store import FindingsStore
from probing.daemon.diagnose.lifecycle import JobFindings
from probing.daemon.query.answer import Item

S = 1_000_000_000


class Collector:
    def live(self, table: str, timeout: float) -> bytes:
        raise AssertionError((table, timeout))

    def record_findings(self, rows: Sequence[Mapping[str, Any]], timeout: float) -> None:
        raise AssertionError((rows, timeout))


def row(name: str, ago_s: int, state: str = "open", **more: Any) -> dict[str, Any]:
    times = {"ts": NOW_NS - ago_s * S, "opened": NOW_NS - 3000 * S - 7, "since": None}
    closed = NOW_NS - ago_s * S if state == "closed" else None
    own = {"node": "n0", "job": "j", "run": "r", "finding_id": name, "verdict": "not_joined", "state": state}
    return {**own, **times, "closed": closed, "stacks": "[]", **more}


def test_the_newest_row_of_each_finding_holds(machine: Machine) -> None:
    machine.files.segment(
        "diagnosis.findings",
        [
            row("a", 50),
            row("a", 30, confidence=0.5),
            row("b", 40),
            row("b", 20, "closed"),
            row("a", 10, run="s"),
            row("weekend", 200_000),
            row("old", 700_000),
        ],
    )
    found = FindingsStore(Collector(), machine.engine, "n0").findings()
    assert [(one["run"], one["finding_id"], one["state"], one["confidence"]) for one in found] == [
        ("s", "a", "open", None),
        ("r", "a", "open", 0.5),
        ("r", "weekend", "open", None),
        ("r", "b", "closed", None),
    ]
    assert {one["opened"] for one in found} == {NOW_NS - 3000 * S - 7}
    job = JobFindings("j", "r")
    job.restore(found[1], "hang")
    (event,) = job.ended(NOW_NS)
    # What is stored again has the columns that the collector takes.
    assert event.row.keys() == found[1].keys() - {"node", "ts"}
    assert (event.row["state"], event.row["opened"]) == ("closed", NOW_NS - 3000 * S - 7)


def test_without_findings_there_are_none(machine: Machine) -> None:
    assert list(FindingsStore(Collector(), machine.engine, "n0").findings()) == []


class _Silent:
    def run_all(self, statements: Sequence[str], *, timeout: float, max_bytes: int, rows_only: bool) -> Iterable[Item]:
        raise PeerError("the collector does not answer")


def test_an_engine_that_cannot_answer_is_an_error() -> None:
    with pytest.raises(InternalError, match="the collector does not answer"):
        FindingsStore(Collector(), _Silent(), "n0").findings()
