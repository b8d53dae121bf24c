"""Runs the statements of one request in a worker: makes views over the files and rows of a snapshot, and answers in
Arrow.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import duckdb
import pyarrow as pa

from probing.api.errors import TOO_LARGE, FormatError, InternalError, QueryError, QueryMemory, StoreError
from probing.api.tables import TABLES, Table
from probing.api.tables.user import user_table_from
from probing.api.text import sql_text
from probing.daemon.arrow import Gathered
from probing.daemon.query.database import Instance, Views, explain
from probing.daemon.store.log.cache import LogCache

__all__ = ("Database", "Job", "Outcome")

# The first rows are held back until they have this many bytes. If an error comes before that, no row was sent, and the
# statement can be run again.
FIRST_BYTES = 4 << 20
CHUNK_BYTES = 1 << 20
BATCH_ROWS = 16_384
# The maximum size of a batch, bytes. A larger batch is split into batches of fewer rows, so that a reader need not hold
# much in memory at once.
BATCH_BYTES = 4 << 20
PROGRESS_S = 0.25
# Errors that the query and its values cause; a damaged file may cause any other error.
_FROM_THE_QUERY = re.compile(
    r"\s*(Binder|Catalog|Constraint|Conversion|Dependency|Not implemented|Out of Memory|Out of Range|Parser|Permission"
    r"|Syntax|Invalid Type|Mismatch Type|INTERRUPT|Interrupt) Error: "
)
_tails = LogCache()
_FAILURES = (duckdb.Error, pa.ArrowException, MemoryError, OSError)


@dataclass(slots=True)
class Job:
    """A request of the engine: checked ``statements``, ``segments`` (paths) by stored table, ``parts`` of the log
    (path, length), ``live`` rows by table. ``max_bytes`` limits all answers together; 0: no limit. ``users``: tables of
    users' probes. ``progress``: whether to report progress. ``columns``: names of the columns that the statements use;
    None: all. ``reads``: for each statement, the tables that it reads; None if statements must be run even over empty
    tables."""

    statements: list[str]
    segments: dict[str, list[str]]
    parts: list[tuple[str, int]]
    live: dict[str, pa.Table]
    max_bytes: int
    users: dict[str, Table] = field(default_factory=dict)
    progress: bool = False
    columns: frozenset[str] | None = None
    reads: list[frozenset[str]] | None = None

    @property
    def known(self) -> dict[str, Table]:
        """Returns the tables that a statement may name."""
        return {**self.users, **TABLES}

    @classmethod
    def unpack(cls, header: Mapping[str, Any], payload: bytes) -> Job:
        """Returns the job in the engine's message. Raises InternalError for a message that is malformed."""
        try:
            return cls._unpack(header, memoryview(payload))
        except (AttributeError, KeyError, OSError, TypeError, ValueError, FormatError, pa.ArrowException) as e:
            raise InternalError(f"a request for a query is malformed: {type(e).__name__}: {e}") from e

    @classmethod
    def _unpack(cls, header: Mapping[str, Any], payload: memoryview) -> Job:
        start = int(header["spec_bytes"])
        spec = json.loads(bytes(payload[:start]))
        live: dict[str, pa.Table] = {}
        for table, length in header["live"]:
            with pa.ipc.open_stream(pa.py_buffer(payload[start : start + int(length)])) as reader:
                rows = reader.read_all()
            rows.validate(full=True)
            live[str(table)] = rows
            start += int(length)
        segments = {str(name): [str(path) for path in paths] for name, paths in spec["segments"].items()}
        parts = [(str(path), int(length)) for path, length in spec["parts"]]
        users = {table.name: table for table in map(user_table_from, spec.get("users", ()))}
        statements = [str(sql) for sql in spec["statements"]]
        columns = None if (named := spec.get("columns")) is None else frozenset(map(str, named))
        reads = None if (read := spec.get("reads")) is None else [frozenset(map(str, names)) for names in read]
        if reads is not None and len(reads) != len(statements):
            raise ValueError('"reads" and "statements" have different lengths')
        progress = bool(spec.get("progress"))
        return cls(statements, segments, parts, live, int(spec["max_bytes"]), users, progress, columns, reads)


@dataclass(slots=True)
class Outcome:
    """The results of a job other than rows: ``tail_rows`` of the log, ``warnings``, and ``damaged`` segments."""

    tail_rows: int = 0
    warnings: list[str] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, object]:
        return {"tail_rows": self.tail_rows, "warnings": self.warnings, "damaged": self.damaged}


@dataclass(slots=True)
class _Answer:
    rows: int = 0
    started: bool = False


class Database:
    """The tables of ``job`` in DuckDB. The views are made before the first statement, and again after a failed
    statement.
    """

    def __init__(self, job: Job, instance: Instance, outcome: Outcome) -> None:
        """Decodes the log. Adds warnings and damaged segments to ``outcome``, now and while statements run."""
        self._job = job
        self._instance = instance
        self._outcome = outcome
        # The views have only these columns (None: all), because DuckDB binds each column of a view twice, which takes
        # long.
        self._columns = job.columns
        self._connection: duckdb.DuckDBPyConnection | None = None
        self._sent = 0
        self._tails = _read_tails(job, outcome)
        segments = {name for name, paths in job.segments.items() if paths}
        rows = (*self._tails.items(), *job.live.items())
        self._filled = segments | {name for name, table in rows if table.num_rows}

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            names = (*self._job.segments, *self._job.live)
            self._instance.release(connection, {name.partition(".")[0] for name in names})

    def needs_no_run(self, number: int) -> bool:
        """Returns whether statement ``number`` of the job has no row to read, and so need not be run."""
        reads = self._job.reads
        return reads is not None and reads[number].isdisjoint(self._filled)

    def answer(self, sql: str, send: Callable[[memoryview], None], tell: Callable[[float], None] | None = None) -> int:
        """Sends the answer to ``sql`` through ``send``, without segments that cannot be read. Returns the number of
        rows.

        If the job wants progress, another thread calls ``tell`` with the share of the work that is done, until the
        first rows are sent. Raises QueryError and its subclasses.
        """
        while True:
            answer = _Answer()
            try:
                self._run(sql, send, tell, answer)
                return answer.rows
            except _FAILURES as e:
                self._discard()
                if isinstance(e, duckdb.BinderException) and self._columns is not None:
                    # The views get all columns, so that DuckDB's message can name similar columns.
                    self._columns = None
                    continue
                damaged = _damaged(self._job, e, self._instance)
                if not damaged:
                    raise explain(e) from None
                _set_aside(self._job, damaged, self._outcome)
                if answer.started:
                    message = "a segment is damaged, and some rows were sent already"
                    raise QueryError(message, hint="ask again: the next answer leaves the segment out") from None
            except BaseException:
                self._discard()
                raise

    def _discard(self) -> None:
        """Closes the connection and its DuckDB, which an error may have left in any state."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        self._instance.discard()

    def _run(
        self, sql: str, send: Callable[[memoryview], None], tell: Callable[[float], None] | None, answer: _Answer
    ) -> None:
        connection = self._connection = self._connection or self._prepared()
        statements = connection.extract_statements(sql)
        if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
            raise InternalError("the gate accepted a text that is not one SELECT")
        with _telling(connection, tell if self._job.progress else None):
            pieces = _stream(connection.sql(sql).to_arrow_reader(BATCH_ROWS), answer)
            data: memoryview | None = next(pieces)
        while data is not None:
            self._sent += len(data)
            if 0 < self._job.max_bytes < self._sent:
                raise QueryMemory(f"the answer is larger than {self._job.max_bytes} bytes", code=TOO_LARGE)
            answer.started = True
            for start in range(0, len(data), CHUNK_BYTES):
                send(data[start : start + CHUNK_BYTES])
            data = next(pieces, None)

    def _prepared(self) -> duckdb.DuckDBPyConnection:
        """Returns a locked connection with views over exactly the listed files."""
        job = self._job
        # These are the folders of tables, not of days, so that tomorrow's segments can be read by the same DuckDB.
        folders = {path.rsplit("/", 2)[0] for paths in job.segments.values() for path in paths}
        # The interval of DuckDB's progress can only be set before its configuration is locked.
        connection = self._instance.unlocked() if job.progress else self._instance.connect(folders)
        try:
            views = Views(connection, job.known)
            names = self._names_of_views()
            for name in names & job.segments.keys():
                views.stored(name, job.segments[name], self._tails.get(name), self._columns)
            for name in names & job.live.keys():
                views.live(name, job.live[name])
            if job.progress:
                connection.execute("SET enable_progress_bar = true; SET enable_progress_bar_print = false")
                connection.execute("SET progress_bar_time = 0")
                self._instance.lock(connection, folders)
        except BaseException:
            connection.close()
            raise
        return connection

    def _names_of_views(self) -> set[str]:
        """Returns the tables of the statements that are run. Only these get views, because making a view takes as long
        as a small query.
        """
        job = self._job
        if job.reads is None:
            return {*job.segments, *job.live}
        return set().union(*(names for number, names in enumerate(job.reads) if not self.needs_no_run(number)))


def _read_tails(job: Job, outcome: Outcome) -> dict[str, pa.Table]:
    """Returns the log's rows of each stored table that the job names."""
    found: dict[str, list[pa.Table]] = {name: [] for name in job.segments}
    known = job.known
    for path, length in job.parts:
        try:
            tail = _tails.read(path, length, found, known)
        except (OSError, StoreError) as e:
            reason = e.message if isinstance(e, StoreError) else str(getattr(e, "strerror", e))
            outcome.warnings.append(f"a part of the log was left out: {reason}")
            continue
        outcome.warnings.extend(tail.problems)
        for name, rows in tail.tables.items():
            found[name].append(rows)
            outcome.tail_rows += rows.num_rows
    return {name: pa.concat_tables(tables) for name, tables in found.items() if tables}


@contextmanager
def _telling(connection: duckdb.DuckDBPyConnection, tell: Callable[[float], None] | None) -> Iterator[None]:
    """Calls ``tell`` with the progress every PROGRESS_S while the block runs."""
    if tell is None:
        yield
        return
    done = threading.Event()

    def watch() -> None:
        while not done.wait(PROGRESS_S):
            percent = connection.query_progress()
            try:
                tell(min(percent / 100, 1.0))
            except InternalError:
                return  # the other end is gone, so sending the answer will fail, too

    thread = threading.Thread(target=watch, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _stream(reader: pa.RecordBatchReader, answer: _Answer) -> Iterator[memoryview]:
    """Yields pieces of an Arrow IPC stream. The first piece has at least FIRST_BYTES, or the whole stream."""
    collected = Gathered()
    # Arrow writes each buffer and its padding separately; this buffer joins them, so that there are fewer Python calls.
    sink = pa.BufferedOutputStream(pa.PythonFile(collected, mode="w"), 1 << 18)
    enough = FIRST_BYTES
    with pa.ipc.new_stream(sink, reader.schema) as writer:
        for batch in chain.from_iterable(map(_cut, reader)):
            writer.write_batch(batch)
            answer.rows += batch.num_rows
            if collected.size >= enough:
                yield memoryview(collected.take())
                enough = CHUNK_BYTES
    sink.flush()
    yield memoryview(collected.take())


def _cut(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Yields the rows of ``batch`` in batches of at most BATCH_BYTES, or of one row."""
    if batch.nbytes <= BATCH_BYTES or batch.num_rows < 2:
        yield batch
        return
    half = batch.num_rows // 2
    yield from _cut(batch.slice(0, half))
    yield from _cut(batch.slice(half))


def _damaged(job: Job, error: BaseException, instance: Instance) -> list[str]:
    """Returns the segments that cannot be read; empty if ``error`` cannot have come from a segment."""
    text = str(error)
    paths = [path for paths in job.segments.values() for path in paths]
    named = [path for path in paths if path in text]
    if not named and _FROM_THE_QUERY.match(text):
        return []
    return [path for path in named or paths if not _readable(path, instance)]


def _readable(path: str, instance: Instance) -> bool:
    connection = instance.unlocked()
    try:
        # The loop reads every column of every row.
        for _ in connection.sql(f"SELECT * FROM read_parquet({sql_text(path)})").to_arrow_reader(BATCH_ROWS):
            pass
    except _FAILURES as e:
        if isinstance(reason := explain(e), QueryMemory):
            raise reason from None
        return False
    finally:
        connection.close()
    return True


def _set_aside(job: Job, damaged: list[str], outcome: Outcome) -> None:
    for name, paths in job.segments.items():
        gone = [path for path in paths if path in damaged]
        job.segments[name] = [path for path in paths if path not in damaged]
        outcome.warnings.extend(f"{name}: a damaged segment was left out: {path.rsplit('/', 1)[-1]}" for path in gone)
    outcome.damaged.extend(damaged)
