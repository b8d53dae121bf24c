"""Queries at random, for the fuzzers: what the dialect has, calls of any function, and attacks that were mutated.

``check_gate`` is what must hold of the gate for each of them, and ``check_work`` how much it may do for it.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from typing import Any

import duckdb
from attacks import BEHIND, EXPENSIVE, HARMLESS, REFUSED
from hypothesis import strategies as st
from sqlglot.dialects.duckdb import DuckDB
from sqlglot.errors import SqlglotError

from probing.api.errors import ProbingError, QueryRejected
from probing.api.tables import TABLES
from probing.daemon.query.gate import check
from probing.federation.sql.allowed import FUNCTION_NAMES, TYPE_NAMES
from probing.federation.sql.reading import MAX_NESTING

__all__ = ("NESTS", "NOW_NS", "check_gate", "check_work", "mutants", "nests", "queries")

NOW_NS = 1_795_000_000_123_456_789
TABLE_FUNCTIONS = {"range", "generate_series", "unnest"}
# Whatever stands for them, DuckDB's own parser may never find a call of one in what the gate prints.
NEVER = {
    "copy_database",
    "current_setting",
    "duckdb_secrets",
    "duckdb_settings",
    "getenv",
    "getvariable",
    "glob",
    "json_execute_serialized_sql",
    "nextval",
    "parquet_metadata",
    "parquet_scan",
    "pragma_table_info",
    "query",
    "query_table",
    "read_blob",
    "read_csv",
    "read_csv_auto",
    "read_json",
    "read_parquet",
    "read_text",
    "sleep_ms",
    "sniff_csv",
    "which_secret",
    "write_log",
}

_all_functions = sorted({name for (name,) in duckdb.sql("SELECT function_name FROM duckdb_functions()").fetchall()})
_functions = st.one_of(
    st.sampled_from(sorted(FUNCTION_NAMES)),
    st.sampled_from(["max", "count", "sum", "lower", "abs", "coalesce", "concat", "replace", "repeat", "list", "len"]),
    st.sampled_from(_all_functions),
)
_columns = sorted({column.name for column in TABLES["comm.ops"].columns})
_names = st.sampled_from(["a", "b", "x", "range", "comm", '"a b"', '"; --"', "\u00e9"])
_texts = st.text(max_size=6).map(lambda s: "'" + s.replace("'", "''").replace("\0", "") + "'")
_leaves = st.one_of(
    st.sampled_from([f'"{name}"' for name in _columns]),
    st.integers(-(2**70), 2**70).map(str),
    _texts,
    _names,
    st.sampled_from(["NULL", "true", "1.5e3", "*", "now()", "DATE '2026-01-01'", "INTERVAL 5 DAY", "[1]", "{'a': 1}"]),
)
_operators = st.sampled_from(
    [
        "+",
        "-",
        "*",
        "/",
        "//",
        "%",
        "**",
        "||",
        "=",
        "<>",
        "<",
        "AND",
        "OR",
        "LIKE",
        "ILIKE",
        "GLOB",
        "SIMILAR TO",
        "<<",
        "&",
        "|",
        "^@",
        "IS DISTINCT FROM",
        "->",
        "->>",
        "COLLATE",
        "::",
        "IN",
    ]
)
_types = st.one_of(
    st.sampled_from(sorted(TYPE_NAMES)), st.sampled_from(["INT[]", "STRUCT(a INT)", "MAP(INT, TEXT)", "DECIMAL(9, 2)"])
)


def _calls(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.builds(
        lambda name, args, tail: f"{name}({', '.join(args)}){tail}",
        _functions,
        st.lists(inner, max_size=3),
        st.sampled_from(["", "", "", " FILTER (true)", " OVER ()", " OVER (PARTITION BY rank ORDER BY ts)"]),
    )


_expressions = st.recursive(
    _leaves,
    lambda inner: st.one_of(
        _calls(inner),
        st.tuples(inner, _operators, inner).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
        st.tuples(inner, _types).map(lambda t: f"TRY_CAST({t[0]} AS {t[1]})"),
        st.tuples(inner, inner).map(lambda t: f"CASE WHEN {t[0]} IS NULL THEN {t[1]} END"),
        st.tuples(inner, inner).map(lambda t: f"[{t[0]}, {t[1]}][1:2]"),
        inner.map(lambda e: f"(SELECT {e} FROM comm.ops)"),
        inner.map(lambda e: f"(NOT {e})"),
        inner.map(lambda e: f"- {e}"),
    ),
    max_leaves=6,
)
_tables = st.one_of(
    st.sampled_from(sorted(TABLES)),
    st.sampled_from(["range(10)", "comm.ops", "a", "b", "unnest([1])", "generate_series(1, 3)", "'/etc/passwd'"]),
)
_joins = st.sampled_from([", ", " JOIN ", " LEFT JOIN ", " ASOF JOIN ", " CROSS JOIN ", " POSITIONAL JOIN "])
_unions = st.sampled_from(["UNION", "UNION ALL BY NAME", "EXCEPT", "INTERSECT ALL"])
_tails = st.sampled_from(
    [
        "",
        " LIMIT 3",
        " ORDER BY 1",
        " ORDER BY ALL DESC NULLS LAST",
        " GROUP BY ALL",
        " QUALIFY true",
        " OFFSET 1",
        " USING SAMPLE 1 ROWS",
        " HAVING true",
        " GROUP BY CUBE (1, 2)",
    ]
)


@st.composite
def _selects(draw: st.DrawFn) -> str:
    columns = ", ".join(draw(st.lists(_expressions, min_size=1, max_size=3)))
    text = f"SELECT {draw(st.sampled_from(['', 'DISTINCT ', 'DISTINCT ON (1) ']))}{columns}"
    if draw(st.booleans()):
        text += f" FROM {draw(_tables)} AS {draw(_names)}"
        if draw(st.booleans()):
            text += f"{draw(_joins)}{draw(_tables)} ON {draw(_expressions)}"
        if draw(st.booleans()):
            text += f" WHERE {draw(_expressions)}"
    return text + draw(_tails)


@st.composite
def queries(draw: st.DrawFn) -> str:
    """A query; most are of the dialect."""
    text = draw(_selects())
    if draw(st.booleans()):
        text = f"{text} {draw(_unions)} {draw(_selects())}"
    if draw(st.booleans()):
        text = f"WITH a AS ({draw(_selects())}), {draw(_names)} AS ({draw(_selects())}) {text}"
    return text


_corpus = [*BEHIND, *HARMLESS, *(sql for some in (REFUSED, EXPENSIVE) for attacks in some.values() for sql in attacks)]
_corpus = [sql for sql in _corpus if len(sql) < 400]


@st.composite
def mutants(draw: st.DrawFn) -> str:
    """An attack with parts of it cut out, doubled, or put where they were not, and parts of another one."""
    words = draw(st.sampled_from(_corpus)).split(" ")
    for _ in range(draw(st.integers(1, 4))):
        at, to = sorted((draw(st.integers(0, len(words))), draw(st.integers(0, len(words)))))
        other = draw(st.sampled_from(_corpus)).split(" ")
        start = draw(st.integers(0, len(other)))
        words[at:to] = draw(st.sampled_from([[], words[at:to] * 2, other[start : start + 4], [draw(_expressions)]]))
    return " ".join(words)


# What stands before, and after, an expression inside of it.
NESTS = (
    ("(", ")"),
    ("[", "]"),
    ("{'a': ", "}"),
    ("(1, ", ")"),
    ("row(", ")"),
    ("array[", "]"),
    ("array(select ", ")"),
    ("abs(", ")"),
    ("coalesce(1, ", ")"),
    ("list_transform([1], x -> ", ")"),
    ("list_filter([1], lambda x: ", ")"),
    ("cast(", " as int)"),
    ("try_cast(", " as int)"),
    ("case when true then ", " end"),
    ("case ", " when 1 then 2 end"),
    ("not ", ""),
    ("- ", ""),
    ("", "::int"),
    ("", "[1]"),
    ("a[", "]"),
    ("a[1:", "]"),
    ("1 in (", ")"),
    ("1 between ", " and 2"),
    ("'a' like ", " escape 'c'"),
    ("interval (", ") day"),
    ("extract(day from ", ")"),
    ("trim(both from ", ")"),
    ("substring(", " from 1)"),
    ("position('a' in ", ")"),
    ("map {'a': ", "}"),
    ("map([", "], [1])"),
    ("struct_pack(a := ", ")"),
    ("[x for x in ", "]"),
    ("columns(", ")"),
    ("date ", ""),
    ("count(*) filter (where ", ")"),
    ("count(distinct ", ")"),
    ("sum(1) over (order by ", ")"),
    ("sum(1) over (rows between ", " preceding and current row)"),
    ("mode() within group (order by ", ")"),
    ("(select ", ")"),
    ("(select 1 limit ", ")"),
    ("(select 1 limit (", "))"),
    ("(select 1 offset ", ")"),
    ("(select 1 order by ", ")"),
    ("(select 1 group by ", ")"),
    ("(select 1 having ", ")"),
    ("(select 1 where ", ")"),
    ("(select 1 qualify ", ")"),
    ("(select distinct on (", ") 1)"),
    ("(select 1 group by cube (", "))"),
    ("(select * exclude (a) replace (", " as b) from t)"),
    ("(select * from (select ", ") t)"),
    ("(select * from unnest(", "))"),
    ("(select * from range(", "))"),
    ("(select * from t using sample ", " rows)"),
    ("(select * from t join u on ", ")"),
    ("(select * from lateral (select ", "))"),
    ("(values (", "))"),
    ("(with a as (select ", ") select 1)"),
    ("(select 1 union select ", ")"),
    ("exists(select ", ")"),
    ("1 in (select ", ")"),
    ("1 = any(select ", ")"),
    ("(from t select ", ")"),
    ("(select * from t pivot (", " for a))"),
)
# Python calls that the gate may make for each token of a query, and beside that.
_CALLS_EACH, _CALLS_MORE = 4000, 200_000


@st.composite
def nests(draw: st.DrawFn) -> str:
    """A few constructs inside each other, deeply; some are not closed."""
    kinds = draw(st.lists(st.sampled_from(NESTS), min_size=1, max_size=3))
    depth = draw(st.integers(1, 120))
    chosen = [kinds[i % len(kinds)] for i in range(depth)]
    closed = draw(st.sampled_from([depth, depth, depth, 0, depth - 1]))
    after = [close for _, close in reversed(chosen)][:closed]
    return "select " + "".join(before for before, _ in chosen) + draw(_leaves) + "".join(after)


class _TooMuch(BaseException):
    pass


def check_work(sql: str) -> None:
    """Raises AssertionError when the gate does more for ``sql`` than its length allows, also where it refuses it."""
    try:
        tokens = len(DuckDB().tokenize(sql))
    except SqlglotError:
        return
    left = _CALLS_EACH * tokens + _CALLS_MORE

    def count(frame: object, event: str, arg: object) -> None:
        nonlocal left
        del frame, arg
        left -= event == "call"
        if left < 0:
            raise _TooMuch

    sys.setprofile(count)
    try:
        check(sql, NOW_NS)
    except ProbingError:
        pass
    except _TooMuch:
        raise AssertionError(f"the work of the gate grows faster than {sql[:400]!r}") from None
    finally:
        sys.setprofile(None)


def check_gate(sql: str) -> str | None:
    """What the gate prints for ``sql``, or None when it refuses. Raises AssertionError when that is not as it must be.

    DuckDB reads it as one SELECT, or cannot; only of our tables, and of no function that is never allowed; the gate
    prints that again as it is, but for casts to times with a zone, which it wraps each time, and for long chains of
    ``x::INT``: their print, ``CAST(CAST(...))``, may be nested deeper than a query of a user may be.
    """
    try:
        checked = check(sql, NOW_NS)
    except ProbingError:
        return None
    try:
        again = check(checked.sql, NOW_NS + 1)
    except QueryRejected as e:
        if e.message != "the query is nested too deeply" or sql.count("::") < MAX_NESTING / 2:
            raise AssertionError(f"the gate refuses its own print of {sql!r}") from e
        again = checked
    assert again.sql == checked.sql or re.search("TIMESTAMP|TIME ZONE", checked.sql)
    assert again.tables == checked.tables
    try:
        found = duckdb.default_connection().extract_statements(checked.sql)
    except (duckdb.ParserException, duckdb.NotImplementedException):
        return None  # DuckDB is stricter here and there, and says so
    assert [statement.type for statement in found] == [duckdb.StatementType.SELECT]
    ((serialized,),) = duckdb.execute("SELECT json_serialize_sql(?::VARCHAR)", [checked.sql]).fetchall()
    tree = json.loads(serialized)
    ctes = {name.lower() for name in _ctes(tree)}
    for node in _nodes(tree):
        _check_duckdb_node(node, ctes, set(checked.tables))
    return checked.sql


def _check_duckdb_node(node: dict[str, Any], ctes: set[str], tables: set[str]) -> None:
    if node.get("type") == "BASE_TABLE":
        assert not node["catalog_name"]
        name = node["table_name"].lower()
        assert (name in ctes) if not node["schema_name"] else f"{node['schema_name'].lower()}.{name}" in tables
    elif node.get("type") == "TABLE_FUNCTION":
        assert node["function"]["function_name"].lower() in TABLE_FUNCTIONS
    elif node.get("class") == "FUNCTION":
        assert node["function_name"].lower() not in NEVER
        assert not node.get("catalog")


def _nodes(value: Any) -> Iterator[dict[str, Any]]:
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            yield value
            waiting.extend(value.values())
        elif isinstance(value, list):
            waiting.extend(value)


def _ctes(tree: Any) -> Iterator[str]:
    for node in _nodes(tree):
        for entry in (node.get("cte_map") or {}).get("map", ()):
            yield entry["key"]
        if node.get("type") == "CTE_NODE":
            yield node["cte_name"]
