"""What follows from diagnoses: their order, the exit code, the object for JSON, the sentence for a healthy job."""

from __future__ import annotations

from collections.abc import Sequence

from probing.client.render.rows import Row
from probing.client.render.text import age, plural, utc, when
from probing.diagnosis.deaths import how_it_ended
from probing.diagnosis.facts import Facts, Missing
from probing.diagnosis.ladder import Diagnosis, begun_ns
from probing.diagnosis.report import CANNOT_TELL, HEALTHY, QUIET_NS, as_dict, unread
from probing.diagnosis.stalls import STUCK_PATIENCE, gate_ns
from probing.diagnosis.verdict import ERROR, NOTE, WARNING

__all__ = (
    "as_object",
    "confidence_word",
    "exit_code",
    "flat",
    "healthy_sentence",
    "missing_text",
    "worst_first",
    "wrong",
)

_WRONG, _UNDECIDED = 3, 4
_ORDER = {ERROR: 0, WARNING: 1, NOTE: 2}
# The time since an operation is known no better.
_NOW_NS = 1_000_000
# The words for a confidence of at least this value.
_WORDS = ((0.85, "high"), (0.6, "medium"))


def wrong(diagnosis: Diagnosis) -> bool:
    """Whether an error or a warning was found, or no rank of the job was seen."""
    return any(finding.severity != NOTE for finding in diagnosis.findings) or not diagnosis.facts.ranks


def worst_first(diagnoses: Sequence[Diagnosis]) -> list[Diagnosis]:
    """Returns the diagnoses by severity, then the newest run of each job, then by the number of ranks that wait."""
    begun: dict[str, list[int]] = {}
    for one in diagnoses:
        begun.setdefault(one.facts.job, []).append(begun_ns(one.facts))

    def order(diagnosis: Diagnosis) -> tuple[int, int, int, str]:
        facts, worst = diagnosis.facts, diagnosis.findings[0] if diagnosis.findings else None
        severity = _ORDER[worst.severity] if worst else len(_ORDER)
        later = sum(other > begun_ns(facts) for other in begun[facts.job])
        return severity, later, -len(worst.victims) if worst else 0, facts.job

    return sorted(diagnoses, key=order)


def exit_code(diagnoses: Sequence[Diagnosis]) -> int:
    """Returns 3 where something is wrong, 4 where that is not known since something could not be read; else 0."""
    verdicts = {as_dict(diagnosis)["verdict"] for diagnosis in diagnoses}
    if verdicts - {HEALTHY, CANNOT_TELL}:
        return _WRONG
    return _UNDECIDED if CANNOT_TELL in verdicts else 0


def confidence_word(confidence: float) -> str:
    """Returns high, medium or low."""
    return next((word for least, word in _WORDS if confidence >= least), "low")


def missing_text(missing: Missing) -> str:
    """Returns what is missing, with its rank or node."""
    about = f"rank {missing.rank}" if missing.rank is not None else f"node {missing.node}" if missing.node else ""
    return missing.text if not about or about in missing.text else f"{about}: {missing.text}"


def healthy_sentence(diagnosis: Diagnosis) -> str:
    """Returns the state of a job, as ``job X: nothing is wrong: 8 ranks, step 812``, or that it cannot be told."""
    facts = diagnosis.facts
    unknown = f"job {facts.job}: cannot tell whether something is wrong"
    gaps = unread(facts, diagnosis.missing)
    if not facts.ranks:
        return f"{unknown}: no rank of it could be read" if gaps else f"job {facts.job}: no rank of it was seen"
    seen, world = len(facts.ranks), facts.world_size
    parts = [f"{seen} of {plural(world, 'rank')}" if world and world > seen else plural(seen, "rank")]
    if steps := [step.step for rank in facts.ranks for step in rank.steps]:
        parts.append(f"step {max(steps)}")
    advanced = [node.advanced_ns for node in facts.nodes if node.advanced_ns is not None]
    quiet = max(0, facts.taken_ns - max(advanced)) if advanced else 0
    if advanced:
        parts.append(f"last operation {age(quiet)} ago" if quiet >= _NOW_NS else "last operation just now")
    state = "nothing is wrong"
    ends = [rank.exit.ts_ns for rank in facts.ranks if rank.exit is not None]
    if len(ends) == seen:
        at = when(utc(max(ends)))
        if diagnosis.findings:
            state = f"it ended at {at}, and was started again"
        elif not gaps:
            state = f"it ended at {at}, healthy until then"
            # When its last operation was, says its end.
            parts[-1:] = how_it_ended(facts) if advanced else [parts[-1], *how_it_ended(facts)]
    elif not gaps and (judged := _judged_after(facts, quiet)):
        state += " yet"
        parts[-1] += f"; a stall is judged after {age(judged)}"
    if gaps:
        ended = f"; it ended at {when(utc(max(ends)))}" if len(ends) == seen else ""
        return f"{unknown}, since not all of it could be read{ended}: {', '.join(parts)}"
    return f"job {facts.job}: {state}: {', '.join(parts)}"


def _judged_after(facts: Facts, quiet: int) -> int | None:
    """Returns after which time the next rule looks at a job that is quiet for unusually long, ns; else None."""
    if quiet < QUIET_NS or quiet <= 2 * (facts.usual_gap_ns or 0):
        return None
    gate = gate_ns(facts)
    return next((limit for limit in (gate, STUCK_PATIENCE * gate) if quiet < limit), None)


def as_object(diagnoses: Sequence[Diagnosis]) -> Row:
    """Returns the object of docs/json.md: that of the first diagnosis, with all other findings in ``others``."""
    first, *others = flat(diagnoses)
    return {**first, "others": others}


def flat(diagnoses: Sequence[Diagnosis]) -> list[Row]:
    """Returns an object for each finding, and for each job without one."""
    found: list[Row] = []
    for diagnosis in diagnoses:
        own = as_dict(diagnosis)
        if not wrong(diagnosis):
            own["sentence"] = healthy_sentence(diagnosis)
        job = {"job": own["job"], "run": own["run"]}
        others = own.pop("others")
        found += [own, *({**job, **other} for other in others)]
    return found
