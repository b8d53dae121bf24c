"""Ranks have waited too long, and the facts do not show for which ranks."""

from __future__ import annotations

from collections.abc import Iterator

from probing.api.text import plural, ranks_of
from probing.diagnosis.case import Case
from probing.diagnosis.holdups import doubts, unseen
from probing.diagnosis.verdict import CANNOT_TELL, ERROR, Finding
from probing.diagnosis.waits import STUCK_PATIENCE
from probing.diagnosis.words import clean

__all__ = ("VERDICTS", "find")

_MOST_NAMED = 4

VERDICTS = (CANNOT_TELL,)


def find(case: Case) -> Iterator[Finding]:
    """Yields one finding for all unexplained waits, if no earlier rule reported an error."""
    places = [place for place in unseen(case) if (place.age_ns or 0) >= STUCK_PATIENCE * case.gate_ns]
    if case.found_error or not places:
        return
    waiters = sorted({rank for place in places for rank in place.waiters})
    unknown = {rank for place in places for rank in place.unknown}
    unidentified = max(place.unidentified for place in places)
    candidates = ranks_of(unknown) if unknown else plural(unidentified, "unknown member")
    one_of = "one of " if len(unknown) > 1 or unidentified > 1 else ""
    silent = [clean(m.text) for m in case.facts.missing if m.kind == "node"]
    yield Finding(
        CANNOT_TELL,
        ERROR,
        0.3,
        f"{places[0].text}; which rank holds them up cannot be told: it may be {one_of}{candidates}",
        (),
        tuple(sorted({rank for place in places for rank in place.victims})),
        places[0].since_ns,
        "",
        (*(place.text for place in places[:_MOST_NAMED]), *silent),
        tuple(doubts(case, (), waiters)),
        (CANNOT_TELL.refuted_by,),
        CANNOT_TELL.next_steps,
        case.stacks((), waiters),
    )
