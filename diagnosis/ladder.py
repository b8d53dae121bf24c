"""Runs the rules over facts, in an order in which causes come before symptoms."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from probing.diagnosis.case import Case
from probing.diagnosis.corroborate import corroborated
from probing.diagnosis.drifts import with_drift
from probing.diagnosis.facts import Facts, Missing, Rank
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
    phase,
    point_to_point,
    rotating,
    shifted_sequence,
    slow_rank,
    undecided,
)
from probing.diagnosis.supplements import (
    advised,
    with_commands,
    with_known_bugs,
    with_phase,
    with_symptoms,
    with_time_out,
)
from probing.diagnosis.verdict import ERROR, NOTE, WARNING, Finding, Verdict

__all__ = ("RULES", "Diagnosis", "Rule", "begun_ns", "diagnose", "diagnose_runs")

_ORDER = {ERROR: 0, WARNING: 1, NOTE: 2}
# The maximum confidence of a finding while a node does not answer.
_WITHOUT_A_NODE = 0.8
_log = logging.getLogger(__name__)


class Rule(Protocol):
    """A module in ``rules``."""

    @property
    def VERDICTS(self) -> tuple[Verdict, ...]:  # noqa: N802
        """Returns the verdicts that the rule may give."""

    def find(self, case: Case) -> Iterator[Finding]:
        """Yields the findings of the rule. ``case.found`` has the findings of earlier rules."""


RULES: tuple[Rule, ...] = (
    # These two rules come before the rule about deaths, because different calls may make ranks die.
    shifted_sequence,
    mismatch,
    death,
    absent,
    point_to_point,
    deadlock,
    # This rule comes before the rules that blame ranks, so that they do not blame ranks of an idle server.
    idle,
    not_joined,
    communicator_error,
    no_completion,
    init,
    outside_collectives,
    phase,
    undecided,
    lingering,
    slow_rank,
    rotating,
    job_slowdown,
    memory,
    numbers,
    mixed_devices,
    # This rule comes before the rule that names single parts, because no single GPU causes a fault of a fabric.
    fabric,
    hardware,
)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The result of the rules. ``findings``: the worst first. ``missing``: gaps in the facts, and rules that failed.

    ``ripens_ns``: the time until a wait that is still too short for the rules is long enough; None: there is no such
    wait. ``outlived``: the run has ended, and a later run of its job goes on, so all findings are notes.
    """

    facts: Facts
    findings: tuple[Finding, ...]
    missing: tuple[Missing, ...]
    ripens_ns: int | None = None
    outlived: bool = False


def _completed(case: Case, finding: Finding) -> Finding:
    """Returns ``finding`` with drifts, reports of witnesses, hardware, known bugs, the phase of the job, its time-out,
    advice and commands added.
    """
    supplements = (with_drift, corroborated, with_symptoms, with_known_bugs, with_phase, with_time_out, advised)
    for add in (*supplements, with_commands):
        finding = add(case, finding)
    return finding


def diagnose(facts: Facts, rules: Sequence[Rule] = RULES, *, later_run_ns: int | None = None) -> Diagnosis:
    """Returns the findings of the rules. A rule that raises is added to ``missing``, and the other rules still run.

    ``later_run_ns``: when the newest living run of the job began, UTC ns; None if no run lives.
    """
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
    outlived = _outlived(facts, later_run_ns)
    judged = tuple(_judged(found, facts.missing, outlived=outlived))
    return Diagnosis(facts, judged, (*facts.missing, *failed), case.ripens_ns, outlived)


def diagnose_runs(runs: Sequence[Facts]) -> list[Diagnosis]:
    """Returns the diagnosis of each run. ``runs`` must have all known runs of each job."""
    living: dict[str, int] = {}
    for facts in runs:
        if not all(map(_ended, facts.ranks)):
            living[facts.job] = max(living.get(facts.job, 0), begun_ns(facts))
    return [diagnose(facts, later_run_ns=living.get(facts.job)) for facts in runs]


def begun_ns(facts: Facts) -> int:
    """Returns when the first rank of a run started, UTC ns; ``taken_ns`` if no start is known."""
    return min((rank.started_ns for rank in facts.ranks if rank.started_ns is not None), default=facts.taken_ns)


def _judged(findings: Iterable[Finding], missing: Iterable[Missing], *, outlived: bool) -> Iterator[Finding]:
    """Yields findings as they are shown and stored. While a node does not answer, the confidence is limited and the gap
    is named; if a later run of the job goes on, findings become notes.
    """
    gaps = [gap for gap in missing if gap.kind in ("node", "claim")]
    most = _WITHOUT_A_NODE if any(gap.kind == "node" for gap in gaps) else 1.0
    for one in findings:
        yield replace(
            one,
            severity=NOTE if outlived else one.severity,
            confidence=min(one.confidence, most),
            missing=tuple(dict.fromkeys([*one.missing, *(gap.text for gap in gaps)])),
        )


def _outlived(facts: Facts, later_run_ns: int | None) -> bool:
    ends = [rank.exit.ts_ns for rank in facts.ranks if rank.exit is not None]
    return later_run_ns is not None and bool(ends) and all(map(_ended, facts.ranks)) and max(ends) <= later_run_ns


def _ended(rank: Rank) -> bool:
    return rank.exit is not None or rank.state == "exited"
