"""Nodes in memory: each a DuckDB with its own rows, and one more with the rows of all."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from decimal import Decimal
from typing import Any
from unittest.mock import patch

import duckdb
import pyarrow as pa
from nodes_asked import Ask, run

from probing.daemon.query.gate import check
from probing.federation.execution.answer import Answer, Reply
from probing.federation.planning.catalog import Catalog, open_database
from probing.federation.planning.split import Plan, plan
from probing.federation.sql.dialect import parse, to_sql
from probing.federation.sql.errors import from_duckdb
from probing.federation.sql.headings import with_headings
from probing.federation.sql.times import fix_times

NOW_NS = 1_790_000_000_123_456_789
SCHEMAS = {
    "comm.ops": pa.schema(
        [
            ("node", pa.string()),
            ("ts", pa.timestamp("ns")),
            ("job", pa.string()),
            ("rank", pa.int32()),
            ("op", pa.string()),
            ("seq", pa.int64()),
            ("bytes", pa.int64()),
            ("duration_ns", pa.int64()),
            ("bw", pa.float64()),
            ("async_op", pa.bool_()),
        ]
    ),
    "process.processes": pa.schema(
        [("node", pa.string()), ("job", pa.string()), ("rank", pa.int32()), ("pid", pa.int32())]
    ),
}
CATALOG = Catalog(SCHEMAS)
# Databases of closed nodes and of merges: opening one takes longer than most queries of a test.
_idle: list[duckdb.DuckDBPyConnection] = []
_idle_merges: list[duckdb.DuckDBPyConnection] = []


@contextmanager
def _merge_database(**options: Any) -> Iterator[duckdb.DuckDBPyConnection]:
    """In place of ``open_database`` in a merge. One whose merge fails is not used again."""
    db = _idle_merges.pop() if _idle_merges else open_database(**{**options, "spill": ""})
    yield db
    _idle_merges.append(db)


def run_here(plan: Plan, addresses: Sequence[str], ask: Ask) -> Answer:
    """As ``run``, in a database that merges before have used."""
    with patch("probing.federation.execution.merge.open_database", _merge_database):
        return run(plan, addresses, ask)


class Nodes:
    """``rows[i]`` are node i's rows by table name."""

    def __init__(self, rows: Sequence[dict[str, list[dict[str, Any]]]]) -> None:
        self.names = [f"n{i}" for i in range(len(rows))]
        self._dbs = {}
        for name, tables in zip(self.names, rows, strict=True):
            own = {t: [{**row, "node": name} for row in tables.get(t, [])] for t in SCHEMAS}
            self._dbs[name] = _database(own)
        union = {
            t: [{**row, "node": n} for n, tables in zip(self.names, rows, strict=True) for row in tables.get(t, [])]
            for t in SCHEMAS
        }
        self._all = _database(union)

    def close(self) -> None:
        _idle.extend([*self._dbs.values(), self._all])

    def ask(self, address: str, sql: str, seconds: float) -> Reply:
        with self._dbs[address].cursor() as cursor:
            try:
                return Reply(address, cursor.sql(check(sql, NOW_NS).sql).to_arrow_table())
            except duckdb.Error as e:
                raise from_duckdb(e) from None

    def change(self, name: str, sql: str) -> None:
        """Runs ``sql`` in the database of node ``name``."""
        self._dbs[name].execute(sql)

    def plan(self, sql: str) -> Plan:
        return plan(sql, NOW_NS, CATALOG)

    def together(self, sql: str) -> Answer:
        return run_here(self.plan(sql), self.names, self.ask)

    def reference(self, sql: str) -> pa.Table:
        return self._all.sql(to_sql(fix_times(with_headings(parse(sql), sql), NOW_NS))).to_arrow_table()

    def check(self, sql: str, *, kind: str | None = None, ordered: bool = False) -> None:
        """Asserts that the nodes together answer as one database with all rows does."""
        if kind is not None:
            assert self.plan(sql).kind == kind, self.plan(sql)
        got, want = self.together(sql).table, self.reference(sql)
        assert got.column_names == want.column_names
        assert got.schema.types == want.schema.types, sql
        assert_same(rows_of(got, ordered=ordered), rows_of(want, ordered=ordered), sql)


def _database(tables: dict[str, list[dict[str, Any]]]) -> duckdb.DuckDBPyConnection:
    options: dict[str, Any] = {"threads": "1", "python_enable_replacements": "false"}
    db = _idle.pop() if _idle else duckdb.connect(config=options)
    for name, rows in tables.items():
        db.execute(f"CREATE SCHEMA IF NOT EXISTS {name.split('.')[0]}")
        db.register("given", pa.Table.from_pylist(rows, schema=SCHEMAS[name]))
        db.execute(f"CREATE OR REPLACE TABLE {name} AS SELECT * FROM given")
        db.unregister("given")
    return db


def rows_of(table: pa.Table, *, ordered: bool = False) -> list[tuple[Any, ...]]:
    """Returns the rows of ``table``, sorted unless ``ordered``, with times in ns."""
    columns = [
        column.cast(pa.int64()).to_pylist() if pa.types.is_timestamp(column.type) else column.to_pylist()
        for column in table.columns
    ]
    rows = list(zip(*columns, strict=True))
    return rows if ordered else sorted(rows, key=_sort_key)


def _sort_key(row: tuple[Any, ...]) -> list[tuple[bool, str]]:
    # Floats are only nearly equal: they must not decide where a row goes unless nothing else does.
    exact = [(value is None, str(value)) for value in row if not isinstance(value, float)]
    return exact + [(value is None, f"{value:.6e}") for value in row if isinstance(value, float)]


def assert_same(got: list[tuple[Any, ...]], want: list[tuple[Any, ...]], what: str) -> None:
    assert len(got) == len(want), f"{what}: {got} for {want}"
    for one, other in zip(got, want, strict=True):
        same = all(_near(a, b) for a, b in zip(one, other, strict=True))
        assert same, f"{what}: {one} for {other}"


def _near(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return (math.isnan(one) and math.isnan(other)) or math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-9)
    if isinstance(one, Decimal) and isinstance(other, Decimal):
        return one == other
    return bool(one == other)
