"""What the engine needs of the process that keeps the rows, and what a query reads of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from probing.api.tables import Table
from probing.daemon.store.needs import Need

__all__ = ("QueryFile", "QuerySnapshot", "Store")


class QueryFile(NamedTuple):
    """A Parquet file and how many rows it has."""

    path: str
    rows: int


@dataclass(frozen=True, slots=True)
class QuerySnapshot:
    """The rows of one instant: segments by table, and ``parts`` of the log (path, length). ``missing``: which rows it
    lacks and why, for the caller."""

    segments: dict[str, list[QueryFile]]
    parts: list[tuple[str, int]]
    missing: list[str] = field(default_factory=list)


class Store(Protocol):
    """The collector, seen from the engine. All methods but ``damaged`` raise PeerError if it does not answer, and
    QueryError once ``cancelled`` returns True."""

    def snapshot(
        self, needs: Mapping[str, Need], timeout: float, cancelled: Callable[[], bool]
    ) -> AbstractContextManager[QuerySnapshot]:
        """The segments that can have rows in ``needs``, and the log. The files stay until the context ends."""

    def live(self, table: str, timeout: float, cancelled: Callable[[], bool]) -> bytes:
        """Rows of a live table in its logical schema, as an Arrow IPC stream."""

    def tables(self, timeout: float) -> Mapping[str, Table]:
        """The tables of users' probes, present and past."""

    def damaged(self, paths: Sequence[str], timeout: float) -> None:
        """Reports segments that could not be read. Raises nothing."""
