"""Ranks make different calls under one sequence number of a communicator: name, root, dtype or size differ."""

from __future__ import annotations

from collections.abc import Iterator

from probing.api.text import listed, ranks_of, time_text
from probing.diagnosis.case import Case
from probing.diagnosis.disagreements import KINDS, Disagreement
from probing.diagnosis.holdups import doubts, longest_wait, lowered, place_text, site
from probing.diagnosis.verdict import ERROR, Culprit, Finding, Verdict
from probing.diagnosis.words import clean

__all__ = ("VERDICTS", "about_of", "find")

_RULE = "Ranks of one communicator {differ} at the same sequence number, and they wait there or failed there."
_EVIDENCE = "The calls of all ranks at that number, and the stack of a rank that differs."
_CONFIDENCE = (
    "0.95; less if ranks were not seen. The minority of the ranks is named. If both parts are equal, the part that"
    " departs from the job's repeated sequence of calls is named; without such a sequence, no rank is named."
)
_TWO_MEANINGS = "The names of the calls of all ranks at that number, which are equal on a communicator that works."

_MISMATCHES = {
    "operation": Verdict(
        "operation_mismatch",
        "hang",
        "Ranks call different collectives",
        _RULE.format(differ="call collectives of different names or reductions"),
        _EVIDENCE,
        _CONFIDENCE,
        _TWO_MEANINGS,
        (
            "Compare the branch that the named rank took with that of the others: its stack names the line.",
            "Look for loops whose length depends on the rank's data or on time.",
        ),
        ("branch", "uneven_data"),
    ),
    "size": Verdict(
        "size_mismatch",
        "hang",
        "Ranks call a collective with different sizes",
        _RULE.format(differ="contribute different numbers of elements"),
        _EVIDENCE,
        _CONFIDENCE,
        _TWO_MEANINGS,
        (
            "Print the shape of the tensor on the named rank before the call.",
            "Look for a last batch that is smaller, or for a model that differs.",
        ),
        ("branch",),
    ),
    "dtype": Verdict(
        "dtype_mismatch",
        "hang",
        "Ranks call a collective with different types",
        _RULE.format(differ="use different element types"),
        _EVIDENCE,
        _CONFIDENCE,
        _TWO_MEANINGS,
        ("Compare the precision that the ranks set (autocast, .half(), default dtype).",),
        ("branch",),
    ),
    "root": Verdict(
        "root_mismatch",
        "hang",
        "Ranks call a collective with different roots",
        _RULE.format(differ="name different roots"),
        _EVIDENCE,
        _CONFIDENCE,
        _TWO_MEANINGS,
        ("Look for a src or dst that depends on the rank.",),
        ("branch",),
    ),
}
VERDICTS = tuple(_MISMATCHES[kind] for kind in KINDS)


def find(case: Case) -> Iterator[Finding]:
    """Yields a finding for each disagreement, unless an earlier rule explains it."""
    explained = {finding.about for finding in case.found}
    for one in case.disagreements:
        if about_of(one) not in explained:
            yield _finding(case, one)


def about_of(one: Disagreement) -> str:
    """Returns ``Finding.about`` of a disagreement."""
    return f"{one.comm} {one.number}"


def _finding(case: Case, one: Disagreement) -> Finding:
    verdict = _MISMATCHES[one.kind]
    whys = _whys(one)
    culprits = tuple(_culprit(case, rank, whys[rank]) for rank in one.odd)
    waiting = set(one.calls) | set(case.graph.victims(one.calls))
    victims = tuple(sorted(waiting - {culprit.rank for culprit in culprits}))
    wait = longest_wait(case, one.open)
    missing = doubts(case, one.odd or one.calls, one.open)
    base = 0.95 if one.odd and not one.by_pattern else 0.75 if one.odd else 0.6
    return Finding(
        verdict,
        ERROR,
        lowered(base, missing),
        _sentence(case, one, wait.age_ns),
        culprits,
        victims,
        since_ns=wait.since_ns,
        about=about_of(one),
        evidence=(*_evidence(case, one),),
        missing=tuple(missing),
        refuted_by=(verdict.refuted_by,),
        next_steps=verdict.next_steps,
        stacks=case.stacks(one.odd or one.votes.groups[1][1], one.votes.groups[0][1]),
    )


def _whys(one: Disagreement) -> dict[int, str]:
    """Returns, for each rank of ``one``, a clause that compares its call with the call of other ranks."""
    first, second = one.votes.groups[:2]
    whys: dict[int, str] = {}
    for own, ranks in one.votes.groups:
        usual, others = first if own != first[0] else second
        does = "calls" if len(others) == 1 else "call"
        why = f"it calls {_call(one, own)} where {ranks_of(others)} {does} {_call(one, usual)}"
        whys |= dict.fromkeys(ranks, why)
    return whys


def _culprit(case: Case, rank: int, why: str) -> Culprit:
    known, place = case.culprit(rank), site(case, rank)
    return Culprit(rank, known.node, known.pid, f"{why}, in {place}" if place else why, known.activity)


def _call(one: Disagreement, value: str) -> str:
    op = next((call.op for call in one.calls.values() if call.op), None) or "a collective"
    return clean(value if one.kind == "operation" else f"{op} with {value}")


def _place(case: Case, one: Disagreement) -> str:
    return place_text(case, one.comm or None, one.number)


def _sentence(case: Case, one: Disagreement, age: int | None) -> str:
    parts = listed(f"{_call(one, value)} on {ranks_of(ranks)}" for value, ranks in one.votes.groups)
    tail = f" for {time_text(age)}" if age is not None else ""
    verb = "wait" if age is not None else "failed"
    if not one.odd:
        calls = f"{ranks_of(one.calls)} {verb}{tail} in different calls {_place(case, one)}"
        return f"{calls}: {parts}; undecided which is wrong"
    first = one.odd[0]
    names = case.who(one.odd)
    does = "calls" if len(one.odd) == 1 else "call"
    own = next(value for value, ranks in one.votes.groups if first in ranks)
    usual, agreed = next((value, ranks) for value, ranks in one.votes.groups if first not in ranks)
    place = site(case, first)
    return (
        f"{names} {does} {_call(one, own)} where {ranks_of(agreed)} {'calls' if len(agreed) == 1 else 'call'}"
        f" {_call(one, usual)}{f', in {place}' if place else ''}: all {verb}{tail} {_place(case, one)}"
    )


def _evidence(case: Case, one: Disagreement) -> Iterator[str]:
    for value, ranks in one.votes.groups:
        yield f"{_place(case, one)}: {_call(one, value)} on {ranks_of(ranks)}"
    if one.by_pattern:
        yield f"{ranks_of(one.odd)} left the sequence that the job repeats"
    for value, ranks in one.votes.groups[:2]:
        place = site(case, ranks[0])
        if place:
            yield f"rank {ranks[0]} calls {_call(one, value)} from {place}"
    for rank, call in sorted(one.calls.items()):
        if call.error:
            yield f"rank {rank} failed: {clean(call.error)}"
