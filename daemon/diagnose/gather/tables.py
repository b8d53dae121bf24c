"""Reads rows as dicts, from live tables and from statements that share one snapshot. Times are UTC ns."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import pyarrow as pa

from probing.api.errors import ProbingError, QueryError
from probing.daemon.query.answer import StatementEnd
from probing.daemon.query.engine import Engine
from probing.daemon.stack_wire import ConditionsRead, ProcessStacks, ReadFailure, VariablesRead
from probing.diagnosis.facts import Missing

__all__ = ("Collector", "Row", "Rows", "live_rows", "query_rows", "seconds_left")

MAX_BYTES = 256 << 20
_LEAST_S = 0.05
Row = Mapping[str, Any]
Rows = Mapping[str, Sequence[Row]]


class Collector(Protocol):
    """The methods of ``service.collector_client.CollectorClient`` that this module uses."""

    def live(self, table: str, timeout: float) -> bytes: ...

    def status(self, timeout: float) -> Mapping[str, Any]: ...

    def stacks(
        self, pids: Sequence[int], job: str, timeout: float, *, native: bool = False, with_locals: bool = False
    ) -> tuple[list[ProcessStacks], list[ReadFailure]]: ...

    def conditions(self, pids: Sequence[int], job: str, timeout: float) -> ConditionsRead: ...

    def variables(self, pids: Sequence[int], job: str, names: Sequence[str], timeout: float) -> VariablesRead: ...

    def record_findings(self, rows: Sequence[Mapping[str, Any]], timeout: float) -> None: ...


def seconds_left(deadline: float) -> float:
    """Returns the seconds until ``deadline`` (time.monotonic()), at least 0.05."""
    return max(deadline - time.monotonic(), _LEAST_S)


def live_rows(
    collector: Collector, names: Sequence[str], deadline: float
) -> tuple[dict[str, list[Row]], list[Missing]]:
    """Returns the rows of live tables, by name, and the tables that could not be read, as missing facts."""
    found: dict[str, list[Row]] = {}
    missing = []
    for name in names:
        try:
            found[name] = _rows(collector.live(name, seconds_left(deadline)))
        except ProbingError as e:
            missing.append(Missing("history", f"{name} cannot be read: {e.message}"))
    return found, missing


def query_rows(
    queries: Engine, statements: Mapping[str, str], deadline: float
) -> tuple[dict[str, list[Row]], list[Missing]]:
    """Returns the rows of each statement by its name, all from one snapshot, and the missing facts.

    If the tables of a statement are empty, the statement is not run (``rows_only``). So it must be a statement that
    returns no row for empty tables.
    """
    found: dict[str, list[Row]] = {}
    missing = []
    names = list(statements)
    pieces: list[bytes] = []
    try:
        for item in queries.run_all(
            list(statements.values()), timeout=seconds_left(deadline), max_bytes=MAX_BYTES, rows_only=True
        ):
            if isinstance(item, bytes):
                pieces.append(item)
            elif isinstance(item, StatementEnd):
                name = names[item.index]
                if item.error is None:
                    found[name] = _rows(b"".join(pieces))
                else:
                    missing.append(Missing("history", f"the {name} cannot be read: {item.error.message}"))
                pieces.clear()
    except ProbingError as e:
        missing.append(Missing("history", f"the stored rows cannot be read: {e.message}"))
    return found, missing


def _rows(stream: bytes) -> list[Row]:
    if not stream:
        return []
    try:
        with pa.ipc.open_stream(stream) as reader:
            return [row for batch in reader for row in _plain(batch).to_pylist()]
    except pa.ArrowInvalid as e:
        raise QueryError("the answer is not an Arrow stream of rows") from e


def _plain(batch: pa.RecordBatch) -> pa.RecordBatch:
    # Python's datetime has no nanoseconds.
    columns = [column.view(pa.int64()) if pa.types.is_timestamp(column.type) else column for column in batch.columns]
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)
