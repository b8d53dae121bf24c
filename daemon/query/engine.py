"""A query from its text to its rows: the gate, a snapshot of the store, live rows, a worker."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from probing.api.errors import InternalError, QueryError, QueryTimeout, error_from
from probing.api.tables import TABLES, Table
from probing.api.tables.user import user_table_to
from probing.daemon.query.gate import Checked, check
from probing.daemon.query.pool import WorkerPool

__all__ = ("End", "Engine", "Segment", "Snapshot", "Store")

# How long a segment that could not be read is left out before it is tried again, s.
SET_ASIDE_S = 600.0
MAX_LIVE_BYTES = 256 << 20


@dataclass(frozen=True)
class Segment:
    """A Parquet file; ``first`` and ``last`` are its earliest and latest ``ts``, UTC ns."""

    path: str
    rows: int
    first: int
    last: int


@dataclass(frozen=True)
class Snapshot:
    """What a query reads: segments by table, and the log's ``parts`` (path, length)."""

    segments: dict[str, list[Segment]]
    parts: list[tuple[str, int]]


class Store(Protocol):
    """Who knows the rows. All raise PeerError when it does not answer."""

    def snapshot(self, tables: tuple[str, ...], timeout: float) -> AbstractContextManager[Snapshot]:
        """Files that stay until the context ends."""

    def live(self, table: str, timeout: float) -> bytes:
        """Rows of a live table in its logical schema, as an Arrow IPC stream."""

    def tables(self, timeout: float) -> Mapping[str, Table]:
        """The tables of users' probes, now and before."""


@dataclass(frozen=True)
class End:
    """What follows the rows. ``rows_scanned``: rows in the files that were opened."""

    rows: int
    rows_scanned: int
    warnings: list[str] = field(default_factory=list)


class Engine:
    """Answers SELECTs; safe for many threads, of which ``concurrent`` run at once and the others wait."""

    def __init__(
        self,
        store: Store,
        pool: WorkerPool,
        *,
        live: Mapping[str, Callable[[], bytes]] | None = None,
        concurrent: int = 4,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """``live`` makes live tables that need no ``store``."""
        self._store = store
        self._pool = pool
        self._live = dict(live or {})
        self._slots = threading.BoundedSemaphore(concurrent)
        self._now_ns = now_ns
        self._damaged: dict[str, float] = {}

    def run(
        self, sql: str, *, timeout: float, max_bytes: int, cancelled: Callable[[], bool] = lambda: False
    ) -> Iterator[bytes | End]:
        """Pieces of one Arrow IPC stream, then an End. ``timeout`` in seconds covers all of it.

        Raises QueryError and its kin, PeerError when the collector does not answer.
        """
        deadline = time.monotonic() + timeout
        checked = check(sql, self._now_ns(), lambda: self._store.tables(_left(deadline)))
        if not self._slots.acquire(timeout=timeout):
            raise QueryTimeout("other queries kept the node busy", hint="ask again, or end the other queries")
        try:
            yield from self._run(checked, deadline, max_bytes, cancelled)
        finally:
            self._slots.release()

    def _run(
        self, checked: Checked, deadline: float, max_bytes: int, cancelled: Callable[[], bool]
    ) -> Iterator[bytes | End]:
        live_ones = [name for name in checked.tables if name in TABLES and TABLES[name].live]
        stored = tuple(name for name in checked.tables if name not in live_ones)
        live = {name: self._live_rows(name, deadline) for name in live_ones}
        if not stored:
            yield from self._ask(checked, Snapshot({}, []), live, deadline, max_bytes, cancelled)
            return
        with self._store.snapshot(stored, _left(deadline)) as snapshot:
            yield from self._ask(checked, snapshot, live, deadline, max_bytes, cancelled)

    def _live_rows(self, name: str, deadline: float) -> bytes:
        make = self._live.get(name)
        rows = make() if make else self._store.live(name, _left(deadline))
        if len(rows) > MAX_LIVE_BYTES:
            raise QueryError(f"{name} has more than {MAX_LIVE_BYTES} bytes of rows now")
        return rows

    def _ask(
        self,
        checked: Checked,
        snapshot: Snapshot,
        live: Mapping[str, bytes],
        deadline: float,
        max_bytes: int,
        cancelled: Callable[[], bool],
    ) -> Iterator[bytes | End]:
        segments, warnings = self._needed(checked, snapshot)
        spec = {
            "sql": checked.sql,
            "segments": {name: [segment.path for segment in found] for name, found in segments.items()},
            "parts": snapshot.parts,
            "max_bytes": max_bytes,
            "users": [user_table_to(table) for table in checked.users.values()],
        }
        text = json.dumps(spec, separators=(",", ":")).encode()
        header: dict[str, object] = {
            "op": "query", "spec_bytes": len(text), "live": [(name, len(rows)) for name, rows in live.items()]
        }
        scanned = sum(segment.rows for found in segments.values() for segment in found)
        payload = b"".join((text, *live.values()))
        for message in self._pool.run(header, payload, deadline=deadline, cancelled=cancelled):
            if "part" in message.header:
                yield message.payload
                continue
            self._remember_damaged(message.header)
            if error := message.header.get("error"):
                raise error_from(str(error.get("kind")), str(error.get("message")), str(error.get("hint", "")))
            yield _end(message.header, scanned, warnings)

    def _needed(self, checked: Checked, snapshot: Snapshot) -> tuple[dict[str, list[Segment]], list[str]]:
        """The segments that the query can need rows of, and a warning for those among them known to be damaged."""
        now = time.monotonic()
        self._damaged = {path: until for path, until in self._damaged.items() if until > now}
        kept: dict[str, list[Segment]] = {}
        warnings = []
        for name, all_of_it in snapshot.segments.items():
            found = [s for s in all_of_it if checked.ranges[name].holds(s.first, s.last)]
            kept[name] = [segment for segment in found if segment.path not in self._damaged]
            if left_out := len(found) - len(kept[name]):
                warnings.append(f"{name}: {left_out} damaged segment{'s' * (left_out > 1)} left out")
        return kept, warnings

    def _remember_damaged(self, header: Mapping[str, Any]) -> None:
        outcome = header.get("end") or header
        until = time.monotonic() + SET_ASIDE_S
        self._damaged = {**self._damaged, **{str(path): until for path in outcome.get("damaged", ())}}


def _end(header: Mapping[str, Any], scanned: int, warnings: list[str]) -> End:
    try:
        end = header["end"]
        return End(int(end["rows"]), scanned + int(end["tail_rows"]), [*warnings, *map(str, end["warnings"])])
    except (KeyError, TypeError, ValueError) as e:
        raise InternalError("a worker's answer makes no sense") from e


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise QueryTimeout("the query did not end in time")
    return left
