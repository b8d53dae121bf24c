"""Parameters of queries: what a value becomes, and that no value can become SQL."""

from __future__ import annotations

import math
import re
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import duckdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from probing.api.errors import QueryRejected, UsageError
from probing.federation.sql.parameters import Typed, bind, parameter


@pytest.fixture(scope="module")
def db() -> duckdb.DuckDBPyConnection:
    return duckdb.connect()


def _value(db: duckdb.DuckDBPyConnection, value: Any) -> tuple[Any, str]:
    """What ``value`` is in SQL, and its type."""
    row = db.execute(bind("SELECT $x AS v, typeof($x) AS t", {"x": value})).fetchone()
    assert row is not None
    return row[0], row[1]


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("rank=3", "rank", 3),
        ("n=-12", "n", -12),
        ("x=1.5", "x", 1.5),
        ("x=-2e3", "x", -2000.0),
        ("ok=true", "ok", True),
        ("ok=NULL", "ok", None),
        ("job=a=b", "job", "a=b"),
        ("job=", "job", ""),
        ("job=4711.0.1", "job", "4711.0.1"),
        ("version=1_000", "version", "1_000"),
        ("job:VARCHAR=4711", "job", Typed("4711", "VARCHAR")),
        ("d:DECIMAL(10, 2)=1.25", "d", Typed("1.25", "DECIMAL(10, 2)")),
        ("ts:TIMESTAMP=2026-11-21 08:00", "ts", Typed("2026-11-21 08:00", "TIMESTAMP")),
    ],
)
def test_what_the_command_line_says(text: str, name: str, value: Any) -> None:
    found = parameter(text)
    assert found == (name, value)
    assert type(found[1]) is type(value)


@pytest.mark.parametrize("text", ["", "rank", "=3", "1a=3", "a b=1", "a:=1", "a:x;y=1", "$=1"])
def test_what_is_no_parameter(text: str) -> None:
    with pytest.raises(UsageError, match="not name=value"):
        parameter(text)


@pytest.mark.parametrize(
    ("value", "shown", "kind"),
    [
        (3, 3, "INTEGER"),
        (-(2**63), -(2**63), "BIGINT"),
        (2**70, 2**70, "HUGEINT"),
        (1.5, 1.5, "DOUBLE"),
        (math.inf, math.inf, "DOUBLE"),
        (True, True, "BOOLEAN"),
        (None, None, '"NULL"'),
        ("it's", "it's", "VARCHAR"),
        (Decimal("-12.50"), Decimal("-12.50"), "DECIMAL(4,2)"),
        (Decimal("1E+5"), Decimal(100_000), "DECIMAL(6,0)"),
        (Decimal("0.001"), Decimal("0.001"), "DECIMAL(4,3)"),
        (date(2026, 11, 21), date(2026, 11, 21), "DATE"),
        (datetime(2026, 11, 21, 8), datetime(2026, 11, 21, 8), "TIMESTAMP"),
        (datetime(2026, 11, 21, 8, tzinfo=timezone(timedelta(hours=2))), datetime(2026, 11, 21, 6), "TIMESTAMP"),
        (timedelta(minutes=-5), timedelta(minutes=-5), "INTERVAL"),
        (Typed("2026-11-21T08:00:00", "TIMESTAMP_NS"), datetime(2026, 11, 21, 8), "TIMESTAMP_NS"),
        ([1, 2], [1, 2], "INTEGER[]"),
    ],
)
def test_values_keep_their_types(db: duckdb.DuckDBPyConnection, value: Any, shown: Any, kind: str) -> None:
    assert _value(db, value) == (shown, kind)


@settings(deadline=None)
@given(text=st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0")))
def test_text_stays_text(db: duckdb.DuckDBPyConnection, text: str) -> None:
    assert _value(db, text)[0] == text


@settings(deadline=None)
@given(st.text(max_size=30), st.text(max_size=30))
def test_only_values_or_errors_come_of_anything(kind: str, text: str) -> None:
    try:
        sql = bind("SELECT $x", {"x": Typed(text, kind)})
    except UsageError:
        return
    assert re.fullmatch(r"SELECT CAST\('(?:[^']|'')*' AS [A-Za-z0-9_ (),]+\)", sql, re.DOTALL)


def test_only_parameters_are_replaced() -> None:
    sql = "SELECT '$rank', rank AS \"$rank\" FROM comm.ops WHERE rank = $rank AND seq > -$Rank LIMIT $n"
    bound = bind(sql, {"rank": -3, "n": 5})
    assert bound == "SELECT '$rank', rank AS \"$rank\" FROM comm.ops WHERE rank = (-3) AND seq > -(-3) LIMIT 5"


def test_a_query_without_parameters_is_left_as_it_is() -> None:
    for sql in ("SELECT  1", "SELECT  '$x'", "SELECT  $$text$$"):
        assert bind(sql, {}) == sql


@pytest.mark.parametrize(
    ("sql", "values", "message"),
    [
        ("SELECT $a", {}, "no value for $a"),
        ("SELECT $a", {"b": 1, "a": 2}, "no $b"),
        ("SELECT 1", {"b": 1}, "no $b"),
        ("SELECT ?", {"b": 1}, "has no name"),
        ("SELECT $1", {"b": 1}, "has no name"),
        ("SELECT t.$a FROM t", {"a": 1}, "where a name is required"),
        ("SELECT $a", {"a": object()}, "is not a value"),
        ("SELECT $a", {"a": Typed("1", "NOSUCH")}, "there is no type NOSUCH"),
    ],
)
def test_errors_name_the_parameter(sql: str, values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        bind(sql, values)


def test_what_is_no_sql() -> None:
    for sql in ("SELECT ((", "SELECT " + "(" * 5000 + "$a", "x" * 100_000):
        with pytest.raises(QueryRejected):
            bind(sql, {"a": 1})
