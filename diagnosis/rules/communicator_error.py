"""The library reports an error of a communicator, or ranks aborted a communicator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from probing.api.text import ranks_of, time_text
from probing.diagnosis.case import Case
from probing.diagnosis.clocks import apart_ns
from probing.diagnosis.disagreements import vote
from probing.diagnosis.facts import Rank
from probing.diagnosis.sequences import Sequence as Calls
from probing.diagnosis.verdict import ERROR, NOTE, Culprit, Finding, Verdict
from probing.diagnosis.words import clean, ranks_wait, who

__all__ = ("COMMUNICATOR_ERROR", "VERDICTS", "find")

COMMUNICATOR_ERROR = Verdict(
    "communicator_error",
    "hang",
    "A communicator has an error, or ranks aborted it",
    "NCCL reports an asynchronous error of a communicator, could not create it, or ranks aborted it with operations in"
    " flight. The first rank with an error of its own is named; an error that only says that another rank is gone does"
    " not count. After an abort, the rank that had not joined the operation in flight is named.",
    "The error, when each rank first had it, the operations that failed, and the report of NCCL's RAS.",
    "0.85 for the only rank with an error of its own, 0.75 for the first of several, 0.5 if no rank can be named.",
    "An earlier error in the log of another rank: a watchdog polls errors ten times a second, and clocks differ.",
    (
        "Read the named rank's log from that time on (NCCL_DEBUG=WARN shows the cause).",
        "Look at the node's network and GPU: `probingctl rdma`, and `dmesg` for Xid lines.",
    ),
    situations=("communicator_error",),
)
VERDICTS = (COMMUNICATOR_ERROR,)

# Errors that only say that another rank is gone or late, in the words of the probes and of RAS.
_OF_OTHERS = frozenset({"ncclRemoteError", "ncclTimeout", "Remote process error", "Timeout"})
# A watchdog polls for errors, so they are recorded up to this much later, ns.
_POLL_NS = 200_000_000
_MOST = 8


@dataclass(frozen=True, slots=True)
class _Report:
    """An error or abort of a communicator on a rank. ``t_ns``: its time on the common clock. ``made``: whether the
    communicator could be created.
    """

    rank: int
    t_ns: int | None
    error: str | None
    aborted: bool
    made: bool
    ras: bool

    @property
    def own(self) -> bool:
        return self.error is not None and self.error not in _OF_OTHERS


def find(case: Case) -> Iterator[Finding]:
    """Yields a finding for each communicator with an error, unless an earlier rule explains all its ranks."""
    explained, every = case.explained, _reports(case)
    # Computed once for all communicators: when a job ends by an error, thousands of communicators are aborted.
    failed = _failed(case) if every else {}
    for comm, reports in every.items():
        if not explained.issuperset(report.rank for report in reports):
            yield from _finding(case, comm, reports, failed.get(comm, {}))


def _reports(case: Case) -> dict[str, list[_Report]]:
    """Returns the reports of errors by communicator: the first report of each rank, sorted by time."""
    found: dict[str, dict[int, _Report]] = {}
    for rank in case.facts.ranks:
        for one in sorted(rank.witnesses, key=lambda w: w.source != "probe"):
            aborted = bool(one.aborted) or one.state == "aborted"
            if one.async_error or aborted:
                # RAS reports an error, but not its time.
                seen = one.ts_ns if one.source == "probe" else None
                t_ns = case.time(rank.rank, seen) if seen is not None else None
                error = clean(one.async_error) if one.async_error else None
                report = _Report(rank.rank, t_ns, error, aborted, one.state != "failed", one.source == "ras")
                found.setdefault(one.comm, {}).setdefault(rank.rank, report)
    return {comm: sorted(own.values(), key=lambda r: (r.t_ns is None, r.t_ns or 0)) for comm, own in found.items()}


def _finding(case: Case, comm: str, reports: Sequence[_Report], failed: Mapping[int, int]) -> Iterator[Finding]:
    if not any(report.error for report in reports) and not failed:
        # An abort without failed operations is not an error: a job that ends aborts its communicators.
        return
    members = _members(case, comm, reports)
    blame = _blame(case, comm, reports, members, failed)
    blamed = {rank.rank for rank in blame.ranks}
    first = reports[0].t_ns
    recovered = first is not None and all(_goes_on(case, rank, first) for rank in members)
    yield Finding(
        COMMUNICATOR_ERROR,
        NOTE if recovered else ERROR,
        blame.confidence,
        _sentence(case, comm, reports, blame),
        culprits=tuple(
            Culprit(r.rank, r.node, r.pid, f"it {blame.says}", case.activity(r.rank).kind) for r in blame.ranks
        ),
        victims=tuple(rank for rank in members if rank not in blamed),
        since_ns=first,
        about=comm,
        evidence=tuple(_evidence(case, comm, reports, failed)),
        missing=() if blame.ranks else (blame.says,),
        refuted_by=(COMMUNICATOR_ERROR.refuted_by,),
        next_steps=COMMUNICATOR_ERROR.next_steps,
    )


@dataclass(frozen=True, slots=True)
class _Blame:
    """The ranks to blame. ``says``: a clause about them; without ranks, the question that stays open."""

    ranks: tuple[Rank, ...]
    confidence: float
    says: str


def _blame(
    case: Case, comm: str, reports: Sequence[_Report], members: Sequence[int], failed: Mapping[int, int]
) -> _Blame:
    name = case.comm_name(comm)
    if own := [report for report in reports if report.own]:
        if len(own) > 1 and not _is_first(case, own):
            return _Blame((), 0.5, "which rank had the error first")
        did = "has an error on" if own[0].made else "could not make"
        return _Blame((case.ranks[own[0].rank],), 0.85 if len(own) == 1 else 0.75, f"{did} {name}: {own[0].error}")
    if error := next((report.error for report in reports if report.error), None):
        gone = [case.ranks[rank] for rank in members if rank in case.ranks and case.ranks[rank].exit is not None]
        if len(gone) == 1:
            return _Blame((gone[0],), 0.75, f"is gone, and {_those(reports)} got {error} on {name}")
        return _Blame((), 0.5, f"which rank broke the connection: {error} names none")
    sequence = case.sequences.get(comm)
    numbers = [case.number(rank, comm, seq) for rank, seq in failed.items()]
    last = max((number for number in numbers if number is not None), default=None)
    late = [rank for rank in members if sequence and last is not None and _never_called(case, rank, sequence, last)]
    if late and len(late) < len(members):
        says = f"did not join operation {last} of {name}, which {_those(reports)} gave up"
        return _Blame(tuple(case.ranks[rank] for rank in late), 0.75, says)
    if len(reports) > 1 and _is_first(case, reports):
        return _Blame((case.ranks[reports[0].rank],), 0.6, f"aborted {name} first, with operations open")
    return _Blame((), 0.5, f"why the ranks gave {name} up")


def _those(reports: Sequence[_Report]) -> str:
    return ranks_of(report.rank for report in reports)


def _is_first(case: Case, reports: Sequence[_Report]) -> bool:
    """Returns whether the first report was certainly before the second, given the errors of clocks and the interval of
    polls.
    """
    first, second = reports[0], reports[1]
    if first.t_ns is None or second.t_ns is None:
        return False
    unsure = apart_ns(case.clocks, case.ranks[first.rank].node, case.ranks[second.rank].node)
    return second.t_ns - first.t_ns > unsure + _POLL_NS


def _failed(case: Case) -> dict[str, dict[int, int]]:
    """Returns the last failed operation of each rank, by communicator."""
    found: dict[str, dict[int, int]] = {}
    for rank in case.facts.ranks:
        for o in rank.done:
            if o.state == "failed" and o.seq is not None:
                own = found.setdefault(o.comm, {})
                own[rank.rank] = max(own.get(rank.rank, o.seq), o.seq)
    return found


def _never_called(case: Case, number: int, sequence: Calls, last: int) -> bool:
    rank = case.ranks.get(number)
    if rank is None or rank.lost:
        return False
    own = sequence.called.get(number)
    if own is not None:
        return own < last
    # If a rank has no operations on the communicator, the daemon may have started too late.
    return rank.seen_from_ns is None and all(one.comm != sequence.comm for one in rank.progress)


def _members(case: Case, comm: str, reports: Sequence[_Report]) -> list[int]:
    known = case.communicators.get(comm)
    return sorted({*(m.rank for m in known.members)} if known else {report.rank for report in reports})


def _users(case: Case, comm: str) -> list[Rank]:
    """Returns the ranks that used, or are members of, the communicator."""
    sequence = case.sequences.get(comm)
    return [case.ranks[rank] for rank in sorted(sequence.members) if rank in case.ranks] if sequence else []


def _goes_on(case: Case, number: int, since_ns: int) -> bool:
    """Returns whether a rank has completed an operation after ``since_ns``."""
    rank = case.ranks.get(number)
    if rank is None:
        return False
    return any(p.last_done_ns is not None and case.time(number, p.last_done_ns) > since_ns for p in rank.progress)


def _sentence(case: Case, comm: str, reports: Sequence[_Report], blame: _Blame) -> str:
    open_on = [rank.rank for rank in _users(case, comm) if any(o.comm == comm for o in rank.open)]
    tail = f"; {ranks_wait(open_on)} in it" if open_on else ""
    if blame.ranks:
        return f"{who(blame.ranks)} {blame.says}{tail}"
    error = next((report.error for report in reports if report.error), None)
    what = f"got {error} on" if error else "gave up"
    return f"{_those(reports)} {what} {case.comm_name(comm)}; no rank can be named as the cause{tail}"


def _evidence(case: Case, comm: str, reports: Sequence[_Report], failed: Mapping[int, int]) -> Iterator[str]:
    start, name = reports[0].t_ns, case.comm_name(comm)
    for report in reports[:_MOST]:
        after = ""
        if report.t_ns is not None and start is not None and report.t_ns > start:
            after = f", {time_text(report.t_ns - start)} after rank {reports[0].rank}"
        source = "NCCL's RAS: " if report.ras else ""
        did = [f"got {report.error} on"] * bool(report.error) + ["aborted"] * report.aborted
        yield f"{source}rank {report.rank} {' and '.join(did)} {name}{after}"
    if len(reports) > _MOST:
        yield f"{len(reports) - _MOST} more ranks report the same communicator"
    for seq, ranks in vote(failed).groups[:_MOST]:
        yield f"operation {seq} of {name} failed on {ranks_of(ranks)}"
    others = [rank for rank in _users(case, comm) if failed and rank.rank not in failed]
    last = {r.rank: p.seq for r in others for p in r.progress if p.comm == comm and p.seq is not None}
    for seq, ranks in vote(last).groups[:_MOST]:
        yield f"the last operation of {name} on {ranks_of(ranks)} is {seq}"
