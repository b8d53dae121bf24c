"""Queries of a token that is limited to jobs see no other rows, whatever they ask."""

from __future__ import annotations

from datetime import date

import duckdb
import pytest

from probing.api.errors import QueryRejected
from probing.api.tables import TABLES
from probing.daemon.query.gate import check

JAN_2 = date(1970, 1, 2)


@pytest.fixture(scope="module")
def database() -> duckdb.DuckDBPyConnection:
    made = duckdb.connect()
    made.execute("CREATE SCHEMA comm; CREATE SCHEMA process; CREATE SCHEMA probing")
    made.execute(
        "CREATE TABLE comm.ops AS SELECT * FROM (VALUES ('a', 'x''y', '1', 1), ('b', 'u', 'secret', 2), "
        "(NULL, 'u', 'secret', 3)) t(job, run, op, rank)"
    )
    made.execute("CREATE TABLE process.processes AS SELECT 'b' AS job, 2 AS rank")
    return made


@pytest.mark.parametrize(
    ("sql", "rows"),
    [
        ("SELECT job FROM comm.ops", [("a",)]),
        ("SELECT o.job FROM comm.ops o", [("a",)]),
        ("SELECT ops.job FROM comm.ops", [("a",)]),
        ("SELECT count(*) FROM comm.ops WHERE job = 'b' OR true", [(1,)]),
        # Fails if it sees another job's row.
        ("SELECT rank FROM comm.ops WHERE CAST(op AS INTEGER) > 0", [(1,)]),
        ("SELECT max(CAST(o.op AS INTEGER)) FROM comm.ops o JOIN comm.ops p USING (rank)", [(1,)]),
        ("WITH ops AS (SELECT * FROM comm.ops) SELECT job FROM ops UNION ALL SELECT job FROM comm.ops", [("a",)] * 2),
        ("SELECT (SELECT count(*) FROM process.processes p WHERE p.rank = o.rank) FROM comm.ops o", [(0,)]),
        ("SELECT o.job, p.job FROM comm.ops o FULL JOIN process.processes p ON true", [("a", None)]),
        ("SELECT j FROM comm.ops AS t(j)", [("a",)]),
        ("SELECT job FROM (comm.ops o LEFT JOIN process.processes p USING (job))", [("a",)]),
        # These expressions are rewritten, as they have a time zone.
        ("SELECT epoch_ns(to_timestamp((SELECT max(rank) FROM comm.ops)))", [(1_000_000_000,)]),
        ("SELECT (TIMESTAMP '1970-01-01' + to_days((SELECT max(rank) FROM comm.ops)))::TIMESTAMPTZ::DATE", [(JAN_2,)]),
        (
            "SELECT (TIMESTAMP '1970-01-01' + to_days((SELECT max(rank) FROM comm.ops))) AT TIME ZONE 'UTC' = DATE"
            " '1970-01-02'",
            [(True,)],
        ),
    ],
)
def test_other_jobs_are_not_there(
    database: duckdb.DuckDBPyConnection, sql: str, rows: list[tuple[object, ...]]
) -> None:
    assert database.execute(check(sql, 0, jobs=["a"]).sql).fetchall() == rows


@pytest.mark.parametrize("table", [name for name, table in TABLES.items() if not table.live][:3])
def test_the_names_of_jobs_are_literals(table: str) -> None:
    printed = check(f"SELECT 1 FROM {table} x", 0, jobs=["o'r\"--", "b"]).sql
    assert "IN ('b', 'o''r\"--')" in printed


def test_tables_without_jobs_are_refused() -> None:
    assert check("SELECT * FROM probing.table_docs", 0, jobs=["a"]).tables == ("probing.table_docs",)
    for name, table in TABLES.items():
        if "job" not in [column.name for column in table.columns] and not name.endswith("_docs"):
            if name == "cluster.members":
                continue
            with pytest.raises(QueryRejected, match=f"limited to jobs, and {name} does not say"):
                check(f"SELECT * FROM {name}", 0, jobs=["a"])
