"""A rank skipped collectives, for example after an exception that it caught, so its later calls are shifted."""

from __future__ import annotations

from collections.abc import Iterator

from probing.api.text import ranks_of, time_text
from probing.diagnosis.case import Case
from probing.diagnosis.disagreements import Disagreement, Pattern, pattern_of
from probing.diagnosis.holdups import doubts, longest_wait, lowered, place_text, site
from probing.diagnosis.rules.mismatch import about_of
from probing.diagnosis.sequences import Sequence, Signature, signature
from probing.diagnosis.verdict import ERROR, Culprit, Finding, Verdict
from probing.diagnosis.words import call_text, clean

__all__ = ("VERDICTS", "find")

_MOST_SKIPPED = 32

SHIFTED = Verdict(
    "shifted_sequence",
    "hang",
    "A rank skipped collectives",
    "The calls of ranks differ at a sequence number of a communicator, and from there on the minority makes the calls"
    " that the others make later: by their recorded calls, or by the job's repeated sequence of calls.",
    "The first number that differs, how many calls were skipped, and what the rank called instead.",
    "0.9; less if operations were lost; 0.7 if the repeated sequence decides which part is wrong.",
    "The skipped call on the named rank, between the two calls that the evidence names.",
    (
        "Look for `except` and `continue` in the step on the named rank: it caught an exception and went on.",
        "Search the logs of that rank for a traceback or a warning at that time.",
    ),
    ("swallowed_exception",),
)
VERDICTS = (SHIFTED,)


def find(case: Case) -> Iterator[Finding]:
    """Yields a finding for each disagreement that a shift explains."""
    for one in case.disagreements:
        if one.number is None or not one.odd or one.pattern is None:
            continue
        sequence = case.sequences[one.comm]
        pattern = one.pattern if one.by_pattern else pattern_of(sequence, sequence.last + 1)
        shifts = {rank: _shift(sequence, rank, one.number, pattern) for rank in one.odd}
        values = set(shifts.values())
        if len(values) == 1 and (shift := values.pop()) is not None:
            yield _finding(case, one, *shift)


def _shift(sequence: Sequence, rank: int, number: int, pattern: Pattern) -> tuple[int, int] | None:
    """Returns the first number that differs, and the number of skipped calls, of ``rank``; None if its calls are not
    shifted.
    """
    own = {n: signature(one) for n, one in sequence.numbers.get(rank, {}).items() if n <= number}
    other = [n for n in sorted(own) if pattern.expected(n) not in (None, own[n])]
    if not other:
        return None
    start = other[0]
    for skipped in range(1, min(_MOST_SKIPPED, max(pattern.period, number - start + 1)) + 1):
        pairs = [(own[n], pattern.expected(n + skipped)) for n in own if n >= start]
        if pairs and all(mine == theirs for mine, theirs in pairs):
            return start, skipped
    return None


def _finding(case: Case, one: Disagreement, start: int, skipped: int) -> Finding:
    ranks = one.odd
    wait = longest_wait(case, one.open)
    missing = doubts(case, ranks, one.open)
    calls = f"{skipped} collective{'s' if skipped > 1 else ''}"
    where = place_text(case, one.comm, start)
    place = site(case, ranks[0])
    names = case.who(ranks)
    why = f"it skipped {calls} {where}{f' and is now in {place}' if place else ''}"
    tail = "" if wait.age_ns is None else f"; all wait for {time_text(wait.age_ns)}"
    victims = tuple(sorted((set(one.calls) | set(case.graph.victims(one.calls))) - set(ranks)))
    culprits = tuple(
        Culprit(rank, own.node, own.pid, why, own.activity) for rank in ranks if (own := case.culprit(rank))
    )
    return Finding(
        SHIFTED,
        ERROR,
        lowered(0.7 if one.by_pattern else 0.9, missing),
        f"{names} skipped {calls} {where}: its calls are shifted against those of {ranks_of(victims)}{tail}",
        culprits,
        victims,
        wait.since_ns,
        about_of(one),
        (*_evidence(case, one, start, skipped),),
        tuple(missing),
        (SHIFTED.refuted_by,),
        SHIFTED.next_steps,
        case.stacks(ranks, one.votes.groups[0][1]),
    )


def _evidence(case: Case, one: Disagreement, start: int, skipped: int) -> Iterator[str]:
    sequence = case.sequences[one.comm]
    pattern = one.pattern if one.by_pattern and one.pattern else pattern_of(sequence, sequence.last + 1)
    rank = one.odd[0]
    for number in range(start, min(start + 3, (one.number or start) + 1)):
        own = sequence.numbers.get(rank, {}).get(number)
        expected = pattern.expected(number)
        if own is not None and expected is not None:
            yield (
                f"seq {number}: rank {rank} called {_text(signature(own))}, the others {_text(expected)};"
                f" the others call {_text(signature(own))} {skipped} later"
            )
    before = sequence.numbers.get(rank, {}).get(start - 1)
    if before is not None:
        yield f"the last call that agreed was {call_text(before.op, one.comm, start - 1)}"
    place = site(case, rank)
    if place:
        yield f"rank {rank} is in {place}"


def _text(call: Signature) -> str:
    op, dtype, count, _ = call
    data = f" of {count} {dtype or 'elements'}" if count else ""
    return clean(f"{op or 'a collective'}{data}")
