"""Ranks that call different things: the cases of PyTorch's analyzer of dumps (fr_trace), and limits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from diagnosis_cases import ago, comm, facts, history, in_collective, op, rank

from probing.diagnosis.facts import Exit, Facts, Operation, Rank
from probing.diagnosis.ladder import diagnose
from probing.diagnosis.verdict import ERROR, Finding


def only(found: Facts) -> Finding:
    (finding,) = [f for f in diagnose(found).findings if f.severity == ERROR]
    return finding


def summary(*ranks: Rank, **fields: Any) -> tuple[str, list[int]]:
    finding = only(facts(*ranks, **fields))
    return finding.verdict.id, [culprit.rank for culprit in finding.culprits]


def at(number: int, name: str = "all_reduce", *, before: int = 6, stack: bool = True, **fields: Any) -> Rank:
    """A rank that waits in the call ``before + 1``."""
    done = history(before, ago=40)
    own = in_collective(name) if stack else None
    return rank(number, *done, op(before + 1, name, ago=39, **fields), stack=own)


def test_rank_0_alone_broadcasts() -> None:
    finding = only(facts(at(0, "broadcast", root=0), *(at(r) for r in (1, 2, 3))))
    assert (finding.verdict.id, [c.rank for c in finding.culprits]) == ("operation_mismatch", [0])
    assert finding.victims == (1, 2, 3)
    assert finding.sentence == (
        "rank 0 (node a, pid 4000) calls broadcast where ranks 1-3 call all_reduce (sum), in train, train.py:40:"
        " all wait for 39 s at seq 7 of default_pg"
    )
    assert finding.about == "0 7"


def test_other_calls_have_their_ranks_and_a_group_without_a_name_is_a_group() -> None:
    unnamed = replace(comm("0", range(4)), name="0")
    finding = only(facts(at(0), at(1), at(2, "barrier"), at(3), comms=[unnamed]))
    assert finding.sentence.endswith("at seq 7 of group 0")
    why = "it calls barrier where ranks 0-1,3 call all_reduce (sum), in train, train.py:40"
    assert finding.culprits[0].why == why
    two = diagnose(facts(at(0), at(1, "barrier"), comms=[unnamed])).findings
    assert all(" 1 call " not in culprit.why for finding in two for culprit in finding.culprits)


def test_one_batch_less_is_a_barrier_among_all_reduces() -> None:
    assert summary(at(0), at(1), at(2, "barrier"), at(3)) == ("operation_mismatch", [2])


def test_several_that_stop_early_are_the_smaller_part() -> None:
    assert summary(at(0), at(1, "barrier"), at(2, "barrier"), at(3), at(4)) == ("operation_mismatch", [1, 2])


def test_of_two_ranks_the_one_that_leaves_the_usual_sequence_is_named() -> None:
    finding = only(facts(at(0, "broadcast"), at(1)))
    assert [c.rank for c in finding.culprits] == [0]
    assert finding.confidence == 0.75
    assert "rank 0 left the sequence that the job repeats" in finding.evidence


def test_a_tie_without_a_usual_sequence_is_undecided() -> None:
    finding = only(facts(at(0, "broadcast", before=0), at(1, before=0)))
    assert (finding.verdict.id, finding.culprits) == ("operation_mismatch", ())
    assert "broadcast on rank 0" in finding.sentence
    assert "all_reduce (sum) on rank 1" in finding.sentence
    assert "undecided" in finding.sentence


def test_ranks_that_were_not_seen_make_no_majority() -> None:
    finding = only(facts(at(0, "broadcast", before=0), at(1, before=0), comms=[comm("0", range(4))], world_size=4))
    assert finding.culprits == ()
    three = [at(r, before=0) for r in (1, 2, 3)]
    assert summary(at(0, "broadcast", before=0), *three, comms=[comm("0", range(5))], world_size=5)[1] == [0]


def test_sizes_that_differ_name_the_smaller_part() -> None:
    finding = only(facts(at(0), at(1, count=20), at(2)))
    assert (finding.verdict.id, [c.rank for c in finding.culprits]) == ("size_mismatch", [1])
    assert "calls all_reduce with 20 elements where ranks 0,2 call all_reduce with 10 elements" in finding.sentence


def test_types_that_differ_name_the_smaller_part() -> None:
    assert summary(at(0), at(1), at(2, dtype="float64", bytes=80)) == ("dtype_mismatch", [2])


def test_a_rank_whose_type_is_not_known_is_not_named() -> None:
    other = [at(r, dtype="float64") for r in (2, 3)]
    assert summary(at(0), at(1), *other, at(4, dtype=None)) == ("dtype_mismatch", [2, 3])


def test_roots_that_differ_name_the_smaller_part() -> None:
    # On gloo rank 2 has ended the broadcast of root 0 and waits in the next call.
    ended = rank(
        2,
        *history(6, ago=40),
        op(7, "broadcast", ago=39, took=0.1, root=0),
        op(8, "barrier", ago=38.8),
        stack=in_collective("barrier"),
    )
    assert summary(at(0, "broadcast", root=0), at(1, "broadcast", root=1), ended) == ("root_mismatch", [1])


def test_reductions_that_differ_are_other_operations() -> None:
    assert summary(at(0), at(1), at(2, redop="max")) == ("operation_mismatch", [2])


@pytest.mark.parametrize("name", ["all_to_all", "scatter", "gather"])
def test_some_collectives_may_have_any_size(name: str) -> None:
    assert summary(at(0, name), at(1, name, count=20), at(2, name))[0] == "no_completion"


def test_a_size_that_made_a_rank_abort_is_the_cause_of_its_death() -> None:
    # gloo ends a rank that receives more than it expects: not the one that sends too much.
    aborted = rank(
        0,
        *history(6, ago=40),
        op(7, ago=39, took=0.01, state="abandoned"),
        state="exited",
        exit=Exit(ago(38.9), signal=6),
    )
    failed = op(7, ago=39, took=0.02, state="failed", error="Connection reset by peer")
    odd = op(7, ago=39, took=0.02, state="failed", error="Connection reset by peer", count=20)
    found = facts(aborted, rank(1, *history(6, ago=40), odd), rank(2, *history(6, ago=40), failed))
    first = diagnose(found).findings[0]
    assert (first.verdict.id, [c.rank for c in first.culprits]) == ("size_mismatch", [1])
    assert "rank 1 failed: Connection reset by peer" in first.evidence


def test_a_failure_that_the_job_left_behind_is_no_finding() -> None:
    def went_on(number: int, count: int) -> Rank:
        bad = op(7, ago=39, took=0.02, state="failed", count=count)
        return rank(number, *history(6, ago=40), bad, op(8, ago=1, took=0.1))

    assert diagnose(facts(went_on(0, 10), went_on(1, 20), went_on(2, 10))).findings == ()


NAMES = ("broadcast", "all_reduce", "all_reduce")


def _stacks(groups: tuple[str, ...], names: tuple[str, ...] = NAMES) -> Facts:
    """Facts of a daemon that came late: only stacks."""
    stacks = [in_collective(name, group=group, since_ns=ago(30)) for name, group in zip(names, groups, strict=True)]
    return facts(*(rank(r, stack=stack, seen_from_ns=ago(1)) for r, stack in enumerate(stacks)), comms=[])


def test_stacks_alone_show_different_calls_of_the_default_group() -> None:
    finding = only(_stacks(("{}", "{}", "{'async_op': False}")))
    assert (finding.verdict.id, [c.rank for c in finding.culprits]) == ("operation_mismatch", [0])
    assert finding.confidence < 0.9


@pytest.mark.parametrize("other", ["{'group': <torch._C._distributed_c10d.ProcessGroup object>}", "{" + "x" * 160])
def test_stacks_in_groups_that_may_differ_show_nothing(other: str) -> None:
    finding = only(_stacks(("{}", other, other)))
    assert (finding.verdict.id, finding.culprits) == ("cannot_tell", ())
    assert only(_stacks((other, other, other), ("all_reduce",) * 3)).verdict.id == "cannot_tell"


def _steps(number: int, names: tuple[str, ...], *last: Operation) -> Rank:
    return rank(number, *history(9, ago=40, names=names), *last, stack=in_collective(last[-1].op or ""))


def test_a_swallowed_exception_shifts_the_sequence() -> None:
    step = ("reduce_scatter", "all_gather", "all_reduce")
    others = [_steps(r, step, op(10, "all_gather", ago=39)) for r in (0, 1, 3)]
    # It skipped the all_gather, and so calls what the others call next.
    finding = only(facts(*others, _steps(2, step, op(10, "all_reduce", ago=39))))
    assert (finding.verdict.id, [c.rank for c in finding.culprits]) == ("shifted_sequence", [2])
    assert finding.sentence.startswith("rank 2 (node a, pid 4002) skipped 1 collective at seq 10 of default_pg: ")
    assert finding.victims == (0, 1, 3)


def test_a_skipped_step_of_several_calls_is_counted() -> None:
    sizes = (11, 13, 17, 19)

    def run(number: int, skipped: int) -> Rank:
        ops = [op(seq, ago=80 - seq, took=0.01, count=sizes[seq % 4]) for seq in range(1, 21)]
        return rank(number, *ops, op(21, ago=39, count=sizes[(21 + skipped) % 4]), stack=in_collective())

    finding = only(facts(run(0, 0), run(1, 3), run(2, 0)))
    assert finding.verdict.id == "shifted_sequence"
    assert "skipped 3 collectives" in finding.sentence


def test_a_shift_that_went_unnoticed_for_some_calls_is_found_where_it_began() -> None:
    # Asynchronous calls of equal size end although ranks mean different ones.
    sizes = (11, 11, 13, 17)

    def run(number: int, skipped: int) -> Rank:
        own = [sizes[(seq + (skipped if seq >= 17 else 0)) % 4] for seq in range(1, 22)]
        ops = [op(seq, ago=80 - seq, took=0.01, count=own[seq - 1]) for seq in range(1, 21)]
        return rank(number, *ops, op(21, ago=39, count=own[20]), stack=in_collective())

    finding = only(facts(run(0, 0), run(1, 1), run(2, 0)))
    assert (finding.verdict.id, [c.rank for c in finding.culprits]) == ("shifted_sequence", [1])


def test_what_the_job_never_calls_is_no_shift() -> None:
    step = ("reduce_scatter", "all_gather", "all_reduce")
    others = [_steps(r, step, op(10, "all_gather", ago=39)) for r in (0, 1, 3)]
    assert summary(*others, _steps(2, step, op(10, "barrier", ago=39))) == ("operation_mismatch", [2])
