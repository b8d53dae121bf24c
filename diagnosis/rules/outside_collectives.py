"""No rank waits in an operation, and no rank makes progress: ranks are stuck outside of collectives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from probing.api.text import ranks_of, time_text
from probing.diagnosis.activity.requests import IDLE, RPC
from probing.diagnosis.activity.scene import is_library, python_frames
from probing.diagnosis.case import Case
from probing.diagnosis.disagreements import vote
from probing.diagnosis.facts import Rank
from probing.diagnosis.holdups import lowered, operation_text, site
from probing.diagnosis.joins import Joins
from probing.diagnosis.verdict import ERROR, NOTE, Finding, Verdict
from probing.diagnosis.waits import STUCK_PATIENCE, halted, main_thread, wait_of
from probing.diagnosis.words import clean

__all__ = ("VERDICTS", "find")

_MOST_NAMED = 4
_FRAMES = 3
# If all ranks use at least this share of a CPU, they may be in an evaluation, which may take this long, ns.
_WORKS, _WORKS_NS = 0.05, 600 * 10**9
# With these activities, a rank without a recorded operation or step may only be starting.
_VAGUE = ("unknown", "computing", "sleeping", "network", "compiling", "nccl_init", "in_collective")

OUTSIDE = Verdict(
    "stuck_outside",
    "hang",
    "Ranks are stuck outside of collectives",
    "No rank of the job waits in an operation, no rank has begun or ended an operation for W, and no rank makes"
    " progress. If operations are in flight for which no stack shows a wait, the time is twice W, and the ranks that"
    " have not called these operations are named. If ranks wait for a request or for its answer, the other ranks are"
    " named. Otherwise ranks are grouped by stack: the minority is named, or without a minority all ranks. If all ranks"
    " have run within W, as in an evaluation, it is a note until they have made no progress for 6 W and 60 s, or for"
    " ten minutes if all of them use 5 % of a CPU.",
    "The activity of each group of ranks, and since when.",
    "0.8 if the activity of the named ranks is known, else 0.5.",
    "A rank that makes progress: its stack changes, it writes, or it uses CPU in changing frames.",
    ("Look at what the named ranks do: `probingctl stacks --job J PID --native` has their whole stacks.",),
    ("blocked_storage", "starved_loader", "blocked_rank"),
)
VERDICTS = (OUTSIDE,)


def find(case: Case) -> Iterator[Finding]:
    """Yields a finding if the whole job makes no progress and no rank waits in an operation."""
    living = [rank for rank in case.facts.ranks if rank.exit is None and rank.state not in ("exited", "zombie")]
    if case.found_error or not living or not case.may_hang or case.waits:
        return
    stalled = case.stalled_ns or 0
    gate = case.gate_ns * (STUCK_PATIENCE if any(rank.open for rank in living) else 1)
    if stalled < gate or len(living) < len(case.facts.ranks):
        return
    numbers = [rank.rank for rank in living]
    asked = _asked(case, numbers)
    if any(_makes_progress(case, rank, stalled) for rank in numbers):
        return
    groups = vote({rank: _signature(case, rank) for rank in numbers})
    odd = groups.odd if len(groups.groups) > 1 and not groups.tied else tuple(numbers)
    if not asked and all(case.activity(rank).kind == IDLE for rank in numbers):
        return
    named = _awaited(case) or asked or odd
    if set(named) == set(numbers) and _may_be_a_pause(case, numbers, stalled):
        yield _pause(case, numbers, stalled)
        return
    worked = bool(asked) or any(rank.progress or rank.done or rank.steps for rank in living)
    if worked or all(case.activity(rank).kind not in _VAGUE for rank in named):
        yield _finding(case, named, stalled, len(living))


def _awaited(case: Case) -> tuple[int, ...]:
    """Returns the ranks that have not called the operations in flight and that wait for no rank themselves."""
    blind = {r.rank: wait_of(replace(r, threads=()), case.facts) for r in case.facts.ranks}
    waits = {rank: wait for rank, wait in blind.items() if wait is not None}
    graph = Joins(case.ranks, waits, case.sequences, case.world, case.now).graph(waits)
    return tuple(sorted(graph.sinks & case.ranks.keys()))


def _asked(case: Case, ranks: list[int]) -> tuple[int, ...]:
    """Returns the ranks that do not wait for a request or an answer, if another rank does."""
    waiting = {rank for rank in ranks if case.activity(rank).kind in (IDLE, RPC)}
    return tuple(rank for rank in ranks if rank not in waiting) if waiting else ()


def _makes_progress(case: Case, rank: int, stalled: int) -> bool:
    own, activity = case.ranks[rank], case.activity(rank)
    if halted(own):
        return False
    if activity.kind in (IDLE, RPC):
        return False
    main = main_thread(own)
    if activity.progressing or (main is not None and main.moving):
        return True
    # Two readings are also equal if a rank sleeps between its steps, so the rank counts as stuck only if it was still
    # for W.
    return not _still(case, own) and stalled < case.patience_ns


def _still(case: Case, own: Rank) -> bool:
    """Returns whether the main thread did not run for W, or every sample of that time showed the same place."""
    main, condition = main_thread(own), own.condition
    since = [
        main.since_ns if main is not None else None,
        condition.asleep_since_ns if condition is not None else None,
    ]
    return any(ns is not None and case.now(own.rank) - ns >= case.gate_ns for ns in since)


def _may_be_a_pause(case: Case, ranks: Sequence[int], stalled: int) -> bool:
    """Returns whether all ranks may be busy with something else, such as an evaluation: each has run within W."""
    work = all(_works(case.ranks[rank]) for rank in ranks)
    longest = max(case.patience_ns, _WORKS_NS) if work else case.patience_ns
    return stalled < longest and not any(_slept(case, case.ranks[rank]) for rank in ranks)


def _works(own: Rank) -> bool:
    # A loop that only polls uses a smaller share of a CPU.
    c = own.condition
    return c is not None and bool(c.interval_ns) and (c.cpu_ns or 0) >= _WORKS * (c.interval_ns or 0)


def _slept(case: Case, own: Rank) -> bool:
    since = own.condition.asleep_since_ns if own.condition is not None else None
    return halted(own) or (since is not None and case.now(own.rank) - since >= case.gate_ns)


def _pause(case: Case, ranks: Sequence[int], stalled: int) -> Finding:
    functions = [_functions(case, rank) for rank in ranks]
    common = next((function for function in functions[0] if all(function in own for own in functions)), None)
    place = f"in {clean(common[0])}, {clean(common[1].rpartition('/')[2])}" if common else "outside of collectives"
    return Finding(
        OUTSIDE,
        NOTE,
        0.5,
        f"all {len(ranks)} ranks are {place} for {time_text(stalled)}, without a collective",
        (),
        (),
        case.time(ranks[0], case.now(ranks[0]) - stalled),
        "",
        tuple(f"rank {rank}: {case.activity(rank).why}{_at(case, rank)}" for rank in ranks[:_MOST_NAMED]),
        (),
        (OUTSIDE.refuted_by,),
        OUTSIDE.next_steps,
        case.stacks((), ranks),
    )


def _functions(case: Case, rank: int) -> list[tuple[str, str]]:
    """Returns the user's functions on the stack of a rank, innermost first."""
    main = main_thread(case.ranks[rank])
    frames = python_frames(main.frames) if main is not None else ()
    return [(frame.func, frame.file) for frame in frames if not is_library(frame)]


def _signature(case: Case, rank: int) -> tuple[object, ...]:
    own = case.ranks[rank]
    main = main_thread(own)
    frames = [(f.func, f.file) for f in main.frames if not f.native][:_FRAMES] if main is not None else []
    return halted(own), *frames


def _finding(case: Case, named: tuple[int, ...], stalled: int, living: int) -> Finding:
    first = case.activity(named[0])
    subject = case.who(named)
    verb = "is" if len(named) == 1 else "are"
    why = first.why if len(named) == 1 else f"rank {named[0]}: {first.why}"
    others = sorted(case.ranks.keys() - {*named})
    unseen = [rank for rank in named if not case.ranks[rank].threads]
    missing = [f"no stack of {ranks_of(unseen)}"] if unseen else []
    lines = [f"no rank has begun or ended an operation for {time_text(stalled)}, and none of {living} waits in one"]
    lines += [line for rank in case.facts.ranks if (line := _in_flight(case, rank))][:_MOST_NAMED]
    lines += [f"rank {r}: {case.activity(r).why}{_at(case, r)}" for r in (*named[:_MOST_NAMED], *others[:2])]
    lines += [line for rank in named[:_MOST_NAMED] for line in case.activity(rank).evidence]
    steps = dict.fromkeys(step for rank in named[:_MOST_NAMED] for step in case.activity(rank).next_steps)
    return Finding(
        OUTSIDE,
        ERROR,
        lowered(0.5 if first.kind == "unknown" else 0.8, missing),
        f"{subject} {verb} stuck outside of collectives for {time_text(stalled)}: {why}",
        tuple(case.culprit(rank) for rank in named),
        tuple(others),
        case.time(named[0], case.now(named[0]) - stalled),
        "",
        tuple(lines),
        tuple(missing),
        (OUTSIDE.refuted_by,),
        (*steps, *OUTSIDE.next_steps),
        case.stacks(named, others),
    )


def _in_flight(case: Case, own: Rank) -> str:
    if not own.open:
        return ""
    oldest = min(own.open, key=lambda o: o.t_call_ns or 0)
    age = case.now(own.rank) - oldest.t_call_ns if oldest.t_call_ns is not None else None
    call = operation_text(case, oldest.comm, oldest.op, oldest.seq)
    return f"rank {own.rank} has {call} in flight for {time_text(age)}, and its stack shows no wait for it"


def _at(case: Case, rank: int) -> str:
    place = site(case, rank)
    return f" (in {place})" if place else ""
