"""No rank is slow for good: each step another one is the last, or one was for a while."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from probing.api.text import ranks_of, share_text, time_text
from probing.diagnosis.arrivals import arrivals
from probing.diagnosis.case import Case
from probing.diagnosis.facts import Rank
from probing.diagnosis.rotation import Burst, Rotation, burst_of, rotation_of
from probing.diagnosis.rules.slow_rank import SLOW_RANK, are_recent
from probing.diagnosis.verdict import ERROR, NOTE, Finding, Verdict

__all__ = ("VERDICTS", "find")

ROTATING = Verdict(
    "rotating_straggler",
    "slow",
    "Each step another rank is the last",
    "Over at least 20 collectives with a late rank the last one changes: three ranks or more (of two, both) take turns,"
    " and none is it in 60 % of them. Together they cost a fifth of the job's time. It is a note: the ranks have"
    " different amounts of work in each step, and no machine is slow.",
    "Which rank calls last, how late, and how often it is another one; waits for a CPU.",
    "0.8; 0.6 if the ranks wait for a CPU a tenth of the time or more, which looks the same.",
    "One rank that is the last in most of the next steps.",
    (
        "Balance the data: batches of equal numbers of tokens or pixels, buckets by length, more even experts.",
        "Look at the shares of each rank: `probingctl balance --job J`.",
    ),
    situations=("uneven_work",),
    tests=("test_a_straggler_that_rotates_is_uneven_data",),
)
PASSED = Verdict(
    "passed_straggler",
    "slow",
    "A rank was slow for a while",
    "Of the collectives with a late rank the same one was the last in five in a row or more, by which a third of the"
    " time of the compared ones was lost, and in none of the eight or more since. It is a note.",
    "The calls of collectives with the clocks of nodes corrected.",
    "0.8.",
    "The rank is late again.",
    ("Look at what the rank did then: `probingctl profile --job J --rank R`, `probingctl events --job J`.",),
    situations=("slow_rank",),
    tests=("test_a_rank_that_was_slow_for_a_while",),
)
VERDICTS = (ROTATING, PASSED)

_CONTENDED = 0.1


def find(case: Case) -> Iterator[Finding]:
    """Returns notes for the communicators of a job without a slow rank."""
    if any(finding.severity == ERROR or finding.verdict is SLOW_RANK for finding in case.found):
        return
    known = [one for one in arrivals(case) if are_recent(case, one)]
    rotations = [rotation for one in known if (rotation := rotation_of(one)) is not None]
    if rotations:
        yield _rotating(case, max(rotations, key=lambda rotation: rotation.share))
        return
    bursts = [burst for one in known if (burst := burst_of(one)) is not None]
    if bursts:
        yield _passed(case, max(bursts, key=lambda burst: burst.share))


def _rotating(case: Case, one: Rotation) -> Finding:
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
            f"in {one.compared} operations of {case.comm_name(one.arrivals.comm)} with a late rank the last one was"
            f" another than before {one.changes} times; most often it was rank {rank}, {times} times",
            f"{ranks_of(one.ranks)} took turns",
        ),
        missing=() if waits is not None else ("state in the kernel of the ranks",),
        refuted_by=(ROTATING.refuted_by,),
        next_steps=ROTATING.next_steps,
    )


def _passed(case: Case, one: Burst) -> Finding:
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
    """Returns the median share of time that ranks wait for a CPU; None if it is not known."""
    known = [
        min(1.0, condition.run_delay_ns / condition.interval_ns)
        for rank in ranks
        if (condition := rank.condition) is not None and condition.run_delay_ns is not None and condition.interval_ns
    ]
    return median(known) if known else None
