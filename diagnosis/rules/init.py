"""Ranks wait while they create a communicator or use a store, and other ranks have not joined them."""

from __future__ import annotations

from collections.abc import Iterator

from probing.api.text import ranks_of, time_text
from probing.diagnosis.case import Case
from probing.diagnosis.holdups import longest_wait, lowered, site
from probing.diagnosis.rules.absent import ended
from probing.diagnosis.stack_calls import native_wait, python_wait
from probing.diagnosis.verdict import ERROR, Finding, Verdict
from probing.diagnosis.waits import INIT, main_thread
from probing.diagnosis.words import clean, ranks_wait

__all__ = ("VERDICTS", "find")

_MOST_NAMED = 4

INIT_STUCK = Verdict(
    "init_stuck",
    "hang",
    "Ranks are stuck in the creation of a communicator",
    "Ranks wait in init_process_group, new_group, a store or ncclCommInit. The ranks that are elsewhere are named."
    " Ranks of which no process was seen are reported, too.",
    "The ranks that wait there, and the activity of the other ranks.",
    "0.8; 0.5 if all known ranks wait, so that the awaited rank is unknown.",
    "The named rank's call of the same function, or a rank that was not seen.",
    (
        "Check that as many processes run as WORLD_SIZE says, with one MASTER_ADDR and MASTER_PORT.",
        "Look at what the named ranks do before they reach init_process_group.",
    ),
    ("nccl_timeout", "bad_ranks"),
)
VERDICTS = (INIT_STUCK,)


def find(case: Case) -> Iterator[Finding]:
    """Yields a finding if ranks that create a communicator have waited for other ranks for at least the time of a
    stall.
    """
    waiting = sorted(rank for rank, wait in case.graph.waits.items() if wait.op == INIT)
    explained = case.explained
    if not explained.isdisjoint(waiting) or not waiting:
        return
    outside = sorted({rank for one in case.graph.pending_of(waiting) for rank in one.awaited})
    # Ranks that wait elsewhere belong to a cycle or chain, which other rules report.
    missing_here = [r for r in outside if r not in case.graph.waits and r not in explained and not ended(case, r)]
    late = [rank for rank in missing_here if case.activity(rank).progressing is not True]
    long = (longest_wait(case, waiting).age_ns or 0) >= case.patience_ns
    if long:
        late = missing_here
    absent = sorted(set(case.world) - set(case.ranks))
    # If all ranks have joined, the creation may only be slow.
    if not late and (outside or (not absent and not long)):
        return
    yield _finding(case, waiting, late, absent)


def _finding(case: Case, waiting: list[int], late: list[int], absent: list[int]) -> Finding:
    wait = longest_wait(case, waiting)
    place = site(case, waiting[0])
    head = f"{ranks_wait(waiting)} in {_call(case, waiting)} for {time_text(wait.age_ns)}"
    if late:
        subject = case.who(late)
        first = case.activity(late[0])
        why = first.why if len(late) == 1 else f"rank {late[0]}: {first.why}"
        sentence = f"{subject} {'has' if len(late) == 1 else 'have'} not joined: {head}; {why}"
    elif absent:
        sentence = f"{head}, and no process of {ranks_of(absent)} was seen"
        if reasons := [m.text for m in case.facts.missing if m.kind == "rank" and m.rank in absent]:
            sentence += f": {clean(reasons[0])}"
    else:
        sentence = f"{head}, and all known ranks are there"
    silent = [m.text for m in case.facts.missing if m.kind in ("node", "rank")]
    missing = [f"nothing was seen of {ranks_of(absent)}"] if absent and late else []
    steps = dict.fromkeys(step for rank in late[:_MOST_NAMED] for step in case.activity(rank).next_steps)
    evidence = [f"{head}{f', called from {place}' if place else ''}", *silent]
    evidence += [line for rank in late[:_MOST_NAMED] for line in case.activity(rank).evidence]
    return Finding(
        INIT_STUCK,
        ERROR,
        lowered(0.8 if late or absent else 0.5, missing),
        sentence,
        tuple(case.culprit(rank) for rank in late),
        tuple(waiting),
        wait.since_ns,
        INIT,
        tuple(evidence),
        tuple(missing),
        (INIT_STUCK.refuted_by,),
        (*steps, *INIT_STUCK.next_steps),
        case.stacks(late, waiting),
    )


def _call(case: Case, waiting: list[int]) -> str:
    """Returns "the creation of a communicator", or the store's function if code of the job waits in it."""
    mains = [main_thread(case.ranks[rank]) for rank in waiting]
    calls = {native_wait(main.frames) if main and python_wait(main.frames) is None else None for main in mains}
    store = calls.pop() if len(calls) == 1 else None
    return store if store and "Store::" in store else "the creation of a communicator"
