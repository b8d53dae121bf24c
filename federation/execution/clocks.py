"""Computes the offsets of the nodes' clocks from our clock, with a bound on the error, from the times of questions and
answers.

A node reads its clock between our question and its answer, so each answer bounds the offset from both sides. The
intervals of several answers overlap, and the offset lies in all of them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import NamedTuple

__all__ = ("Clocks", "Offset", "measured", "spread_ns")

# The assumed drift between two clocks after a measurement: 50 ppm, more than the drift of servers' crystals.
_DRIFT = 50e-6
_MOST_NODES = 100_000


class Offset(NamedTuple):
    """The offset of a node's clock, which is ``offset_ns`` ahead of our clock (negative: behind). The error is at most
    ``error_ns``.
    """

    offset_ns: int
    error_ns: int

    @property
    def low_ns(self) -> int:
        return self.offset_ns - self.error_ns

    @property
    def high_ns(self) -> int:
        return self.offset_ns + self.error_ns

    @property
    def apart(self) -> bool:
        """Whether the clocks certainly differ."""
        return abs(self.offset_ns) > self.error_ns


def measured(sent_ns: int, received_ns: int, node_ns: int) -> Offset | None:
    """Returns the offset computed from one answer. ``sent_ns`` and ``received_ns``: times of our clock; ``node_ns``: a
    time of the node's clock in between.

    None if the node did not send its time.
    """
    if node_ns <= 0 or received_ns < sent_ns:
        return None
    return _between(node_ns - received_ns, node_ns - sent_ns)


def _between(low_ns: int, high_ns: int) -> Offset:
    middle = (low_ns + high_ns) // 2
    return Offset(middle, high_ns - middle)


def spread_ns(offsets: Iterable[Offset | None]) -> int | None:
    """Returns the largest possible difference between two of the clocks; None if the offset of a clock is unknown."""
    known = list(offsets)
    found = [offset for offset in known if offset is not None]
    if not found or len(found) < len(known):
        return None
    return max(offset.high_ns for offset in found) - min(offset.low_ns for offset in found)


class Clocks:
    """The best offset of each node so far. Thread-safe."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Offset, int]] = {}
        self._lock = threading.Lock()

    def add(self, node: str, found: Offset | None, now_ns: int) -> Offset | None:
        """Returns the offset of ``node`` after a further measurement, at ``now_ns`` on a monotonic clock."""
        with self._lock:
            known = self._aged(node, now_ns)
            if found is None:
                return known
            best = found
            if known is not None:
                low, high = max(known.low_ns, found.low_ns), min(known.high_ns, found.high_ns)
                # If the intervals do not overlap, a clock was set meanwhile: the newer interval counts.
                best = _between(low, high) if low <= high else found
            if node in self._known or len(self._known) < _MOST_NODES:
                self._known[node] = best, now_ns
            return best

    def of(self, node: str, now_ns: int) -> Offset | None:
        with self._lock:
            return self._aged(node, now_ns)

    def _aged(self, node: str, now_ns: int) -> Offset | None:
        if node not in self._known:
            return None
        offset, since_ns = self._known[node]
        return Offset(offset.offset_ns, offset.error_ns + int((now_ns - since_ns) * _DRIFT))
