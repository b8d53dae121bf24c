"""A rank is persistently last at collectives, and the others wait for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from probing.api.text import ranks_of, share_text, time_text
from probing.diagnosis.arrivals import Arrivals, arrivals
from probing.diagnosis.case import Case
from probing.diagnosis.facts import Rank
from probing.diagnosis.lateness import Late, by_rank, late_ranks
from probing.diagnosis.slow_reasons import SlowReason, reason_of
from probing.diagnosis.verdict import ERROR, WARNING, Culprit, Finding, Verdict
from probing.diagnosis.words import who

__all__ = ("SLOW_RANK", "VERDICTS", "are_recent", "find")

SLOW_RANK = Verdict(
    "slow_rank",
    "slow",
    "A rank slows the others",
    "Over at least 20 collectives the same rank calls last. Its lag behind the median of the others is more than 5 ms,"
    " more than three times the error of the clocks, and costs a tenth of the job's time. Its waits on other"
    " communicators do not count. The rank that waits longest is never named.",
    "Calls of collectives with the clocks of nodes corrected; run-queue delay, throttling and page faults of the rank;"
    " its sampled stacks against those of the others.",
    "0.9; lower if operations were lost, ranks not seen, or the reason is not known; 0.6 if hosts run ahead of GPUs.",
    "The lag moves to another rank in the next minute, or stays with the node when the ranks are exchanged.",
    ("Exchange the rank's node, or its data, with another rank's: see which one the lag follows.",),
    situations=("slow_rank", "uneven_work", "cpu_contention"),
)
VERDICTS = (SLOW_RANK,)

_UNKNOWN = SlowReason("unknown", "nothing that was recorded shows why", ())
_MOST_NAMED = 4
_STEPS = 3
_FRESH_NS = 15_000_000_000


def find(case: Case) -> Iterator[Finding]:
    """Yields one finding for all slow ranks of a job that makes progress."""
    if any(finding.severity == ERROR for finding in case.found):
        return
    late = by_rank(one for one in late_ranks(arrivals(case)) if are_recent(case, one.arrivals))
    if not late:
        return
    slow = [case.ranks[r] for r in sorted(late)]
    peers = _peers(case, late)
    reasons = [reason_of(case, rank, peers) or _UNKNOWN for rank in slow]
    worst = max(late.values(), key=lambda one: one.share)
    steps = [step for reason in reasons for step in reason.next_steps]
    yield Finding(
        SLOW_RANK,
        WARNING,
        _confidence(case, worst, reasons),
        _sentence(worst, slow, peers, reasons),
        culprits=tuple(
            Culprit(r.rank, r.node, r.pid, why.why, why.activity) for r, why in zip(slow, reasons, strict=True)
        ),
        victims=tuple(peer.rank for peer in peers),
        evidence=tuple(_evidence(case, late, slow, reasons)),
        missing=tuple(_missing(case, worst, slow, reasons)),
        refuted_by=(SLOW_RANK.refuted_by,),
        next_steps=tuple(dict.fromkeys([*steps, *SLOW_RANK.next_steps])),
    )


def are_recent(case: Case, compared: Arrivals) -> bool:
    """Returns whether the newest compared operation is recent."""
    clocks = case.clocks
    taken = max((n.taken_ns - clocks[n.node].offset_ns for n in case.facts.nodes if n.node in clocks), default=0)
    return taken - compared.newest_ns <= max(_STEPS * case.usual_gate_ns, _FRESH_NS)


def _peers(case: Case, late: Mapping[int, Late]) -> list[Rank]:
    """Returns the other ranks of the communicators in which ranks are late."""
    numbers = {r for one in late.values() for r in one.arrivals.ranks} - late.keys()
    return [case.ranks[r] for r in sorted(numbers)]


def _sentence(worst: Late, slow: Sequence[Rank], peers: Sequence[Rank], reasons: Sequence[SlowReason]) -> str:
    others = ranks_of(peer.rank for peer in peers) if len(peers) == 1 else f"{len(peers)} ranks"
    verb = "slows" if len(slow) == 1 else "slow"
    whys = dict.fromkeys(reason.why for reason in reasons)
    why = next(iter(whys)) if len(whys) == 1 else "for different reasons"
    return f"{who(slow)} {verb} {others} by {share_text(worst.share)} of their time: {why}"


def _evidence(
    case: Case, late: Mapping[int, Late], slow: Sequence[Rank], reasons: Sequence[SlowReason]
) -> Iterator[str]:
    for one in dict.fromkeys(late.values()):
        first, last = int(one.arrivals.seqs[0]), int(one.arrivals.seqs[-1])
        verb = "was" if len(one.ranks) == 1 else "were"
        yield (
            f"{ranks_of(one.ranks)} {verb} the last in {one.last_in} of {one.compared} operations of"
            f" {case.comm_name(one.arrivals.comm)} with a late rank (seq {first} to {last}, {one.of} operations)"
        )
        yield f"{time_text(one.lag_ns)} after the median of the others: {share_text(one.share)} of the time is lost"
        if one.arrivals.error_ns:
            yield f"the clocks of the nodes agree to {time_text(one.arrivals.error_ns)}"
    for rank, reason in list(zip(slow, reasons, strict=True))[:_MOST_NAMED]:
        yield from (text if len(slow) == 1 else f"rank {rank.rank}: {text}" for text in reason.evidence)


def _missing(case: Case, worst: Late, slow: Sequence[Rank], reasons: Sequence[SlowReason]) -> Iterator[str]:
    lost = sum(case.ranks[r].lost for r in worst.arrivals.ranks)
    if lost:
        yield f"{lost} operations were lost"
    unseen = worst.arrivals.size - len(worst.arrivals.ranks)
    if unseen > 0:
        yield f"{unseen} of {worst.arrivals.size} ranks of {case.comm_name(worst.arrivals.comm)} are not seen"
    unknown = [rank for rank, reason in zip(slow, reasons, strict=True) if reason is _UNKNOWN]
    if lacks := [rank.rank for rank in unknown if not rank.samples]:
        yield f"samples of {ranks_of(lacks)}"
    if lacks := [rank.rank for rank in unknown if rank.condition is None]:
        yield f"state in the kernel of {ranks_of(lacks)}"


def _confidence(case: Case, worst: Late, reasons: Sequence[SlowReason]) -> float:
    sure = 0.9 * min(reason.sure for reason in reasons)
    if _runs_ahead(case, worst):
        sure = min(sure, 0.6)
    unseen = worst.arrivals.size > len(worst.arrivals.ranks) or any(case.ranks[r].lost for r in worst.arrivals.ranks)
    return round(sure - 0.15 * unseen - 0.15 * (_UNKNOWN in reasons), 2)


def _runs_ahead(case: Case, one: Late) -> bool:
    """Returns whether hosts may run ahead of their GPUs, so that no rank has to wait for a late call."""
    communicator = case.communicators.get(one.arrivals.comm)
    return communicator is not None and communicator.backend == "nccl"
