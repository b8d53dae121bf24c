"""A rank that stays when the others have ended."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from diagnosis_cases import ago, facts, history, in_collective, op, rank, thread

from probing.diagnosis.facts import Condition, Exit, Facts, Rank
from probing.diagnosis.ladder import diagnose
from probing.diagnosis.verdict import NOTE, WARNING, Finding

STILL: dict[str, Any] = {"state": "S", "interval_ns": 10**9, "cpu_ns": 0, "switches": 0, "asleep_since_ns": ago(400)}
SHUTDOWN = "_shutdown /usr/lib/python3.11/threading.py:1590"


def stays(**fields: Any) -> Rank:
    upload = thread("upload train.py:27", main=False, tid=107, name="wandb-upload")
    condition = Condition(**{**STILL, "syscall": "futex", "children": (("wandb-core", 4711, "S"),), **fields})
    return rank(0, *history(6, ago=401), threads=(thread(SHUTDOWN), upload), condition=condition)


def ended(number: int, seconds: float, code: int = 0) -> Rank:
    return rank(number, *history(6, ago=401), state="exited", exit=Exit(ago(seconds), code))


def findings(*ranks: Rank) -> list[Finding]:
    return list(diagnose(facts(*ranks)).findings)


@pytest.mark.parametrize(("seconds", "severity"), [(9, None), (11, NOTE), (299, NOTE), (301, WARNING)])
def test_a_rank_that_stays_is_a_note_and_later_a_warning(seconds: float, severity: str | None) -> None:
    found = findings(stays(), ended(1, seconds + 1), ended(2, seconds))
    assert [(f.verdict.id, f.severity) for f in found] == ([("rank_lingers", severity)] if severity else [])


def test_what_a_rank_that_stays_waits_for_is_shown() -> None:
    (finding,) = findings(stays(), ended(1, 23), ended(2, 23))
    assert finding.sentence == (
        "rank 0 (node a, pid 4000) has not ended for 23 s after ranks 1-2: it waits for another thread to end in"
        " _shutdown, threading.py:1590: thread wandb-upload (107) in upload, train.py:27"
    )
    assert "rank 0 has the child wandb-core (pid 4711, state S)" in finding.evidence


def test_a_rank_that_gets_on_with_something_stays_a_note() -> None:
    writes = stays(write_bytes=1 << 20, cpu_ns=10**8, switches=9)
    (finding,) = findings(writes, ended(1, 301), ended(2, 301))
    assert finding.severity == NOTE


def test_a_rank_that_waits_for_those_that_ended_is_an_error() -> None:
    waits = rank(0, *history(6, ago=401), op(7, ago=400), stack=in_collective())
    assert [f.verdict.id for f in findings(waits, ended(1, 23), ended(2, 23))] == ["rank_died"]


def test_an_end_by_an_error_is_a_death() -> None:
    assert "rank_lingers" not in [f.verdict.id for f in findings(stays(), ended(1, 23, 1), ended(2, 23))]


def test_whole_jobs_do_not_linger() -> None:
    whole: Facts = facts(stays(), replace(stays(), rank=1, pid=4001))
    assert "rank_lingers" not in [f.verdict.id for f in diagnose(whole).findings]
    assert findings(ended(0, 301), ended(1, 301)) == []
