"""Defines the interface to the collector, which keeps the rows; the snapshot that a query reads; and the list of
segments that could not be read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from probing.api.tables import Table
from probing.daemon.store.needs import Need

__all__ = ("DamagedSegments", "QueryFile", "QuerySnapshot", "Segments", "Store")

# The time for which queries leave out a damaged segment, s. Afterwards a query reads it again.
SET_ASIDE_S = 600.0
MAX_SET_ASIDE = 10_000


class QueryFile(NamedTuple):
    """A Parquet file and its number of rows."""

    path: str
    rows: int


Segments = Mapping[str, Sequence[QueryFile]]


@dataclass(frozen=True, slots=True)
class QuerySnapshot:
    """The rows at one instant: segments by table, and ``parts`` of the log (path, length). ``missing``: texts that tell
    the caller which rows the snapshot lacks."""

    segments: dict[str, list[QueryFile]]
    parts: list[tuple[str, int]]
    missing: list[str] = field(default_factory=list)


class Store(Protocol):
    """The collector as the engine uses it. All methods except ``damaged`` raise PeerError if the collector does not
    answer, and QueryError once ``cancelled`` returns True."""

    def snapshot(
        self, needs: Mapping[str, Need], timeout: float, cancelled: Callable[[], bool]
    ) -> AbstractContextManager[QuerySnapshot]:
        """Context manager that yields the segments that may have rows in ``needs``, and the log. Their files stay until
        the context ends. ``timeout``: the limit of the wait, and of the time for which the files stay, s."""

    def live(self, table: str, timeout: float, cancelled: Callable[[], bool]) -> bytes:
        """Returns the rows of a live table in its logical schema, as an Arrow IPC stream."""

    def tables(self, timeout: float) -> Mapping[str, Table]:
        """Returns the tables of present and former probes of users."""

    def damaged(self, paths: Sequence[str], timeout: float) -> None:
        """Reports segments that could not be read. Raises nothing."""


class DamagedSegments:
    """The segments that could not be read, which the next queries leave out. Thread-safe."""

    def __init__(self) -> None:
        # The dict is replaced, never changed, so that threads may read it without a lock.
        self._until: dict[str, float] = {}

    def without(self, segments: Segments) -> tuple[dict[str, list[QueryFile]], list[str]]:
        """Returns ``segments`` without damaged segments, and a warning for each table that has damaged segments."""
        now = time.monotonic()
        self._until = {path: until for path, until in self._until.items() if until > now}
        kept: dict[str, list[QueryFile]] = {}
        warnings = []
        for name, files in segments.items():
            kept[name] = [file for file in files if file.path not in self._until]
            if left_out := len(files) - len(kept[name]):
                warnings.append(f"{name}: {left_out} damaged segment{'s' * (left_out > 1)} left out")
        return kept, warnings

    def add(self, paths: Sequence[str]) -> Sequence[str]:
        """Leaves out the segments at ``paths`` for SET_ASIDE_S; returns ``paths``."""
        if paths:
            known = {**self._until, **dict.fromkeys(paths, time.monotonic() + SET_ASIDE_S)}
            self._until = dict(list(known.items())[-MAX_SET_ASIDE:])
        return paths
