"""Which segments a query can do without."""

from __future__ import annotations

from collections.abc import Iterator

import duckdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from long import examples

from probing.api.tables import TABLES
from probing.daemon.query.gate import check
from probing.daemon.query.pruning import SLACK_NS
from probing.daemon.store.needs import EVER, Need, Range

NOW_NS = 1_795_000_000_000_000_000
MINUTE = 60 * 10**9
NEW_YEAR = 1_767_225_600 * 10**9  # 2026-01-01 00:00:00


@pytest.mark.parametrize(
    ("where", "low", "high"),
    [
        ("ts > now() - INTERVAL 5 MINUTE", NOW_NS - 5 * MINUTE, None),
        ("ts >= now() - INTERVAL '5 minutes' AND rank = 0", NOW_NS - 5 * MINUTE, None),
        ("now() - INTERVAL 1 HOUR < ts", NOW_NS - 60 * MINUTE, None),
        ("ts > '2026-01-01'", NEW_YEAR, None),
        ("ts > TIMESTAMP '2026-01-01 00:00:01.5'", NEW_YEAR + 1_500_000_000, None),
        ("ts >= DATE '2026-01-01 13:00:00'", NEW_YEAR, None),
        ("ts BETWEEN '2026-01-01' AND now()", NEW_YEAR, NOW_NS),
        ("(ts > '2026-01-01' AND (ts < '2026-01-01 00:01' AND op = 'x'))", NEW_YEAR, NEW_YEAR + MINUTE),
        ("ts = '2026-01-01'", NEW_YEAR, NEW_YEAR),
        ("ops.ts > '2026-01-01'", NEW_YEAR, None),
        (f"ts < make_timestamp_ns({NEW_YEAR})", None, NEW_YEAR),
        ("ts > now() AND ts > '2026-01-01'", NOW_NS, None),
    ],
)
def test_bounds_are_found(where: str, low: int | None, high: int | None) -> None:
    found = check(f"SELECT * FROM comm.ops WHERE {where}", NOW_NS).needs["comm.ops"].times
    assert found.low == (None if low is None else low - SLACK_NS)
    assert found.high == (None if high is None else high + SLACK_NS)


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT * FROM comm.ops",
        "SELECT * FROM comm.ops WHERE ts > now() OR rank = 0",
        "SELECT * FROM comm.ops WHERE NOT ts > now()",
        "SELECT * FROM comm.ops WHERE t_start > now()",
        "SELECT * FROM comm.ops WHERE ts > t_start",
        "SELECT * FROM comm.ops WHERE ts > now() - INTERVAL 1 MONTH",
        "SELECT * FROM comm.ops WHERE ts > now() - INTERVAL '²' MINUTE",
        "SELECT * FROM comm.ops WHERE ts > 'yesterday'",
        "SELECT * FROM comm.ops WHERE ts > '2026-01-01T00:00:00+02:00'",
        "SELECT * FROM comm.ops WHERE ts BETWEEN SYMMETRIC now() AND '2026-01-01'",
        "SELECT * FROM comm.ops WHERE ts > (SELECT max(created) FROM comm.communicators)",
        "SELECT * FROM comm.ops a JOIN comm.ops b USING (seq) WHERE a.ts > now()",
        "SELECT * FROM comm.ops a, comm.communicators b WHERE ts > now()",
        "SELECT * FROM comm.ops a ASOF JOIN comm.communicators b ON a.ts >= b.ts WHERE a.ts > now()",
        "SELECT * FROM comm.ops a POSITIONAL JOIN comm.communicators b WHERE a.ts > now()",
        "SELECT * FROM comm.ops TABLESAMPLE 10% WHERE ts > now()",
        "SELECT rank AS ts FROM comm.ops WHERE ts > now()",
        "SELECT * FROM comm.ops AS t(ts, node) WHERE ts > '2026-01-01'",
        "SELECT count(*) FILTER (ts > now()) FROM comm.ops",
        "SELECT * FROM comm.ops QUALIFY ts > now()",
        "SELECT * FROM comm.ops WHERE ts > now() UNION ALL SELECT * FROM comm.ops",
        "WITH a AS (SELECT * FROM comm.ops) SELECT * FROM a WHERE ts > now()",
    ],
)
def test_what_does_not_surely_narrow_leaves_all_times(sql: str) -> None:
    assert check(sql, NOW_NS).needs["comm.ops"].times == EVER


def test_places_of_a_table_are_taken_together() -> None:
    sql = "SELECT * FROM comm.ops WHERE ts > '2026-01-01' UNION ALL SELECT * FROM comm.ops o WHERE o.ts > now()"
    assert check(sql, NOW_NS).needs == {"comm.ops": Need(Range(low=NEW_YEAR - SLACK_NS))}


def test_a_join_narrows_each_of_its_tables() -> None:
    sql = "SELECT * FROM comm.ops o LEFT JOIN comm.communicators c USING (comm) WHERE o.ts > now() AND c.ts < now()"
    assert check(sql, NOW_NS).needs == {
        "comm.ops": Need(Range(low=NOW_NS - SLACK_NS)),
        "comm.communicators": Need(Range(high=NOW_NS + SLACK_NS)),
    }


@pytest.mark.parametrize(
    ("where", "jobs"),
    [
        ("job = 'a'", {"a"}),
        ("'a' = ops.job AND rank = 0", {"a"}),
        ("(job IN ('a', 'it''s') AND ts > now())", {"a", "it's"}),
        ("job IN ('a', 'b') AND job = 'b'", {"b"}),
        ("job = 'a' AND job = 'b'", set()),
        ("JOB = 'A'", {"A"}),
    ],
)
def test_jobs_are_found(where: str, jobs: set[str]) -> None:
    assert check(f"SELECT * FROM comm.ops WHERE {where}", NOW_NS).needs["comm.ops"].jobs == frozenset(jobs)


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT * FROM comm.ops",
        "SELECT * FROM comm.ops WHERE job = 'a' OR rank = 0",
        "SELECT * FROM comm.ops WHERE NOT job = 'a'",
        "SELECT * FROM comm.ops WHERE job <> 'a'",
        "SELECT * FROM comm.ops WHERE job NOT IN ('a')",
        "SELECT * FROM comm.ops WHERE job IN ('a', lower('B'))",
        "SELECT * FROM comm.ops WHERE job IN ('a', NULL)",
        "SELECT * FROM comm.ops WHERE job IN (SELECT job FROM train.steps)",
        "SELECT * FROM comm.ops WHERE job = run",
        "SELECT * FROM comm.ops WHERE lower(job) = 'a'",
        "SELECT * FROM comm.ops WHERE run = 'a'",
        "SELECT run AS job FROM comm.ops WHERE job = 'a'",
        "SELECT * FROM comm.ops a, comm.communicators b WHERE job = 'a'",
        "SELECT * FROM comm.ops a ASOF JOIN comm.communicators b ON a.ts >= b.ts WHERE a.job = 'a'",
        "SELECT count(*) FILTER (job = 'a') FROM comm.ops",
        "SELECT * FROM comm.ops WHERE job = 'a' UNION ALL SELECT * FROM comm.ops",
        "SELECT * FROM comm.ops UNION ALL SELECT * FROM comm.ops WHERE job = 'a'",
    ],
)
def test_what_does_not_surely_name_jobs_leaves_all_of_them(sql: str) -> None:
    assert check(sql, NOW_NS).needs["comm.ops"].jobs is None


def test_jobs_of_places_and_of_joined_tables() -> None:
    sql = "SELECT * FROM comm.ops WHERE job = 'a' UNION ALL SELECT * FROM comm.ops o WHERE o.job = 'b'"
    assert check(sql, NOW_NS).needs["comm.ops"].jobs == {"a", "b"}
    sql = "SELECT * FROM comm.ops o JOIN comm.communicators c USING (comm) WHERE o.job = 'a' AND c.job IN ('b', 'c')"
    found = {name: need.jobs for name, need in check(sql, NOW_NS).needs.items()}
    assert found == {"comm.ops": {"a"}, "comm.communicators": {"b", "c"}}


def test_a_job_that_is_shown_is_the_one_that_is_stored() -> None:
    shown = [column for table in TABLES.values() for column in table.columns if column.name == "job"]
    assert shown
    assert {column.sql for column in shown} == {None}


_TIMES = st.sampled_from(
    [
        "now()",
        "now() - INTERVAL 5 MINUTE",
        "now() + INTERVAL '2 hours'",
        "today()",
        "DATE '2026-11-18'",
        "'2026-11-18 10:00:00'",
        "TIMESTAMP '2026-11-18 11:06:40.5'",
        "TIMESTAMPTZ '2026-11-18 11:06:40+01'",
        f"make_timestamp_ns({NOW_NS - 7})",
        "current_date - 1",
        "to_timestamp(1795000000)",
        "o.t_call",
    ]
)
_TS = st.sampled_from(["ts", "o.ts"])
_TESTS = st.one_of(
    st.tuples(_TS, st.sampled_from(["<", "<=", ">", ">=", "=", "<>"]), _TIMES).map(" ".join),
    st.tuples(_TIMES, st.sampled_from(["<", "<=", ">", ">=", "="]), _TS).map(" ".join),
    st.tuples(_TIMES, _TIMES).map(lambda t: f"ts BETWEEN {t[0]} AND {t[1]}"),
    st.sampled_from(["seq % 2 = 0", "true", "o.ts IS NOT NULL", "job = 'a'", "o.job IN ('b', 'c')", "job <> 'd'"]),
)
_WHERES = st.recursive(
    _TESTS,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["AND", "OR"]), inner).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
        inner.map(lambda e: f"(NOT {e})"),
    ),
    max_leaves=5,
)


@pytest.fixture(scope="module")
def rows() -> Iterator[duckdb.DuckDBPyConnection]:
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        connection.execute("CREATE SCHEMA comm")
        connection.execute(
            f"CREATE TABLE comm.ops AS SELECT make_timestamp_ns({NOW_NS} + (range - 400) * 611111111111) AS ts, "
            "ts AS t_call, range AS seq, chr((97 + range % 4)::INT) AS job FROM range(800)"
        )
        yield connection


@settings(max_examples=examples(300), deadline=None)
@given(_WHERES)
def test_no_row_that_a_query_keeps_lies_outside_its_range(rows: duckdb.DuckDBPyConnection, where: str) -> None:
    checked = check(f"SELECT epoch_ns(ts), job FROM comm.ops o WHERE {where}", NOW_NS)
    found, jobs = checked.needs["comm.ops"].times, checked.needs["comm.ops"].jobs
    kept = rows.sql(checked.sql).fetchall()
    assert all(found.holds(ts, ts) for ts, _ in kept)
    assert jobs is None or {job for _, job in kept} <= jobs
