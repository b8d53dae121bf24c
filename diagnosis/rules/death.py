"""A rank died: names the first rank that died, the cause, and the ranks that died because of it or wait for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from probing.api.text import listed, ranks_of, time_text
from probing.diagnosis.case import Case
from probing.diagnosis.clocks import apart_ns
from probing.diagnosis.deaths import Death, First, Kind, behind, calls_behind, deaths, first_of, lost_worker
from probing.diagnosis.facts import Rank
from probing.diagnosis.holdups import destroyed_text, operation_text
from probing.diagnosis.peer_sockets import Named, first_to_close
from probing.diagnosis.verdict import ERROR, Culprit, Finding, Verdict
from probing.diagnosis.waits import INIT, Wait, is_p2p
from probing.diagnosis.words import clean, exit_text, ranks_wait, who

__all__ = ("RANK_DIED", "VERDICTS", "find")

RANK_DIED = Verdict(
    "rank_died",
    "death",
    "A rank died",
    "The first rank that ended by a signal or with a code other than 0, for a cause of its own: no launcher ended it,"
    " it did not wait for others, and its error is not that a peer is gone. If errors about a lost peer name a socket"
    " of a rank that lives on, that rank closed its connections first. Or a rank exited with code 0 while others wait"
    " for it in an operation that it never called. If all ranks of a run have ended and its launcher lives, the run is"
    " being restarted, and nothing is reported.",
    "Exits with signal, code and OOM kills; operations in flight at the end; logged errors; the ranks whose sockets,"
    " open or closed, errors name; lost data-loader workers.",
    "0.95 if the first exit is clear; 0.4 to 0.8 if others ended at the same time, or no error of its own is known;"
    " 0.75 to 0.85 if errors name the socket of a rank that lives on.",
    "Another rank ended earlier, or the error of this one says that a peer is gone.",
    (
        "Read the last lines of that rank: `probingctl logs --job J --rank R`, or the output of the launcher.",
        "Look for OOM kills and hardware errors of its node in the kernel's log.",
    ),
    situations=("dead_rank",),
)
VERDICTS: tuple[Verdict, ...] = (RANK_DIED,)

# Within this time, ns, a launcher has noticed a death, and begun to end or restart the others.
_GRACE_NS = 5_000_000_000
_RESTART_NS = 60_000_000_000
_MOST = 8
_UNEVEN = (
    "Compare the number of batches and steps of the ranks: these had fewer.",
    "Use a sampler that gives each rank equally many batches, or torch's Join context manager.",
)


def find(case: Case) -> Iterator[Finding]:
    """Yields one finding: the first death, else the ranks that exited early with code 0."""
    died = deaths(case)
    if died and not _restarting(case, died):
        first = first_of(case, died)
        # A mismatch explains the deaths that it causes, but it does not explain a kill.
        if first is not None and (first.death.rank.rank not in case.explained or first.death.kind is Kind.SUDDEN):
            yield _death(case, first, died)
            return
    if not died:
        yield from _left(case)


def _restarting(case: Case, died: Sequence[Death]) -> bool:
    """Returns whether a launcher may still restart the ranks."""
    age = min(case.now(death.rank.rank) - death.exit.ts_ns for death in died)
    if any(r.exit is None and r.state not in ("exited", "zombie") for r in case.facts.ranks):
        return age < min(_GRACE_NS, case.facts.stall_s * 1e9)
    launchers = [p for p in case.facts.processes if p.role == "launcher"]
    return any(p.exit is None and p.state not in ("exited", "zombie") for p in launchers) and age < _RESTART_NS


def _death(case: Case, first: First, died: Sequence[Death]) -> Finding:
    death = first.death
    if death.kind is Kind.CONSEQUENCE and (left := _gone(case)):
        return _leavers(case, left, died)
    if death.kind is Kind.CONSEQUENCE and (blamed := _absent(case, died))[0]:
        return _absentee(case, *blamed, died)
    first_ones = (death, *first.alike)
    dead = {d.rank.rank for d in died}
    waiting = tuple(sorted(set(case.waits) - dead))
    later = tuple(sorted(dead - {d.rank.rank for d in first_ones}))
    missing = [first.doubt] if first.doubt else []
    if not death.error and not death.exit.signal and not death.rank.logs:
        unread = any(gap.kind == "history" for gap in case.facts.missing)
        why = "process.logs could not be read" if unread else "process.logs has no line of it"
        missing.append(f"what rank {death.rank.rank} logged: {why}")
    names = who([d.rank for d in first_ones])
    return Finding(
        RANK_DIED,
        ERROR,
        first.confidence,
        f"{names} {_why(death)}{_toll(waiting, later)}",
        culprits=tuple(Culprit(d.rank.rank, d.rank.node, d.rank.pid, _why(d), "exited") for d in first_ones),
        victims=tuple(sorted({*waiting, *later})),
        since_ns=death.at_ns,
        evidence=tuple(_evidence(case, death, died)),
        missing=tuple(missing),
        refuted_by=(RANK_DIED.refuted_by,),
        next_steps=RANK_DIED.next_steps,
    )


def _why(death: Death) -> str:
    worker = lost_worker(death.rank)
    if worker is not None and worker.exit is not None:
        after = f" after its data-loader worker {worker.pid} {exit_text(worker.exit)}"
    else:
        after = f" after {death.error}" if death.error else ""
    return f"{exit_text(death.exit, death.rank.condition)}{after}"


def _toll(waiters: Sequence[int], later: Sequence[int]) -> str:
    parts = []
    if later:
        parts.append(f"{ranks_of(later)} ended after it")
    if waiters:
        parts.append(f"{ranks_wait(waiters)} for it")
    return f"; {listed(parts)}" if parts else ""


def _evidence(case: Case, death: Death, died: Sequence[Death]) -> Iterator[str]:
    yield from (_exit_line(other, death) for other in died[:_MOST])
    if len(died) > _MOST:
        yield f"{len(died) - _MOST} more ranks ended"
    calls: dict[str, list[int]] = {}
    for rank in sorted(set(case.waits) - {d.rank.rank for d in died}):
        wait = case.waits[rank]
        call = f"in {operation_text(case, wait.comm, wait.op, wait.seq)}"
        calls.setdefault("for other ranks to come" if wait.op == INIT else call, []).append(rank)
    for call, ranks in list(calls.items())[:_MOST]:
        yield f"{ranks_wait(ranks)} {call}"
    for process in case.facts.processes:
        if process.role == "launcher" and process.exit is not None:
            yield f"the launcher (node {clean(process.node)}, pid {process.pid}) {exit_text(process.exit)}"


def _exit_line(one: Death, first: Death) -> str:
    after = one.at_ns - first.at_ns
    when = "" if one is first else f" {time_text(abs(after))} {'later' if after >= 0 else 'earlier'}"
    error = f": {one.error}" if one.error else ""
    return f"rank {one.rank.rank} {exit_text(one.exit, one.rank.condition)}{when}{error}"


def _absent(case: Case, died: Sequence[Death]) -> tuple[list[Rank], tuple[Named, ...]]:
    """Returns the awaited ranks: other ranks waited for them, and then died of a lost peer. Also returns the errors
    that name sockets of the awaited ranks.

    An awaited rank was alive and had not called the operation in which the others waited, or it closed its connections
    while it was alive.
    """
    later = {d.rank.rank for d in died if d.kind in (Kind.OWN, Kind.UNKNOWN)}
    lived = [r for r in case.facts.ranks if (r.exit is None and r.rank not in case.waits) or r.rank in later]
    late = [rank for rank in lived if behind(case, rank)]
    first, named = first_to_close(case, {d.rank.rank for d in died if d.kind is Kind.CONSEQUENCE})
    # A launcher ends the remaining ranks when a rank has died.
    ordered = [d.rank for d in died if d.kind is Kind.ORDERED and _outlived(case, d, died[0], named)]
    # A rank that took part in all operations may have closed its connections because another rank did not come.
    if first is None or first.rank not in [rank.rank for rank in (*(late or lived), *ordered)]:
        return late, ()
    return [first], named


def _outlived(case: Case, one: Death, first: Death, named: Sequence[Named]) -> bool:
    """Returns whether ``one`` ended after the ``first`` death, and the error of that death names a socket of
    ``one``.
    """
    unsure = apart_ns(case.clocks, one.rank.node, first.rank.node)
    return any(n.rank == first.rank.rank for n in named) and one.at_ns - first.at_ns > unsure


def _absentee(case: Case, absent: Sequence[Rank], named: Sequence[Named], died: Sequence[Death]) -> Finding:
    numbers = [rank.rank for rank in absent]
    culprits = tuple(_absent_culprit(case, rank, died) for rank in absent)
    victims = tuple(sorted(d.rank.rank for d in died if d.rank.rank not in numbers))
    ended = all(rank.exit is not None for rank in absent)
    verb = "left before" if ended else "is alive" if len(absent) == 1 else "are alive"
    closed = " and has closed its connections" if named else ""
    late = [rank for rank in absent if behind(case, rank)]
    whys = f": {culprits[0].why}" if len(absent) == 1 else ""
    return Finding(
        RANK_DIED,
        ERROR,
        0.6 if not named else 0.85 if late else 0.75,
        f"{ranks_of(victims)} died while waiting for {who(absent)}, which {verb}{closed}{whys}",
        culprits=culprits,
        victims=victims,
        since_ns=died[0].at_ns,
        evidence=(
            *_evidence(case, died[0], died),
            *(one.as_text() for one in named[:_MOST]),
            *(text for rank in late[:_MOST] for text in _last_call(case, rank)),
        ),
        refuted_by=(RANK_DIED.refuted_by,),
        next_steps=("Look at what that rank does: `probingctl stacks --job J PID --native`.", *RANK_DIED.next_steps),
    )


def _absent_culprit(case: Case, rank: Rank, died: Sequence[Death]) -> Culprit:
    death = next((d for d in died if d.rank is rank), None)
    if death is None:
        return case.culprit(rank.rank)
    later = time_text(death.at_ns - died[0].at_ns)
    return Culprit(rank.rank, rank.node, rank.pid, f"{_why(death)}, {later} after them", "exited")


def _last_call(case: Case, rank: Rank) -> Iterator[str]:
    late, number, last = next(calls_behind(case, rank))
    call = operation_text(case, late.comm, late.op, number)
    yield f"rank {rank.rank} last called {call}, and others have called seq {last}"
    if left := destroyed_text(case, rank.rank, late.comm):
        yield left


def _gone(case: Case) -> list[Rank]:
    """Returns the ranks that exited with code 0 before they had called operations that others have called."""
    return [rank for rank in case.facts.ranks if rank.exit is not None and rank.exit.code == 0 and behind(case, rank)]


def _leavers(case: Case, left: Sequence[Rank], died: Sequence[Death]) -> Finding:
    """Returns the finding that ranks died because others exited early with code 0."""
    victims = tuple(sorted(d.rank.rank for d in died))
    return Finding(
        RANK_DIED,
        ERROR,
        0.9 if len(left) <= len(died) else 0.6,
        f"{who(left)} exited with code 0 before the others; {ranks_of(victims)} died of it",
        culprits=tuple(Culprit(g.rank, g.node, g.pid, "exited with code 0", "exited") for g in left),
        victims=victims,
        since_ns=max(case.time(g.rank, g.exit.ts_ns) for g in left if g.exit),
        evidence=(*_evidence(case, died[0], died), *_never(left)),
        refuted_by=(RANK_DIED.refuted_by,),
        next_steps=_UNEVEN,
    )


def _never(left: Sequence[Rank]) -> Iterator[str]:
    yield from (f"rank {g.rank} exited with code 0 and never called the last operation of the others" for g in left)


def _left(case: Case) -> Iterator[Finding]:
    """Yields the finding about ranks that exited with code 0 while others wait for an operation that they
    never called.
    """
    gone = [rank for rank in case.facts.ranks if rank.exit is not None and rank.exit.code == 0]
    newest: dict[str, int] = {}
    for g in gone:
        newest[g.node] = max(newest.get(g.node, 0), g.exit.ts_ns if g.exit else 0)
    waiting = {}
    for number, wait in case.waits.items():
        since = max(wait.since_ns or 0, newest.get(case.ranks[number].node, 0))
        if wait.comm is not None and case.now(number) - since >= case.facts.stall_s * 1e9:
            waiting[number] = wait
    exited = {g.rank: g for g in gone}
    calls = {(w.comm, case.number(rank, w.comm or "", w.seq), w.op, w.peer): w for rank, w in waiting.items()}
    never = {g for (_, number, _, _), wait in calls.items() for g in _never_called(case, exited, wait, number)}
    left = [g for g in gone if g.rank in never]
    if not left:
        return
    culprits = tuple(Culprit(g.rank, g.node, g.pid, "exited with code 0", "exited") for g in left)
    texts = sorted({operation_text(case, w.comm, w.op, w.seq) for w in calls.values()})
    yield Finding(
        RANK_DIED,
        ERROR,
        0.9 if len(left) <= len(waiting) else 0.6,
        f"{who(left)} exited with code 0 while {ranks_wait(waiting)} for {'it' if len(left) == 1 else 'them'}",
        culprits=culprits,
        victims=tuple(sorted(waiting)),
        since_ns=max(case.time(g.rank, g.exit.ts_ns) for g in left if g.exit),
        evidence=(f"{ranks_wait(waiting)} in {listed(texts)}", *(f"rank {g.rank} never called it" for g in left)),
        refuted_by=(RANK_DIED.refuted_by,),
        next_steps=_UNEVEN,
    )


def _never_called(case: Case, exited: Mapping[int, Rank], wait: Wait, number: int | None) -> Iterator[int]:
    """Yields the ranks of ``exited`` that are members of the operation of ``wait`` and never called it. ``number``: the
    number of this operation on all ranks; None if unknown.
    """
    sequence = case.sequences.get(wait.comm or "")
    if sequence is None:
        return
    # Each rank counts its own sends and receives.
    peer = sequence.job_rank(wait.peer) if is_p2p(wait.op) else None
    known = case.communicators.get(sequence.comm)
    members = {member.rank for member in known.members} if known is not None else set[int]()
    for other in sequence.members:
        rank = exited.get(other)
        if rank is None or rank.lost:
            continue
        if is_p2p(wait.op):
            never = peer == other
        elif (own := sequence.called.get(other)) is not None:
            never = wait.seq is None or (number is not None and own < number)
        else:
            used = any(one.comm == sequence.comm for one in rank.progress)
            never = not used and rank.seen_from_ns is None and other in members
        if never:
            yield other
