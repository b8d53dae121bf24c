"""A rank is in a phase that its label names, and the limit of this phase has not passed: the job may stand still."""

from __future__ import annotations

from collections.abc import Iterator

from probing.api.text import time_text
from probing.diagnosis.case import Case
from probing.diagnosis.verdict import NOTE, Finding, Verdict
from probing.diagnosis.waits import phase_limit_ns
from probing.diagnosis.words import clean

__all__ = ("PHASE", "VERDICTS", "find")

PHASE = Verdict(
    "phase",
    "hang",
    "The job stands still in a phase that a label names",
    "No rank has begun or ended an operation for W, and a rank has the label phase=compile, eval or checkpoint for less"
    " than the limit of this phase (diagnose.compile_s, eval_s, checkpoint_s). Until then no hang is reported.",
    "The rank and its label, and how long both last.",
    "0.9: the job or an administrator says so.",
    "The limit passes, or the label is removed, and the job still stands.",
    ("Set or remove the label: `probingctl annotate --job J phase=eval`, `phase=`.",),
)
VERDICTS = (PHASE,)


def find(case: Case) -> Iterator[Finding]:
    """Yields a note if the job stands still, and the label of a rank allows that."""
    phase, stalled = case.facts.phase, case.stalled_ns
    limit = phase_limit_ns(case.facts)
    if phase is None or not limit or stalled is None or stalled < case.facts.stall_s * 1e9:
        return
    if case.found_error:
        return
    lasts = max(case.facts.taken_ns - phase.since_ns, 0)
    name, allowed = clean(phase.name), time_text(limit)
    yield Finding(
        PHASE,
        NOTE,
        0.9,
        f"rank {phase.rank} is in the phase {name} for {time_text(lasts)}; it counts as a stall after {allowed}",
        (),
        (),
        phase.since_ns,
        "",
        (f"rank {phase.rank} has the label phase={name}", f"no operation has begun or ended for {time_text(stalled)}"),
        (),
        (PHASE.refuted_by,),
        PHASE.next_steps,
        case.stacks((), list(case.ranks)),
    )
