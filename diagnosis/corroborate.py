"""Compares findings with the reports of NCCL's RAS and PyTorch's flight recorder, which do not depend on probes.

A report counts if it was made after the wait began. A report that agrees raises the confidence of the finding; a report
that contradicts lowers it. The finding says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from probing.api.text import ranks_of
from probing.diagnosis.case import Case
from probing.diagnosis.facts import Operation, Witness
from probing.diagnosis.verdict import Finding

__all__ = ("corroborated",)

# Verdicts by their claim. _BEHIND: the culprits are behind the waiting ranks. _DIFFERENT: the culprits are in another
# operation. _EQUAL: all ranks are equally far.
_BEHIND = frozenset({"not_joined", "rank_dead", "rank_unreachable", "rank_died", "shifted_sequence", "stuck_outside"})
_DIFFERENT = frozenset({"operation_mismatch", "size_mismatch", "dtype_mismatch"})
_EQUAL = frozenset({"no_completion"})
# The operations that RAS counts.
_COUNTED = frozenset({"broadcast", "reduce", "all_gather", "reduce_scatter", "all_reduce"})
_NAMES = {"ras": "NCCL's RAS", "flight_recorder": "the flight recorder"}
# Ranks launch at different times: a report from the first second of a wait proves nothing.
_SETTLED_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class _Opinion:
    source: str
    agrees: bool
    text: str


def corroborated(case: Case, finding: Finding) -> Finding:
    """Returns ``finding`` with the reports of other witnesses about it, and with its confidence changed accordingly."""
    opinions = list(_opinions(case, finding))
    if not opinions:
        return finding
    confidence = finding.confidence
    lines, doubts = [], []
    for opinion in opinions:
        name = _NAMES[opinion.source]
        if opinion.agrees:
            confidence += (1 - confidence) / 2
            lines.append(f"{name} agrees: {opinion.text}")
        else:
            confidence /= 2
            lines.append(f"{name} contradicts: {opinion.text}")
            doubts.append(f"which witness is right: {name} contradicts what the probes saw")
    return replace(
        finding,
        confidence=round(min(confidence, 0.99), 2),
        evidence=(*finding.evidence, *lines),
        missing=(*finding.missing, *doubts),
    )


def _opinions(case: Case, finding: Finding) -> Iterator[_Opinion]:
    verdict, culprits = finding.verdict.id, [culprit.rank for culprit in finding.culprits]
    if verdict not in _BEHIND | _DIFFERENT | _EQUAL:
        return
    by_comm: dict[str, list[int]] = {}
    for rank in finding.victims:
        wait = case.waits.get(rank)
        if wait is not None and wait.comm is not None:
            by_comm.setdefault(wait.comm, []).append(rank)
    for comm, waiting in by_comm.items():
        for source, judge in (("ras", _ras), ("flight_recorder", _flight_recorder)):
            said = _said(case, finding, source, comm)
            opinion = judge(case, _Claim(verdict, comm, culprits, waiting), said) if said else None
            if opinion is not None:
                yield _Opinion(source, *opinion)


@dataclass(frozen=True, slots=True)
class _Claim:
    """The claim of a finding: the ranks ``waiting`` wait on ``comm`` because of ``culprits``."""

    verdict: str
    comm: str
    culprits: Sequence[int]
    waiting: Sequence[int]


def _said(case: Case, finding: Finding, source: str, comm: str) -> Mapping[int, Witness]:
    """Returns the last report of ``source`` about each rank on ``comm``, if it was made after the wait began."""
    since = None if finding.since_ns is None else finding.since_ns + _SETTLED_NS
    return {
        rank.rank: one
        for rank, one in case.reports.get((source, comm), ())
        if one.ts_ns is not None and (since is None or case.time(rank.rank, one.ts_ns) > since)
    }


def _ras(case: Case, claim: _Claim, said: Mapping[int, Witness]) -> tuple[bool, str] | None:
    gone = [rank for rank in claim.culprits if rank in said and (said[rank].missing or said[rank].dead)]
    if gone and claim.verdict in _BEHIND:
        return True, f"it cannot reach {ranks_of(gone)}"
    if any(case.waits[rank].op not in _COUNTED for rank in claim.waiting):
        return None
    kinds = {rank: one.launched for rank, one in said.items() if one.launched}
    totals = {rank: sum(count for _, count in launched) for rank, launched in kinds.items()}
    if claim.verdict in _DIFFERENT:
        if claim.verdict != "operation_mismatch" or not _all_in(kinds, claim):
            return None
        waiting = [rank for rank in claim.waiting if rank in kinds]
        same = any(kinds[culprit] == kinds[rank] for culprit in claim.culprits for rank in waiting)
        shown = (*claim.culprits, waiting[0])
        return not same, "; ".join(f"rank {rank} launched {_counts(kinds[rank])}" for rank in shown)
    return _standing(case, claim, totals, "launched {} operations on {}", "launched {}")


def _flight_recorder(case: Case, claim: _Claim, said: Mapping[int, Witness]) -> tuple[bool, str] | None:
    last = {rank: max(ops, key=_seq) for rank, one in said.items() if (ops := [o for o in one.operations if o.seq])}
    # If all operations of the waiting ranks are complete in the dump, the dump is from before the wait and says nothing
    # about it.
    if not any(rank in last and last[rank].state != "completed" for rank in claim.waiting):
        return None
    if claim.verdict in _DIFFERENT:
        if not _all_in(last, claim):
            return None
        waiting = next(rank for rank in claim.waiting if rank in last)
        seq = min(_seq(last[rank]) for rank in (*claim.culprits, waiting))
        calls = {rank: _call(said[rank], seq) for rank in (*claim.culprits, waiting)}
        if None in calls.values():
            return None
        text = "; ".join(f"rank {rank} is at {call} number {seq}" for rank, call in calls.items())
        return all(calls[culprit] != calls[waiting] for culprit in claim.culprits), text
    at = {rank: _seq(one) for rank, one in last.items()}
    return _standing(case, claim, at, "called operation {} of {} last", "called {}")


def _standing(case: Case, claim: _Claim, at: Mapping[int, int], says: str, again: str) -> tuple[bool, str] | None:
    """Returns whether the culprits are behind the waiting ranks; without culprits, whether all ranks are equally far.

    ``says``: the format of the text about the first ranks, with their number and the name of the communicator.
    ``again``: the format of the text about the other ranks, with their number.
    """
    name = case.comm_name(claim.comm)
    waiting = [rank for rank in claim.waiting if rank in at]
    if claim.verdict in _EQUAL:
        if not waiting or len(at) < 2:
            return None
        most = max(at.values())
        behind = [rank for rank, count in at.items() if count < most]
        text = f"{ranks_of(behind or at)} {says.format(at[(behind or waiting)[0]], name)}"
        return not behind, text + (f", the others {again.format(most)}" if behind else "")
    if not waiting or not _all_in(at, claim):
        return None
    least, most = min(at[rank] for rank in waiting), max(at[rank] for rank in claim.culprits)
    if most < least:
        standing = f"{ranks_of(claim.culprits)} {says.format(most, name)}"
        return True, f"{standing}, {ranks_of(waiting)} {again.format(least)}"
    if min(at[rank] for rank in claim.culprits) >= max(at[rank] for rank in waiting):
        return False, f"{ranks_of(claim.culprits)} {says.format(most, name)}, as {ranks_of(waiting)} did"
    return None


def _all_in(known: Mapping[int, object], claim: _Claim) -> bool:
    return (
        bool(claim.culprits)
        and all(rank in known for rank in claim.culprits)
        and any(rank in known for rank in claim.waiting)
    )


def _counts(launched: Sequence[tuple[str, int]]) -> str:
    return ", ".join(f"{count} {op}" for op, count in launched if count) or "nothing"


def _seq(operation: Operation) -> int:
    return operation.seq or 0


def _call(witness: Witness, seq: int) -> str | None:
    """Returns the rank's call with number ``seq`` as text, with its size and dtype; None if unknown."""
    for one in witness.operations:
        if one.seq == seq and one.op is not None:
            return f"{one.op} of {one.count} {one.dtype}" if one.count else one.op
    return None
