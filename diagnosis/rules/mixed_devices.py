"""The GPUs of a job differ in model or memory."""

from __future__ import annotations

from collections.abc import Iterator

from probing.api.text import ranks_of, size
from probing.diagnosis.case import Case
from probing.diagnosis.verdict import NOTE, Finding, Verdict
from probing.diagnosis.words import clean

__all__ = ("VERDICTS", "find")

MIXED_DEVICES = Verdict(
    "mixed_devices",
    "hardware",
    "The GPUs of the job differ",
    "Ranks use GPUs of different models, or of sizes of memory that differ by more than a tenth. A step takes as long"
    " as on the slowest GPU.",
    "Model and memory of the GPU of each rank.",
    "0.9.",
    "The work of each rank suits its GPU.",
    ("Give the job nodes of one kind, or less work to the ranks with smaller GPUs.",),
    situations=("mixed_devices",),
)
VERDICTS = (MIXED_DEVICES,)

_ALIKE = 1.1


def find(case: Case) -> Iterator[Finding]:
    """Yields a note if the GPUs of the ranks are of several kinds."""
    kinds: dict[tuple[str, int], list[int]] = {}
    for node in case.facts.nodes:
        for gpu in node.hardware.gpus:
            if gpu.ranks and gpu.name is not None:
                total = next((s for n, s in kinds if n == gpu.name and _alike(s, gpu.total_bytes or 0)), None)
                kinds.setdefault((gpu.name, gpu.total_bytes or 0 if total is None else total), []).extend(gpu.ranks)
    if len(kinds) < 2:
        return
    texts = [
        f"{clean(name)}{f' with {size(total)}' if total else ''} on {ranks_of(ranks)}"
        for (name, total), ranks in sorted(kinds.items(), key=lambda kind: -len(kind[1]))
    ]
    yield Finding(
        MIXED_DEVICES,
        NOTE,
        0.9,
        f"the GPUs of the job differ: {', '.join(texts[:4])}",
        evidence=tuple(texts),
        refuted_by=(MIXED_DEVICES.refuted_by,),
        next_steps=MIXED_DEVICES.next_steps,
    )


def _alike(one: int, other: int) -> bool:
    return max(one, other) <= _ALIKE * min(one, other)
