"""No rank is always slow: at each step a different rank is last, or one rank was last for a while."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise
from statistics import median

import numpy as np

from probing.api.text import ranks_of, share_text, time_text
from probing.diagnosis.arrivals import Arrivals, arrivals
from probing.diagnosis.case import Case
from probing.diagnosis.facts import Rank
from probing.diagnosis.lateness import CLOCK_ERRORS, MIN_LAG_NS, MIN_OPERATIONS
from probing.diagnosis.rules.slow_rank import SLOW_RANK, are_recent
from probing.diagnosis.verdict import ERROR, NOTE, Finding, Verdict

__all__ = ("VERDICTS", "find")

_MIN_SHARE = 0.2
# If one rank is last in a larger share of the collectives, that is, or nearly is, the case of the rule slow_rank.
_MOST_OFTEN = 0.6
_LEAST_OFTEN = 0.05
_BURST, _BURST_SHARE = 5, 0.3
_AFTER = 8
_ELSEWHERE = 0.1


@dataclass(frozen=True, slots=True, eq=False)
class _Rotation:
    """Each of ``ranks`` was the last in some of ``compared`` collectives with a late rank. ``often``: the rank that was
    last most often, and how often it was last.

    ``lag_ns``: the median lag of the last rank. ``share``: the lost share of the time. ``changes``: how often the last
    rank differed from the last rank of the compared collective before.
    """

    arrivals: Arrivals
    ranks: tuple[int, ...]
    often: tuple[int, int]
    lag_ns: float
    share: float
    compared: int
    changes: int


@dataclass(frozen=True, slots=True, eq=False)
class _Burst:
    """A time in which one rank was late: ``rank`` was the last in ``count`` successive collectives with a late rank,
    and in none of the ``after`` collectives since.

    ``lasted_ns``: the time from the first to the last of the ``count`` collectives. ``ended_ns``: the time of the last
    call of the last of them, on the common clock. ``share``: the lost share of the time.
    """

    arrivals: Arrivals
    rank: int
    count: int
    after: int
    lasted_ns: int
    ended_ns: int
    share: float


def _rotation_of(a: Arrivals) -> _Rotation | None:
    """Returns the rotation of lateness among the ranks of a communicator; None if it costs less than a fifth of the
    time.
    """
    late, lags = _lasts(a)
    known = [(rank, lag) for rank, lag in zip(late, lags, strict=True) if rank is not None]
    if len(a.seqs) < MIN_OPERATIONS or len(known) < MIN_OPERATIONS or a.covered_ns <= 0:
        return None
    counts = Counter(rank for rank, _ in known)
    ranks = tuple(sorted(rank for rank, count in counts.items() if count >= _LEAST_OFTEN * len(known)))
    often = counts.most_common(1)[0]
    share = float(sum(lag for _, lag in known) / a.covered_ns)
    changes = sum(one[0] != other[0] for one, other in pairwise(known))
    # On a communicator of two ranks, both must take turns. On a larger one, at least three ranks must, so that a pair
    # of slow ranks does not count.
    if len(ranks) < min(3, len(a.ranks)) or often[1] >= _MOST_OFTEN * len(known) or share < _MIN_SHARE:
        return None
    if changes < len(known) / 4:
        return None
    return _Rotation(a, ranks, often, float(np.median([lag for _, lag in known])), min(share, 1.0), len(known), changes)


def _burst_of(a: Arrivals) -> _Burst | None:
    """Returns a past period in which one rank was always late. None if no such period cost at least 30 % of the time
    covered by the compared collectives.
    """
    late, lags = _lasts(a)
    if len(a.seqs) < MIN_OPERATIONS or a.covered_ns <= 0:
        return None
    rows = [row for row, rank in enumerate(late) if rank is not None]
    runs = [(rank, list(own)) for rank, own in groupby(rows, key=lambda row: late[row])]
    for rank, run in sorted(runs, key=lambda one: -len(one[1])):
        share = sum(lags[row] for row in run) / a.covered_ns
        outside = sum(late[row] == rank for row in rows) - len(run)
        after = len(late) - 1 - run[-1]
        if rank is None or len(run) < _BURST or share < _BURST_SHARE:
            return None
        if after >= _AFTER and outside <= _ELSEWHERE * len(late) and rank not in late[run[-1] + 1 :]:
            return _burst(a, rank, run, after, share)
    return None


def _burst(a: Arrivals, rank: int, run: list[int], after: int, share: float) -> _Burst:
    calls = np.nanmax(a.call_ns, axis=1)
    ended = a.newest_ns - round(float(np.nanmax(a.call_ns) - calls[run[-1]]))
    return _Burst(a, rank, len(run), after, round(float(calls[run[-1]] - calls[run[0]])), ended, min(float(share), 1.0))


def _lasts(a: Arrivals) -> tuple[list[int | None], list[float]]:
    """Returns for each collective the rank that was late and last, and its lag; None and 0 if no rank was late."""
    least = max(MIN_LAG_NS, CLOCK_ERRORS * a.error_ns)
    lag = np.where(np.isfinite(a.own_ns), a.own_ns, -np.inf)
    columns, most = lag.argmax(axis=1), lag.max(axis=1)
    is_late: Iterable[bool] = most > least
    late = [a.ranks[column] if yes else None for column, yes in zip(columns, is_late, strict=True)]
    return late, [float(one) if one > least else 0.0 for one in most]


ROTATING = Verdict(
    "rotating_straggler",
    "slow",
    "Each step another rank is the last",
    "Over at least 20 collectives with a late rank the last rank changes: three ranks or more take turns (both, if"
    " there are only two ranks), and no rank is last in 60 % of them. Their lags cost a fifth of the job's time. It is"
    " a note: the ranks have different amounts of work in each step, and no machine is slow.",
    "Which rank calls last, how late, and how often the last rank changes; waits for a CPU.",
    "0.8; 0.6 if the ranks wait for a CPU a tenth of the time or more, which looks the same.",
    "One rank that is the last in most of the next steps.",
    (
        "Balance the data: batches of equal numbers of tokens or pixels, buckets by length, more even experts.",
        "Look at the shares of each rank: `probingctl balance --job J`.",
    ),
    situations=("uneven_work",),
)
PASSED = Verdict(
    "passed_straggler",
    "slow",
    "A rank was slow for a while",
    "One rank was the last in at least five collectives with a late rank in a row, which cost 30 % of the compared"
    " time, and in none of the eight or more collectives since. It is a note.",
    "The calls of collectives with the clocks of nodes corrected.",
    "0.8.",
    "The rank is late again.",
    ("Look at what the rank did then: `probingctl profile --job J --rank R`, `probingctl events --job J`.",),
    situations=("slow_rank",),
)
VERDICTS = (ROTATING, PASSED)

_CONTENDED = 0.1


def find(case: Case) -> Iterator[Finding]:
    """Yields notes for the communicators of a job without a slow rank."""
    if any(finding.severity == ERROR or finding.verdict is SLOW_RANK for finding in case.found):
        return
    known = [one for one in arrivals(case) if are_recent(case, one)]
    rotations = [rotation for one in known if (rotation := _rotation_of(one)) is not None]
    if rotations:
        yield _rotating(case, max(rotations, key=lambda rotation: rotation.share))
        return
    bursts = [burst for one in known if (burst := _burst_of(one)) is not None]
    if bursts:
        yield _passed(case, max(bursts, key=lambda burst: burst.share))


def _rotating(case: Case, one: _Rotation) -> Finding:
    waits = _waits_for_cpu([case.ranks[rank] for rank in one.arrivals.ranks])
    contended = waits is not None and waits >= _CONTENDED
    why = f"they wait for a CPU {share_text(waits or 0.0)} of the time" if contended else "uneven data"
    rank, times = one.often
    return Finding(
        ROTATING,
        NOTE,
        0.6 if contended else 0.8,
        f"each step another rank is the last, by {time_text(one.lag_ns)}, which costs {share_text(one.share)} of"
        f" the time of {len(one.arrivals.ranks)} ranks: {why}, no slow rank",
        victims=one.arrivals.ranks,
        about=one.arrivals.comm,
        evidence=(
            f"in {one.compared} operations of {case.comm_name(one.arrivals.comm)} with a late rank the last rank"
            f" changed {one.changes} times; most often it was rank {rank}, {times} times",
            f"{ranks_of(one.ranks)} took turns",
        ),
        missing=() if waits is not None else ("state in the kernel of the ranks",),
        refuted_by=(ROTATING.refuted_by,),
        next_steps=ROTATING.next_steps,
    )


def _passed(case: Case, one: _Burst) -> Finding:
    peers = tuple(rank for rank in one.arrivals.ranks if rank != one.rank)
    own = case.ranks[one.rank]
    ago = max(0, case.time(own.rank, case.now(own.rank)) - one.ended_ns)
    others = ranks_of(peers) if len(peers) == 1 else f"{len(peers)} ranks"
    return Finding(
        PASSED,
        NOTE,
        0.8,
        f"{case.who([one.rank])} slowed {others} for {time_text(one.lasted_ns)}, until {time_text(ago)} ago, and no"
        " longer does",
        victims=peers,
        since_ns=one.ended_ns - one.lasted_ns,
        about=f"{one.arrivals.comm} {one.rank}",
        evidence=(
            f"it was the last in {one.count} operations of {case.comm_name(one.arrivals.comm)} with a late rank, and in"
            f" none of the {one.after} since",
            f"{share_text(one.share)} of the time of the compared operations was lost",
        ),
        refuted_by=(PASSED.refuted_by,),
        next_steps=PASSED.next_steps,
    )


def _waits_for_cpu(ranks: list[Rank]) -> float | None:
    """Returns the median share of time that ranks wait for a CPU; None if unknown."""
    known = [
        min(1.0, condition.run_delay_ns / condition.interval_ns)
        for rank in ranks
        if (condition := rank.condition) is not None and condition.run_delay_ns is not None and condition.interval_ns
    ]
    return median(known) if known else None
