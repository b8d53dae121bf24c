"""Diagnoses and findings as plain objects, which `diagnose -f json` prints and hooks receive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from probing.api.text import utc
from probing.diagnosis.facts import Facts, Frame, Missing
from probing.diagnosis.ladder import Diagnosis
from probing.diagnosis.verdict import NOTE, Advice, Finding, StackOf

__all__ = (
    "CANNOT_TELL",
    "HEALTHY",
    "QUIET_NS",
    "as_dict",
    "ending_dict",
    "finding_dict",
    "stack_dict",
    "unread",
    "utc_text",
)

HEALTHY = "healthy"
CANNOT_TELL = "cannot_tell"
# Gaps of these kinds may hide a fault: they lower the confidence that the job is healthy.
_WITNESSES = frozenset({"rank", "operations"})
# A job with a gap of a kind in _UNREAD is never called healthy. A job with a gap of a kind in _UNREAD_AT_REST is called
# healthy only if it advances.
_UNREAD = frozenset({"node", "rule", "history", "pause"})
_UNREAD_AT_REST = frozenset({"stacks", "condition"})
QUIET_NS = 2_000_000_000
"""A job without an operation for this long may be about to hang."""


def as_dict(diagnosis: Diagnosis) -> dict[str, Any]:
    """Returns the object of a job: its worst finding, and the other findings as ``others``.

    Notes are never the worst finding: a job with notes only is healthy, or cannot_tell if none of its ranks was seen,
    or if facts that could show a fault could not be read.
    """
    facts = diagnosis.facts
    worst = next((finding for finding in diagnosis.findings if finding.severity != NOTE), None)
    first = _nothing(facts, diagnosis.missing) if worst is None else finding_dict(worst)
    missing = [*first["missing"], *(m.text for m in diagnosis.missing)]
    return {
        "job": facts.job,
        "run": facts.run,
        "taken": utc_text(facts.taken_ns),
        **first,
        "missing": list(dict.fromkeys(missing)),
        "others": [finding_dict(finding) for finding in diagnosis.findings if finding is not worst],
    }


def unread(facts: Facts, missing: Sequence[Missing]) -> list[Missing]:
    """Returns the gaps of ``missing`` that may hide a fault: nodes, rows and rules that could not be read; and the
    stacks and conditions of a job that is not seen to advance."""
    advanced = max((node.advanced_ns for node in facts.nodes if node.advanced_ns is not None), default=None)
    advances = advanced is not None and facts.taken_ns - advanced < QUIET_NS
    kinds = _UNREAD if advances else _UNREAD | _UNREAD_AT_REST
    return [gap for gap in missing if gap.kind in kinds]


def finding_dict(finding: Finding) -> dict[str, Any]:
    """Returns a finding without its job. Times are UTC texts, unknown times None."""
    return {
        "verdict": finding.verdict.id,
        "severity": finding.severity,
        "confidence": finding.confidence,
        "sentence": finding.sentence,
        "culprits": [
            {"rank": c.rank, "node": c.node, "pid": c.pid, "why": c.why, "activity": c.activity}
            for c in finding.culprits
        ],
        "victims": list(finding.victims),
        "since": utc_text(finding.since_ns),
        "about": finding.about,
        "evidence": list(finding.evidence),
        "missing": list(finding.missing),
        "refuted_by": list(finding.refuted_by),
        "next_steps": list(finding.next_steps),
        "advice": _advice(finding.advice),
        "ends": ending_dict(finding.ends.at_ns, finding.ends.by) if finding.ends is not None else None,
        "stacks": [stack_dict(stack) for stack in finding.stacks],
    }


def stack_dict(stack: StackOf) -> dict[str, object]:
    """Returns a stack with the fields of `stacks -f json`, and ``role``, ``since`` and ``moving``."""
    thread = stack.thread
    return {
        "role": stack.role,
        "node": stack.node,
        "rank": stack.rank,
        "pid": stack.pid,
        "tid": thread.tid,
        "thread": thread.name,
        "state": thread.state,
        "gil": thread.gil,
        "since": utc_text(thread.since_ns),
        "moving": thread.moving,
        "native_missing": thread.native_missing or None,
        "frames": [_frame(frame) for frame in thread.frames],
    }


def ending_dict(at_ns: int, by: str) -> dict[str, object]:
    """Returns the expected end of a job: its time and its cause."""
    return {"at": utc_text(at_ns), "by": by}


def utc_text(ns: int | None) -> str | None:
    """Returns a time for JSON in the form of ``utc``; None if it is unknown or beyond the calendar."""
    text = "" if ns is None else utc(ns)
    return text if text.endswith("Z") else None


def _frame(frame: Frame) -> dict[str, object]:
    found: dict[str, object] = {
        "func": frame.func,
        "file": frame.file,
        "lineno": frame.line,
        "frame_type": "Native" if frame.native else "Python",
    }
    if frame.values:
        found["values"] = dict(frame.values)
    return found


def _nothing(facts: Facts, missing: Sequence[Missing]) -> Mapping[str, Any]:
    lacks = any(m.kind in _WITNESSES for m in missing)
    verdict, confidence, sentence = HEALTHY, 0.5 if lacks else 1.0, "nothing is wrong with the job"
    if unread(facts, missing):
        verdict, confidence, sentence = CANNOT_TELL, 0.0, "whether something is wrong with the job cannot be told"
    elif not facts.ranks:
        verdict, confidence, sentence = CANNOT_TELL, 0.0, "no rank of the job was seen"
    return {
        "verdict": verdict,
        "severity": None,
        "confidence": confidence,
        "sentence": sentence,
        **{name: [] for name in ("culprits", "victims", "evidence", "missing", "refuted_by", "next_steps", "stacks")},
        "advice": None,
        "ends": None,
        "since": None,
        "about": "",
    }


def _advice(advice: Advice | None) -> dict[str, object] | None:
    if advice is None:
        return None
    return {"action": advice.action, "nodes": list(advice.nodes), "reason": advice.reason}
