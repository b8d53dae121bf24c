"""Times with a zone, headings of columns as typed, and hints for what people write first."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any

import duckdb
import pytest

from probing.api.errors import ProbingError, QueryRejected
from probing.daemon.query.gate import check
from probing.federation.planning.catalog import api_catalog
from probing.federation.planning.split import plan
from probing.federation.sql.errors import from_duckdb

NOW_NS = 1_795_000_000_123_456_789
NOW = datetime(2026, 11, 18, 11, 6, 40, 123457)


@pytest.fixture(scope="module")
def database() -> Iterator[duckdb.DuckDBPyConnection]:
    """One row of comm.ops, at 23:30:00.123456789 UTC."""
    with duckdb.connect(config={"threads": "1", "python_enable_replacements": "false"}) as db:
        db.execute("SET TimeZone = 'UTC'")
        db.execute("CREATE SCHEMA comm; CREATE TABLE comm.ops (ts TIMESTAMP_NS, job VARCHAR, rank INT, op VARCHAR)")
        db.execute("INSERT INTO comm.ops VALUES ('2026-11-17 23:30:00.123456789', 'j', 1, 'barrier')")
        yield db


def ask(db: duckdb.DuckDBPyConnection, sql: str) -> tuple[list[str], list[tuple[Any, ...]]]:
    try:
        found = db.sql(check(sql, NOW_NS).sql)
        return found.columns, found.fetchall()
    except duckdb.Error as e:
        raise from_duckdb(e) from None


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("ts AT TIME ZONE 'Asia/Shanghai'", datetime(2026, 11, 18, 7, 30, 0, 123457)),
        ("ts AT TIME ZONE 'America/New_York'", datetime(2026, 11, 17, 18, 30, 0, 123457)),
        ("(ts) AT TIME ZONE 'UTC'", datetime(2026, 11, 17, 23, 30, 0, 123457)),
        ("max(ts) AT TIME ZONE 'Asia/Shanghai'", datetime(2026, 11, 18, 7, 30, 0, 123457)),
        ("ts::TIMESTAMP AT TIME ZONE 'Asia/Shanghai'", datetime(2026, 11, 18, 7, 30, 0, 123457)),
        # As it had to be written before.
        (
            "ts::TIMESTAMP AT TIME ZONE 'UTC' AT TIME ZONE 'Asia/Shanghai'",
            datetime(2026, 11, 18, 7, 30, 0, 123457),
        ),
        ("date_trunc('day', ts AT TIME ZONE 'Asia/Shanghai')", datetime(2026, 11, 18)),
        ("strftime(ts AT TIME ZONE 'Asia/Shanghai', '%d %H:%M')", "18 07:30"),
        ("(SELECT max(t.ts) FROM comm.ops t) AT TIME ZONE 'Asia/Shanghai'", datetime(2026, 11, 18, 7, 30, 0, 123457)),
        ("now() AT TIME ZONE 'Asia/Shanghai'", NOW.replace(hour=19)),
        ("(now() - INTERVAL 1 HOUR) AT TIME ZONE 'Asia/Shanghai'", NOW.replace(hour=18)),
        # A constant is the time that clocks there show.
        ("TIMESTAMP '2026-11-18 07:30:00' AT TIME ZONE 'Asia/Shanghai'", datetime(2026, 11, 17, 23, 30)),
        ("'2026-11-18 07:30:00'::TIMESTAMP AT TIME ZONE 'Asia/Shanghai'", datetime(2026, 11, 17, 23, 30)),
        ("TIMESTAMPTZ '2026-11-17 23:30:00+00' AT TIME ZONE 'Asia/Shanghai'", datetime(2026, 11, 18, 7, 30)),
    ],
)
def test_a_column_is_utc_and_a_constant_is_local(
    database: duckdb.DuckDBPyConnection, expression: str, value: object
) -> None:
    sql = f"SELECT {expression} FROM comm.ops"
    assert ask(database, sql) == ([expression], [(value,)])
    # What the asker of many nodes makes of it once more goes through the gate of a node, and says the same.
    whole = plan(sql, NOW_NS, api_catalog())
    if whole.kind == "rows":
        assert ask(database, whole.parts[0].sql)[1] == [(value,)]


def test_a_range_in_local_time_finds_the_row(database: duckdb.DuckDBPyConnection) -> None:
    low, high = (f"TIMESTAMP '2026-11-18 07:{minute}' AT TIME ZONE 'Asia/Shanghai'" for minute in (30, 31))
    assert ask(database, f"SELECT op FROM comm.ops WHERE ts >= {low} AND ts < {high}")[1] == [("barrier",)]
    assert ask(database, f"SELECT op FROM comm.ops WHERE ts >= {high}")[1] == []


@pytest.mark.parametrize("zone", ["Mars/Olympus", "", "UTC+99", "'"])
def test_a_zone_that_does_not_exist_is_an_error(database: duckdb.DuckDBPyConnection, zone: str) -> None:
    with pytest.raises(ProbingError):
        ask(database, f"SELECT ts AT TIME ZONE '{zone}' FROM comm.ops")


@pytest.mark.parametrize(
    ("sql", "titles"),
    [
        ("SELECT now(), ts - INTERVAL '5 minutes', rank FROM comm.ops", ["now()", "ts - INTERVAL '5 minutes'", "rank"]),
        ("SELECT count(*), max(rank)+1, max(rank) AS m FROM comm.ops", ["count(*)", "max(rank)+1", "m"]),
        ("SELECT rank::VARCHAR, job || ', ' || op FROM comm.ops", ["rank::VARCHAR", "job || ', ' || op"]),
        ("SELECT DISTINCT\n  max( rank ),\n  (SELECT 1)\nFROM comm.ops", ["max( rank )", "(SELECT 1)"]),
        ("SELECT rank IS DISTINCT FROM 1, -1 FROM comm.ops", ["rank IS DISTINCT FROM 1", "-1"]),
        ("SELECT CASE WHEN rank = 1 THEN 'a' END FROM comm.ops", ["CASE WHEN rank = 1 THEN 'a' END"]),
        ("WITH x AS (SELECT max(rank), 2 FROM comm.ops) SELECT count(*) FROM x", ["count(*)"]),
        ("FROM comm.ops SELECT min(ts), rank WHERE rank = 1 GROUP BY rank", ["min(ts)", "rank"]),
        ("SELECT min(rank), 2 FROM comm.ops UNION ALL SELECT 3, 4", ["min(rank)", "2"]),
        ("SELECT * FROM comm.ops", ["ts", "job", "rank", "op"]),
        # What may become several columns has DuckDB's names.
        ("SELECT max(COLUMNS('r.*')), ops.rank FROM comm.ops GROUP BY 2", ["rank", "rank"]),
        ("SELECT unnest([rank]), rank FROM comm.ops", ["unnest(list_value(rank))", "rank"]),
        ("SELECT '\"' || op FROM comm.ops", ["'\"' || op"]),
    ],
)
def test_headings_are_as_typed(database: duckdb.DuckDBPyConnection, sql: str, titles: list[str]) -> None:
    assert ask(database, sql)[0] == titles


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT count(*), max(rank) + 1 FROM comm.ops",
        "SELECT op, now(), count(*) FROM comm.ops GROUP BY op ORDER BY count(*) DESC, op LIMIT 3",
        "SELECT max(rank) OVER (PARTITION BY job) FROM comm.ops",
        "SELECT rank + 1 FROM comm.ops ORDER BY rank + 1 LIMIT 2",
    ],
)
def test_headings_over_all_nodes_are_those_of_one(database: duckdb.DuckDBPyConnection, sql: str) -> None:
    assert [name for name, _ in plan(sql, NOW_NS, api_catalog()).columns] == ask(database, sql)[0]


@pytest.mark.parametrize(
    ("sql", "hint"),
    [
        ("SELECT now() - '5m'", "INTERVAL '5 minutes'"),
        ("SELECT * FROM comm.ops WHERE ts > now() - '5 minutes'", "INTERVAL '5 minutes'"),
        ("SELECT timezone('Asia/Shanghai', ts) FROM comm.ops", "AT TIME ZONE"),
        ("SELECT * FROM json_each('[1]')", "from_json"),
        ("DESCRIBE comm.ops", r"\d TABLE"),
        ("SHOW TABLES", r"\d TABLE"),
        ("SUMMARIZE comm.ops", "quantile_cont"),
        ("PIVOT comm.ops ON op USING count(*)", "FILTER"),
        ("PIVOT comm.ops ON op || 'x' USING count(*) + 1", "FILTER"),
    ],
)
def test_what_people_write_first_has_a_hint(database: duckdb.DuckDBPyConnection, sql: str, hint: str) -> None:
    with pytest.raises((QueryRejected, ProbingError)) as refused:
        ask(database, sql)
    assert hint in refused.value.hint


def test_columns_of_json_become_rows(database: duckdb.DuckDBPyConnection) -> None:
    text = """'[{"rank": 1, "node": "a"}, {"rank": 4, "node": "b"}]'"""
    shape = """'[{"rank": "INT", "node": "VARCHAR"}]'"""
    for function in ("from_json", "json_transform"):
        sql = f"SELECT c.rank, c.node FROM (SELECT unnest({function}({text}, {shape})) AS c) AS q ORDER BY 1"
        assert ask(database, sql)[1] == [(1, "a"), (4, "b")]
    assert ask(database, f"SELECT c->>'node' FROM (SELECT unnest({text}::JSON[]) AS c) AS q")[1] == [("a",), ("b",)]
