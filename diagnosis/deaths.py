"""Tells how ranks ended: which rank ended first, whether by a cause of its own, and who ended the others."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

from probing.api.text import ranks_of
from probing.diagnosis.case import Case
from probing.diagnosis.clocks import apart_ns
from probing.diagnosis.facts import Exit, Facts, Helper, Process, Progress, Rank
from probing.diagnosis.peer_sockets import PEER_GONE
from probing.diagnosis.words import clean, exit_text

__all__ = (
    "Death",
    "First",
    "Kind",
    "behind",
    "calls_behind",
    "deaths",
    "first_failure",
    "first_of",
    "how_it_ended",
    "job_ended",
    "lost_worker",
)

# A failing process closes its sockets before it unloads libraries, so its peers may end first.
_TEARDOWN_NS = 5_000_000_000
# A launcher polls its workers every 0.1 s or less often, and then ends them one right after the other. So if the next
# rank ended more than this later, ns, no launcher ended both ranks.
_ORDER_NS = 50_000_000
_WORKER_NS = 30_000_000_000
_LONGEST = 200
_MOST_NAMED = 4
_ORDERS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
_RANK = re.compile(r"^\[rank\d+\]:?\s*")
_TRACEBACK = "Traceback (most recent call last):"
_ERROR = re.compile(
    r"(?:\[rank\d+\]:?\s*)?((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Fault))(?::|$)"
)


class Kind(IntEnum):
    """Why a process ended. The lower the value, the more likely this death caused the others."""

    OWN = 0
    """An OOM kill, an error that it raised itself, or an end before a collective that others had called."""
    UNKNOWN = 1
    SUDDEN = 2
    """A signal such as SIGSEGV or SIGKILL. A launcher sends SIGKILL to processes that do not end."""
    CONSEQUENCE = 3
    """It waited for other ranks, or its error is that a peer is gone."""
    ORDERED = 4
    """SIGTERM, SIGINT or SIGHUP, from a user, scheduler or launcher."""


@dataclass(frozen=True, slots=True)
class Death:
    """A rank that ended. ``at_ns``: its end on the common clock. ``error``: its error, from its log or its library."""

    rank: Rank
    exit: Exit
    at_ns: int
    kind: Kind
    error: str = ""


@dataclass(frozen=True, slots=True)
class First:
    """The first death. ``confidence``: how sure it is that this death came first and has a cause of its own. ``doubt``:
    why it is not certain.

    ``alike``: deaths with the same error at nearly the same time, which this death did not cause.
    """

    death: Death
    confidence: float
    doubt: str = ""
    alike: tuple[Death, ...] = ()


def deaths(case: Case) -> list[Death]:
    """Returns the ranks that ended by a signal or with a code other than 0, sorted by time."""
    found = []
    for rank in case.facts.ranks:
        end = rank.exit
        if end is not None and _failed(end):
            error = _error(case, rank)
            found.append(Death(rank, end, case.time(rank.rank, end.ts_ns), _kind(case, rank, end, error), error))
    return sorted(found, key=lambda death: death.at_ns)


def first_of(case: Case, died: Sequence[Death]) -> First | None:
    """Returns the first death with a cause of its own; None if a user, scheduler or launcher ended all ranks."""
    first = died[0]
    near = [d for d in died if d.at_ns - first.at_ns <= apart_ns(case.clocks, first.rank.node, d.rank.node)]
    sudden = min(near, key=lambda d: (d.kind not in (Kind.SUDDEN, Kind.OWN), d.at_ns))
    if sudden.kind in (Kind.SUDDEN, Kind.OWN):
        return _first(sudden, died, case)
    if first.kind is Kind.ORDERED:
        return _ordered(case, died)
    window = [d for d in died if d.at_ns - first.at_ns <= _TEARDOWN_NS and d.kind is not Kind.SUDDEN]
    return _first(min(window, key=lambda d: (d.kind, d.at_ns)), died, case)


def first_failure(facts: Facts) -> Rank | Process | None:
    """Returns the process whose failure made the others fail: the rank that died first; if no rank died, the first
    other process that failed. None if a user, scheduler or launcher ended all ranks."""
    case = Case(facts)
    if died := deaths(case):
        first = first_of(case, died)
        return None if first is None else first.death.rank
    # A data loader that was ended by SIGTERM has not failed: its trainer sends SIGTERM if the loader is slow to exit.
    failed = [
        (process.exit.ts_ns, process)
        for process in facts.processes
        if process.exit is not None
        and _failed(process.exit)
        and (process.role, process.exit.signal) != ("data_loader", signal.SIGTERM)
    ]
    return min(failed, key=lambda one: one[0])[1] if failed else None


def _failed(end: Exit) -> bool:
    return bool(end.signal or end.code or end.oom)


def _ordered(case: Case, died: Sequence[Death]) -> First | None:
    first, others = died[0], died[1:]
    # SIGINT from a terminal reaches all ranks and ends each, sooner or later.
    if first.exit.signal == signal.SIGINT and all(d.kind is Kind.CONSEQUENCE for d in others):
        return First(first, 0.8 if others else 0.6, "" if others else "who sent SIGINT to it is not known")
    if first.exit.signal == signal.SIGTERM:
        if _succeeded(case, first):
            return None
        if others and all(d.kind is Kind.CONSEQUENCE for d in others):
            return First(first, 0.8)
        if not others or (others[0].at_ns - first.at_ns > _ORDER_NS and others[0].rank.node == first.rank.node):
            return First(first, 0.6, "who sent SIGTERM to it is not known")
    own = [d for d in others if d.kind in (Kind.OWN, Kind.UNKNOWN)]
    return First(own[0], 0.4, f"rank {first.rank.rank} was ended before it") if own else None


def _succeeded(case: Case, death: Death) -> bool:
    """Returns whether the launcher of a rank that died exited with code 0 later. Such a launcher ended the rank itself,
    to start the ranks again with more or fewer nodes.
    """
    launchers = [p for p in case.facts.processes if p.role == "launcher" and p.node == death.rank.node]
    return any(p.exit is not None and p.exit.code == 0 and p.exit.ts_ns >= death.exit.ts_ns for p in launchers)


def _first(death: Death, died: Sequence[Death], case: Case) -> First:
    if death.kind is Kind.CONSEQUENCE:
        return First(death, 0.4, "no rank shows an error of its own")
    unread = [missing.text for missing in case.facts.missing if missing.kind == "history"]
    if death.kind is Kind.UNKNOWN and unread:
        return First(death, 0.4, unread[0])
    alike = tuple(d for d in died if d is not death and _alike(d, death))
    if alike:
        return First(death, 0.8, alike=alike)
    # A process that ends by itself closes its sockets before it exits, so its victims may end before it does.
    before = [d for d in died if d.at_ns < death.at_ns]
    rivals = [d for d in died if d is not death and _rivals(case, d, death)]
    if rivals:
        return First(death, 0.6, f"rank {rivals[0].rank.rank}, which ended soon after, may have failed before")
    if before:
        return First(death, 0.8, f"rank {before[0].rank.rank} ended before it, while it waited for others")
    return First(death, 0.95 if death.kind is not Kind.UNKNOWN else 0.85)


def _alike(one: Death, death: Death) -> bool:
    same = _RANK.sub("", one.error) == _RANK.sub("", death.error)
    return bool(death.error) and one.kind is death.kind is Kind.OWN and same and one.at_ns - death.at_ns <= _TEARDOWN_NS


def _rivals(case: Case, one: Death, death: Death) -> bool:
    """Returns whether ``one`` may have come before ``death`` and caused it."""
    if one.kind > death.kind:
        return False
    # A process that was already ending may have closed the connection that ended the other.
    unsure = _TEARDOWN_NS if one.kind is Kind.UNKNOWN else apart_ns(case.clocks, one.rank.node, death.rank.node)
    return one.at_ns - death.at_ns <= unsure


def _kind(case: Case, rank: Rank, end: Exit, error: str) -> Kind:
    if end.oom:
        return Kind.OWN
    if end.signal in _ORDERS:
        return Kind.ORDERED
    if end.signal and end.signal != signal.SIGABRT:
        return Kind.SUDDEN
    if error and PEER_GONE.search(error):
        return Kind.CONSEQUENCE
    if lost_worker(rank) is not None or error or behind(case, rank):
        return Kind.OWN
    return Kind.CONSEQUENCE if _in_operation(rank) else Kind.UNKNOWN


def _in_operation(rank: Rank) -> bool:
    """Returns whether the last recorded operation of a rank was in flight, or had failed, when the rank ended."""
    if rank.open:
        return True
    newest = max(rank.done, key=lambda o: o.t_call_ns or 0, default=None)
    return newest is not None and (newest.state in ("failed", "abandoned") or bool(newest.error))


def behind(case: Case, rank: Rank) -> bool:
    """Returns whether another rank has called an operation that ``rank`` has not called."""
    # If operations were lost, the last recorded operation may not be the rank's last.
    return not rank.lost and any(True for _ in calls_behind(case, rank))


def calls_behind(case: Case, rank: Rank) -> Iterator[tuple[Progress, int, int]]:
    """Yields, for each communicator on which another rank is further, the progress of ``rank``, its last number, and
    the last number of any rank.
    """
    for one in rank.progress:
        sequence = case.sequences.get(one.comm)
        # The sequence numbers of ranks cannot be compared if they also count sends and receives.
        if sequence is not None and sequence.called.get(rank.rank, sequence.last) < sequence.last:
            yield one, sequence.called[rank.rank], sequence.last


def _error(case: Case, rank: Rank) -> str:
    """Returns the last error that a rank logged, else the error that its library reported, else ""."""
    for before, line in reversed(list(zip(("", *rank.logs), rank.logs, strict=False))):
        # Only the first line of a traceback and its exception are stored.
        raised = _TRACEBACK in before and _TRACEBACK not in line
        if raised or _ERROR.match(line) or PEER_GONE.search(line):
            return clean(line.strip(), _LONGEST)
    reported = [o.error for o in (*rank.done, *rank.open) if o.error]
    reported += [w.async_error for w in rank.witnesses if w.async_error]
    if not reported and len(case.facts.ranks) == 1:
        reported = [c.async_error for c in case.facts.communicators if c.async_error]
    return clean(reported[-1], _LONGEST) if reported else ""


def lost_worker(rank: Rank) -> Helper | None:
    """Returns a data-loader worker that was killed, or failed, shortly before the rank ended."""
    end = rank.exit
    if end is None:
        return None
    for helper in rank.helpers:
        lost = helper.exit
        if lost is None or not 0 <= end.ts_ns - lost.ts_ns <= _WORKER_NS:
            continue
        if lost.oom or (lost.signal and lost.signal not in _ORDERS) or (lost.code or 0) > 0:
            return helper
    return None


def job_ended(facts: Facts) -> bool:
    """Returns whether all ranks of the job have ended."""
    return bool(facts.ranks) and all(rank.exit is not None for rank in facts.ranks)


def how_it_ended(facts: Facts) -> Iterator[str]:
    """Yields lines that say how the ranks and the launcher of a job ended, and who ended them."""
    alike: dict[str, list[int]] = {}
    for rank in facts.ranks:
        if rank.exit is not None:
            alike.setdefault(exit_text(rank.exit, rank.condition), []).append(rank.rank)
    for text, ranks in list(alike.items())[:_MOST_NAMED]:
        yield f"{ranks_of(ranks)} {text if len(ranks) == 1 else text.replace('was ', 'were ', 1)}"
    for process in facts.processes:
        if process.role == "launcher" and process.exit is not None:
            yield f"the launcher (pid {process.pid}) {exit_text(process.exit)}"
    yield from _by_whom(facts)


def _by_whom(facts: Facts) -> Iterator[str]:
    """Yields a line that says who ended the job, if exits show it: the kernel, or the sender of a signal."""
    ends = [rank.exit for rank in facts.ranks if rank.exit is not None]
    if any(end.oom for end in ends):
        yield "the kernel ended it for lack of memory"
    elif ends and all(end.signal in _ORDERS for end in ends):
        launchers = [process for process in facts.processes if process.role == "launcher"]
        if any(process.exit is None and process.state not in ("exited", "zombie") for process in launchers):
            yield "its launcher lives: it or a user ended the ranks"
        else:
            yield f"a scheduler{', its launcher' if launchers else ''} or a user ended it: it is not a fault of a rank"
