"""What a query may read, and for how long it stays."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypedDict

from probing.daemon.store.log.parts import Part
from probing.daemon.store.manifest import Segment

__all__ = ("Leases", "Snapshot", "describe_part", "describe_segment_file")


class Snapshot(TypedDict):
    """JSON-able. Paths are absolute.

    ``tables``: {name: [{path, size, crc, rows, ts_min, ts_max, jobs}]}, sealed segments, CRC32 of the file, times in
    UTC ns, the values of ``job`` or None where they are not known. ``parts``: log parts in order, [{path, length,
    number, tables: {name: rows}}], of which the first ``length`` bytes are read.
    """

    generation: int
    node: str
    root: str
    tables: dict[str, list[dict[str, Any]]]
    parts: list[dict[str, Any]]


def describe_segment_file(root: Path, segment: Segment) -> dict[str, Any]:
    return {
        "path": str(root / segment.path),
        "size": segment.size,
        "crc": segment.crc,
        "rows": segment.rows,
        "ts_min": segment.ts_min,
        "ts_max": segment.ts_max,
        "jobs": None if segment.jobs is None else list(segment.jobs),
    }


def describe_part(part: Part) -> dict[str, Any]:
    return {"path": str(part.path), "length": part.length, "number": part.number, "tables": dict(part.rows)}


class Leases:
    """Which files snapshots hold, and which of them are to go once they do not. Its owner locks."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[int, frozenset[Path]]] = {}
        self._doomed: set[Path] = set()
        self._generation = 0

    @property
    def count(self) -> int:
        return len(self._held)

    def take(self, paths: Iterable[Path], until_ns: int) -> int:
        """Hold ``paths`` until ``until_ns`` on the monotonic clock at the latest; gives the generation."""
        self._generation += 1
        self._held[self._generation] = (until_ns, frozenset(paths))
        return self._generation

    def doom(self, paths: Iterable[Path]) -> list[Path]:
        """``paths`` are to go; returns those that may go now."""
        self._doomed.update(paths)
        return self._free()

    @property
    def doomed(self) -> frozenset[Path]:
        """What is to go and is still held."""
        return frozenset(self._doomed)

    def pardon(self, paths: Iterable[Path]) -> None:
        """``paths`` are in use again: files of these names were written anew."""
        self._doomed.difference_update(paths)

    def keep_doomed(self, paths: Iterable[Path]) -> None:
        """``paths`` could not be removed now."""
        self._doomed.update(paths)

    def release(self, generation: int) -> list[Path]:
        """Returns what may go now."""
        self._held.pop(generation, None)
        return self._free()

    def expire(self, now_ns: int) -> list[Path]:
        """Release what is past its time; returns what may go now."""
        for generation in [g for g, (until, _) in self._held.items() if until <= now_ns]:
            del self._held[generation]
        return self._free()

    def _free(self) -> list[Path]:
        held = frozenset[Path]().union(*(paths for _, paths in self._held.values()))
        free = sorted(self._doomed - held)
        self._doomed &= held
        return free
