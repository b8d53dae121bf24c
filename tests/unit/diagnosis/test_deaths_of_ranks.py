"""Deaths: who ended first, of what, who died of it; and ends of jobs that are none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from diagnosis_cases import NOW, ago, comm, elsewhere, facts, history, in_collective, node, op, rank, shifted
from hypothesis import given
from hypothesis import strategies as st

from probing.diagnosis.case import Case
from probing.diagnosis.facts import Condition, Exit, Facts, Helper, Missing, Operation, Process, Rank
from probing.diagnosis.rules.death import find
from probing.diagnosis.verdict import Finding

KILL, TERM, INT, ABRT, SEGV = 9, 15, 2, 6, 11
CLOSED = "[rank0]: RuntimeError: [../gloo/pair.cc:525] Connection closed by peer [127.0.0.1]:41234"


def ended(
    number: int,
    seconds: float,
    *ops: Operation,
    code: int | None = None,
    by: int | None = None,
    oom: bool = False,
    **fields: Any,
) -> Rank:
    """Returns a rank that ended so many seconds ago."""
    return rank(number, *ops, state="exited", exit=Exit(ago(seconds), code, by, oom), **fields)


def waits(number: int, seq: int = 9, seconds: float = 20, **fields: Any) -> Rank:
    """Returns a rank that waits in an all_reduce."""
    ops = (*history(seq - 1, ago=seconds + 1), op(seq, ago=seconds))
    return rank(number, *ops, stack=in_collective(), **fields)


def broken(seq: int = 9, seconds: float = 20) -> tuple[Operation, ...]:
    """Returns the operations of a rank that ended in an all_reduce."""
    return *history(seq - 1, ago=seconds + 1), op(seq, ago=seconds, took=0.1, state="abandoned")


def found_in(made: Facts) -> list[Finding]:
    return list(find(Case(made)))


def the(made: Facts) -> Finding:
    (finding,) = found_in(made)
    return finding


def culprits(made: Facts) -> list[int]:
    return [c.rank for finding in found_in(made) for c in finding.culprits]


def test_a_killed_rank_and_those_that_wait_for_it() -> None:
    finding = the(facts(waits(0), waits(1), ended(2, 20, *history(8, ago=21), by=KILL), waits(3)))
    assert finding.sentence == "rank 2 (node a, pid 4002) was killed by SIGKILL; ranks 0-1,3 wait for it"
    assert (finding.victims, finding.since_ns, finding.confidence) == ((0, 1, 3), ago(20), 0.95)
    assert finding.culprits[0].activity == "exited"
    assert "ranks 0-1,3 wait in all_reduce seq 9 of default_pg" in finding.evidence


def test_out_of_memory_with_the_limit_of_its_cgroup() -> None:
    limit = Condition(memory_limit_bytes=2 << 30)
    finding = the(facts(waits(0), ended(1, 20, by=KILL, oom=True, condition=limit)))
    assert finding.culprits[0].why == "was killed by SIGKILL, out of memory (OOM, limit 2 GiB)"
    likely = the(facts(waits(0), ended(1, 20, by=KILL, condition=Condition(oom_kills=1))))
    assert likely.culprits[0].why == "was killed by SIGKILL, probably out of memory (OOM)"


def test_who_died_of_it() -> None:
    made = facts(
        ended(0, 19.99, *broken(), code=1, logs=(CLOSED,)),
        ended(1, 20, *history(8, ago=21), by=SEGV),
        ended(2, 19.98, *broken(), by=ABRT),
        ended(3, 19.5, by=TERM),
    )
    finding = the(made)
    assert finding.sentence == "rank 1 (node a, pid 4001) was killed by SIGSEGV; ranks 0,2-3 ended after it"
    assert finding.evidence[0] == "rank 1 was killed by SIGSEGV"
    assert finding.evidence[1] == f"rank 0 exited with code 1 10 ms later: {CLOSED}"
    assert finding.evidence[3] == "rank 3 was killed by SIGTERM 500 ms later"


def test_a_rank_that_raised_and_took_its_time_to_end_is_before_those_that_lost_it() -> None:
    own = ("Traceback (most recent call last):", "[rank1]: RuntimeError: shape '[2, 3]' is invalid for input of size 5")
    made = facts(
        ended(0, 19.9, *broken(), code=1, logs=(CLOSED,)),
        ended(1, 19.0, *history(8, ago=21), code=1, logs=own),
    )
    finding = the(made)
    assert [c.rank for c in finding.culprits] == [1]
    assert finding.culprits[0].why == f"exited with code 1 after {own[1]}"
    assert finding.confidence == 0.8


def test_without_logs_the_one_that_had_not_called_the_operation_was_first() -> None:
    made = facts(ended(0, 19.9, *broken(), code=1), ended(1, 19.0, *history(8, ago=21), code=1))
    finding = the(made)
    assert [c.rank for c in finding.culprits] == [1]


def test_without_the_stored_rows_the_first_exit_may_be_a_consequence() -> None:
    made = facts(ended(0, 19.9, code=1), ended(1, 19.0, code=1))
    assert the(made).confidence > 0.5
    unread = Missing("history", "the stored rows cannot be read: no worker was started in time")
    finding = the(replace(made, missing=(unread,)))
    assert (finding.confidence, finding.missing[0]) == (0.4, unread.text)


def test_with_lost_operations_being_behind_shows_nothing_and_confidence_sinks() -> None:
    made = facts(ended(0, 19.9, *broken(), code=1), ended(1, 19.0, *broken(8), code=1, lost=7))
    assert the(made).confidence <= 0.4


def test_a_launcher_that_ends_all_after_one_failed() -> None:
    launcher = Process("a", 7, 7, "launcher", "exited", Exit(ago(18), 1))
    made = facts(
        ended(0, 19.0, *broken(), by=TERM),
        ended(1, 20, code=3),
        ended(2, 19.0, by=TERM),
        processes=(launcher,),
    )
    finding = the(made)
    assert finding.sentence == "rank 1 (node a, pid 4001) exited with code 3; ranks 0,2 ended after it"
    assert "the launcher (node a, pid 7) exited with code 1" in finding.evidence
    assert finding.missing == ("what rank 1 logged: process.logs has no line of it",)


def test_sigkill_by_a_launcher_after_another_failed_is_no_first_death() -> None:
    assert culprits(facts(ended(0, 19.5, by=KILL), ended(1, 20, code=3), ended(2, 19.4, by=KILL))) == [1]


@pytest.mark.parametrize("signal", [TERM, INT])
def test_a_job_that_somebody_ended_did_not_die(signal: int) -> None:
    assert found_in(facts(*(ended(n, 20 - n / 1e3, *broken(), by=signal) for n in range(4)))) == []


@pytest.mark.parametrize("signal", [TERM, INT])
def test_one_rank_that_somebody_ended(signal: int) -> None:
    assert culprits(facts(ended(0, 20, by=signal), waits(1))) == [0]
    assert culprits(facts(ended(0, 20, by=signal), ended(1, 19.9, *broken(), code=1, logs=(CLOSED,)))) == [0]


def test_an_interrupt_from_a_terminal_ends_all_ranks_each_in_its_time() -> None:
    assert found_in(facts(*(ended(n, 20 - 3 * n, *broken(), by=INT) for n in range(4)))) == []


def test_an_error_of_any_name_is_said() -> None:
    for error in ("[rank1]: faults.InjectedException", "[rank1]: KeyboardInterrupt", "ValueError: no label"):
        finding = the(facts(waits(0), ended(1, 20, code=1, logs=("Traceback (most recent call last):", error))))
        assert finding.sentence.endswith(f"exited with code 1 after {error}; rank 0 waits for it")


@pytest.mark.parametrize("error", ["data.ShardCorrupt: shard 17", "StopIteration", "[rank1]: Bad"])
def test_the_line_below_a_traceback_is_the_error_whatever_its_name(error: str) -> None:
    lines = ("NCCL WARN before", "[rank1]: Traceback (most recent call last):", error, "NCCL WARN after")
    finding = the(facts(waits(0), ended(1, 20, code=1, logs=lines)))
    assert finding.sentence.endswith(f"exited with code 1 after {error}; rank 0 waits for it")
    assert finding.evidence[0].endswith(error)


def test_logs_that_could_not_be_read_are_not_said_to_be_empty() -> None:
    unread = Missing("history", "the lines cannot be read: the query did not end in time")
    made = replace(facts(waits(0), ended(1, 20, code=3)), missing=(unread,))
    assert "what rank 1 logged: process.logs could not be read" in the(made).missing


def test_a_normal_end() -> None:
    assert found_in(facts(*(ended(n, 20 - n, *history(9, ago=25), code=0) for n in range(4)))) == []
    going = rank(3, *history(9, ago=25), stack=elsewhere())
    assert found_in(facts(*(ended(n, 20 - n, *history(9, ago=25), code=0) for n in range(3)), going)) == []


def test_an_elastic_restart_is_no_death() -> None:
    launcher = Process("a", 7, 7, "launcher", "running")
    all_gone = facts(ended(0, 20, code=1), ended(1, 19, by=TERM), processes=(launcher,))
    assert found_in(all_gone) == []
    assert culprits(replace(all_gone, processes=())) == [0]
    # The launcher has not noticed yet.
    assert found_in(facts(ended(0, 1, code=1), waits(1, seconds=1))) == []


@pytest.mark.parametrize("others", [(), (ended(1, 19.9, *broken(), code=1, logs=(CLOSED,)),)])
def test_an_elastic_restart_of_a_job_that_ended_well_is_no_death(others: tuple[Rank, ...]) -> None:
    made = facts(ended(0, 20, by=TERM), *others)

    def launched(code: int | None, ended_ago: float) -> Facts:
        return replace(made, processes=(Process("a", 7, 7, "launcher", "exited", Exit(ago(ended_ago), code)),))

    assert found_in(launched(0, 3)) == []
    for code, ended_ago in ((1, 3), (None, 3), (0, 23)):
        assert culprits(launched(code, ended_ago)) == [0]


def test_a_rank_that_exits_early_with_0() -> None:
    finding = the(facts(waits(0), waits(1), ended(2, 21, *history(8, ago=22), code=0), waits(3)))
    assert finding.sentence == "rank 2 (node a, pid 4002) exited with code 0 while ranks 0-1,3 wait for it"
    assert finding.evidence == ("ranks 0-1,3 wait in all_reduce seq 9 of default_pg", "rank 2 never called it")
    assert (finding.victims, finding.confidence) == ((0, 1, 3), 0.9)


def test_a_rank_that_exits_with_0_and_nobody_waits_long_enough() -> None:
    assert found_in(facts(waits(0, seconds=5), ended(1, 6, *history(8, ago=7), code=0))) == []


def test_a_rank_that_exits_with_0_after_it_called_the_same_operation_is_not_named() -> None:
    assert found_in(facts(waits(0), ended(1, 20, *history(9, ago=21), code=0))) == []


def test_ranks_that_died_of_one_that_exited_with_0() -> None:
    peer_gone = ("RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:4711.",)
    died = [ended(n, 20, *broken(), code=1, logs=peer_gone) for n in (0, 2)]
    finding = the(facts(died[0], ended(1, 20.2, *history(8, ago=21), code=0), died[1]))
    assert finding.sentence == "rank 1 (node a, pid 4001) exited with code 0 before the others; ranks 0,2 died of it"
    assert ([c.rank for c in finding.culprits], finding.victims, finding.confidence) == ([1], (0, 2), 0.9)


def test_a_lost_data_loader_worker() -> None:
    worker = Helper(77, 7, "data_loader", "exited", Exit(ago(21), None, KILL, True))
    finding = the(facts(waits(0), ended(1, 20, *broken(8), code=1, helpers=(worker,))))
    assert finding.culprits[0].why == (
        "exited with code 1 after its data-loader worker 77 was killed by SIGKILL, out of memory (OOM)"
    )


def test_ranks_that_died_waiting_for_one_that_lives() -> None:
    timeout = ("RuntimeError: [unbound_buffer.cc:84] Timed out waiting 1800000ms for recv operation to complete",)
    made = facts(
        *(ended(n, 20, *broken(), code=1, logs=timeout) for n in (0, 2)),
        rank(1, *history(8, ago=1900), stack=elsewhere()),
    )
    finding = the(made)
    assert [c.rank for c in finding.culprits] == [1]
    assert finding.victims == (0, 2)
    assert finding.sentence.startswith("ranks 0,2 died while waiting for rank 1 (node a, pid 4001), which is alive: ")


def test_a_rank_that_left_and_ended_a_minute_later_is_named() -> None:
    dead = [ended(r, 80 - r, *broken(seconds=81), code=1, logs=(CLOSED,)) for r in (0, 2)]
    left = ended(1, 19, *history(8, ago=81), code=1, logs=("ValueError: batch 300 has no label",))
    finding = the(facts(dead[0], left, dead[1]))
    assert finding.sentence == (
        "ranks 0,2 died while waiting for rank 1 (node a, pid 4001), which left before: exited with code 1 after"
        " ValueError: batch 300 has no label, 61 s after them"
    )
    assert ([c.rank for c in finding.culprits], finding.victims) == ([1], (0, 2))
    assert "rank 1 last called all_reduce seq 8 of default_pg, and others have called seq 9" in finding.evidence


def test_a_rank_that_a_launcher_ended_after_the_others_is_not_named() -> None:
    dead = [ended(r, 80 - r, *broken(seconds=81), code=1, logs=(CLOSED,)) for r in (0, 2)]
    assert culprits(facts(dead[0], ended(1, 77, *history(8, ago=81), by=TERM), dead[1])) == [0]


def test_errors_of_a_library() -> None:
    remote = op(9, ago=20, took=1, state="failed", error="ncclRemoteError")
    own = op(9, ago=20, took=1, state="failed", error="ncclUnhandledCudaError")
    made = facts(ended(0, 18, remote, by=ABRT), ended(1, 17.9, own, by=ABRT))
    finding = the(made)
    assert finding.culprits[0].why == "was killed by SIGABRT after ncclUnhandledCudaError"


def test_what_a_target_logs_becomes_no_escape_sequence() -> None:
    finding = the(facts(waits(0), ended(1, 20, code=1, logs=("ValueError: \x1b[31m" + "x" * 9_000,))))
    assert "\x1b" not in finding.sentence
    assert len(finding.sentence) < 400


@given(seconds=st.sampled_from((0.05, -0.05, 5.0, -5.0)), first=st.integers(0, 1))
def test_clocks_of_two_nodes_do_not_turn_the_order(seconds: float, first: int) -> None:
    ops = [op(n, ago=30 - n, took=0.1) for n in range(9)]
    a = ended(0, 20 - 0.5 * first, *ops, by=SEGV, node="a")
    b = ended(1, 20 - 0.5 * (1 - first), *ops, by=SEGV, node="b")
    made = facts(a, shifted(b, seconds), nodes=[node("a"), node("b")])
    assert culprits(made) == [first]


def test_deaths_that_the_clocks_cannot_tell_apart_lower_the_confidence() -> None:
    nodes = [node("a"), node("b", clock_error_ns=10**9)]
    finding = the(facts(ended(0, 20, by=SEGV, node="a"), ended(1, 20.2, by=SEGV, node="b"), nodes=nodes))
    assert (finding.confidence, finding.missing) == (0.6, ("rank 0, which ended soon after, may have failed before",))


def test_a_communicator_that_a_rank_never_used() -> None:
    made = facts(waits(0), ended(1, 21, code=0), comms=[comm("0", [0, 1])])
    assert culprits(made) == [1]
    late = replace(made, ranks=(made.ranks[0], replace(made.ranks[1], seen_from_ns=ago(30))))
    assert found_in(late) == []


def test_ranks_that_raise_the_same_error_at_once_are_all_named() -> None:
    made = facts(*(ended(n, 20 - n / 10, code=1, logs=(f"[rank{n}]: FileNotFoundError: no model",)) for n in range(3)))
    finding = the(made)
    assert [c.rank for c in finding.culprits] == [0, 1, 2]
    assert finding.sentence == "ranks 0-2 exited with code 1 after [rank0]: FileNotFoundError: no model"
    assert (finding.victims, finding.confidence) == ((), 0.8)


def test_ranks_that_died_do_not_blame_a_living_one_whose_operations_were_lost() -> None:
    made = facts(
        ended(0, 20, *broken(), code=1, logs=(CLOSED,)), rank(1, *history(5, ago=30), lost=4, stack=elsewhere())
    )
    assert culprits(made) == [0]


def test_a_rank_that_exited_with_0_is_not_named_where_another_one_has_not_sent() -> None:
    # A pipeline: rank 0 sends to rank 1, which sends to rank 2.
    first = ended(0, 30, *history(4, ago=31, names=("send",), peer=1), code=0)
    receiver = rank(2, op(9, "recv", ago=29, peer=1), stack=in_collective("recv"))
    stuck = rank(1, *history(8, ago=30, names=("send",), peer=2), stack=elsewhere())
    assert culprits(facts(first, stuck, receiver)) == []
    waiting = replace(stuck, open=(op(9, "recv", ago=29, peer=0),), threads=(in_collective("recv"),))
    assert culprits(facts(first, waiting, receiver)) == [0]


def test_the_time_of_a_death_is_that_of_the_common_clock() -> None:
    exit_ = ended(1, 20, *history(8, ago=21), by=KILL, node="b")
    nodes = [node("a"), node("b", clock_offset_ns=5 * 10**9, clock_error_ns=10**6, taken_ns=NOW + 5 * 10**9)]
    assert the(facts(waits(0), shifted(exit_, 5), nodes=nodes)).since_ns == ago(20)


def test_a_rank_that_sent_less_is_not_behind() -> None:
    # gloo counts sends and receives: the rank that waited in a receive has the lower number.
    peer = (op(1, "all_reduce", ago=30, took=0.1), op(2, "recv", ago=20, took=0.1, peer=1, state="failed"))
    sends = (op(seq, "send", ago=30 - seq, took=0.01, peer=0) for seq in (2, 3, 4))
    first = (op(1, "all_reduce", ago=30, took=0.1), *sends)
    finding = the(facts(ended(0, 19.9, *peer, code=1), ended(1, 20, *first, code=1)))
    assert [c.rank for c in finding.culprits] == [1]
    assert "operation" not in " ".join(finding.evidence)


def test_a_rank_that_left_is_named_by_collectives_alone() -> None:
    # Both called one all_reduce; rank 0 waits in its second one, with a lower number than the sends of rank 1 have.
    stays = (op(1, "all_reduce", ago=50, took=0.1), op(2, "all_reduce", ago=40))
    sends = (op(seq, "send", ago=50 - seq, took=0.01, peer=2) for seq in (2, 3, 4))
    leaves = (op(1, "all_reduce", ago=50, took=0.1), *sends)
    third = (op(1, "all_reduce", ago=50, took=0.1), op(2, "all_reduce", ago=40))
    left = the(facts(rank(0, *stays, stack=in_collective()), ended(1, 41, *leaves, code=0), rank(2, *third)))
    assert [c.rank for c in left.culprits] == [1]
