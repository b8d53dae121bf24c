"""What the gate lets through, what it refuses and how it says so."""

from __future__ import annotations

import duckdb
import pytest
import sqlglot
from attacks import EXPENSIVE, HARMLESS, REFUSED
from hypothesis import given, settings
from hypothesis import strategies as st
from long import examples, long_unless
from sqlglot import exp

from probing.api.errors import NO_TABLE, QueryRejected
from probing.api.tables import TABLES
from probing.daemon.query.gate import check
from probing.federation.sql import allowed
from probing.federation.sql.reading import MAX_TEXT

NOW_NS = 1_795_000_000_123_456_789


@pytest.mark.parametrize("sql", [sql for attacks in REFUSED.values() for sql in attacks])
def test_attacks_are_refused_in_one_line(sql: str) -> None:
    with pytest.raises(QueryRejected) as caught:
        check(sql, NOW_NS)
    assert caught.value.message
    assert "\n" not in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    "sql",
    # The gate takes seconds for a text of tens of kB.
    [
        long_unless(len(sql) < 10_000, sql)
        for sql in (*HARMLESS, *(s for attacks in EXPENSIVE.values() for s in attacks))
    ],
)
def test_what_is_no_attack_or_is_for_the_workers_limits_passes(sql: str) -> None:
    checked = check(sql, NOW_NS)
    (statement,) = duckdb.default_connection().extract_statements(checked.sql)
    assert statement.type == duckdb.StatementType.SELECT
    # The names of columns make the text longer.
    if len(checked.sql) <= MAX_TEXT:
        assert check(checked.sql, NOW_NS + 1).sql == checked.sql


@pytest.mark.parametrize(
    "sql",
    [
        "(" * 500 + "SELECT 1" + ")" * 500,
        "SELECT " + "(" * 500 + "1" + ")" * 500,
        "SELECT " + "NOT " * 5000 + "true",
        "SELECT " + "- " * 5000 + "1",
        "SELECT " + "1 + " * 15_000 + "1",
        "SELECT " + "CASE WHEN true THEN " * 3000 + "1" + " END" * 3000,
        "SELECT " + "a." * 3000 + "b",
        "SELECT 1" + " UNION ALL SELECT 1" * 3000,
        "SELECT " + "[" * 200 + "]" * 200,
        "SELECT " + "f(" * 2000,
        "SELECT 1 WHERE x IN (" + "1," * 20_000 + "1)",
        "SELECT '" + "x" * MAX_TEXT + "'",
        "SELECT 1 " + "-- " * 30_000,
    ],
    ids=range(13),
)
def test_deep_and_large_queries_are_refused(sql: str) -> None:
    with pytest.raises(QueryRejected):
        check(sql, NOW_NS)


@pytest.mark.parametrize(
    ("sql", "tables"),
    [
        ("SELECT 1", ()),
        ("select * from comm.ops", ("comm.ops",)),
        ('SELECT * FROM "comm"."ops"', ("comm.ops",)),
        ("SELECT * FROM COMM.Ops", ("comm.ops",)),
        ("FROM comm.ops", ("comm.ops",)),
        ("SELECT * FROM comm.ops o JOIN comm.inflight i USING (job, seq)", ("comm.inflight", "comm.ops")),
        ("WITH a AS (SELECT * FROM comm.ops), b AS (SELECT * FROM a) SELECT * FROM b", ("comm.ops",)),
        ("SELECT (SELECT max(ts) FROM probing.losses)", ("probing.losses",)),
        ("SELECT * FROM comm.ops WHERE pid IN (SELECT pid FROM process.processes)", ("comm.ops", "process.processes")),
        ("SELECT 1 UNION SELECT rank FROM comm.ops EXCEPT SELECT 2", ("comm.ops",)),
        ("SELECT 'a;b', 'it''s' -- a comment; with a semicolon\n FROM comm.ops;", ("comm.ops",)),
        ("SELECT * FROM range(10), comm.ops", ("comm.ops",)),
    ],
)
def test_tables_of_a_query_are_found(sql: str, tables: tuple[str, ...]) -> None:
    assert check(sql, NOW_NS).tables == tables


@pytest.mark.parametrize(
    ("sql", "message", "hint"),
    [
        ("SELECT * FROM ops", "there is no table ops", "did you mean comm.ops?"),
        ("SELECT * FROM comm.opps", "there is no table comm.opps", "did you mean comm.ops"),
        ("SELECT * FROM zzz.qqq", "there is no table zzz.qqq", "`probingctl tables` lists the tables"),
        (
            "SELECT quantil_cont(bytes, 0.5) FROM comm.ops",
            "the function quantil_cont is not allowed",
            "similar names: ",
        ),
        ("SHOW TABLES", "SHOW is not allowed, only SELECT", "list the tables with SELECT * FROM probing.table_docs"),
        ("SELECT FROM WHERE", "syntax: ", "one SELECT"),
        ("SELECT {: 1}", "syntax: an expression is not complete", "one SELECT"),
        ("SELECT 1; SELECT 2", "more than one statement", "send one SELECT"),
    ],
)
def test_a_refusal_names_the_thing_and_a_way_out(sql: str, message: str, hint: str) -> None:
    with pytest.raises(QueryRejected) as caught:
        check(sql, NOW_NS)
    assert caught.value.message.startswith(message)
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("table", "code"),
    [
        ("python.losses", NO_TABLE),
        ("user.loads", NO_TABLE),
        ("global.user.loads", ""),
        ("python.`1 + 1`", ""),
        ("comm.opps", ""),
        ("ops", ""),
    ],
)
def test_programs_can_tell_that_a_table_is_of_other_nodes(table: str, code: str) -> None:
    with pytest.raises(QueryRejected) as caught:
        check(f"SELECT * FROM {table}", NOW_NS)
    assert caught.value.code == code


def test_now_is_one_instant_in_all_its_forms() -> None:
    printed = check("SELECT now(), current_timestamp, get_current_timestamp(), localtimestamp, today()", NOW_NS).sql
    assert printed.count("CAST('2026-11-18 11:06:40.123456789' AS TIMESTAMP_NS)") == 4
    assert printed.count("CAST('2026-11-18' AS DATE)") == 1
    assert duckdb.sql(f"SELECT epoch_ns(a) FROM ({check('SELECT now() a', NOW_NS).sql})").fetchall() == [(NOW_NS,)]
    typed = f"SELECT typeof(a), typeof(b) FROM ({check('SELECT now() a, today() b', NOW_NS).sql})"
    assert duckdb.sql(typed).fetchall() == [("TIMESTAMP_NS", "DATE")]


def test_a_cte_is_seen_only_where_it_is_defined() -> None:
    check("SELECT * FROM (WITH a AS (SELECT 1) SELECT * FROM a)", NOW_NS)
    for sql in (
        "SELECT * FROM (WITH a AS (SELECT 1) SELECT * FROM a), a",
        "WITH a AS (SELECT * FROM b), b AS (SELECT 1) SELECT * FROM a",
        "WITH a AS (SELECT * FROM a) SELECT * FROM a",
        # To DuckDB the Kelvin sign is no k, so the last name would be of a file.
        'WITH "/x/\u212a.parquet" AS (SELECT 1) SELECT * FROM "/x/k.parquet"',
    ):
        with pytest.raises(QueryRejected, match="there is no table"):
            check(sql, NOW_NS)


def test_allowed_names_exist() -> None:
    classes = allowed.NODE_CLASSES | allowed.FUNCTION_CLASSES
    assert {name for name in classes if not hasattr(exp, name)} == set()
    assert {name for name in allowed.TYPE_NAMES if name not in exp.DataType.Type.__members__} == set()
    known = {name.lower() for (name,) in duckdb.sql("SELECT DISTINCT function_name FROM duckdb_functions()").fetchall()}
    # `row` is syntax in DuckDB.
    assert allowed.FUNCTION_NAMES - known == set()


@pytest.mark.parametrize(
    "text",
    ["1 day", "3d", "90 min", "1.5 hours", "-2 weeks", "1 day 02:03:04", "1 day ago", "5 minutes 00:00:30", "1h 30m"],
)
def test_an_interval_is_as_long_as_its_whole_text_says(text: str) -> None:
    sql = f"SELECT TIMESTAMP '2026-01-31' + INTERVAL '{text}' AS x"
    assert duckdb.sql(check(sql, NOW_NS).sql).fetchall() == duckdb.sql(sql).fetchall()


@pytest.mark.parametrize("path", ["a", "a.b", "l[0]", "x y", "*", "/a/b", "$.a.b", '$."a.b"', "$.l[*]"])
@pytest.mark.parametrize("call", ["x -> '{}'", "x ->> '{}'", "json_extract(x, '{}')", "json_extract_string(x, '{}')"])
def test_a_path_into_json_leads_to_the_same_value(call: str, path: str) -> None:
    rows = """(SELECT '{"a.b": 1, "a": {"b": 2}, "l": [3], "l[0]": 4, "x y": 5}'::JSON AS x)"""
    sql = f"SELECT {call.format(path)} AS y FROM {rows}"
    assert duckdb.sql(check(sql, NOW_NS).sql).fetchall() == duckdb.sql(sql).fetchall()


_WORDS = st.sampled_from(
    ["SELECT", "FROM", "WHERE", "(", ")", ",", "*", "comm.ops", "1", "'a'", "read_text", "WITH", "AS", "x", ";", "COPY"]
)
_COLUMNS = sorted({column.name for column in TABLES["comm.ops"].columns})
_LEAVES = st.one_of(
    st.sampled_from([f'"{name}"' for name in _COLUMNS]),
    st.integers(-(2**40), 2**40).map(str),
    st.text(max_size=12).filter(lambda s: s.isprintable()).map(lambda s: "'" + s.replace("'", "''") + "'"),
    st.sampled_from(["NULL", "true", "1.5e3", "ts - INTERVAL 5 MINUTE", "DATE '2026-01-01'"]),
)
_OPERATORS = st.sampled_from(["+", "-", "*", "%", "||", "=", "<", "AND", "OR", "IS DISTINCT FROM"])
_FUNCTIONS = st.sampled_from(["max", "lower", "abs", "coalesce", "epoch_ns"])
_EXPRESSIONS = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.tuples(inner, _OPERATORS, inner).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
        st.tuples(_FUNCTIONS, inner).map(lambda t: f"{t[0]}({t[1]})"),
        inner.map(lambda e: f"CASE WHEN {e} IS NULL THEN 1 END"),
        inner.map(lambda e: f"TRY_CAST({e} AS VARCHAR)"),
        inner.map(lambda e: f"(NOT {e})"),
        inner.map(lambda e: f"(- {e})"),
    ),
    max_leaves=8,
)


@settings(max_examples=examples(150), deadline=None)
@given(_EXPRESSIONS)
def test_what_is_printed_means_what_was_asked(expression: str) -> None:
    """DuckDB parses the printed text to one SELECT, and the gate prints that again as it is."""
    checked = check(f"SELECT {expression} AS x FROM comm.ops", NOW_NS)
    (statement,) = duckdb.default_connection().extract_statements(checked.sql)
    assert statement.type == duckdb.StatementType.SELECT
    assert check(checked.sql, NOW_NS + 1) == checked


@settings(max_examples=examples(200), deadline=None)
@given(st.text(max_size=200))
def test_any_text_is_answered_or_refused(text: str) -> None:
    try:
        checked = check(text, NOW_NS)
    except QueryRejected:
        return
    assert sqlglot.parse_one(checked.sql, read="duckdb")


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(_WORDS, max_size=15))
def test_shuffled_words_never_get_a_file_or_a_second_statement_through(words: list[str]) -> None:
    try:
        checked = check(" ".join(words), NOW_NS)
    except QueryRejected:
        return
    assert "READ_TEXT(" not in checked.sql.upper()
    try:
        (statement,) = duckdb.default_connection().extract_statements(checked.sql)
    except duckdb.ParserException:
        return  # `SELECT` alone, say: DuckDB is stricter
    assert statement.type == duckdb.StatementType.SELECT


@pytest.mark.parametrize(
    ("sql", "columns"),
    [
        ("SELECT count(*) FROM comm.ops", {"comm", "ops"}),
        ("SELECT Op, sum(bytes) AS n FROM comm.ops o WHERE o.rank = 1 GROUP BY op", {"op", "bytes", "n", "rank"}),
        ("SELECT a.seq FROM comm.ops a JOIN comm.ops b USING (rank)", {"seq", "rank"}),
        ("SELECT * FROM comm.ops", None),
        ("SELECT o.* EXCLUDE (seq) FROM comm.ops o", None),
        ("SELECT rank FROM (SELECT * FROM comm.ops)", None),
        ("SELECT COLUMNS('r.*') FROM comm.ops", None),
        ("SELECT ops FROM comm.ops", None),
        ("SELECT o FROM comm.ops o", None),
        ("SELECT #3 FROM comm.ops", None),
        ("SELECT x FROM comm.ops AS o(x)", None),
        ("SELECT a.seq FROM comm.ops a NATURAL JOIN comm.ops b", None),
    ],
)
def test_the_columns_that_a_statement_uses(sql: str, columns: set[str] | None) -> None:
    try:
        found = check(sql, NOW_NS).columns
    except QueryRejected:
        # What the gate refuses needs no columns.
        assert columns is None
        return
    assert found is None if columns is None else found is not None and columns <= found
