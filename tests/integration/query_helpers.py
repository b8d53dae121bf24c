"""A small machine around the query engine: workers started like inetd does, a collector's socket, real files."""

from __future__ import annotations

import json
import math
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from forked_workers import ForkedWorker, forked_worker

from probing.api.errors import NotFound, ProbingError
from probing.api.tables import table_named
from probing.daemon.arrow import batch_of
from probing.daemon.ipc import connect
from probing.daemon.query.answer import End, StatementEnd
from probing.daemon.query.caller import stop_if
from probing.daemon.query.engine import Engine
from probing.daemon.query.pool import GATE, WorkerPool
from probing.daemon.query.snapshot import QueryFile, QuerySnapshot
from probing.daemon.store import Store
from probing.daemon.store.needs import Need

# As the supervisor starts a worker.
SQL_WORKER = ("-m", "probing.daemon.confined.sql_worker")
T0 = 1_795_000_000_000_000_000
NOW_NS = T0 + 60_000_000_000


class Inetd:
    """Listens on ``path`` and starts a worker of queries for each connection."""

    def __init__(self, path: Path, args: Sequence[str], command: Sequence[str] = ()) -> None:
        """``command``: what Python runs instead of the worker; ``SQL_WORKER`` for one that is no fork."""
        self._args = list(args)
        self._argv = [sys.executable, *command, *args] if command else []
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._server.bind(str(path))
        self._server.listen(16)
        self.children: list[subprocess.Popen[bytes] | ForkedWorker] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            with client:
                if self._argv:
                    self.children.append(subprocess.Popen(self._argv, stdin=client, cwd="/"))
                else:
                    self.children.append(forked_worker(self._args, client))

    def alive(self) -> list[subprocess.Popen[bytes] | ForkedWorker]:
        return [child for child in self.children if child.poll() is None]

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._thread.join(10)
        for child in self.children:
            child.kill()
            child.wait(10)


@dataclass(frozen=True)
class FileSegment:
    """A segment as the store knows it."""

    path: str
    rows: int
    first: int
    last: int
    jobs: frozenset[str] | None = None

    def needed(self, need: Need) -> bool:
        return need.holds(self.first, self.last, self.jobs)


@contextmanager
def snapshot_of(store: Store, needs: Mapping[str, Need]) -> Iterator[QuerySnapshot]:
    """A snapshot of all that ``store`` has of the tables in ``needs``."""
    found = store.snapshot()
    tables = found["tables"]
    try:
        yield QuerySnapshot(
            {name: [QueryFile(s["path"], s["rows"]) for s in tables.get(name, ())] for name in needs},
            [(part["path"], part["length"]) for part in found["parts"]],
        )
    finally:
        store.release(found["generation"])


class Files:
    """A store of files: segments written by pyarrow, parts of the log as the tests give them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.segments: dict[str, list[FileSegment]] = {}
        self.snapshots: list[dict[str, Need]] = []
        self.filled: list[str] = []
        self.parts: list[tuple[str, int]] = []
        self.live_rows: dict[str, bytes] = {}
        self.held = 0
        self.reported_damaged: list[str] = []

    def segment(self, table: str, rows: pa.Table | Sequence[Mapping[str, Any]]) -> Path:
        data = rows if isinstance(rows, pa.Table) else pa.Table.from_batches([batch_of(table, rows)])
        path = self.root / table / f"{len(self.segments.get(table, []))}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(data, path, compression="zstd")
        times = [ts for ts in data.column("ts").cast(pa.int64()).to_pylist() if ts is not None]
        entry = FileSegment(str(path), data.num_rows, min(times, default=0), max(times, default=0))
        self.segments.setdefault(table, []).append(entry)
        return path

    @contextmanager
    def snapshot(
        self, needs: Mapping[str, Need], timeout: float, cancelled: Callable[[], bool] = lambda: False
    ) -> Iterator[QuerySnapshot]:
        stop_if(cancelled)
        self.snapshots.append(dict(needs))
        self.held += 1
        try:
            found = {
                name: [QueryFile(s.path, s.rows) for s in self.segments.get(name, []) if s.needed(need)]
                for name, need in needs.items()
            }
            yield QuerySnapshot(found, list(self.parts))
        finally:
            self.held -= 1

    def live(self, table: str, timeout: float, cancelled: Callable[[], bool] = lambda: False) -> bytes:
        stop_if(cancelled)
        self.filled.append(table)
        if table not in self.live_rows:
            raise NotFound(f"no live table {table}", hint="ask for another")
        return self.live_rows[table]

    def damaged(self, paths: Sequence[str], timeout: float) -> None:
        self.reported_damaged.extend(paths)


@dataclass
class Machine:
    root: Path
    files: Files
    inetd: Inetd
    pool: WorkerPool
    engine: Engine
    gate: WorkerPool

    def rows(self, sql: str, **options: float) -> list[tuple[object, ...]]:
        table, _ = answer(self.engine, sql, **options)
        return [tuple(row.values()) for row in table.to_pylist()]


@contextmanager
def gates(root: Path, *command: str) -> Iterator[WorkerPool]:
    """Workers that check; ``command``: what a process of them runs, if not the worker."""
    inetd = Inetd(root / "gate.sock", [f"--state_dir={root}/state"], command)
    # A check of half a second starts another worker, which is kept for a minute: tests look at what is left.
    pool = WorkerPool(str(root / "gate.sock"), GATE._replace(long_s=math.inf))
    if not command:
        # So that no deadline of a test is taken by its start.
        check = b'{"statements": ["SELECT 1"], "now_ns": 0}'
        list(pool.run({"op": "check"}, check, deadline=time.monotonic() + 60, cancelled=lambda: False))
    yield pool
    pool.close()
    inetd.close()


def operations(count: int, *, start: int = 0, rank: int = 0) -> list[dict[str, Any]]:
    """Rows of comm.ops: one a ms from T0, as long as their number in us."""
    return [
        {
            "node": "n0",
            "ts": T0 + i * 1_000_000,
            "job": "j",
            "run": "0",
            "pid": 100 + rank,
            "start_ns": 10_000_000,
            "tid": 100 + rank,
            "rank": rank,
            "comm": "default_pg",
            "comm_rank": rank,
            "comm_size": 2,
            "backend": "gloo",
            "seq": i,
            "op": "all_reduce" if i % 5 else "barrier",
            "dtype": "float32",
            "count": 1000,
            "bytes": 4000,
            "timing_source": "exact",
            "state": "done",
            "start_ns_after": 1000,
            "done_lo_ns": 1000 + i * 1000,
            "done_hi_ns": 1000 + i * 1000,
        }
        for i in range(start, start + count)
    ]


def logical(table: str, rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Rows of a live table as an Arrow IPC stream."""
    data = pa.Table.from_pylist([dict(row) for row in rows], schema=table_named(table).logical)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, data.schema) as writer:
        writer.write_table(data)
    return bytes(sink.getvalue())


def answer(engine: Engine, sql: str, *, timeout: float = 60.0, max_bytes: int = 1 << 30) -> tuple[pa.Table, End]:
    """The whole answer to ``sql``."""
    pieces: list[bytes] = []
    end: End | None = None
    for item in engine.run(sql, timeout=timeout, max_bytes=max_bytes):
        if isinstance(item, End):
            end = item
        elif isinstance(item, bytes):
            pieces.append(item)
    assert end is not None
    return pa.ipc.open_stream(b"".join(pieces)).read_all(), end


def answers(
    engine: Engine, statements: Sequence[str], *, timeout: float = 60.0, max_bytes: int = 1 << 30
) -> tuple[list[pa.Table | ProbingError], End]:
    """The rows or the error of each of ``statements``, of one request."""
    pieces: list[bytes] = []
    found: list[pa.Table | ProbingError] = []
    for item in engine.run_all(statements, timeout=timeout, max_bytes=max_bytes):
        if isinstance(item, bytes):
            pieces.append(item)
        elif isinstance(item, StatementEnd):
            assert item.index == len(found)
            found.append(item.error or pa.ipc.open_stream(b"".join(pieces)).read_all())
            assert item.error or found[-1].num_rows == item.rows
            pieces.clear()
        elif isinstance(item, End):
            assert len(found) == len(statements)
            return found, item
    raise AssertionError("the answer has no end")


def ask_worker(path: Path, sql: str) -> dict[str, Any]:
    """Sends SQL to a worker past the gate; returns the statement's end."""
    spec = json.dumps({"statements": [sql], "segments": {}, "parts": [], "max_bytes": 1 << 20}).encode()
    with connect(str(path)) as channel:
        channel.send({"op": "query", "spec_bytes": len(spec), "live": []}, spec)
        while True:
            message = channel.receive(60)
            if "part" not in message.header:
                return message.header.get("statement", message.header)
