"""An idle server: its ranks wait for requests, or for a rank that waits for requests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from probing.api.text import time_text
from probing.diagnosis.activity.requests import IDLE as WAITS_FOR_REQUESTS
from probing.diagnosis.case import Case
from probing.diagnosis.holdups import hold_ups, operation_text
from probing.diagnosis.verdict import NOTE, Finding, Verdict
from probing.diagnosis.waits import INIT
from probing.diagnosis.words import ranks_wait

__all__ = ("VERDICTS", "find")

_MOST_NAMED = 4

IDLE = Verdict(
    "idle",
    "hang",
    "A server is idle: it has no requests",
    "The ranks that hold others up, or all ranks of a job without operations in flight, wait for requests from outside:"
    " for connections on a listening socket, for ZeroMQ, for a ring of shared memory, or for a queue that a thread"
    " with such a wait fills. A server of metrics does not count. It is a note for as long as it lasts.",
    "What the ranks wait for, and which ranks wait for them.",
    "0.8.",
    "A request that gets no answer.",
    ("Send a request, and check whether the server answers.",),
    ("idle_server",),
)
VERDICTS = (IDLE,)


def find(case: Case) -> Iterator[Finding]:
    """Yields a note for each hold-up by ranks that wait for requests, or one note if all ranks wait for requests."""
    if not case.may_hang or case.found_error:
        return
    if case.waits:
        for hold_up in hold_ups(case):
            if hold_up.edge.op != INIT and _all_idle(case, hold_up.ranks):
                edge = hold_up.edge
                call = operation_text(case, edge.comm, edge.op, edge.seq)
                waiting = f"{ranks_wait(hold_up.victims)} for that in {call}"
                yield _finding(case, hold_up.ranks, hold_up.victims, hold_up.age_ns, waiting)
    elif (case.stalled_ns or 0) >= case.gate_ns and _all_idle(case, case.ranks):
        yield _finding(case, tuple(case.ranks), (), case.stalled_ns, "")


def _all_idle(case: Case, ranks: Iterable[int]) -> bool:
    return all(case.activity(rank).kind == WAITS_FOR_REQUESTS for rank in ranks)


def _finding(case: Case, idle: tuple[int, ...], victims: tuple[int, ...], age_ns: int | None, waiting: str) -> Finding:
    first = case.activity(idle[0])
    more = f"; {waiting}" if waiting else ""
    lines = [f"rank {rank}: {case.activity(rank).why}" for rank in idle[:_MOST_NAMED]]
    lines += [line for rank in idle[:_MOST_NAMED] for line in case.activity(rank).evidence]
    return Finding(
        IDLE,
        NOTE,
        0.8,
        f"idle for {time_text(age_ns)}: {case.who(idle)}: {first.why}{more}",
        tuple(case.culprit(rank) for rank in idle),
        victims,
        case.time(idle[0], case.now(idle[0]) - age_ns) if age_ns is not None else None,
        "",
        tuple(lines),
        (),
        (IDLE.refuted_by,),
        IDLE.next_steps,
        case.stacks(idle, victims),
    )
