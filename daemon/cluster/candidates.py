"""Addresses that may be new ones of known nodes, which are asked before they are believed."""

from __future__ import annotations

__all__ = ("Candidates",)

MAX_CANDIDATES = 64
# Asked so often, and again so long after the last time, s.
TRIES = 3
AGAIN_S = 30.0


class Candidates:
    """By name of the node and address: since when, and how often it is still asked."""

    def __init__(self) -> None:
        self._since: dict[tuple[str, str], float] = {}
        self._left: dict[tuple[str, str], int] = {}

    def add(self, name: str, address: str, now: float) -> None:
        """Notes ``address``, unless it is known or there are too many."""
        key = name, address
        if key in self._since and now - self._since[key] < AGAIN_S:
            return
        if len(self._since) >= MAX_CANDIDATES:
            oldest = min(self._since, key=self._since.__getitem__)
            if self._left.get(oldest) or now - self._since[oldest] < AGAIN_S:
                return
            del self._since[oldest]
        self._since[key], self._left[key] = now, TRIES

    def since(self, name: str, address: str) -> float:
        """Returns when it was noted; now and for ever for one that was not."""
        return self._since.get((name, address), float("inf"))

    def due(self) -> list[tuple[str, str]]:
        """Returns (name, address) of those to be asked, and counts that."""
        asked = [key for key, left in self._left.items() if left]
        for key in asked:
            self._left[key] -= 1
        for key in [key for key, left in self._left.items() if not left]:
            del self._left[key]
        return asked
