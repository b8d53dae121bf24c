"""Reports: the worst finding first, notes never first, JSON values only."""

from __future__ import annotations

import json
from dataclasses import replace

from probing.diagnosis.facts import Facts, Frame, Missing, Rank, Thread
from probing.diagnosis.ladder import Diagnosis
from probing.diagnosis.report import as_dict, finding_dict, utc_text
from probing.diagnosis.verdict import ERROR, NOTE, Culprit, Finding, StackOf, Verdict

FACTS = Facts("j", "r", 2, 10.0, 1_700_000_000_123_456_789, (), (Rank(0, "a", 1, 2),))
VERDICT = Verdict("not_joined", "hang", "a rank did not join", "", "", "", "", ())
FRAMES = (Frame("wait", "w.py", 3, values=(("x", "1"),)), Frame("f", "c", native=True))
THREAD = Thread(7, "MainThread", True, "S", None, FRAMES)
FOUND = Finding(
    VERDICT,
    ERROR,
    0.9,
    "rank 1 holds up 1 rank",
    (Culprit(1, "b", 4711, "sleeps", "sleeping"),),
    (0,),
    since_ns=1_700_000_000_000_000_000,
    missing=("m",),
    stacks=(StackOf(1, "b", 4711, "culprit", THREAD),),
)


def test_the_worst_finding_stands_for_the_job() -> None:
    note = replace(FOUND, severity=NOTE)
    found = as_dict(Diagnosis(FACTS, (FOUND, note), (Missing("node", "node c does not answer"), Missing("rank", "m"))))
    assert (found["verdict"], found["job"], found["run"]) == ("not_joined", "j", "r")
    assert found["culprits"] == [{"rank": 1, "node": "b", "pid": 4711, "why": "sleeps", "activity": "sleeping"}]
    assert found["missing"] == ["m", "node c does not answer"]
    assert [other["severity"] for other in found["others"]] == [NOTE]
    assert json.loads(json.dumps(found)) == found


def test_a_job_with_only_notes_is_healthy() -> None:
    note = replace(FOUND, severity=NOTE)
    found = as_dict(Diagnosis(FACTS, (note,), ()))
    assert (found["verdict"], found["confidence"], len(found["others"])) == ("healthy", 1.0, 1)


def test_a_missing_witness_lowers_the_confidence_that_a_job_is_healthy() -> None:
    assert as_dict(Diagnosis(FACTS, (), (Missing("operations", "x"),)))["confidence"] == 0.5


def test_a_job_of_which_nothing_was_seen_is_not_called_healthy() -> None:
    assert as_dict(Diagnosis(replace(FACTS, ranks=()), (), ()))["verdict"] == "cannot_tell"


def test_stacks_have_the_fields_of_the_command_stacks() -> None:
    (stack,) = finding_dict(FOUND)["stacks"]
    assert (stack["role"], stack["native_missing"]) == ("culprit", None)
    assert stack["frames"] == [
        {"func": "wait", "file": "w.py", "lineno": 3, "frame_type": "Python", "values": {"x": "1"}},
        {"func": "f", "file": "c", "lineno": None, "frame_type": "Native"},
    ]


def test_times_keep_their_nanoseconds() -> None:
    assert utc_text(1_700_000_000_000_000_007) == "2023-11-14T22:13:20.000000007Z"
    assert utc_text(None) is None
    assert utc_text(1 << 90) is None
