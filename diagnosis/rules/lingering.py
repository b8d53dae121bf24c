"""A rank has not ended, although all others have: it keeps the nodes of the job busy."""

from __future__ import annotations

from collections.abc import Iterator

from probing.api.text import ranks_of, time_text
from probing.diagnosis.case import Case
from probing.diagnosis.facts import Rank
from probing.diagnosis.verdict import NOTE, WARNING, Finding, Verdict
from probing.diagnosis.waits import phase_limit_ns
from probing.diagnosis.words import clean, who

__all__ = ("VERDICTS", "find")

_NOTED_NS = 10 * 10**9
# How long torchrun waits for other agents after its ranks ended, ns (exit_barrier_timeout of its api.py).
_CARES_NS = 300 * 10**9
_MOST_NAMED = 4

LINGERS = Verdict(
    "rank_lingers",
    "hang",
    "A rank has not ended, and the others have",
    "All other ranks ended with code 0, at least 10 s ago, and the rank waits in no operation. It is a note. If the"
    " rank makes no progress, it is a warning after 5 minutes, the time for which torchrun waits for the agents of"
    " other nodes.",
    "When the others ended; what the rank waits for: a thread, a child process, a file or the network.",
    "0.8.",
    "The end of the rank, or the end of what it waits for.",
    ("Look at its threads and children: `probingctl stacks --job J PID --native`.",),
    ("lingering_rank",),
)
VERDICTS = (LINGERS,)


def find(case: Case) -> Iterator[Finding]:
    """Yields a finding if some ranks ended with code 0 long ago, and the others wait in no operation."""
    ranks = case.facts.ranks
    ended = [rank for rank in ranks if rank.exit is not None]
    living = [rank for rank in ranks if rank.exit is None]
    if case.found_error or not ended or not living or any(rank.rank in case.waits for rank in living):
        return
    if any(rank.exit is None or rank.exit.code != 0 for rank in ended):
        return
    last = max(case.time(rank.rank, rank.exit.ts_ns) for rank in ended if rank.exit is not None)
    age = case.time(living[0].rank, case.now(living[0].rank)) - last
    if age >= _NOTED_NS:
        yield _finding(case, living, ended, age, last)


def _finding(case: Case, living: list[Rank], ended: list[Rank], age: int, since: int) -> Finding:
    numbers = [rank.rank for rank in living]
    cares = (
        age >= _CARES_NS
        and not phase_limit_ns(case.facts)
        and all(case.activity(number).progressing is not True for number in numbers)
    )
    first = case.activity(numbers[0])
    why = first.why if len(numbers) == 1 else f"rank {numbers[0]}: {first.why}"
    verb = "has" if len(numbers) == 1 else "have"
    return Finding(
        LINGERS,
        WARNING if cares else NOTE,
        0.8,
        f"{who(living)} {verb} not ended for {time_text(age)} after {ranks_of(r.rank for r in ended)}: {why}",
        tuple(case.culprit(number) for number in numbers),
        (),
        since,
        "",
        tuple(line for rank in living[:_MOST_NAMED] for line in _evidence(case, rank)),
        (),
        (LINGERS.refuted_by,),
        LINGERS.next_steps,
        case.stacks(numbers, ()),
    )


def _evidence(case: Case, rank: Rank) -> Iterator[str]:
    yield from case.activity(rank.rank).evidence
    for name, pid, state in rank.condition.children[:_MOST_NAMED] if rank.condition is not None else ():
        yield f"rank {rank.rank} has the child {clean(name)} (pid {pid}, state {clean(state, 1)})"
