"""Leases: which files snapshots hold, and which of them are removed once they do not."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

__all__ = ("Leases",)


class Leases:
    """Not safe for two threads: its owner locks."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[int, frozenset[Path]]] = {}
        self._doomed: set[Path] = set()
        self._generation = 0

    @property
    def count(self) -> int:
        """How many snapshots hold files."""
        return len(self._held)

    @property
    def doomed(self) -> frozenset[Path]:
        """Files that are to be removed and are still held."""
        return frozenset(self._doomed)

    def take(self, paths: Iterable[Path], until_ns: int) -> int:
        """Holds ``paths`` until ``until_ns`` (monotonic) at the latest; returns the generation to release."""
        self._generation += 1
        self._held[self._generation] = (until_ns, frozenset(paths))
        return self._generation

    def doom(self, paths: Iterable[Path]) -> list[Path]:
        """Marks ``paths`` to be removed; returns all files that may be removed now."""
        self._doomed.update(paths)
        return self._free()

    def pardon(self, paths: Iterable[Path]) -> None:
        """Keeps ``paths``: new files were written under these names."""
        self._doomed.difference_update(paths)

    def keep_doomed(self, paths: Iterable[Path]) -> None:
        """Marks ``paths`` again: removing them failed."""
        self._doomed.update(paths)

    def release(self, generation: int) -> list[Path]:
        """Ends a lease, if there is one; returns all files that may be removed now."""
        self._held.pop(generation, None)
        return self._free()

    def expire(self, now_ns: int) -> list[Path]:
        """Ends the leases whose time is past; returns all files that may be removed now."""
        for generation in [g for g, (until, _) in self._held.items() if until <= now_ns]:
            del self._held[generation]
        return self._free()

    def _free(self) -> list[Path]:
        held = frozenset[Path]().union(*(paths for _, paths in self._held.values()))
        free = sorted(self._doomed - held)
        self._doomed &= held
        return free
