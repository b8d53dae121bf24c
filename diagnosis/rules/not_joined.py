"""Ranks hold others up: they have not joined an operation in which others wait, and wait for no rank themselves."""

from __future__ import annotations

from collections.abc import Iterator

from probing.api.text import ranks_of, time_text
from probing.diagnosis.activity.requests import IDLE
from probing.diagnosis.case import Case
from probing.diagnosis.holdups import HoldUp, destroyed_text, doubts, edge_text, hold_ups, lowered, operation_text, site
from probing.diagnosis.rules.absent import ended
from probing.diagnosis.verdict import ERROR, Culprit, Finding, Verdict
from probing.diagnosis.waits import FILE_LOCK, INIT, halted, last_seen_ns, main_thread
from probing.diagnosis.words import ranks_wait

__all__ = ("VERDICTS", "find")

_MOST_NAMED = 4
# A rank that uses its CPU at one line for the time of a stall may never leave that line.
_MAY_NOT_END = ("gil_held", "computing")

NOT_JOINED = Verdict(
    "not_joined",
    "hang",
    "A rank has not joined an operation that the others wait in",
    "Ranks have not called the operation in which other members of the communicator wait, and wait for no other rank"
    " themselves (the sinks of the wait-for graph), nor for the lock of a file that a rank holds. A rank"
    " also counts as not joined if it is stopped within the operation, or if it has called the operation in a group of"
    " NCCL that it has not ended, and does something else. A rank that makes progress elsewhere is named only after 6 W"
    " and 60 s.",
    "The operation, the ranks that wait in it and since when; the last operation of the named rank, its activity and"
    " its stack.",
    "0.95; less for each of these: operations of the rank were lost, its stack could not be read, other members were"
    " not seen, the operations began before they could be recorded.",
    "The named rank's call of the operation, or an operation in which it waits for another rank.",
    ("Look at what the named rank does: `probingctl stacks --job J PID --native` has its whole stack.",),
    ("branch", "uneven_data", "blocked_rank", "busy_rank", "blocked_storage", "starved_loader", "nccl_timeout"),
)
VERDICTS = (NOT_JOINED,)


def find(case: Case) -> Iterator[Finding]:
    """Yields a finding for each hold-up by living ranks."""
    explained = case.explained
    for hold_up in hold_ups(case):
        if hold_up.edge.op == INIT:
            continue
        dead = any(ended(case, rank) for rank in hold_up.ranks)
        living = [r for r in hold_up.ranks if not ended(case, r) and r not in explained]
        # A rank that waits for requests is not to blame if other missing ranks do not wait for requests.
        living = [r for r in living if case.activity(r).kind != IDLE]
        named = [r for r in living if not (_busy(case, r) and (hold_up.age_ns or 0) < case.patience_ns)]
        if dead:
            # A rank that survived the death of another rank may be about to end, too.
            named = [r for r in named if case.activity(r).progressing is False and not _failed(case, r)]
        if named and all(_advances(case, r) for r in named) and len(named) > len(hold_up.victims):
            yield _alone(case, hold_up, named)
        elif named:
            yield _finding(case, hold_up, named)


def _advances(case: Case, rank: int) -> bool:
    # Returns whether the rank was seen to begin or end an operation or step within the time of a stall.
    seen = last_seen_ns(case.ranks[rank])
    return seen is not None and case.now(rank) - seen < case.usual_gate_ns and not halted(case.ranks[rank])


def _busy(case: Case, rank: int) -> bool:
    if halted(case.ranks[rank]):
        return False
    activity, main = case.activity(rank), main_thread(case.ranks[rank])
    moving = main.moving if main is not None else None
    if activity.kind in _MAY_NOT_END and moving is False:
        return _advances(case, rank)
    condition = case.ranks[rank].condition
    if activity.progressing is None and (condition is None or condition.cpu_ns is None):
        return moving is True or _advances(case, rank)
    return activity.progressing is True or _advances(case, rank)


def _failed(case: Case, rank: int) -> bool:
    last = max(case.ranks[rank].done, key=lambda o: o.t_done_ns or 0, default=None)
    return last is not None and last.state == "failed"


def _finding(case: Case, hold_up: HoldUp, named: list[int]) -> Finding:
    first = case.activity(named[0])
    subject = case.who(named)
    verb = "holds" if len(named) == 1 else "hold"
    why = first.why if len(named) == 1 else f"rank {named[0]}: {first.why}"
    count = len(hold_up.victims)
    missing = doubts(case, named, hold_up.waiters)
    steps = dict.fromkeys(step for rank in named[:_MOST_NAMED] for step in case.activity(rank).next_steps)
    edge = hold_up.edge
    call = operation_text(case, edge.comm, edge.op, edge.seq)
    return Finding(
        NOT_JOINED,
        ERROR,
        lowered(0.95, missing),
        f"{subject} {verb} up {count} rank{'s' if count != 1 else ''} for {time_text(hold_up.age_ns)}: {why}",
        tuple(case.culprit(rank) for rank in named),
        hold_up.victims,
        hold_up.since_ns,
        f"{edge.comm} {edge.seq} {edge.op}",
        tuple(_evidence(case, hold_up, named)),
        tuple(missing),
        (f"{ranks_of(named)} in {call}, or in another operation that waits for a rank",),
        (*steps, *NOT_JOINED.next_steps),
        case.stacks(named, hold_up.waiters),
    )


def _alone(case: Case, hold_up: HoldUp, going_on: list[int]) -> Finding:
    # The majority goes on without calling the operation, so the minority that has called it is named.
    alone, edge = hold_up.victims, hold_up.edge
    call = operation_text(case, edge.comm, edge.op, edge.seq)
    subject = case.who(alone)
    missing = doubts(case, going_on, alone)
    verb = "waits" if len(alone) == 1 else "wait"
    return Finding(
        NOT_JOINED,
        ERROR,
        lowered(0.7, missing),
        f"{subject} {verb} alone in {call} for {time_text(hold_up.age_ns)}: {ranks_of(going_on)} go on without it",
        tuple(_called_alone(case, rank, call) for rank in alone),
        (),
        hold_up.since_ns,
        f"{edge.comm} {edge.seq} {edge.op}",
        tuple(_evidence(case, hold_up, going_on)),
        tuple(missing),
        (f"a call of {call} by {ranks_of(going_on)}",),
        ("Compare the branch that the named rank took with that of the others: its stack names the line.",),
        case.stacks(alone, going_on),
    )


def _called_alone(case: Case, rank: int, call: str) -> Culprit:
    own, place = case.culprit(rank), site(case, rank)
    return Culprit(rank, own.node, own.pid, f"it waits alone in {call}{f', in {place}' if place else ''}", own.activity)


def _evidence(case: Case, hold_up: HoldUp, named: list[int]) -> Iterator[str]:
    edge = hold_up.edge
    call = operation_text(case, edge.comm, edge.op, edge.seq)
    same = [r for r in hold_up.waiters if case.graph.waits[r].comm == edge.comm] or [edge.waiter]
    yield f"{ranks_wait(same)} in {call}, the first for {time_text(hold_up.age_ns)}"
    for one in case.graph.awaiting(named):
        if one.op == FILE_LOCK:
            yield edge_text(case, one.edge(one.waiters[0], min(one.awaited)))
    for rank in named[:_MOST_NAMED]:
        if edge.op != FILE_LOCK:
            yield _last_of(case, rank, edge.comm)
            if left := destroyed_text(case, rank, edge.comm):
                yield left
        yield from case.activity(rank).evidence
    if others := sorted({*hold_up.victims}.difference(hold_up.waiters)):
        yield f"{ranks_wait(others)} for these in turn"
        onward = case.graph.pending[others[0]]
        yield edge_text(case, onward.edge(others[0], min(onward.awaited)))


def _last_of(case: Case, rank: int, comm: str | None) -> str:
    own = case.ranks[rank]
    if halted(own) and any(o.comm == comm for o in own.open):
        return f"rank {rank} has called it, and its process is stopped"
    last = next((p for p in own.progress if p.comm == comm), None)
    place = site(case, rank)
    tail = f"; its stack is in {place}" if place else ""
    if any(o.launched is False and o.comm == comm for o in own.open):
        return f"rank {rank} has called it in a group of NCCL that it has not ended, so it is not launched{tail}"
    if last is None:
        return f"rank {rank} has not called it: no operation of it there was seen{tail}"
    ends = [t for t in (last.last_done_ns, last.last_call_ns) if t is not None]
    ago = f" {time_text(max(0, case.now(rank) - max(ends)))} ago" if ends else ""
    return f"rank {rank} has not called it: its last there is {last.op} seq {last.seq}{ago}{tail}"
