"""Facts of several nodes as one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from probing.diagnosis.facts import Communicator, Exit, Facts, Member, Missing, NodeFacts, Process, Progress, Rank
from probing.diagnosis.merge import merge, merge_runs


def _facts(node: str, *ranks: int) -> Facts:
    members = tuple(Member(rank, rank) for rank in ranks)
    return Facts(
        "job",
        "0-a",
        None,
        10.0,
        7,
        (NodeFacts(node, 7),),
        tuple(Rank(rank, node, 100 + rank, 1000 + rank) for rank in ranks),
        (Communicator("0", "default_pg", "gloo", 5, members, state="active"),),
        (Process(node, 50, 1, "launcher"),),
    )


def test_ranks_members_nodes_and_processes_are_united() -> None:
    one = replace(_facts("b", 3, 4), world_size=5, usual_gap_ns=11, step_history=((1, 2),))
    found = merge([one, replace(_facts("a", 0, 1, 2), usual_gap_ns=13, taken_ns=17)])
    assert [(rank.rank, rank.node) for rank in found.ranks] == [(0, "a"), (1, "a"), (2, "a"), (3, "b"), (4, "b")]
    assert [node.node for node in found.nodes] == ["a", "b"]
    assert [member.rank for member in found.communicators[0].members] == [0, 1, 2, 3, 4]
    assert sorted(process.node for process in found.processes) == ["a", "b"]
    assert (found.world_size, found.usual_gap_ns, found.taken_ns, found.step_history) == (5, 13, 17, ((1, 2),))
    assert found.missing == ()


def test_a_node_that_did_not_answer_is_missing() -> None:
    found = merge([_facts("a", 0)], {"c": "it timed out", "b": "refused"})
    assert found.missing == (
        Missing("node", "node b did not answer: refused", node="b"),
        Missing("node", "node c did not answer: it timed out", node="c"),
    )


def test_what_is_missing_is_named_once() -> None:
    lost = Missing("operations", "13 operations were lost")
    parts = [replace(_facts(node, rank), missing=(lost,)) for rank, node in enumerate("ab")]
    assert merge(parts).missing == (lost,)


def test_of_two_processes_with_one_rank_the_newer_counts() -> None:
    old, new = _facts("a", 0, 1), _facts("b", 1)
    old = replace(old, ranks=tuple(replace(rank, started_ns=5) for rank in old.ranks))
    new = replace(new, ranks=tuple(replace(rank, started_ns=9) for rank in new.ranks))
    for parts in ([old, new], [new, old]):
        found = merge(parts)
        assert [(rank.rank, rank.node) for rank in found.ranks] == [(0, "a"), (1, "b")]
        [note] = found.missing
        assert (note.kind, note.rank, note.node) == ("rank", 1, "b")
        assert note.text == "rank 1 is claimed by pid 101 on node a and pid 101 on node b; the newer process counts"


def test_a_process_that_runs_counts_before_one_that_ended() -> None:
    ended, runs = _facts("a", 0), _facts("b", 0)
    ended = replace(ended, ranks=(replace(ended.ranks[0], exit=Exit(5, 1), started_ns=50),))
    assert merge([runs, ended]).ranks[0].node == "b"


def test_the_same_process_twice_is_one_rank() -> None:
    found = merge([_facts("a", 0), _facts("a", 0)])
    assert [rank.rank for rank in found.ranks] == [0]
    assert found.missing == ()


def test_two_ranks_with_one_place_in_a_communicator_are_noted() -> None:
    odd = replace(_facts("b", 1), communicators=(Communicator("0", None, None, 5, (Member(0, 1),), state="aborted"),))
    found = merge([_facts("a", 0), odd])
    [comm] = found.communicators
    assert (comm.members, comm.state, comm.name) == ((Member(0, 0),), "aborted", "default_pg")
    assert [note.text for note in found.missing] == ["ranks 0 and 1 both are member 0 of communicator 0"]


def test_what_a_probe_saw_counts_before_what_a_stack_shows() -> None:
    guess = replace(_facts("a", 0).communicators[0], witness="stack", size=2, aborted=True)
    found = merge([replace(_facts("a", 0), communicators=(guess,)), _facts("b", 1)])
    assert (found.communicators[0].witness, found.communicators[0].aborted) == ("probe", True)


def test_runs_are_not_mixed() -> None:
    other = replace(_facts("a", 0), run="1-a")
    assert [facts.run for facts in merge_runs([other, _facts("a", 0), _facts("b", 1)])] == ["0-a", "1-a"]
    with pytest.raises(ValueError, match="several runs"):
        merge([other, _facts("a", 0)])


def test_facts_of_another_owner_are_those_of_another_job() -> None:
    honest = [replace(_facts("a", 0, 1), owner=1000), replace(_facts("b", 2, 3), owner=1000)]
    stranger = replace(_facts("c", 0), owner=65534)
    # A node of the version before says no owner.
    older = _facts("d", 4)
    for parts in ([*honest, stranger, older], [stranger, older, *honest]):
        first, second = merge_runs(parts)
        assert (first.job, [rank.rank for rank in first.ranks], first.owner) == ("job", [0, 1, 2, 3, 4], 1000)
        assert (second.job, [rank.node for rank in second.ranks]) == ("job (uid 65534)", ["c"])
        assert first.missing == second.missing == ()
    with pytest.raises(ValueError, match="several owners"):
        merge([*honest, stranger])


def test_of_two_processes_with_one_rank_the_one_that_shares_communicators_counts() -> None:
    """Who claims a rank later does not replace it."""
    honest = _facts("a", 0, 1, 2)
    working = tuple(
        replace(rank, progress=(Progress("c0", 7, "all_reduce", 7, 5),), started_ns=5) for rank in honest.ranks
    )
    alone = replace(_facts("b", 1).ranks[0], progress=(Progress("mine", 9, "all_reduce", 9, 9),), started_ns=9)
    parts = [replace(honest, ranks=working), replace(_facts("b", 1), ranks=(alone,))]
    for ordered in (parts, parts[::-1]):
        found = merge(ordered)
        assert [rank.node for rank in found.ranks] == ["a", "a", "a"]
        [note] = found.missing
        assert note.text == (
            "rank 1 is claimed by pid 101 on node b and pid 101 on node a; the second counts: it shares"
            " communicators with 2 other ranks"
        )
