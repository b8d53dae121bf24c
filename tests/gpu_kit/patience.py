"""How much longer than usual everything may take, on a machine that has little time for it."""

from __future__ import annotations

import os

__all__ = ("patient",)

_FACTOR = "GPU_KIT_PATIENCE"


def patient(seconds: float) -> float:
    """Returns ``seconds`` times GPU_KIT_PATIENCE, by default 1: the limit of a wait on this machine."""
    return seconds * float(os.environ.get(_FACTOR) or 1)
