"""Remembers segments that could not be read, so that the next queries leave them out."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

from probing.daemon.query.snapshot import QueryFile

__all__ = ("DamagedSegments", "Segments")

# How long a damaged segment is left out before it is tried again, s.
SET_ASIDE_S = 600.0
MAX_SET_ASIDE = 10_000
Segments = Mapping[str, Sequence[QueryFile]]


class DamagedSegments:
    """Safe for many threads: the dict is replaced, never changed."""

    def __init__(self) -> None:
        self._until: dict[str, float] = {}

    def without(self, segments: Segments) -> tuple[dict[str, list[QueryFile]], list[str]]:
        """``segments`` without the damaged ones, and a warning for each table that has some."""
        now = time.monotonic()
        self._until = {path: until for path, until in self._until.items() if until > now}
        kept: dict[str, list[QueryFile]] = {}
        warnings = []
        for name, found in segments.items():
            kept[name] = [segment for segment in found if segment.path not in self._until]
            if left_out := len(found) - len(kept[name]):
                warnings.append(f"{name}: {left_out} damaged segment{'s' * (left_out > 1)} left out")
        return kept, warnings

    def add(self, paths: Iterable[object]) -> list[str]:
        """Leaves out the segments at ``paths`` for SET_ASIDE_S; returns the paths."""
        added = [str(path) for path in paths]
        if added:
            known = {**self._until, **dict.fromkeys(added, time.monotonic() + SET_ASIDE_S)}
            self._until = dict(list(known.items())[-MAX_SET_ASIDE:])
        return added
