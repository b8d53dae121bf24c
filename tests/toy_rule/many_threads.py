"""A rank has far more threads than the others: a library made a pool for each CPU."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from probing.diagnosis.case import Case
from probing.diagnosis.verdict import NOTE, Finding, Verdict

__all__ = ("VERDICTS", "find")

MANY_THREADS = Verdict(
    "many_threads",
    "slow",
    "A rank has many more threads than the others",
    "The number of a rank's threads is more than four times the median of the job.",
    "Threads of each rank, from the kernel.",
    "0.6; no finding without the condition of three ranks.",
    "The same number of threads on all ranks.",
    ("Set OMP_NUM_THREADS on that node as on the others.",),
)
VERDICTS = (MANY_THREADS,)


def find(case: Case) -> Iterator[Finding]:
    """Returns a note on each rank with many threads."""
    counts = {n: r.condition.threads for n, r in case.ranks.items() if r.condition and r.condition.threads}
    if len(counts) < 3:
        return
    usual = median(counts.values())
    for rank, threads in counts.items():
        if threads > 4 * usual:
            yield Finding(
                MANY_THREADS,
                NOTE,
                0.6,
                f"rank {rank} has {threads} threads, the others about {usual:.0f}",
                culprits=(case.culprit(rank),),
                evidence=(f"threads by rank: {counts}",),
                refuted_by=(MANY_THREADS.refuted_by,),
                next_steps=MANY_THREADS.next_steps,
            )
