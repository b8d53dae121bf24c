"""Facts of a peer say something of its own ranks, and of nothing else."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
from diagnosis_cases import NOW, WORLD, comm, elsewhere, facts, history, in_collective, op, rank

from probing.api.errors import NotFound, PeerError
from probing.daemon.diagnose.coordination.job_facts import MAX_RANKS, facts_of
from probing.daemon.diagnose.coordination.peers import PeerFacts
from probing.diagnosis.facts import Exit, Facts, Missing, Phase, Process
from probing.diagnosis.facts_file import to_json
from probing.diagnosis.ladder import diagnose
from probing.diagnosis.merge import merge

S = 1_000_000_000
COMMS = [comm(WORLD, range(3))]


def of_rank(number: int, node: str, *, late: bool = False, **fields: Any) -> Facts:
    """A job of three ranks: rank 1, on node n2, does not join the collective in which the others wait."""
    stack = elsewhere() if late else in_collective()
    ops = [*history(6, ago=40), *([] if late else [op(7, ago=39)])]
    own = rank(number, *ops, node=node, world_size=3, stack=stack)
    return replace(facts(own, comms=COMMS, world_size=3), **fields)


OWN = of_rank(0, "n1")
TRUE = of_rank(1, "n2", late=True)


def taken(sent: Facts, node: str = "x", own: Facts = OWN, offset_ns: int = 0) -> Facts:
    return facts_of(node, PeerFacts([to_json(sent)], offset_ns, 1000), own)


def blamed(*parts: Facts) -> list[tuple[str, int, str]]:
    found = diagnose(merge(parts)).findings
    return [(one.verdict.id, culprit.rank, culprit.node) for one in found for culprit in one.culprits]


TRUTH = [("not_joined", 1, "n2")]


@pytest.mark.parametrize(
    "lie",
    [
        # The job counts as stalled after a year, was asked for in a year, is much larger, and always pauses for years.
        {"stall_s": 3e5},
        {"taken_ns": NOW + 10**9 * S},
        {"world_size": 16384},
        {"usual_gap_ns": 10**9 * S},
        # A rank of this node, or a rank that the peer does not have, is in a phase. The peer's own rank is in a phase
        # that begins in the future, or whose limit is shorter than the time for which ranks of this node stand still.
        {"phase": Phase("eval", 0, NOW - S, 1800.0)},
        {"phase": Phase("eval", 1, NOW - S, 1800.0)},
        {"phase": Phase("eval", 2, NOW + 100 * S, 1e308)},
        {"phase": Phase("eval", 2, NOW - S, 38.0)},
        {"phase": Phase("eval", 2, NOW - S, -1e308)},
        {"step_history": tuple((number, 10 * S) for number in range(1000))},
        {"missing": tuple(Missing("node", f"node n2 did not answer {number}", node="n2") for number in range(999))},
        {"missing": tuple(Missing("history", "x" * 5000, node="n2") for _ in range(999))},
    ],
    ids=lambda lie: next(iter(lie)),
)
def test_what_a_peer_says_of_the_job_hides_no_stall(lie: dict[str, Any]) -> None:
    own = replace(OWN, usual_gap_ns=S, step_history=((1, 2), (3, 4)))
    found = taken(of_rank(2, "x", **lie), own=own)
    assert blamed(own, TRUE, found) == TRUTH
    merged = merge([own, found])
    assert (merged.stall_s, merged.world_size, merged.taken_ns, merged.step_history) == (10.0, 3, NOW, own.step_history)
    assert len(merged.missing) <= 64
    assert all(one.node == "x" and len(one.text) <= 300 and one.kind != "node" for one in merged.missing)


def test_a_phase_of_a_peers_rank_counts_by_this_nodes_clock() -> None:
    said = of_rank(2, "x", phase=Phase("eval", 2, NOW - 7 * S, 1800.0))
    ahead = replace(said, nodes=(replace(said.nodes[0], taken_ns=NOW + 5 * S),))
    found = taken(replace(ahead, phase=Phase("eval", 2, NOW - 2 * S, 1800.0)), offset_ns=5 * S)
    assert found.phase == said.phase
    assert [one.verdict.id for one in diagnose(merge([OWN, TRUE, found])).findings] == ["phase"]


def test_ranks_of_this_node_are_known_here() -> None:
    # The peer has a newer process of rank 0, which seems to be elsewhere, and is said to have crashed.
    lie = of_rank(0, "x", late=True)
    newer = replace(lie.ranks[0], started_ns=NOW, start_ns=1 << 60, exit=Exit(NOW, signal=9))
    found = taken(replace(lie, ranks=(newer, of_rank(2, "x").ranks[0])))
    assert [one.rank for one in found.ranks] == [2]
    assert blamed(OWN, TRUE, found) == TRUTH
    assert any("rank 0 is on this node" in one.text for one in found.missing)


def test_ranks_beyond_the_job_are_left_out() -> None:
    lie = of_rank(2, "x")
    assert [one.rank for one in taken(replace(lie, ranks=(*lie.ranks, replace(lie.ranks[0], rank=3)))).ranks] == [2]


def test_what_a_rank_of_this_node_died_of_stays() -> None:
    own = replace(OWN, ranks=(replace(OWN.ranks[0], exit=Exit(NOW - 20 * S, signal=9), state="exited"),))
    found = taken(of_rank(0, "x"), own=own)
    assert found.ranks == ()
    assert [one.exit for one in merge([own, found]).ranks] == [own.ranks[0].exit]


@pytest.mark.parametrize(
    "lie",
    [
        of_rank(1, "n2"),
        replace(of_rank(2, "x"), ranks=(*of_rank(2, "x").ranks, *TRUE.ranks)),
        replace(of_rank(2, "x"), nodes=(*of_rank(2, "x").nodes, *TRUE.nodes)),
        replace(of_rank(2, "x"), nodes=of_rank(2, "x").nodes * 2),
        replace(of_rank(2, "x"), nodes=()),
        replace(of_rank(2, "x"), processes=(Process("n1", 7, 7, "launcher"),)),
        replace(of_rank(2, "x"), processes=tuple(Process("x", at, 7, "other") for at in range(MAX_RANKS + 1))),
        replace(
            of_rank(2, "x"), ranks=tuple(replace(of_rank(2, "x").ranks[0], rank=at) for at in range(MAX_RANKS + 1))
        ),
        replace(of_rank(2, "x"), nodes=(replace(of_rank(2, "x").nodes[0], taken_ns=NOW + 3600 * S),)),
        replace(of_rank(2, "x"), nodes=(replace(of_rank(2, "x").nodes[0], taken_ns=NOW - 3600 * S),)),
    ],
    ids=[
        "another node's",
        "others, too",
        "nodes",
        "twice",
        "none",
        "launcher",
        "processes",
        "ranks",
        "later",
        "before",
    ],
)
def test_facts_of_others_are_refused(lie: Facts) -> None:
    with pytest.raises(PeerError):
        taken(lie)


@pytest.mark.parametrize("apart_ns", [365 * 24 * 3600 * S, -365 * 24 * 3600 * S])
def test_a_clock_that_is_a_year_off_is_none_of_another_time(apart_ns: int) -> None:
    there = of_rank(2, "x")
    shifted = replace(there, nodes=(replace(there.nodes[0], taken_ns=NOW + apart_ns),))
    assert taken(shifted, offset_ns=apart_ns).nodes[0].clock_offset_ns == apart_ns


@pytest.mark.parametrize("parts", [[], [to_json(replace(OWN, run="other"))], [to_json(replace(OWN, job="other"))]])
def test_facts_of_other_jobs_are_none(parts: list[bytes]) -> None:
    with pytest.raises(NotFound):
        facts_of("x", PeerFacts(parts, 0, 0), OWN)


@pytest.mark.parametrize(("here", "there", "refused"), [(0, 1000, True), (1000, 1000, False), (None, 1000, False)])
def test_a_job_of_another_owner_is_another_job(here: int | None, there: int | None, refused: bool) -> None:
    with pytest.raises(PeerError, match="uid 1000") if refused else nullcontext():
        found = taken(of_rank(2, "x", owner=there), own=replace(OWN, owner=here))
        assert [one.rank for one in found.ranks] == [2]
