"""Adds what is wrong with the hardware of ranks to the findings that name them."""

from __future__ import annotations

from dataclasses import replace

from probing.diagnosis.case import Case
from probing.diagnosis.verdict import Finding

__all__ = ("with_symptoms",)

_MOST = 4
# Nobody is to blame: the hardware of those that wait is looked at.
_OF_VICTIMS = frozenset({"no_completion"})


def with_symptoms(case: Case, finding: Finding) -> Finding:
    """Returns a hang or death with the symptoms of its culprits' hardware as evidence; others as they are.

    The finding of a slow rank has them as its reason.
    """
    if finding.verdict.group not in ("hang", "death"):
        return finding
    named = [culprit.rank for culprit in finding.culprits]
    if not named and finding.verdict.id in _OF_VICTIMS:
        named = list(finding.victims)
    found = list(dict.fromkeys(symptom for rank in named for symptom in case.symptoms_of_rank(rank)))[:_MOST]
    if not found:
        return finding
    steps = [step for symptom in found for step in symptom.next_steps]
    return replace(
        finding,
        evidence=(*finding.evidence, *(f"node {symptom.node}: {symptom.text}" for symptom in found)),
        next_steps=tuple(dict.fromkeys([*finding.next_steps, *steps])),
    )
