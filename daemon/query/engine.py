"""A query from its text to its rows: the gate, a snapshot of the store, live rows, a worker."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from probing.api.errors import InternalError, QueryError, QueryTimeout, error_from
from probing.api.tables import TABLES, Table
from probing.api.tables.schema import View
from probing.api.tables.user import user_table_to
from probing.daemon.query.caller import NOBODY, Caller
from probing.daemon.query.cancellation import stop_if
from probing.daemon.query.concurrency import Slots
from probing.daemon.query.gate import Checked
from probing.daemon.query.gatekeeper import Gatekeeper
from probing.daemon.query.pool import WorkerPool
from probing.daemon.query.pruning import EVER, Range

__all__ = ("End", "Engine", "Need", "Progress", "Segment", "Snapshot", "Store")

# How long a segment that could not be read is left out before it is tried again, s.
SET_ASIDE_S = 600.0
MAX_SET_ASIDE = 10_000
MAX_LIVE_BYTES = 256 << 20
# A query over more rows than this is a large one. One over so many is answered within about a second.
LARGE_ROWS = 8_000_000
# How long a query's end may wait to tell the store of damaged segments, s.
TELL_S = 0.5
_Cancelled = Callable[[], bool]


@dataclass(frozen=True)
class Segment:
    """A Parquet file; ``first`` and ``last`` are its earliest and latest ``ts``, UTC ns, ``jobs`` all values of its
    column ``job``; None: not known."""

    path: str
    rows: int
    first: int
    last: int
    jobs: frozenset[str] | None = None


@dataclass(frozen=True)
class Need:
    """Which rows of a table a query can need; ``jobs`` None: of any."""

    times: Range = EVER
    jobs: frozenset[str] | None = None

    def holds(self, segment: Segment) -> bool:
        """Whether some row of ``segment`` can be needed."""
        if self.jobs is not None and segment.jobs is not None and self.jobs.isdisjoint(segment.jobs):
            return False
        return self.times.holds(segment.first, segment.last)


@dataclass(frozen=True)
class Snapshot:
    """What a query reads: segments by table, and the log's ``parts`` (path, length). ``missing``: the rows that it
    lacks, for who asks."""

    segments: dict[str, list[Segment]]
    parts: list[tuple[str, int]]
    missing: list[str] = field(default_factory=list)


class Store(Protocol):
    """Who knows the rows. All raise PeerError when it does not answer, and QueryError when ``cancelled`` says so."""

    def snapshot(
        self, needs: Mapping[str, Need], timeout: float, cancelled: _Cancelled
    ) -> AbstractContextManager[Snapshot]:
        """Files that stay until the context ends. Those without a row that is needed of a table may be left out."""

    def live(self, table: str, timeout: float, cancelled: _Cancelled) -> bytes:
        """Rows of a live table in its logical schema, as an Arrow IPC stream."""

    def tables(self, timeout: float) -> Mapping[str, Table]:
        """The tables of users' probes, now and before."""

    def damaged(self, paths: Sequence[str], timeout: float) -> None:
        """Segments that could not be read. Raises nothing: whether that helps is not the query's matter."""


@dataclass(frozen=True)
class Progress:
    """``fraction`` of the work that is known so far, 0 to 1; negative while that cannot be told. ``rows_to_scan``:
    rows in the files that are read; ``elapsed_ms`` since the query was asked."""

    fraction: float
    rows_to_scan: int
    elapsed_ms: int


@dataclass(frozen=True)
class End:
    """What follows the rows. ``rows_scanned``: rows in the files that were opened."""

    rows: int
    rows_scanned: int
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Asked:
    checked: Checked
    started: float
    deadline: float
    max_bytes: int
    cancelled: _Cancelled
    progress: bool

    @property
    def left(self) -> float:
        """Seconds to the deadline."""
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise QueryTimeout("the query did not end in time")
        return left


class Engine:
    """Answers SELECTs; safe for many threads. ``concurrent`` of them run at once as ``Slots`` says, the others wait."""

    def __init__(
        self,
        store: Store,
        pool: WorkerPool,
        gate: WorkerPool,
        *,
        live: Mapping[str, Callable[[], bytes]] | None = None,
        concurrent: int = 4,
        now_ns: Callable[[], int] = time.time_ns,
        views: Callable[[], Mapping[str, View]] = dict,
    ) -> None:
        """``gate``: workers that check. ``live`` makes live tables that need no ``store``; ``views`` gives the views
        of the schema ``view``."""
        self._store = store
        self._pool = pool
        self._gate = Gatekeeper(gate)
        self._live = dict(live or {})
        self._views = views
        self._slots = Slots(concurrent)
        self._now_ns = now_ns
        self._damaged: dict[str, float] = {}

    @property
    def running(self) -> int:
        """Queries that have a slot now."""
        return self._slots.held

    def run(
        self,
        sql: str,
        *,
        timeout: float,
        max_bytes: int,
        cancelled: _Cancelled = lambda: False,
        progress: bool = False,
        caller: Caller = NOBODY,
        resting: Callable[[], bool] = lambda: False,
    ) -> Generator[bytes | Progress | End, None, None]:
        """Pieces of one Arrow IPC stream, then an End; before the first piece Progress now and then, if it is wanted.

        ``timeout`` in seconds covers all of it, also the time in which the caller takes the pieces. ``max_bytes`` of
        the stream; 0: any number. While it is ``resting``, since nobody takes its pieces, the query keeps no other
        waiting. Raises QueryError and its kin, PeerError when the collector does not answer.
        """
        started = time.monotonic()
        deadline = started + timeout
        checked = self._gate.check(
            sql,
            self._now_ns(),
            lambda: self._store.tables(max(deadline - time.monotonic(), 0.001)),
            self._views,
            deadline=deadline,
            cancelled=cancelled,
            caller=caller,
        )
        asked = _Asked(checked, started, deadline, max_bytes, cancelled, progress)
        with self._slots.taken(deadline, cancelled, caller, resting) as slot:
            live_ones = [name for name in checked.tables if name in TABLES and TABLES[name].live]
            live = {name: self._live_rows(name, asked) for name in live_ones}
            needs = {
                name: Need(checked.ranges[name], checked.jobs.get(name))
                for name in checked.tables
                if name not in live_ones
            }
            if not needs:
                yield from self._ask(asked, Snapshot({}, []), {}, live)
                return
            with self._store.snapshot(needs, asked.left, cancelled) as snapshot:
                needed = {
                    name: [segment for segment in found if needs[name].holds(segment)]
                    for name, found in snapshot.segments.items()
                }
                if _rows(needed) > LARGE_ROWS:
                    self._slots.grow(slot)
                yield from self._ask(asked, snapshot, needed, live)

    def _live_rows(self, name: str, asked: _Asked) -> bytes:
        stop_if(asked.cancelled)
        make = self._live.get(name)
        rows = make() if make else self._store.live(name, asked.left, asked.cancelled)
        if len(rows) > MAX_LIVE_BYTES:
            raise QueryError(f"{name} has more than {MAX_LIVE_BYTES} bytes of rows now")
        return rows

    def _ask(
        self, asked: _Asked, snapshot: Snapshot, needed: Mapping[str, list[Segment]], live: Mapping[str, bytes]
    ) -> Iterator[bytes | Progress | End]:
        segments, damaged = self._readable(needed)
        warnings = [*asked.checked.warnings, *snapshot.missing, *damaged]
        spec = {
            "sql": asked.checked.sql,
            "segments": {name: [segment.path for segment in found] for name, found in segments.items()},
            "parts": snapshot.parts,
            "max_bytes": asked.max_bytes,
            "users": [user_table_to(table) for table in asked.checked.users.values()],
            "progress": asked.progress,
        }
        text = json.dumps(spec, separators=(",", ":")).encode()
        header: dict[str, object] = {
            "op": "query", "spec_bytes": len(text), "live": [(name, len(rows)) for name, rows in live.items()]
        }
        rows = _rows(segments)
        payload = b"".join((text, *live.values()))
        for message in self._pool.run(header, payload, deadline=asked.deadline, cancelled=asked.cancelled):
            if "part" in message.header:
                yield message.payload
            elif "progress" in message.header:
                elapsed_ms = int((time.monotonic() - asked.started) * 1000)
                yield Progress(float(message.header["progress"]), rows, elapsed_ms)
            else:
                self._remember_damaged(message.header)
                if error := message.header.get("error"):
                    raise error_from(str(error.get("kind")), str(error.get("message")), str(error.get("hint", "")))
                yield _end(message.header, rows, warnings)

    def _readable(self, needed: Mapping[str, list[Segment]]) -> tuple[dict[str, list[Segment]], list[str]]:
        """``needed`` without the segments that are known to be damaged, and a warning of each table that has some."""
        now = time.monotonic()
        self._damaged = {path: until for path, until in self._damaged.items() if until > now}
        kept: dict[str, list[Segment]] = {}
        warnings = []
        for name, found in needed.items():
            kept[name] = [segment for segment in found if segment.path not in self._damaged]
            if left_out := len(found) - len(kept[name]):
                warnings.append(f"{name}: {left_out} damaged segment{'s' * (left_out > 1)} left out")
        return kept, warnings

    def _remember_damaged(self, header: Mapping[str, Any]) -> None:
        paths = [str(path) for path in (header.get("end") or header).get("damaged", ())]
        if paths:
            until = time.monotonic() + SET_ASIDE_S
            known = {**self._damaged, **dict.fromkeys(paths, until)}
            self._damaged = dict(list(known.items())[-MAX_SET_ASIDE:])
            self._store.damaged(paths, TELL_S)


def _rows(segments: Mapping[str, list[Segment]]) -> int:
    return sum(segment.rows for found in segments.values() for segment in found)


def _end(header: Mapping[str, Any], scanned: int, warnings: list[str]) -> End:
    try:
        end = header["end"]
        return End(int(end["rows"]), scanned + int(end["tail_rows"]), [*warnings, *map(str, end["warnings"])])
    except (KeyError, TypeError, ValueError) as e:
        raise InternalError("a worker's answer makes no sense") from e
