"""The rules on hangs, each by the case that it is for, and by those that it must leave alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from diagnosis_cases import (
    C10D,
    NOW,
    TORCH,
    ago,
    comm,
    elsewhere,
    facts,
    frame,
    history,
    in_collective,
    node,
    op,
    progress,
    rank,
    thread,
)

from probing.diagnosis.case import Case
from probing.diagnosis.facts import Condition, Exit, Facts, Missing, Operation, Rank, Step, Thread
from probing.diagnosis.ladder import diagnose
from probing.diagnosis.verdict import ERROR, Finding


def errors(found: Facts) -> list[Finding]:
    diagnosis = diagnose(found)
    assert not [m for m in diagnosis.missing if m.kind == "rule"]
    return [finding for finding in diagnosis.findings if finding.severity == ERROR]


def only(found: Facts) -> Finding:
    (finding,) = errors(found)
    return finding


def summary(found: Facts) -> tuple[str, list[int], tuple[int, ...]]:
    finding = only(found)
    return finding.verdict.id, [culprit.rank for culprit in finding.culprits], finding.victims


def waiting(number: int, name: str = "all_reduce", *, seq: int = 7, since: float = 39.0, **fields: object) -> Rank:
    """A rank that has done ``seq - 1`` operations and waits in the next one."""
    return rank(number, *history(seq - 1, ago=40), op(seq, name, ago=since), stack=in_collective(name), **fields)


def late(number: int, stack: str = "load data.py:12", *, seq: int = 7, **fields: object) -> Rank:
    """A rank that has done ``seq - 1`` operations and is elsewhere."""
    return rank(number, *history(seq - 1, ago=40), stack=elsewhere(stack), **fields)


def test_the_rank_that_has_not_joined_is_named() -> None:
    finding = only(facts(waiting(0), late(1), waiting(2), waiting(3, node="b")))
    assert finding.verdict.id == "not_joined"
    assert [(c.rank, c.node, c.pid) for c in finding.culprits] == [(1, "a", 4001)]
    assert (finding.victims, finding.since_ns, finding.about) == ((0, 2, 3), ago(39), "0 7 all_reduce")
    assert finding.sentence.startswith("rank 1 (node a, pid 4001) holds up 3 ranks for 39 s: ")
    assert "load, data.py:12" in finding.sentence
    assert finding.evidence[0] == "ranks 0,2-3 wait in all_reduce seq 7 of default_pg, the first for 39 s"
    assert [(stack.rank, stack.role) for stack in finding.stacks] == [(1, "culprit"), (0, "victim")]
    assert finding.confidence == 0.95


def test_rank_0_is_not_right_by_birth() -> None:
    assert summary(facts(late(0), waiting(1)))[:2] == ("not_joined", [0])
    assert summary(facts(waiting(0), late(1)))[:2] == ("not_joined", [1])


def test_a_short_wait_is_no_stall() -> None:
    assert errors(facts(waiting(0, since=9.9), late(1))) == []


def test_a_job_with_long_steps_has_a_longer_gate() -> None:
    slow = facts(waiting(0), late(1), usual_gap_ns=25 * 10**9)
    assert errors(slow) == []
    assert summary(replace(slow, usual_gap_ns=19 * 10**9))[:2] == ("not_joined", [1])


def test_a_chain_of_groups_leads_to_the_rank_at_its_end() -> None:
    comms = [comm("tp", (0, 1), role="tp"), comm("dp", (1, 2), role="dp")]
    first = rank(0, op(5, ago=30, comm="tp"), stack=in_collective())
    second = rank(1, *history(4, ago=60, comm="tp"), op(3, ago=35, comm="dp"), stack=in_collective())
    third = rank(2, *history(2, ago=60, comm="dp"), stack=elsewhere())
    found = facts(first, second, third, comms=comms)
    assert summary(found) == ("not_joined", [2], (0, 1))
    assert "rank 0 waits in all_reduce seq 5 of tp (tp) for rank 1 for 30 s" in only(found).evidence


def test_a_rank_that_gets_on_with_something_has_a_minute() -> None:
    def found(since: float) -> Facts:
        writes = Condition(state="D", interval_ns=10**9, write_bytes=50 << 20, cpu_ns=10**7)
        return facts(waiting(0, since=since), late(1, "save train.py:80", condition=writes))

    assert errors(found(59)) == []
    assert summary(found(61))[:2] == ("not_joined", [1])


def test_a_rank_that_goes_on_with_others_has_a_minute() -> None:
    # Ranks 2 and 3 evaluate in a group of their own, while the others wait at a barrier.
    def found(since: float) -> Facts:
        comms = [comm("0", range(4)), comm("eval", (2, 3))]
        own = history(900, ago=0.5, every=0.1, comm="eval")
        on = [rank(r, *history(6, ago=90), *own, stack=elsewhere()) for r in (2, 3)]
        return facts(waiting(0, "barrier", since=since), waiting(1, "barrier", since=since), *on, comms=comms)

    assert errors(found(59)) == []
    assert summary(found(61)) == ("not_joined", [2, 3], (0, 1))


def test_the_smaller_part_that_waits_alone_while_the_others_go_on_is_named() -> None:
    comms = [comm("0", range(4)), comm("train", (1, 2, 3))]
    on = [rank(r, *history(900, ago=0.5, every=0.1, comm="train"), stack=elsewhere()) for r in (1, 2, 3)]
    alone = rank(0, op(1, "broadcast", ago=70), stack=in_collective("broadcast"))
    finding = only(facts(alone, *on, comms=comms))
    assert (finding.verdict.id, [c.rank for c in finding.culprits]) == ("not_joined", [0])
    assert "waits alone in broadcast seq 1 of default_pg" in finding.sentence


def test_a_stopped_rank_is_named_also_within_the_operation() -> None:
    stopped = waiting(1, condition=Condition(state="T"), state="stopped")
    assert summary(facts(waiting(0), stopped, waiting(2))) == ("not_joined", [1], (0, 2))


def test_a_rank_that_has_not_ended_its_group_of_nccl_is_named() -> None:
    asleep = Condition(syscall="clock_nanosleep")

    def grouped(stack: Thread, condition: Condition | None, launched: bool | None = False, seq: int = 7) -> Rank:
        open_ = op(seq, ago=39, state="called", launched=launched)
        return rank(1, *history(seq - 1, ago=40), open_, stack=stack, condition=condition)

    found = facts(waiting(0), grouped(elsewhere("nap train.py:31"), asleep), waiting(2))
    assert summary(found) == ("not_joined", [1], (0, 2))
    assert any("in a group of NCCL that it has not ended" in text for text in only(found).evidence)
    # In the call itself it may wait for the others; a stack without native frames does not show where it is; and what
    # is launched needs nothing of its thread.
    for other in (
        grouped(in_collective(), None),
        grouped(elsewhere(), None),
        grouped(elsewhere(), asleep, launched=None),
        grouped(elsewhere(), asleep, seq=8),
    ):
        assert summary(facts(waiting(0), other, waiting(2)))[:2] != ("not_joined", [1]), other


def test_an_operation_that_is_not_awaited_does_not_excuse() -> None:
    # Rank 1 has started the next bucket and is in the loader; its other group needs it.
    comms = [comm("0", (0, 1)), comm("x", (0, 1))]
    native = (frame("clock_nanosleep", native=True), frame("sleep data.py:3"))
    apart = rank(1, op(7, ago=39, async_op=True), stack=thread(*native))
    found = facts(
        rank(0, op(7, ago=39, async_op=True), op(3, ago=38, comm="x"), stack=in_collective()), apart, comms=comms
    )
    assert summary(found) == ("not_joined", [1], (0,))


def test_nothing_is_concluded_from_losses_without_a_stack() -> None:
    finding = only(facts(waiting(0), waiting(2), rank(1, *history(6, ago=40), lost=3)))
    assert (finding.verdict.id, finding.culprits, finding.confidence) == ("cannot_tell", (), 0.3)
    assert "it may be rank 1" in finding.sentence


def test_losses_lower_what_a_stack_shows() -> None:
    whole, lossy = (only(facts(waiting(0), waiting(2), late(1, lost=lost))) for lost in (0, 3))
    assert [c.rank for c in lossy.culprits] == [1]
    assert lossy.confidence < whole.confidence
    assert "operations of rank 1 were lost" in lossy.missing


def test_a_late_daemon_names_the_rank_outside_by_stacks() -> None:
    stacks = [in_collective(since_ns=ago(30)), elsewhere(since_ns=ago(31)), in_collective(since_ns=ago(30))]
    ranks = [rank(r, stack=stack, seen_from_ns=ago(2)) for r, stack in enumerate(stacks)]
    finding = only(facts(*ranks, nodes=[node("a", watching_since_ns=ago(2))]))
    assert (finding.verdict.id, [c.rank for c in finding.culprits], finding.victims) == ("not_joined", [1], (0, 2))
    assert finding.confidence < 0.9
    assert any("began before it could be seen" in line for line in finding.missing)


def test_a_late_daemon_knows_since_when_a_thread_sleeps() -> None:
    asleep = Condition(asleep_since_ns=ago(25), syscall="futex")
    ranks = [
        rank(0, stack=in_collective(), condition=asleep, seen_from_ns=ago(1)),
        rank(1, stack=elsewhere(), condition=Condition(asleep_since_ns=ago(26)), seen_from_ns=ago(1)),
    ]
    assert summary(facts(*ranks, nodes=[node("a", watching_since_ns=ago(1))])) == ("not_joined", [1], (0,))


def test_a_late_daemon_names_a_rank_that_wakes_up_now_and_then() -> None:
    # A data loader asks every 5 s whether its worker lives.
    def found(waits_since: float, awake_ago: float, *ops: Operation) -> Facts:
        waiter = Condition(asleep_since_ns=ago(waits_since), syscall="futex")
        loader = Condition(asleep_since_ns=ago(awake_ago), syscall="poll")
        ranks = [
            rank(0, *ops, stack=in_collective(), condition=waiter, seen_from_ns=ago(2)),
            rank(1, stack=elsewhere(), condition=loader, seen_from_ns=ago(2)),
        ]
        return facts(*ranks, nodes=[node("a", watching_since_ns=ago(2))])

    assert summary(found(25, 3)) == ("not_joined", [1], (0,))
    assert errors(found(9, 3)) == []
    # Rank 0 began its last operation lately.
    assert errors(found(25, 3, *history(6, ago=3))) == []


def test_a_collective_of_an_unknown_group_blames_nobody_of_several_outside() -> None:
    # Only its stack shows the collective of rank 0: ranks 1 and 2 may be no members of its group.
    groups = [comm("0", range(3)), comm("x", (0, 1))]
    lossy = rank(0, *history(6, ago=40), stack=in_collective(since_ns=ago(39)), lost=1)
    assert summary(facts(lossy, late(1), late(2), comms=groups)) == ("cannot_tell", [], (0,))
    assert summary(facts(lossy, late(1), waiting(2), comms=groups)) == ("not_joined", [1], (0, 2))
    # Of rank 2 nothing is known: it may be the one that has not joined.
    blind = rank(2, *history(5, ago=50), lost=2)
    assert summary(facts(lossy, late(1), blind, comms=groups)) == ("cannot_tell", [], (0,))


def test_a_stack_in_some_collective_does_not_show_that_it_is_the_same() -> None:
    groups = [comm("0", range(2)), comm("x", (1, 2))]
    lossy = rank(1, *history(6, ago=40), stack=in_collective(since_ns=ago(39)), lost=1)
    elsewhere_too = rank(2, stack=elsewhere(), lost=1)
    found = errors(facts(waiting(0), lossy, elsewhere_too, comms=groups))
    assert [f.verdict.id for f in found] == ["not_joined"]
    assert {c.rank for f in found for c in f.culprits} == {2}


@pytest.mark.parametrize("place", ["train train.py:40", f"_engine_run_backward {TORCH}autograd/graph.py:824"])
def test_a_lossy_rank_where_the_others_await_an_asynchronous_operation_is_not_named(place: str) -> None:
    # Without native frames the wait in C looks like the line that calls it.
    def awaits(number: int, *ops: Operation, **fields: object) -> Rank:
        inner = frame(place, rank=str(number))
        return rank(number, *history(6, ago=40), *ops, stack=thread(inner, "<module> train.py:60"), **fields)

    there = [awaits(r, op(7, ago=39, async_op=True)) for r in (0, 2)]
    assert summary(facts(*there, awaits(1, lost=1)))[1] == []
    assert summary(facts(*there, late(1, lost=1)))[1] == [1]


def test_ranks_on_a_node_that_does_not_answer_are_unreachable() -> None:
    found = facts(waiting(0), waiting(1), comms=[comm("0", range(4))], world_size=4)
    silent = replace(found, missing=(Missing("node", "node b did not answer in 1 s", node="b"),))
    assert summary(silent) == ("rank_unreachable", [2, 3], (0, 1))
    assert only(silent).sentence == "ranks 2-3 (node b) cannot be reached: ranks 0-1 wait for 39 s"


def test_a_rank_that_may_wait_for_a_silent_node_is_not_blamed_for_it() -> None:
    # Nothing shows whether rank 0 waits for its asynchronous operation, whose other member the silent node has.
    mine, comms = op(7, ago=39, comm="tp", async_op=True), [comm("tp", (0,), size=2), comm("dp", (0, 1))]
    done = history(6, ago=40, comm="dp"), history(6, ago=40, comm="tp")
    first = rank(0, *done[0], *done[1], mine, stack=elsewhere("step x.py:4"))
    other = rank(1, *done[0], op(7, ago=38, comm="dp"))
    gap = Missing("node", "node b did not answer", node="b")
    found = facts(first, other, comms=comms, world_size=3, missing=(gap,))
    assert summary(found) == ("cannot_tell", [], (0, 1))
    assert only(found).sentence.endswith("cannot be told: it may be 1 unknown member")
    assert "1 member of the communicator was not seen" in only(found).missing


def test_ranks_that_nobody_was_asked_for_cannot_be_judged() -> None:
    found = facts(waiting(0), waiting(1), comms=[comm("0", range(4))], world_size=4)
    assert summary(found) == ("cannot_tell", [], (0, 1))


def test_a_rank_that_is_gone_is_named() -> None:
    gone = rank(1, *history(6, ago=40), state="exited")
    assert summary(facts(waiting(0), gone, waiting(2))) == ("rank_dead", [1], (0, 2))


def test_a_rank_after_a_death_is_not_blamed() -> None:
    died = rank(1, *history(6, ago=40), state="exited", exit=Exit(ago(38), signal=9))
    found = errors(facts(waiting(0), died, late(2, "cleanup train.py:90"), waiting(3)))
    assert {c.rank for f in found for c in f.culprits} == {1}


def test_all_joined_and_none_completes() -> None:
    found = facts(*(waiting(r, node="ab"[r % 2]) for r in range(4)))
    assert summary(found) == ("no_completion", [], (0, 1, 2, 3))
    assert "the ranks lie on 2 nodes: a, b" in only(found).evidence


def test_an_operation_that_ended_on_some_ranks_says_on_which() -> None:
    done = rank(2, *history(7, ago=39), op(8, ago=30), stack=in_collective())
    finding = next(f for f in errors(facts(waiting(0), waiting(1), done)) if f.verdict.id == "no_completion")
    assert "it has ended on rank 2" in finding.evidence


def test_an_error_of_the_communicator_is_evidence() -> None:
    broken = comm("0", (0, 1), async_error="unhandled system error\x1b[31m")
    finding = errors(facts(waiting(0), waiting(1), comms=[broken]))[0]
    assert "the library holds an error of this communicator: unhandled system error\\x1b[31m" in finding.evidence


def test_two_groups_in_opposite_order_are_a_deadlock() -> None:
    comms = [comm("tp", (0, 1)), comm("dp", (0, 1))]
    first = rank(
        0,
        *history(4, ago=40, comm="tp"),
        *history(8, ago=40, comm="dp"),
        op(5, ago=39, comm="tp"),
        stack=in_collective(),
    )
    other = rank(
        1,
        *history(4, ago=40, comm="tp"),
        *history(8, ago=40, comm="dp"),
        op(9, ago=38, comm="dp"),
        stack=in_collective(),
    )
    finding = only(facts(first, other, comms=comms))
    assert (finding.verdict.id, [c.rank for c in finding.culprits]) == ("deadlock", [0, 1])
    assert finding.evidence == (
        "rank 0 waits in all_reduce seq 5 of tp for rank 1 for 39 s",
        "rank 1 waits in all_reduce seq 9 of dp for rank 0 for 38 s",
    )


def test_the_odd_rank_of_a_cycle_is_named() -> None:
    comms = [comm("0", range(4)), comm("x", range(4))]
    odd = rank(3, op(1, "broadcast", ago=39, comm="x"), stack=in_collective("broadcast"))
    others = [rank(r, op(1, ago=39), stack=in_collective()) for r in range(3)]
    assert summary(facts(*others, odd, comms=comms)) == ("deadlock", [3], (0, 1, 2))


def test_a_ring_of_sends_is_a_deadlock() -> None:
    ring = [rank(r, op(1, "send", ago=39, peer=(r + 1) % 3), stack=in_collective("send")) for r in range(3)]
    assert summary(facts(*ring)) == ("deadlock", [0, 1, 2], ())


def test_a_large_ring_of_sends_is_a_deadlock() -> None:
    # Searching a cycle from each rank would take minutes.
    ranks = [rank(r, op(1, "send", ago=39, peer=(r + 1) % 2000)) for r in range(2000)]
    finding = only(facts(*ranks))
    assert (finding.verdict.id, len(finding.culprits), len(finding.evidence)) == ("deadlock", 2000, 8)


def test_the_graph_of_a_large_job_has_one_operation_and_not_an_edge_for_each_two_ranks() -> None:
    ranks = [rank(r, *history(6, ago=40), *[op(7, ago=39 + r / 1000)] * (r < 1000)) for r in range(2000)]
    made = facts(*ranks)
    (pending,) = Case(made).graph.operations
    assert (pending.waiters, pending.awaited) == (tuple(range(1000)), frozenset(range(1000, 2000)))
    assert summary(made)[1] == [*range(1000, 2000)]


def test_a_send_without_a_receive_names_the_sender() -> None:
    # gloo numbers sends together with collectives: the barrier of the others has the number of the send.
    sends = rank(0, *history(1, ago=40), op(2, "send", ago=39, peer=1), stack=in_collective("send"))
    others = [rank(r, *history(1, ago=40), op(2, "barrier", ago=38), stack=in_collective("barrier")) for r in (1, 2)]
    finding = only(facts(sends, *others))
    assert (finding.verdict.id, [c.rank for c in finding.culprits], finding.victims) == ("unmatched_p2p", [0], (1, 2))
    assert "sends to rank 1 for 39 s, and rank 1 waits for it in barrier seq 2 of default_pg" in finding.sentence


def test_a_receive_waits_for_its_sender() -> None:
    receives = rank(0, op(1, "recv", ago=39, peer=1), stack=in_collective("recv"))
    assert summary(facts(receives, rank(1, stack=elsewhere()))) == (
        "not_joined",
        [1],
        (0,),
    )


def test_a_send_that_meets_its_receive_does_not_blame_the_peer() -> None:
    sends = rank(0, op(1, "send", ago=39, peer=1), stack=in_collective("send"))
    receives = rank(1, op(1, "recv", ago=39, peer=0), stack=in_collective("recv"))
    assert summary(facts(sends, receives)) == ("no_completion", [], (0, 1))


def coalesced(number: int, to: int, source: int, first: str) -> Rank:
    """A rank whose send and receive were called in one group, and so end together."""
    calls = [op(None, "send", ago=39, peer=to, async_op=True), op(None, "recv", ago=39, peer=source, async_op=True)]
    return rank(number, *(calls if first == "send" else calls[::-1]))


@pytest.mark.parametrize("first", ["send", "recv"])
def test_a_ring_of_coalesced_sends_and_receives_names_only_the_rank_that_has_not_called(first: str) -> None:
    ring = [coalesced(r, (r + 1) % 6, (r - 1) % 6, first) for r in range(6)]
    ring[3] = rank(3, stack=elsewhere())
    assert summary(facts(*ring)) == ("not_joined", [3], (2, 4))


@pytest.mark.parametrize("first", ["send", "recv"])
def test_a_stage_that_waits_in_coalesced_operations_leads_to_the_stage_before_it(first: str) -> None:
    last = rank(2, op(None, "recv", ago=39, peer=1, async_op=True))
    assert summary(facts(rank(0, stack=elsewhere()), coalesced(1, 2, 0, first), last)) == ("not_joined", [0], (1,))


@pytest.mark.parametrize("first", ["send", "recv"])
def test_a_ring_of_coalesced_operations_that_all_have_called_does_not_complete(first: str) -> None:
    ring = [coalesced(r, (r + 1) % 3, (r - 1) % 3, first) for r in range(3)]
    assert summary(facts(*ring)) == ("no_completion", [], (0, 1, 2))


def test_peers_are_ranks_of_the_communicator() -> None:
    pair = comm("pp", (4, 6))
    sends = rank(4, op(1, "send", ago=39, comm="pp", peer=1), stack=in_collective("send"))
    assert summary(facts(sends, rank(6, stack=elsewhere()), late(1), comms=[pair])) == ("not_joined", [6], (4,))


def test_a_receive_from_anybody_of_several_blames_nobody() -> None:
    receives = rank(0, op(1, "recv", ago=39), stack=in_collective("recv"))
    assert summary(facts(receives, late(1), late(2))) == ("cannot_tell", [], (0,))


def test_the_rank_that_has_not_come_to_init_is_named() -> None:
    stacks = [in_collective("init_process_group", since_ns=ago(30)), elsewhere("load data.py:3", since_ns=ago(31))]
    found = facts(*(rank(r, stack=stacks[r % 2]) for r in range(3)), comms=[])
    assert summary(found) == ("init_stuck", [1], (0, 2))


def test_a_wait_of_user_code_in_a_store_is_named_as_such() -> None:
    store = frame("c10d::TCPStore::wait()", native=True)
    waits = rank(0, stack=thread(store, "sync train.py:9", since_ns=ago(30)))
    creates = rank(0, stack=thread(store, f"init_process_group {C10D}:9", "main train.py:3", since_ns=ago(30)))
    late = rank(1, stack=elsewhere("load data.py:3", since_ns=ago(31)))
    assert "rank 0 waits in c10d::Store::wait for 30 s" in only(facts(waits, late, comms=[])).sentence
    assert "rank 0 waits in the creation of a communicator for 30 s" in only(facts(creates, late, comms=[])).sentence


def in_store(number: int, *ops: Operation) -> Rank:
    """A rank whose own code waits in a store, for 40 s."""
    native = frame("c10d::TCPStore::wait(std::string)", native=True)
    return rank(number, *ops, stack=thread(native, "get_state sync.py:3", "train train.py:40", since_ns=ago(40)))


def test_a_rank_that_waits_in_a_store_for_the_late_rank_is_in_no_cycle() -> None:
    found = facts(waiting(0, since=30), waiting(1, since=30), in_store(2, *history(6, ago=60)), late(3))
    assert summary(found) == ("not_joined", [3], (0, 1, 2))


def test_a_receive_from_a_rank_that_waits_in_a_store_for_the_late_rank_has_its_counterpart() -> None:
    receives = rank(0, op(None, "recv", ago=30, peer=1), stack=in_collective("recv"))
    waits = rank(2, op(None, "recv", ago=30, peer=3), stack=in_collective("recv"))
    assert summary(facts(receives, in_store(1), waits, rank(3, stack=elsewhere()))) == ("not_joined", [3], (0, 1, 2))


def test_a_rank_that_alone_waits_in_a_store_is_in_a_cycle_with_those_that_wait_for_it() -> None:
    found = facts(waiting(0, since=30), waiting(1, since=30), in_store(2, *history(6, ago=60)), waiting(3, since=30))
    assert summary(found) == ("deadlock", [2], (0, 1, 3))


def test_a_world_that_is_not_whole_waits_in_init() -> None:
    stack = in_collective("_store_based_barrier", since_ns=ago(30))
    finding = only(facts(rank(0, stack=stack), rank(2, stack=stack), world_size=4, comms=[]))
    assert (finding.verdict.id, finding.culprits) == ("init_stuck", ())
    assert "no process of ranks 1,3 was seen" in finding.sentence


def test_a_world_size_that_no_job_has_is_not_believed() -> None:
    stack = in_collective("_store_based_barrier", since_ns=ago(30))
    finding = only(facts(rank(0, stack=stack), rank(1, stack=elsewhere()), world_size=2**63, comms=[]))
    assert (finding.verdict.id, [c.rank for c in finding.culprits]) == ("init_stuck", [1])
    large = comm("0", range(2), size=2**63)
    assert summary(facts(waiting(0), rank(1, stack=elsewhere()), world_size=2**63, comms=[large])) == (
        "not_joined",
        [1],
        (0,),
    )


def test_ranks_that_start_up_one_after_another_are_let_be() -> None:
    stack = in_collective("init_process_group", since_ns=ago(8))
    assert errors(facts(rank(0, stack=stack), rank(1, stack=elsewhere(moving=True)), comms=[])) == []


def test_a_wait_since_an_unknown_time_needs_a_minute_of_quiet() -> None:
    # The daemon watches for an hour, the processes run for some seconds.
    def found(since: float) -> list[Finding]:
        ranks = [rank(r, stack=in_collective("init_process_group"), started_ns=ago(since)) for r in range(3)]
        return errors(facts(*ranks, comms=[]))

    assert found(59) == []
    assert [f.verdict.id for f in found(61)] == ["init_stuck"]


def test_a_wait_since_an_unknown_time_beside_one_of_known_length_is_said_to_be_one() -> None:
    tp = [comm("0", range(4)), comm("tp", (2, 3))]
    timeless = rank(2, op(3, ago=39, comm="tp"), stack=in_collective(since_ns=None))
    timeless = replace(timeless, open=(replace(timeless.open[0], t_call_ns=None),))
    found = facts(waiting(0), waiting(1), timeless, rank(3, stack=elsewhere()), comms=tp)
    texts = [f.sentence for f in errors(found)]
    assert not any("for 0 s" in text for text in texts), texts


def test_uncertainty_is_reported_only_after_twice_the_time() -> None:
    def found(since: float) -> list[Finding]:
        return errors(facts(waiting(0, since=since), waiting(2, since=since), rank(1, lost=3)))

    assert found(19) == []
    assert [f.verdict.id for f in found(21)] == ["cannot_tell"]


def _idle(number: int, text: str = "load data.py:12", **fields: object) -> Rank:
    still = Condition(state="S", interval_ns=10**9, cpu_ns=0, switches=0, asleep_since_ns=ago(40))
    return rank(number, *history(6, ago=40), stack=elsewhere(text, moving=False), **{"condition": still, **fields})


def test_ranks_that_block_outside_are_named() -> None:
    found = facts(*(_idle(r) for r in range(3)))
    assert summary(found) == ("stuck_outside", [0, 1, 2], ())


def test_the_smaller_group_outside_is_named() -> None:
    assert summary(facts(_idle(0), _idle(1, "acquire lock.py:3"), _idle(2))) == ("stuck_outside", [1], (0, 2))


def test_what_all_ranks_do_together_is_a_note_for_a_minute() -> None:
    def found(seconds: float, since: float = 0.1, cpu_ms: int = 1) -> list[tuple[str, str, list[int]]]:
        # Each sample shows the same line, and the thread wakes up now and then.
        cpu_ns = cpu_ms * 10**6
        wakes = Condition(state="S", syscall="poll", interval_ns=10**9, cpu_ns=cpu_ns, asleep_since_ns=ago(since))
        stack = thread("wait_for_scores eval.py:7", "evaluate eval.py:23", since_ns=ago(seconds), moving=False)
        ranks = [rank(r, *history(60, ago=seconds), stack=stack, condition=wakes) for r in range(3)]
        diagnosis = diagnose(facts(*ranks))
        return [(f.severity, f.sentence, [c.rank for c in f.culprits]) for f in diagnosis.findings]

    ((severity, sentence, ranks),) = found(18)
    assert (severity, ranks) == ("note", [])
    assert sentence == "all 3 ranks are in wait_for_scores, eval.py for 18 s, without a collective"
    ((severity, _, ranks),) = found(61)
    assert (severity, ranks) == ("error", [0, 1, 2])
    # Ranks that use the CPU may evaluate for minutes.
    assert [severity for severity, *_ in found(84, cpu_ms=50)] == ["note"]
    assert [severity for severity, *_ in found(601, cpu_ms=50)] == ["error"]
    # A thread that has not run for W is stuck.
    ((severity, _, ranks),) = found(18, since=17)
    assert (severity, ranks) == ("error", [0, 1, 2])


def test_operations_in_flight_that_nobody_is_seen_to_wait_for_are_reported_after_twice_the_time() -> None:
    def found(since: float) -> list[Finding]:
        still = Condition(state="S", interval_ns=10**9, cpu_ns=0, switches=0, asleep_since_ns=ago(since))
        stack = thread(frame("poll", native=True), frame("mine::wait()", native=True), "step mine.py:3", moving=False)
        calls = [*history(6, ago=since), op(7, ago=since, async_op=True)]
        return errors(facts(*(rank(r, *calls[: 6 + r], stack=stack, condition=still) for r in range(2))))

    assert found(19) == []
    (finding,) = found(21)
    assert (finding.verdict.id, [c.rank for c in finding.culprits], finding.victims) == ("stuck_outside", [0], (1,))
    assert any(line.startswith("rank 1 has all_reduce seq 7 of ") for line in finding.evidence), finding.evidence
    assert any("in flight for 21 s" in line for line in finding.evidence), finding.evidence


def test_a_job_that_gets_on_outside_is_healthy() -> None:
    busy = Condition(state="R", interval_ns=10**9, cpu_ns=9 * 10**8)
    ranks = [rank(r, *history(6, ago=40), stack=elsewhere(moving=True), condition=busy) for r in range(3)]
    assert errors(facts(*ranks)) == []
    assert errors(facts(*ranks[:2], _idle(2))) == []


def test_a_job_that_was_never_seen_at_work_may_be_starting() -> None:
    still = Condition(state="S", interval_ns=10**9, cpu_ns=0, switches=0, asleep_since_ns=ago(40))
    ranks = [rank(r, stack=elsewhere("fetch setup.py:3", moving=False), condition=still) for r in range(2)]
    assert errors(facts(*ranks, comms=[])) == []


def test_steps_count_as_progress() -> None:
    step = Step(5, ago(1.5), 10**9)
    moving = [replace(_idle(r), steps=(step,)) for r in range(2)]
    assert errors(facts(*moving)) == []


@pytest.mark.parametrize("age", [0.1, 9.0])
def test_a_job_that_advances_has_no_finding(age: float) -> None:
    ranks = [rank(r, *history(60, ago=age + 0.1, every=0.1), op(61, ago=age), stack=in_collective()) for r in range(3)]
    assert errors(facts(*ranks, late(3, seq=61))) == []


def test_an_open_operation_whose_end_was_missed_is_no_wait() -> None:
    stale = rank(0, *history(90, ago=0.5, every=0.1), op(12, ago=80, async_op=False))
    assert errors(facts(stale, rank(1, *history(90, ago=0.5, every=0.1)))) == []


def test_facts_without_anything_give_nothing() -> None:
    assert errors(facts()) == []
    assert errors(facts(rank(0), rank(1))) == []
    assert errors(Facts("j", "r", None, 10.0, NOW, (), ())) == []


def test_progress_alone_shows_that_a_rank_has_joined() -> None:
    # The last operations of rank 1 are not among the facts, but its progress is.
    there = replace(rank(1, lost=4), progress=progress([op(7, ago=39)]))
    assert summary(facts(waiting(0), there, late(2)))[1] == [2]
