"""Chooses the lines that are stored: those that contain one of a few texts, at a limited rate for each process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ("Allowance", "Patterns", "RateLimit")

SECOND_NS = 1_000_000_000
MAX_PROCESSES = 4096


class Patterns:
    """Plain texts, matched by bytes (UTF-8), with case."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = [(text, text.encode()) for text in texts if text]

    def kind(self, line: bytes) -> str | None:
        """Returns the first of the texts that ``line`` contains."""
        return next((text for text, encoded in self._texts if encoded in line), None)


class Allowance(NamedTuple):
    """Lines of a process: stored in ``second``, and suppressed since the last stored one, by kind."""

    second: int
    stored: int
    suppressed: tuple[tuple[str, int], ...]


class RateLimit:
    """For one thread. ``lines_per_s`` is for each process, by the clock of its own lines."""

    def __init__(self, lines_per_s: int) -> None:
        self.lines_per_s = lines_per_s
        self._known: dict[tuple[int, int], Allowance] = {}

    def take(self, pid: int, start_ns: int, kind: str, mono_ns: int) -> int | None:
        """Returns how many lines of this kind were suppressed before this one, or None to suppress it, too."""
        known = self._known.pop((pid, start_ns), None)
        # Lines are reported when they end: one that began long ago must not open an older second again.
        second = max(mono_ns // SECOND_NS, known.second if known is not None else 0)
        stored = known.stored if known is not None and known.second == second else 0
        suppressed = dict(known.suppressed) if known is not None else {}
        left_out: int | None = None
        if stored < self.lines_per_s:
            left_out, stored = suppressed.pop(kind, 0), stored + 1
        else:
            suppressed[kind] = suppressed.get(kind, 0) + 1
        if len(self._known) >= MAX_PROCESSES:
            del self._known[next(iter(self._known))]
        self._known[pid, start_ns] = Allowance(second, stored, tuple(suppressed.items()))
        return left_out

    def forget(self, pid: int, start_ns: int) -> int:
        """Drop the state of a process that ended. Returns how many suppressed lines no row reports."""
        known = self._known.pop((pid, start_ns), None)
        return 0 if known is None else sum(number for _, number in known.suppressed)
