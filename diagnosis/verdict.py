"""A verdict is a conclusion that a rule can reach. A finding applies a verdict to a job."""

from __future__ import annotations

from dataclasses import dataclass, field

from probing.diagnosis.facts import Thread

__all__ = ("CANNOT_TELL", "ERROR", "NOTE", "WARNING", "Advice", "Culprit", "Ending", "Finding", "StackOf", "Verdict")

ERROR = "error"
"""The job stands still, died or computes wrongly."""
WARNING = "warning"
"""The job runs, and is slow or will fail."""
NOTE = "note"
"""A fact worth knowing; `diagnose` still exits 0."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A conclusion, as docs/verdicts.md describes it. ``group``: ``hang``, ``slow``, ``death``, ``memory``,
    ``numbers``, ``hardware`` or ``general``.

    ``situations``: ids of ``vocabulary.SITUATIONS`` that it recognises.
    """

    id: str
    group: str
    title: str
    rule: str
    evidence: str
    confidence: str
    refuted_by: str
    next_steps: tuple[str, ...]
    situations: tuple[str, ...] = ()


CANNOT_TELL = Verdict(
    "cannot_tell",
    "general",
    "The facts do not suffice",
    "No rank of the job was seen; or nothing wrong was seen, but nodes, stored rows, or the stacks of a job at rest"
    " could not be read; or ranks wait, and the facts do not show for which ranks.",
    "The known facts, and under `missing` the facts that could not be read.",
    "Low by nature.",
    "Nothing: it claims nothing.",
    ("Ask all nodes: `probingctl diagnose --all-nodes`.", "Look at `probingctl stacks --job J --native`."),
)


@dataclass(frozen=True, slots=True)
class Culprit:
    """A rank to blame. ``activity``: a key of ``activity.kinds.ACTIVITIES``.

    ``why``: the activity as a clause that follows "rank 1 (node b, pid 4711)", such as "its data loader waits in
    fetch_shard, data.py:12".
    """

    rank: int
    node: str
    pid: int
    why: str
    activity: str = "unknown"


@dataclass(frozen=True, slots=True)
class StackOf:
    """A stack that is kept with a finding. ``role``: culprit or victim."""

    rank: int
    node: str
    pid: int
    role: str
    thread: Thread


@dataclass(frozen=True, slots=True)
class Advice:
    """Advice about the job. ``action``: ``restart``, ``restart_without`` (``nodes`` are left out), ``do_not_restart``
    (the same would happen again) or ``wait``. ``reason``: a clause to print.
    """

    action: str
    reason: str
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of the job if nobody acts. ``at_ns``: its time on the common clock. ``by``: its cause, such as "gloo's
    time-out (30 min)".
    """

    at_ns: int
    by: str


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a rule. ``sentence``: the first line to print. ``confidence``: 0 to 1. ``since_ns``: the beginning
    of the situation on the common clock. ``victims``: the ranks that wait for the culprits.

    ``about``: distinguishes this finding from others with its verdict, such as communicator and seq. Job, run, verdict,
    culprits and ``about`` identify a finding, so ``about`` must not change while the situation lasts. ``advice``: None
    until the ladder has added it. ``ends``: None if no time-out is known.
    """

    verdict: Verdict
    severity: str
    confidence: float
    sentence: str
    culprits: tuple[Culprit, ...] = ()
    victims: tuple[int, ...] = ()
    since_ns: int | None = None
    about: str = ""
    evidence: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    refuted_by: tuple[str, ...] = ()
    next_steps: tuple[str, ...] = ()
    stacks: tuple[StackOf, ...] = field(default=())
    advice: Advice | None = None
    ends: Ending | None = None
