"""speedscope's own format: https://www.speedscope.app/file-format-schema.json (jlfwong/speedscope,
src/lib/file-format-spec.ts: File, SampledProfile)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from probing.client.profile.model import Frame, Profile, merged

__all__ = ("speedscope",)

_SCHEMA = "https://www.speedscope.app/file-format-schema.json"


def speedscope(profiles: Sequence[Profile], title: str, exporter: str) -> str:
    """Returns one document with ``profiles``, which speedscope lists in a menu. Weights are ns."""
    numbers: dict[Frame, int] = {}
    shown = [_sampled(profile, numbers) for profile in profiles]
    document = {
        "$schema": _SCHEMA,
        "shared": {"frames": [_frame(frame) for frame in numbers]},
        "profiles": shown,
        "name": title,
        "activeProfileIndex": 0,
        "exporter": exporter,
    }
    return json.dumps(document, separators=(",", ":")) + "\n"


def _sampled(profile: Profile, numbers: dict[Frame, int]) -> dict[str, Any]:
    samples = merged(profile.samples)
    return {
        "type": "sampled",
        "name": profile.title,
        "unit": "nanoseconds",
        "startValue": 0,
        "endValue": sum(sample.ns for sample in samples),
        "samples": [[numbers.setdefault(frame, len(numbers)) for frame in sample.frames] for sample in samples],
        "weights": [sample.ns for sample in samples],
    }


def _frame(frame: Frame) -> dict[str, Any]:
    found: dict[str, Any] = {"name": frame.func or "?"}
    if frame.file:
        found["file"] = frame.file
    if frame.lineno is not None:
        found["line"] = frame.lineno
    return found
