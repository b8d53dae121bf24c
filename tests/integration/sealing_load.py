"""A store under load, sealed, merged and shortened all the while, and queries that know what they must count."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
from query_helpers import Inetd, answer, gates, operations

from probing.daemon.arrow import batch_of
from probing.daemon.collector.control import ControlServer, Requests
from probing.daemon.query.engine import Engine
from probing.daemon.query.pool import WorkerPool
from probing.daemon.service.collector_client import CollectorClient
from probing.daemon.store import Store, StoreLimits, TableLimits

ROWS, LOSSES = 200, 20
# Of probing.losses, by age.
KEPT_S = 1.0
LIMITS = StoreLimits(
    part_bytes=1 << 15,
    segment_bytes=1 << 18,
    keep_free_bytes=0,
    sync_interval_s=0.1,
    tables={"probing.losses": TableLimits(max_age_s=KEPT_S)},
)
_ALL = "SELECT count(*), sum(seq)::BIGINT, coalesce(max(seq), -1) FROM comm.ops"
# A worker has no memory for the distinct numbers of all rows: they are counted a slice at a time.
SLICE = 1_000_000
_SLICE = "SELECT count(*), count(DISTINCT seq) FROM comm.ops WHERE seq >= {first} AND seq < {end}"
_LAST = 'SELECT count(*), sum("count")::BIGINT, min("count"), max("count") FROM probing.losses'


class Writer:
    """Appends records as quickly as it may: ROWS of comm.ops and LOSSES of probing.losses, numbered from 0 on.

    ``begun`` and ``done`` count records: those that the store was given, and those that it acknowledged.
    """

    def __init__(self, store: Store, per_second: float) -> None:
        self._store = store
        self._pause = 1 / per_second
        self._stop = threading.Event()
        self._template = batch_of("comm.ops", operations(ROWS))
        self._losses = batch_of("probing.losses", [{"node": "n0", "source": "s", "reason": "r"}] * LOSSES)
        self.begun = self.done = 0
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="writer")

    def __enter__(self) -> Writer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stop.wait(self._pause):
                self.begun += 1
                batches = {
                    "comm.ops": [_numbered(self._template, "seq", self.done * ROWS)],
                    "probing.losses": [_numbered(self._losses, "count", self.done * LOSSES)],
                }
                self._store.append(batches, {})
                self.done += 1
        except BaseException as e:
            self.failure = e
            raise


def _numbered(batch: pa.RecordBatch, column: str, first: int) -> pa.RecordBatch:
    now = time.time_ns()
    for name, values in ((column, first + np.arange(len(batch))), ("ts", now + np.arange(len(batch)))):
        index = batch.schema.get_field_index(name)
        batch = batch.set_column(index, batch.schema.field(name), pa.array(values).cast(batch.schema.field(name).type))
    return batch


@dataclass
class Machine:
    store: Store
    engine: Engine
    writer: Writer


@contextlib.contextmanager
def running(
    root: Path, per_second: float = 200.0, limits: StoreLimits = LIMITS, flush: Callable[[], str] = str
) -> Iterator[Machine]:
    """``root`` is a directory that the workers may enter."""
    nobody = cast(Any, None)
    with contextlib.ExitStack() as undo:
        store = undo.enter_context(Store.open(root / "state", node="n0", limits=limits))
        requests = Requests(store, nobody, nobody, {}, flush, dict, lambda paused: paused)
        control = ControlServer(root / "collector.sock", requests.handlers(), frozenset())
        control.on_disconnect = requests.release_all
        control.start()
        undo.callback(control.stop)
        arguments = [f"--state_dir={root / 'state'}", f"--query.memory_bytes={256 << 20}"]
        undo.callback(Inetd(root / "sql.sock", arguments).close)
        pool = WorkerPool(str(root / "sql.sock"))
        undo.callback(pool.close)
        client = CollectorClient(str(root / "collector.sock"))
        undo.callback(client.close)
        engine = Engine(client, pool, undo.enter_context(gates(root)))
        writer = undo.enter_context(Writer(store, per_second))
        yield Machine(store, engine, writer)


@dataclass
class Counts:
    """What was counted last: what comes then is no less."""

    rows: int = 0
    first: int = 0
    last: int = -1
    queries: int = 0


def count(machine: Machine, seen: Counts) -> None:
    """One round of queries; AssertionError where a row is missing or there twice."""
    writer = machine.writer
    before = writer.done
    rows, total, last = _row(machine, _ALL)
    # Each record is there whole: what was acknowledged before is, what was not begun since is not.
    assert before * ROWS <= rows <= writer.begun * ROWS, (before, rows, writer.begun)
    assert rows % ROWS == 0
    assert (last, total or 0) == (rows - 1, rows * (rows - 1) // 2)
    for first in range(0, rows, SLICE):
        end = min(rows, first + SLICE)
        assert _row(machine, _SLICE.format(first=first, end=end)) == [end - first] * 2
        seen.queries += 1
    assert rows >= seen.rows
    before = writer.done
    kept, total, first, last = _row(machine, _LAST)
    # Retention takes the oldest: what is left is one range, up to the newest.
    if kept:
        assert kept == last - first + 1
        assert total == (first + last) * kept // 2
        assert first >= seen.first
        assert last >= max(seen.last, before * LOSSES - 1)
        seen.first, seen.last = first, last
    seen.rows, seen.queries = rows, seen.queries + 2


def _row(machine: Machine, sql: str) -> list[Any]:
    table, end = answer(machine.engine, sql)
    assert not end.warnings, end.warnings
    assert machine.writer.failure is None
    return list(table.to_pylist()[0].values())
