"""A verdict that was shown stays while the job stands still, and goes once it goes on."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

import pyarrow as pa
import pytest
from diagnosis_cases import NOW, ago, elsewhere, facts, history, in_collective, op, rank

from probing.api.errors import QueryTimeout
from probing.client.diagnosis.asking import with_stored_findings
from probing.client.diagnosis.page import exit_code, people
from probing.diagnosis.facts import Condition, Exit, Facts, Missing, Rank
from probing.diagnosis.ladder import Diagnosis, diagnose, diagnose_runs

MOVES = Condition(state="R", interval_ns=10**9, cpu_ns=5 * 10**8, switches=20)


def moment(ns: int) -> datetime:
    return datetime.fromtimestamp(ns / 1e9, timezone.utc)


def row(**fields: Any) -> dict[str, Any]:
    culprit = {"rank": 1, "node": "a", "pid": 4001, "why": "it sleeps in load, data.py:12", "activity": "sleeping"}
    own = {
        "finding_id": "5f",
        "job": "job",
        "run": "run",
        "ts": moment(ago(23)),
        "node": "a",
        "verdict": "not_joined",
        "severity": "error",
        "state": "open",
        "confidence": 0.95,
        "sentence": "rank 1 (node a, pid 4001) holds up 2 ranks for 16 s: it sleeps in load, data.py:12",
        "ranks": "1",
        "victims": "0,2",
        "opened": moment(ago(23)),
        "about": "",
        "closed": None,
        "since": moment(ago(39)),
        "culprits": json.dumps([culprit]),
        "evidence": json.dumps(["ranks 0,2 wait in all_reduce"]),
        "next_steps": "[]",
        "missing": "[]",
        "refuted_by": "[]",
        "stacks": "[]",
        "found_by": "a",
        "advice": "restart_without",
        "advice_nodes": "a",
        "advice_reason": "GPU 3 is lost",
        "ends": moment(NOW + 60 * 10**9),
        "ends_by": "gloo's time-out (99 s)",
    }
    return {**own, **fields}


class Node:
    """Answers the query for open findings with ``rows``, or fails with ``error``."""

    def __init__(self, *rows: dict[str, Any], error: Exception | None = None) -> None:
        self._rows, self._error = rows, error
        self.asked = 0

    def query(self, sql: str) -> pa.Table:
        assert "job IN ('job')" in sql
        self.asked += 1
        if self._error is not None:
            raise self._error
        return pa.Table.from_pylist(list(self._rows))


def look(since: float = 39.0) -> Facts:
    """Two ranks wait, and rank 1 seems to get on with something."""
    waiting = (rank(r, *history(6, ago=40), op(7, ago=since), stack=in_collective()) for r in (0, 2))
    moving = rank(1, *history(6, ago=40), stack=elsewhere(moving=True), condition=MOVES)
    return facts(*sorted((*waiting, moving), key=lambda one: one.rank))


def shown(node: Any, found: Facts) -> Diagnosis:
    (diagnosis,) = with_stored_findings(node, [diagnose(found)])
    return diagnosis


def test_an_open_finding_stays_while_the_job_stands_still() -> None:
    assert diagnose(look()).findings == ()
    diagnosis = shown(Node(row()), look())
    (finding,) = diagnosis.findings
    assert (finding.verdict.id, [c.rank for c in finding.culprits], finding.victims) == ("not_joined", [1], (0, 2))
    assert "holds up 2 ranks for 39 s" in finding.sentence
    assert exit_code([diagnosis]) == 3
    page = people([diagnosis], None)
    assert "and the job has not gone on since" in page
    assert "rank 1 now: it runs in load, data.py:12" in page
    assert "the present facts alone do not show it" in page
    assert "  - Restart the job without node a: GPU 3 is lost.\n" in page
    assert "  - If nobody ends it, gloo's time-out (99 s) does at 2027-01-15 08:01:00Z.\n" in page
    # It did not.
    late = people([shown(Node(row(ends=moment(ago(1)))), look())], None)
    assert "If nobody ends it" not in late


def test_a_node_that_cannot_tell_who_holds_a_job_up_says_what_all_nodes_found() -> None:
    # Of three ranks the two of this node are seen, and the third may have joined.
    alone = replace(look(), ranks=tuple(one for one in look().ranks if one.rank != 1))
    (blind,) = diagnose(alone).findings
    assert (blind.verdict.id, exit_code([diagnose(alone)])) == ("cannot_tell", 4)
    diagnosis = shown(Node(row()), alone)
    assert [(f.verdict.id, [c.rank for c in f.culprits]) for f in diagnosis.findings] == [("not_joined", [1])]
    assert exit_code([diagnosis]) == 3
    assert "the present facts alone do not show it" in people([diagnosis], None)
    # A finding of before the job went on explains nothing.
    assert shown(Node(row(opened=moment(ago(41)))), alone).findings == (blind,)


@pytest.mark.parametrize(
    "fields",
    [
        {"opened": moment(ago(41))},
        {"severity": "warning"},
        {"state": "closed"},
        {"run": "another"},
        {"verdict": "of a later version"},
    ],
    ids=["the job went on since", "a warning", "closed", "another run", "an unknown verdict"],
)
def test_what_does_not_hold_any_more_is_not_shown(fields: dict[str, Any]) -> None:
    assert shown(Node(row(**fields)), look()).findings == ()


def test_a_culprit_that_has_ended_is_not_shown() -> None:
    found = look()
    ended = replace(found.ranks[1], exit=Exit(NOW, code=0))
    assert all(
        "holds up" not in f.sentence for f in shown(Node(row()), replace(found, ranks=(found.ranks[0], ended))).findings
    )


def test_nobody_is_asked_about_a_job_that_goes_on_or_is_wrong() -> None:
    node = Node(row())
    going_on = facts(*(rank(r, *history(6, ago=0.1), stack=elsewhere(moving=True), condition=MOVES) for r in range(3)))
    assert shown(node, going_on).findings == ()
    still = Condition(state="S", syscall="clock_nanosleep", interval_ns=10**9, cpu_ns=0, asleep_since_ns=ago(39))
    stuck = look()
    stuck = replace(stuck, ranks=(stuck.ranks[0], replace(stuck.ranks[1], condition=still), stuck.ranks[2]))
    assert len(shown(node, stuck).findings) == 1
    assert node.asked == 0


def test_what_cannot_be_asked_is_said() -> None:
    diagnosis = shown(Node(error=QueryTimeout("no worker was free")), look())
    (missing,) = diagnosis.missing
    assert missing.text == "whether a finding is open: no worker was free"
    assert exit_code([diagnosis]) == 4


def slow(**fields: Any) -> dict[str, Any]:
    sentence = "rank 1 (node a, pid 4001) takes 1.8 times as long as others: it reads in fetch_shard, data.py:12"
    return row(**{"verdict": "slow_rank", "severity": "warning", "sentence": sentence, **fields})


def test_what_could_not_be_read_leaves_the_open_finding_as_a_note() -> None:
    going_on = facts(*(rank(r, *history(6, ago=0.1), stack=elsewhere(moving=True), condition=MOVES) for r in range(3)))
    unread = Missing("history", "the stored rows cannot be read: the query did not end in time")
    late = replace(going_on, missing=(unread,))
    diagnosis = shown(Node(slow()), late)
    page = people([diagnosis], None)
    assert exit_code([diagnosis]) == 4
    assert page.startswith("job job: cannot tell whether something is wrong")
    assert "  note: open since " in page
    assert "rank 1 (node a, pid 4001) takes 1.8 times as long as others" in page
    assert unread.text in page
    # What is closed is no part of it.
    assert shown(Node(slow(state="closed")), late).findings == ()


def test_a_job_that_could_not_be_read_at_all_has_its_open_findings() -> None:
    unread = Missing("history", "the processes of job 'job' cannot be read: no worker was free")
    none = Facts("job", "", None, 0.0, NOW, (), (), missing=(unread,))
    diagnosis = shown(Node(slow(), slow(run="older", state="closed")), none)
    assert [finding.severity for finding in diagnosis.findings] == ["note"]
    page = people([diagnosis], None)
    assert page.startswith("job job: cannot tell whether something is wrong: no rank of it could be read\n  note: open")
    assert exit_code([diagnosis]) == 4


@pytest.mark.parametrize("text", ["[", "{}", "[1, null]", '[{"rank": "x"}]', None])
def test_columns_that_cannot_be_read_leave_the_sentence(text: str | None) -> None:
    (finding,) = shown(Node(row(culprits=text, evidence=text, next_steps=text)), look()).findings
    assert finding.culprits == ()
    assert finding.sentence.startswith("rank 1 (node a")


def ended(number: int, seconds: float, **end: Any) -> Rank:
    return rank(number, *history(6, ago=40), state="exited", exit=Exit(ago(seconds), **end))


def test_an_ended_job_keeps_its_story() -> None:
    found = facts(*(ended(r, 5, signal=15) for r in range(3)))
    assert diagnose(found).findings == ()
    diagnosis = shown(Node(row(state="closed", closed=moment(ago(4)))), found)
    (finding,) = diagnosis.findings
    assert finding.sentence.startswith("until it ended at ")
    assert finding.sentence.endswith(
        "rank 1 (node a, pid 4001) holds up 2 ranks for 34 s: it sleeps in load, data.py:12"
    )
    assert "ranks 0-2 were killed by SIGTERM" in finding.evidence
    assert exit_code([diagnosis]) == 3


@pytest.mark.parametrize(
    "fields",
    [{"closed": moment(ago(6))}, {"verdict": "rank_died"}, {"opened": moment(ago(4))}],
    ids=["it went on before it ended", "its end, which the facts show", "found in its end"],
)
def test_what_was_over_before_a_job_ended_is_no_part_of_its_story(fields: dict[str, Any]) -> None:
    found = facts(*(ended(r, 5, code=0) for r in range(3)))
    assert shown(Node(row(**{"state": "closed", "closed": moment(ago(4)), **fields})), found).findings == ()


def test_the_hang_of_a_run_that_was_started_again_is_a_note() -> None:
    old = facts(*(ended(r, 5, signal=15) for r in range(3)))
    new = replace(facts(*(rank(r, *history(6, ago=0.1), started_ns=ago(3)) for r in range(3))), run="next")
    found = with_stored_findings(
        Node(row(state="closed", closed=moment(ago(4)))),  # type: ignore[arg-type]
        diagnose_runs([new, old]),
    )
    assert [finding.severity for one in found for finding in one.findings] == ["note"]
    assert exit_code(found) == 0
