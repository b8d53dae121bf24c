"""Rows of simulated nodes: DuckDB answers a SELECT once, and each node sends the same bytes under its own name."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable

import duckdb
import pyarrow as pa

from probing.api.errors import ProbingError
from probing.api.tables import TABLES
from probing.federation.sql.dialect import parse
from probing.federation.sql.errors import from_duckdb
from probing.federation.sql.states import with_states
from probing.federation.sql.times import fix_times
from simulator.cast import Cast

__all__ = ("Answers", "encoded", "operations")

_KEPT = 256
_NAME = Cast.name(999_999)


def operations(rows: int) -> Callable[[duckdb.DuckDBPyConnection], None]:
    """Returns a function that fills comm.ops with ``rows`` rows."""

    def fill(db: duckdb.DuckDBPyConnection) -> None:
        db.execute(
            "INSERT INTO comm.ops BY NAME SELECT"
            f" '{_NAME}' AS node, make_timestamp_ns(1_790_000_000_000_000_000 + i * 1_000_000) AS ts, 'job' AS job,"
            " 'r1' AS run, 1000 + i % 8 AS pid, i % 8 AS rank, i // 8 AS seq,"
            " ['all_reduce', 'broadcast'][1 + i % 2] AS op, 1 << (i % 20) AS bytes,"
            f" 1000 * i AS duration_ns, 'done' AS state FROM range({rows}) AS r(i)"
        )

    return fill


def encoded(table: pa.Table) -> bytes:
    """Returns ``table`` as an Arrow stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


class Answers:
    """The answers over the tables that ``fill`` fills. ``dialect``: SQL is changed before it runs, as a node does.
    Belongs to one event loop."""

    def __init__(self, fill: Callable[[duckdb.DuckDBPyConnection], None], *, dialect: bool = False) -> None:
        self._dialect = dialect
        self._db = duckdb.connect(config={"threads": "1"})
        for name, table in TABLES.items():
            self._db.execute(f"CREATE SCHEMA IF NOT EXISTS {name.split('.')[0]}")
            self._db.register("given", table.logical.empty_table())
            self._db.execute(f"CREATE TABLE {name} AS SELECT * FROM given")
            self._db.unregister("given")
        fill(self._db)
        self._made: OrderedDict[str, asyncio.Task[tuple[bytes, int]]] = OrderedDict()

    async def rows(self, sql: str, number: int) -> tuple[bytes, int]:
        """Returns the Arrow stream of ``sql`` at the node ``number``, and its rows. Raises QueryError."""
        made = self._made.get(sql)
        if made is None:
            made = self._made[sql] = asyncio.create_task(asyncio.to_thread(self._run, sql))
            if len(self._made) > _KEPT:
                self._made.popitem(last=False)
        stream, rows = await asyncio.shield(made)
        return stream.replace(_NAME.encode(), Cast.name(number).encode()), rows

    def _run(self, sql: str) -> tuple[bytes, int]:
        try:
            text = with_states(fix_times(parse(sql), time.time_ns())) if self._dialect else sql
            with self._db.cursor() as cursor:
                table = cursor.sql(text).to_arrow_table()
        except duckdb.Error as e:
            error: ProbingError = from_duckdb(e)
            raise error from None
        return encoded(table), table.num_rows
