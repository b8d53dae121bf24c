"""The label ``phase`` of a rank: until the limit of its phase passes, a job that stands still is no hang."""

from __future__ import annotations

from dataclasses import replace

import pytest
from diagnosis_cases import ago, facts, history, in_collective, op, rank

from probing.diagnosis.facts import Facts, Phase, Rank
from probing.diagnosis.facts_file import from_json, to_json
from probing.diagnosis.ladder import diagnose
from probing.diagnosis.merge import merge
from probing.diagnosis.verdict import Finding


def waiting(number: int, since: float) -> Rank:
    return rank(number, *history(6, ago=since + 1), op(7, ago=since), stack=in_collective())


def stalled(phase: Phase | None, since: float = 39.0) -> Facts:
    behind = rank(1, *history(6, ago=since + 1), stack=in_collective("broadcast"))
    return facts(waiting(0, since), waiting(2, since), behind, phase=phase)


def findings(found: Facts) -> list[Finding]:
    diagnosis = diagnose(found)
    assert not [missing for missing in diagnosis.missing if missing.kind == "rule"]
    return list(diagnosis.findings)


def test_a_phase_within_its_limit_is_a_note() -> None:
    (finding,) = findings(stalled(Phase("checkpoint", 0, ago(43), 900.0)))
    assert (finding.verdict.id, finding.severity, finding.culprits) == ("phase", "note", ())
    assert finding.sentence == "rank 0 is in the phase checkpoint for 43 s; it counts as a stall after 15 min"
    assert finding.evidence[0] == "rank 0 has the label phase=checkpoint"


@pytest.mark.parametrize("phase", [None, Phase("checkpoint", 0, ago(901), 900.0), Phase("warming", 2, ago(43))])
def test_else_the_rank_that_holds_the_job_up_is_named(phase: Phase | None) -> None:
    found = [f for f in findings(stalled(phase)) if f.severity == "error"]
    assert len(found) == 1
    assert found[0].verdict.id == findings(stalled(None))[0].verdict.id
    lines = [line for line in found[0].evidence if "label" in line]
    limit = ", its limit is 15 min" if phase and phase.limit_s else ", which has no limit of its own"
    lasts = "15 min" if phase and phase.limit_s else "43 s"
    expected = [f"rank {phase.rank} has the label phase={phase.name} for {lasts}{limit}"] if phase else []
    assert lines == expected


def test_a_job_that_advances_has_no_such_note() -> None:
    ranks = [rank(number, *history(7, ago=0.2), stack=in_collective()) for number in range(2)]
    assert findings(facts(*ranks, phase=Phase("eval", 0, ago(43), 1800.0))) == []


@pytest.mark.parametrize("limit", [-1e308, 1e308, 0.0])
def test_a_limit_that_a_peer_made_up_does_no_harm(limit: float) -> None:
    severities = {f.severity for f in findings(stalled(Phase("x", 0, ago(43), limit)))}
    assert severities == ({"note"} if limit > 0 else {"error"})


def test_a_phase_that_begins_in_the_future_counts_as_none() -> None:
    """The clock was set back, or a peer lies."""
    assert "error" in [f.severity for f in findings(stalled(Phase("eval", 0, ago(-61), 1800.0)))]
    assert [f.severity for f in findings(stalled(Phase("eval", 0, ago(-59), 1800.0)))] == ["note"]


def test_a_wait_that_is_older_than_the_phase_is_excused_as_well() -> None:
    assert [f.severity for f in findings(stalled(Phase("eval", 0, ago(5), 30.0)))] == ["note"]


def test_no_phase_lasts_longer_than_an_hour() -> None:
    """A peer may claim any limit."""
    assert [f.severity for f in findings(stalled(Phase("x", 0, ago(3599), 1e9), 3590.0))] == ["note"]
    assert "error" in [f.severity for f in findings(stalled(Phase("x", 0, ago(3601), 1e9), 3590.0))]


def test_of_many_nodes_the_longest_phase_counts() -> None:
    one = stalled(Phase("checkpoint", 0, ago(43), 900.0))
    other = replace(one, phase=Phase("eval", 1, ago(41), 1800.0), ranks=())
    assert merge([one, other]).phase == other.phase
    assert merge([other, replace(one, phase=None)]).phase == other.phase
    assert from_json(to_json(one)) == one
