"""The module ``waiting`` that the doubles import, where the kit runs without the tests around it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from gpu_kit.scene import until as wait_until

__all__ = ("until", "whole_lines")

T = TypeVar("T")


def until(condition: Callable[[], T], seconds: float = 60.0, *, what: object = "it", poll_s: float = 0.01) -> T:
    """Returns the first true value of ``condition``, as ``tests/waiting.py`` does."""
    return wait_until(condition, seconds, str(what), poll_s)


def whole_lines(path: Path) -> list[str]:
    """Returns the lines of a file that another process is writing, without one that it has not ended yet."""
    return path.read_text().split("\n")[:-1]
