"""Runs the rules over facts, in an order in which causes come before symptoms."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from probing.diagnosis.advice import advised
from probing.diagnosis.case import Case
from probing.diagnosis.corroborate import corroborated
from probing.diagnosis.drifts import with_drift
from probing.diagnosis.facts import Facts, Missing
from probing.diagnosis.hardware_evidence import with_symptoms
from probing.diagnosis.known_bugs import with_known_bugs
from probing.diagnosis.next_steps import with_commands
from probing.diagnosis.rules import (
    absent,
    communicator_error,
    deadlock,
    death,
    fabric,
    hardware,
    idle,
    init,
    job_slowdown,
    lingering,
    memory,
    mismatch,
    mixed_devices,
    no_completion,
    not_joined,
    numbers,
    outside_collectives,
    point_to_point,
    rotating,
    shifted_sequence,
    slow_rank,
    undecided,
)
from probing.diagnosis.time_outs import with_time_out
from probing.diagnosis.verdict import ERROR, NOTE, WARNING, Finding, Verdict

__all__ = ("RULES", "Diagnosis", "Rule", "diagnose")

_ORDER = {ERROR: 0, WARNING: 1, NOTE: 2}
_log = logging.getLogger(__name__)


class Rule(Protocol):
    """A module of ``rules``."""

    @property
    def VERDICTS(self) -> tuple[Verdict, ...]:  # noqa: N802
        """The verdicts that it may return."""

    def find(self, case: Case) -> Iterator[Finding]:
        """Returns what the facts show. ``case.found`` has the findings of earlier rules."""


RULES: tuple[Rule, ...] = (
    # Different calls make ranks fail: they come before deaths.
    shifted_sequence,
    mismatch,
    death,
    absent,
    point_to_point,
    deadlock,
    # Before the rules that blame ranks.
    idle,
    not_joined,
    communicator_error,
    no_completion,
    init,
    outside_collectives,
    undecided,
    lingering,
    slow_rank,
    rotating,
    job_slowdown,
    memory,
    numbers,
    mixed_devices,
    # Before the rule that names single parts.
    fabric,
    hardware,
)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The result of the rules. ``findings``: the worst first. ``missing``: gaps in the facts, and rules that failed.

    ``ripens_ns``: how soon a wait that is too short for the rules lasts long enough; None: there is none.
    """

    facts: Facts
    findings: tuple[Finding, ...]
    missing: tuple[Missing, ...]
    ripens_ns: int | None = None


def _completed(case: Case, finding: Finding) -> Finding:
    """Returns ``finding`` with what drifts, witnesses, hardware and known bugs add, what to do, and when it ends."""
    for add in (with_drift, corroborated, with_symptoms, with_known_bugs, with_time_out, advised, with_commands):
        finding = add(case, finding)
    return finding


def diagnose(facts: Facts, rules: Sequence[Rule] = RULES) -> Diagnosis:
    """Returns what the rules find. A rule that raises is added to ``missing``; the others still run."""
    case = Case(facts)
    failed = []
    for rule in rules:
        try:
            case.found += list(rule.find(case))
        except Exception as e:
            name = rule.VERDICTS[0].id
            _log.exception("rule %s failed", name)
            failed.append(Missing("rule", f"rule {name} failed: {type(e).__name__}"))
    try:
        case.found = [_completed(case, finding) for finding in case.found]
    except Exception as e:
        _log.exception("witnesses and symptoms could not be compared")
        failed.append(Missing("rule", f"the comparison with witnesses and symptoms failed: {type(e).__name__}"))
    found = sorted(case.found, key=lambda f: (_ORDER[f.severity], -f.confidence))
    return Diagnosis(facts, tuple(found), (*facts.missing, *failed), case.ripens_ns)
