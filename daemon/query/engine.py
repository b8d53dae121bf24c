"""Answers queries: the gate checks them, and a worker runs them over live rows and a snapshot of the store.

A request has one or several SELECTs. They share one check by the gate, one reading of each live table, one snapshot of
the store and one worker. So they see the same rows, and ``now()`` is the same time in all.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TypedDict

from probing.api.errors import InternalError, ProbingError, QueryError, QueryRejected, QueryTimeout
from probing.api.tables import TABLES
from probing.api.tables.schema import View
from probing.api.tables.user import user_table_to
from probing.api.typed import typed
from probing.api.wire import MAX_STATEMENTS
from probing.daemon.ipc import Message, error_of
from probing.daemon.query.answer import Checked, End, Item, QueryProgress, StatementEnd
from probing.daemon.query.caller import NOBODY, Caller, stop_if
from probing.daemon.query.concurrency import QuerySlots
from probing.daemon.query.gatekeeper import Gatekeeper
from probing.daemon.query.pool import WorkerPool
from probing.daemon.query.snapshot import DamagedSegments, QueryFile, QuerySnapshot, Segments, Store
from probing.daemon.store.needs import Need

__all__ = ("Engine",)

MAX_LIVE_BYTES = 256 << 20
# A request is large if its statements together scan more rows than this, which takes about a second.
LARGE_ROWS = 8_000_000
# The timeout for reporting damaged segments to the store at the end of a query, s.
REPORT_S = 0.5
_Cancelled = Callable[[], bool]


@dataclass(frozen=True, slots=True)
class _Request:
    """A request. ``limited``: the caller sees only rows of some jobs, and no count that includes rows of other jobs."""

    statements: list[Checked | ProbingError]
    started: float
    deadline: float
    max_bytes: int
    cancelled: _Cancelled
    progress: bool
    rows_only: bool
    limited: bool = False

    @property
    def left(self) -> float:
        """Returns the seconds until the deadline."""
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise QueryTimeout("the query did not end in time")
        return left

    @property
    def runnable(self) -> list[Checked]:
        """The statements that have not failed."""
        return [one for one in self.statements if isinstance(one, Checked)]

    def without(self, failed: Mapping[str, ProbingError]) -> _Request:
        """Returns this request, with each statement that names a failed table replaced by the table's error.
        ``failed``: the errors by table name.
        """

        def outcome(one: Checked | ProbingError) -> Checked | ProbingError:
            if isinstance(one, ProbingError):
                return one
            return next((failed[name] for name in one.tables if name in failed), one)

        return replace(self, statements=[outcome(one) for one in self.statements])

    def rows_to_scan(self, segments: Segments) -> int:
        """Returns the number of rows that the statements read from segments, summed over the statements."""
        return sum(_rows(segments.get(name, ())) for one in self.runnable for name in one.tables)


class Engine:
    """Answers SELECTs. Thread-safe. ``QuerySlots(concurrent)`` limits the requests that run at the same time."""

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
        """Makes the engine. ``gate``: the workers that check statements. ``live`` makes the rows of live tables that do
        not come from ``store``; ``views`` returns the views of the schema ``view``."""
        self._store = store
        self._pool = pool
        self._gate = Gatekeeper(gate)
        self._live = dict(live or {})
        self._views = views
        self._slots = QuerySlots(concurrent)
        self._now_ns = now_ns
        self._damaged = DamagedSegments()

    @property
    def running(self) -> int:
        """Returns the number of requests that have a slot now."""
        return self._slots.held

    @property
    def waiting(self) -> int:
        """Returns the number of requests that wait for a slot."""
        return self._slots.waiting

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
    ) -> Generator[bytes | QueryProgress | End, None, None]:
        """Yields the items of ``run_all`` for one statement, without the StatementEnd. Raises the statement's error."""
        error: ProbingError | None = None
        warnings: tuple[str, ...] = ()
        items = self.run_all(
            [sql],
            timeout=timeout,
            max_bytes=max_bytes,
            cancelled=cancelled,
            progress=progress,
            caller=caller,
            resting=resting,
        )
        with closing(items):
            for item in items:
                if isinstance(item, StatementEnd):
                    error, warnings = item.error, item.warnings
                elif not isinstance(item, End):
                    yield item
                elif error is not None:
                    raise error
                else:
                    yield replace(item, warnings=[*warnings, *item.warnings])

    def run_all(
        self,
        statements: Sequence[str],
        *,
        timeout: float,
        max_bytes: int,
        cancelled: _Cancelled = lambda: False,
        progress: bool = False,
        caller: Caller = NOBODY,
        resting: Callable[[], bool] = lambda: False,
        rows_only: bool = False,
    ) -> Generator[Item, None, None]:
        """Yields, for each statement in turn, the pieces of an Arrow IPC stream and a StatementEnd; after the last
        statement an End. With ``progress`` also yields QueryProgress items before the first piece of a statement.

        ``rows_only``: the caller knows that a statement over empty tables returns no rows, and does not need the
        columns of an empty answer. So a statement whose tables are empty is not run and has no pieces.

        ``timeout`` in seconds covers the request, including the time in which the caller reads the pieces.
        ``max_bytes`` limits all pieces together; 0: no limit. While ``resting`` returns True, because the caller reads
        nothing, other requests do not wait for this one. Raises QueryRejected for more than MAX_STATEMENTS, QueryError
        or a subclass if the whole request fails, and PeerError when the collector does not answer.
        """
        if len(statements) > MAX_STATEMENTS:
            raise QueryRejected(f"more than {MAX_STATEMENTS} statements in one request", hint="send several requests")
        started = time.monotonic()
        deadline = started + timeout
        found = self._gate.check(
            statements,
            self._now_ns(),
            lambda: self._store.tables(max(deadline - time.monotonic(), 0.001)),
            self._views,
            deadline=deadline,
            cancelled=cancelled,
            caller=caller,
        )
        limited = caller.jobs is not None
        request = _Request(found, started, deadline, max_bytes, cancelled, progress, rows_only, limited)
        if not request.runnable:
            yield from _all_failed(request)
            return
        with self._slots.taken(deadline, cancelled, caller, resting) as slot:
            live, failed = self._live_rows(request)
            request = request.without(failed)
            needs = _needs(request.runnable, live)
            if not request.runnable:
                yield from _all_failed(request)
                return
            if not needs:
                yield from self._ask(request, QuerySnapshot({}, []), live)
                return
            with self._store.snapshot(needs, request.left, cancelled) as snapshot:
                if request.rows_to_scan(snapshot.segments) > LARGE_ROWS:
                    self._slots.grow(slot)
                yield from self._ask(request, snapshot, live)

    def _live_rows(self, request: _Request) -> tuple[dict[str, bytes], dict[str, ProbingError]]:
        """Returns the rows of the live tables that the statements name, and the error of each table that could not be
        read.
        """
        names = sorted({name for one in request.runnable for name in one.tables if name in TABLES})
        rows: dict[str, bytes] = {}
        failed: dict[str, ProbingError] = {}
        for name in names:
            if TABLES[name].live:
                try:
                    rows[name] = self._rows_of(name, request)
                except ProbingError as e:
                    failed[name] = e
        return rows, failed

    def _rows_of(self, name: str, request: _Request) -> bytes:
        stop_if(request.cancelled)
        make = self._live.get(name)
        rows = make() if make else self._store.live(name, request.left, request.cancelled)
        if len(rows) > MAX_LIVE_BYTES:
            raise QueryError(f"{name} has more than {MAX_LIVE_BYTES} bytes of rows now")
        return rows

    def _ask(self, request: _Request, snapshot: QuerySnapshot, live: Mapping[str, bytes]) -> Iterator[Item]:
        segments, left_out = self._damaged.without(snapshot.segments)
        header, payload = _job(request, segments, snapshot.parts, live)
        waiting = deque(enumerate(request.statements))
        rows = 0
        to_scan = 0 if request.limited else request.rows_to_scan(segments)
        yield from _failed_first(waiting)
        for message in self._pool.run(header, payload, deadline=request.deadline, cancelled=request.cancelled):
            answer = _answer_of(message)
            if "part" in answer:
                yield message.payload
            elif "progress" in answer:
                elapsed_ms = int((time.monotonic() - request.started) * 1000)
                yield QueryProgress(answer["progress"], to_scan, elapsed_ms)
            elif "statement" in answer and waiting:
                statement = _statement_end(answer["statement"], *waiting.popleft())
                rows += statement.rows
                yield statement
                yield from _failed_first(waiting)
            elif "error" in answer:
                raise error_of(answer["error"])
            elif "end" in answer:
                if paths := self._damaged.add(answer["end"]["damaged"]):
                    self._store.damaged(paths, REPORT_S)
                if waiting:
                    raise InternalError("a worker did not answer every statement")
                scanned = rows if request.limited else answer["end"]["tail_rows"] + sum(map(_rows, segments.values()))
                yield End(rows, scanned, [*snapshot.missing, *left_out, *answer["end"]["warnings"]])
            else:
                raise InternalError("a worker sent a message that the engine does not know")


class _StatementAnswer(TypedDict, total=False):
    rows: int
    error: dict[str, str]


class _JobEnd(TypedDict):
    tail_rows: int
    warnings: list[str]
    damaged: list[str]


class _WorkerAnswer(TypedDict, total=False):
    """A message of a worker, which has one of these fields."""

    part: str
    progress: float
    statement: _StatementAnswer
    error: dict[str, str]
    end: _JobEnd


def _answer_of(message: Message) -> _WorkerAnswer:
    try:
        return typed(_WorkerAnswer, message.header)
    except ValueError as e:
        raise InternalError(f"a worker's answer is malformed: {e}") from e


def _statement_end(answer: _StatementAnswer, index: int, statement: Checked | ProbingError) -> StatementEnd:
    warnings = statement.warnings if isinstance(statement, Checked) else ()
    if "error" in answer:
        return StatementEnd(index, 0, warnings, error_of(answer["error"]))
    if "rows" in answer:
        return StatementEnd(index, answer["rows"], warnings)
    raise InternalError("a worker answered a statement without rows and without an error")


def _job(
    request: _Request, segments: Segments, parts: list[tuple[str, int]], live: Mapping[str, bytes]
) -> tuple[dict[str, object], bytes]:
    """Returns the message for a worker, header and payload, which ``query/job.py`` reads."""
    users = {name: table for one in request.runnable for name, table in one.users.items()}
    whole = any(one.columns is None for one in request.runnable)
    spec = {
        "statements": [one.sql for one in request.runnable],
        "segments": {name: [segment.path for segment in found] for name, found in segments.items()},
        "parts": parts,
        "max_bytes": request.max_bytes,
        "users": [user_table_to(table) for table in users.values()],
        "progress": request.progress,
        "reads": [one.tables for one in request.runnable] if request.rows_only else None,
        "columns": None if whole else sorted({name for one in request.runnable for name in one.columns or ()}),
    }
    text = json.dumps(spec, separators=(",", ":")).encode()
    header = {"op": "query", "spec_bytes": len(text), "live": [(name, len(rows)) for name, rows in live.items()]}
    return header, b"".join((text, *live.values()))


def _needs(statements: Iterable[Checked], live: Mapping[str, bytes]) -> dict[str, Need]:
    """Returns, for each stored table, the rows that the statements together need."""
    needs: dict[str, Need] = {}
    for one in statements:
        for name, need in one.needs.items():
            if name not in live:
                needs[name] = needs[name].either(need) if name in needs else need
    return needs


def _all_failed(request: _Request) -> Iterator[StatementEnd | End]:
    yield from _failed_first(deque(enumerate(request.statements)))
    yield End(0, 0)


def _failed_first(waiting: deque[tuple[int, Checked | ProbingError]]) -> Iterator[StatementEnd]:
    """Removes the failed statements from the front of ``waiting``, and yields their ends."""
    while waiting and isinstance(error := waiting[0][1], ProbingError):
        yield StatementEnd(waiting.popleft()[0], error=error)


def _rows(segments: Iterable[QueryFile]) -> int:
    return sum(segment.rows for segment in segments)
