"""Finds ranks that called more or fewer collectives on one communicator than the other ranks. Calls on other
communicators serve as reference points, called marks.

The calls of a communicator have the same numbers on all its ranks. If a program makes the same calls on all ranks, then
all ranks have reached the same number on one communicator when they make a given call on another communicator. After a
rank has skipped a call, its number is one less than that of the other ranks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from probing.api.text import ranks_of
from probing.diagnosis.case import Case
from probing.diagnosis.disagreements import vote
from probing.diagnosis.holdups import operation_text, place_text
from probing.diagnosis.sequences import Sequence
from probing.diagnosis.verdict import Finding
from probing.diagnosis.words import clean

__all__ = ("Drift", "drifts_of", "with_drift")

# A drift counts only if, at this many or more compared calls on the other communicator just before it, all ranks had
# reached the same call number on the first communicator.
_BEFORE = 8
_MOST_MARKS = 64
# Limits that keep the comparisons for one job below 5 s: a thousand ranks and one other communicator take 50 ms.
_MOST_RANKS, _MOST_OTHERS, _MOST_WAITS = 2048, 4, 3
# Maps the number of a call on the other communicator to the number that the rank had reached on the first communicator.
_Marks = dict[int, int]


@dataclass(frozen=True, slots=True)
class Drift:
    """Ranks that drift apart. Since call ``since`` on another communicator, ``marks``, the ``ranks`` are ``count``
    calls on ``comm`` ahead of the other ranks. A negative ``count`` means behind.

    If only one other communicator shows the drift, the calls on that communicator may differ, and not the calls on
    ``comm``.
    """

    comm: str
    ranks: tuple[int, ...]
    count: int
    marks: str
    since: int


def drifts_of(sequences: Mapping[str, Sequence], comm: str) -> Iterator[Drift]:
    """Yields the drifts on ``comm``, one for each other communicator that shows it. At most four other communicators
    are compared, and none if ``comm`` has more than 2,048 ranks.
    """
    own = sequences.get(comm)
    if own is None or len(own.members) > _MOST_RANKS or not own.complete:
        return
    around = [one for one in sequences.values() if one.comm != comm and own.known <= one.known and one.complete]
    for other in around[:_MOST_OTHERS]:
        drift = _drift(own, other)
        if drift is not None:
            yield drift


def with_drift(case: Case, finding: Finding) -> Finding:
    """Returns a hang with the drift of its ranks on the communicators in which they wait. Other findings are returned
    unchanged.

    If culprits have drifted, the other culprits become victims.
    """
    if finding.verdict.group != "hang":
        return finding
    named = {culprit.rank for culprit in finding.culprits}
    waits = [case.graph.waits[rank] for rank in {*named, *finding.victims} if rank in case.graph.waits]
    comms = dict.fromkeys(wait.comm for wait in waits if wait.comm is not None)
    found = [drift for comm in list(comms)[:_MOST_WAITS] for drift in drifts_of(case.sequences, comm)]
    if not found:
        return finding
    # The drift that most of the other communicators show is reported.
    by_drift = Counter((drift.comm, drift.ranks, drift.count) for drift in found)
    (comm, ranks, count), witnesses = by_drift.most_common(1)[0]
    drift = next(one for one in found if (one.comm, one.ranks, one.count) == (comm, ranks, count))
    return _told(case, finding, drift, named, certain=witnesses > 1)


def _told(case: Case, finding: Finding, drift: Drift, named: set[int], *, certain: bool) -> Finding:
    text = _text(case, drift, certain)
    odd = set(drift.ranks)
    if not odd & named:
        return replace(finding, evidence=(*finding.evidence, text))
    left = [culprit for culprit in finding.culprits if culprit.rank not in odd]
    return replace(
        finding,
        sentence=f"{finding.sentence}; {text}",
        culprits=tuple(culprit for culprit in finding.culprits if culprit.rank in odd),
        victims=tuple(sorted({*finding.victims, *(culprit.rank for culprit in left)})),
        evidence=(text, *finding.evidence),
    )


def _text(case: Case, drift: Drift, certain: bool) -> str:
    calls = {one.op for one in case.sequences[drift.comm].numbers[drift.ranks[0]].values()}
    op = clean(next(iter(calls)) or "collective") if len(calls) == 1 else "collective"
    count = abs(drift.count)
    step = _step(case, drift)
    since = f"step {step}" if step is not None else operation_text(case, drift.marks, "call", drift.since)
    more, less = ("more", "less") if drift.count > 0 else ("less", "more")
    instead = "" if certain else f", or {count} {less} {place_text(case, drift.marks, None)},"
    has = "has" if len(drift.ranks) == 1 else "have"
    return (
        f"since {since} {ranks_of(drift.ranks)} {has} made {count} {op}{'s' if count > 1 else ''} {more}"
        f" {place_text(case, drift.comm, None)}{instead} than the other ranks"
    )


def _step(case: Case, drift: Drift) -> int | None:
    """Returns the step of the rank in which the calls began to differ; None if unknown."""
    rank = case.ranks[drift.ranks[0]]
    numbers = case.sequences[drift.marks].numbers[rank.rank]
    at = next((numbers[n].t_call_ns for n in (drift.since, drift.since - 1) if n in numbers), None)
    if at is None:
        return None
    return next((one.step for one in rank.steps if one.t_start_ns <= at < one.t_start_ns + one.duration_ns), None)


def _drift(own: Sequence, other: Sequence) -> Drift | None:
    marks = {rank: _marks(own, other, rank) for rank in own.members}
    common = sorted(set.intersection(*(set(one) for one in marks.values())))[-_MOST_MARKS:]
    equal = [len({marks[rank][mark] for rank in marks}) == 1 for mark in common]
    same = equal.index(False) if False in equal else len(equal)
    if same < _BEFORE or any(equal[same:]):
        return None
    before = common[same - _BEFORE : same]
    rank = own.members[0]
    grows = {marks[rank][b] - marks[rank][a] for a, b in pairwise(before)}
    each = next(iter(grows)) if len(grows) == 1 and before[-1] - before[0] == _BEFORE - 1 else None
    if same < len(common):
        return _by_marks(own, other, marks, common[same:], common[same - 1], each)
    return _by_last(own, other, marks, common[-1], each) if each else None


def _marks(own: Sequence, other: Sequence, rank: int) -> _Marks:
    calls = sorted((one.t_call_ns, number) for number, one in own.numbers[rank].items() if one.t_call_ns is not None)
    times, found = [at for at, _ in calls], {}
    for mark, one in other.numbers[rank].items():
        if one.t_call_ns is not None and (place := bisect_right(times, one.t_call_ns)):
            found[mark] = calls[place - 1][1]
    return found


def _by_marks(
    own: Sequence, other: Sequence, marks: Mapping[int, _Marks], differ: list[int], equal: int, each: int | None
) -> Drift | None:
    """Returns the drift of the minority at the marks ``differ``. If both groups have the same size, the group that
    drifted is the group whose number no longer grows by ``each`` from mark to mark.
    """
    votes = [vote({rank: one[mark] for rank, one in marks.items()}) for mark in differ]
    last = votes[-1]
    usual = last.groups[0][0]
    if last.tied:
        if each is None:
            return None
        usual = marks[own.members[0]][equal] + each * (differ[-1] - equal)
    odd = [(value, ranks) for value, ranks in last.groups if value != usual]
    if len(odd) != 1 or len(last.groups) != 2:
        return None
    (value, ranks) = odd[0]
    others = marks.keys() - set(ranks)
    ahead = {marks[rank][mark] > marks[peer][mark] for mark in differ for rank in ranks for peer in others}
    if ahead != {value > usual}:
        return None
    return Drift(own.comm, ranks, value - usual, other.comm, differ[0])


def _by_last(own: Sequence, other: Sequence, marks: Mapping[int, _Marks], equal: int, each: int) -> Drift | None:
    """Returns the drift of the ranks that made more or fewer than ``each`` calls after ``equal``, the last mark that
    all ranks share.
    """
    usual = next(iter(marks.values()))[equal] + each
    fewer = {rank: one[equal + 1] - usual for rank, one in marks.items() if one.get(equal + 1, usual) < usual}
    more = {
        rank: own.called[rank] - usual
        for rank, one in marks.items()
        if equal + 1 not in one and other.called.get(rank, equal) == equal and own.called.get(rank, usual) > usual
    }
    found = fewer or more
    if (fewer and more) or len(set(found.values())) != 1 or len(found) == len(marks):
        return None
    return Drift(own.comm, tuple(sorted(found)), next(iter(found.values())), other.comm, equal + 1)
