"""A SELECT over many nodes returns the rows of the same SELECT over the union of their tables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from federation_support import NOW_NS, Nodes
from hypothesis import given, settings
from hypothesis import strategies as st
from long import examples

from probing.federation.planning import shapes

SECOND = 1_000_000_000

ROW = st.fixed_dictionaries(
    {
        "ts": st.integers(NOW_NS - 600 * SECOND, NOW_NS),
        "job": st.sampled_from(["a", "b", None]),
        "rank": st.one_of(st.none(), st.integers(0, 3)),
        "op": st.sampled_from(["all_reduce", "barrier", "send"]),
        "seq": st.integers(0, 5),
        "bytes": st.one_of(st.none(), st.integers(-(2**40), 2**62)),
        "duration_ns": st.one_of(st.none(), st.integers(0, 10**6)),
        "bw": st.one_of(st.none(), st.floats(-1e6, 1e6, width=32)),
        "async_op": st.one_of(st.none(), st.booleans()),
    }
)
PROCESS = st.fixed_dictionaries(
    {"job": st.sampled_from(["a", "b", None]), "rank": st.integers(0, 3), "pid": st.integers(1, 3)}
)
NODE = st.fixed_dictionaries(
    {"comm.ops": st.lists(ROW, max_size=6), "process.processes": st.lists(PROCESS, max_size=3)}
)
NODES = st.lists(NODE, min_size=1, max_size=4)

AGGREGATES = (
    "count(*)",
    "count(bytes)",
    "sum(bytes)",
    "sum(duration_ns)",
    "sum(bw)",
    "min(bytes)",
    "max(ts)",
    "min(op)",
    "avg(bytes)",
    "avg(bw)",
    "bool_and(async_op)",
    "bool_or(async_op)",
    "count(DISTINCT rank)",
    "count(DISTINCT job)",
    "count(DISTINCT bytes)",
    "stddev(duration_ns)",
    "stddev_pop(bw)",
    "var_samp(duration_ns)",
    "var_pop(bw)",
    "variance(bw)",
    "count_if(bytes > 3)",
    "bit_and(seq)",
    "bit_or(seq)",
    "bit_xor(seq)",
    "min(DISTINCT seq)",
    "sum(DISTINCT seq)",
    "median(duration_ns)",
    "quantile_cont(bw, 0.9)",
    "max(ts) - min(ts)",
    "sum(bytes) / nullif(count(bytes), 0)",
    "count(*) FILTER (WHERE async_op)",
    "sum(duration_ns) FILTER (WHERE op = 'send')",
    "avg(bw) FILTER (WHERE rank > 0)",
    "count(DISTINCT seq) FILTER (WHERE rank > 0)",
    "coalesce(sum(bytes), 0) + 1",
    "sum(bytes::DECIMAL(38,2) / 1000000)",
    "max(bytes) - min(bytes)",
    "sum(async_op::INT)",
    "round(avg(bw), 1)",
    "max(seq, 2)",
    "arg_max(seq, ts) IS NULL",
    "corr(seq, duration_ns) IS NULL",
    "mean(duration_ns)",
    "list_sort(list(seq))",
    "string_agg(op, ',' ORDER BY op)",
)
KEYS = (
    "node",
    "op",
    "job",
    "rank",
    "op || 'x'",
    "date_trunc('minute', ts)",
    "seq % 2",
    "async_op",
    "coalesce(job, 'none')",
)
FILTERS = (
    "",
    "WHERE bytes > 0",
    "WHERE ts > now() - INTERVAL 5 MINUTE",
    "WHERE op = 'send' AND rank IS NOT NULL",
    "WHERE job = 'nobody'",
    "WHERE node <> 'n0'",
    "WHERE coalesce(rank, 0) = 0 OR async_op",
    "WHERE age(ts) > INTERVAL 1 SECOND",
)


@pytest.fixture(scope="module")
def fixed() -> Iterator[Nodes]:
    """Three nodes with NULLs and equal values; one of them is empty."""
    nodes = Nodes([{"comm.ops": _some(0), "process.processes": _processes(0)}, {}, {"comm.ops": _some(1)}])
    yield nodes
    nodes.close()


def _some(node: int) -> list[dict[str, Any]]:
    return [
        {
            "ts": NOW_NS - i * 37 * SECOND - node,
            "job": "ab"[i % 2] if i % 5 else None,
            "rank": i % 4 if i % 7 else None,
            "op": ("all_reduce", "barrier", "send")[i % 3],
            "seq": i // 4,
            "bytes": None if i % 6 == 5 else (i + node) << 40,
            "duration_ns": i * 1000 + node * 7,
            "bw": i / 3 + node if i % 4 else None,
            "async_op": None if i % 9 == 8 else i % 2 == 0,
        }
        for i in range(24)
    ]


def _processes(node: int) -> list[dict[str, Any]]:
    return [{"job": "ab"[i % 2], "rank": i, "pid": 100 * node + i} for i in range(4)]


@settings(max_examples=examples(40), deadline=None)
@given(
    NODES,
    st.lists(st.sampled_from(AGGREGATES), min_size=1, max_size=4),
    st.lists(st.sampled_from(KEYS), max_size=2, unique=True),
    st.sampled_from(FILTERS),
)
def test_aggregates_are_those_of_the_union(rows: list[Any], aggregates: list[str], keys: list[str], where: str) -> None:
    nodes = Nodes(rows)
    try:
        shown = ", ".join(f"{a} AS a{i}" for i, a in enumerate([*keys, *aggregates]))
        group = f"GROUP BY {', '.join(str(i + 1) for i in range(len(keys)))}" if keys else ""
        nodes.check(f"SELECT {shown} FROM comm.ops {where} {group}")
    finally:
        nodes.close()


@settings(max_examples=examples(25), deadline=None)
@given(
    NODES,
    st.sampled_from(["ts", "bytes DESC", "-seq", "op, bw DESC NULLS FIRST", "2", "length(op) DESC, rank NULLS FIRST"]),
    st.integers(0, 8),
    st.integers(0, 3),
    st.sampled_from(FILTERS),
)
def test_the_first_rows_are_those_of_the_union(
    rows: list[Any], order: str, limit: int, offset: int, where: str
) -> None:
    nodes = Nodes(rows)
    try:
        # Every column in the order, so that no tie is left open.
        columns = "op, bytes, ts, job, rank, seq, duration_ns, bw, async_op, node"
        sql = f"SELECT {columns} FROM comm.ops {where} ORDER BY {order}, {columns} LIMIT {limit} OFFSET {offset}"
        nodes.check(sql, kind="rows", ordered=True)
    finally:
        nodes.close()


@pytest.mark.parametrize("limit", ["LIMIT 4", "LIMIT 2 OFFSET 20", "LIMIT 40 OFFSET 30", "OFFSET 5"])
def test_a_limit_above_which_nodes_do_not_sort(fixed: Nodes, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    monkeypatch.setattr(shapes, "_TOP_N", 3)
    fixed.check(f"SELECT ts FROM comm.ops ORDER BY ts {limit}", kind="rows", ordered=True)
    fixed.check(f"SELECT DISTINCT ts FROM comm.ops ORDER BY ts DESC {limit}", kind="rows", ordered=True)


def test_a_large_limit_of_unsorted_rows_reaches_the_nodes(fixed: Nodes) -> None:
    (part,) = fixed.plan("SELECT ts FROM comm.ops LIMIT 200000 OFFSET 7").parts
    assert part.sql.endswith("LIMIT 200007")


LEFT_FILTERS = ("o.seq > 1", "o.bytes IS NULL", "o.op = 'send' OR o.rank IS NULL")
BOTH_FILTERS = (
    *LEFT_FILTERS,
    "p.pid IS NULL",
    "p.pid > 1 AND o.seq > 1",
    "p.rank = o.rank",
    "coalesce(p.pid, 0) = 0",
    "o.seq IS NULL",
)
JOINS = [
    *((join, where) for join in ("JOIN", "LEFT JOIN", "RIGHT JOIN", "FULL JOIN") for where in BOTH_FILTERS),
    *((join, where) for join in ("SEMI JOIN", "ANTI JOIN") for where in LEFT_FILTERS),
]


def _join(join: str, where: str) -> str:
    shown = "o.op, o.seq" if join in ("SEMI JOIN", "ANTI JOIN") else "o.op, o.seq, p.pid, p.node"
    on = "o.job = p.job AND o.rank = p.rank AND o.seq > 1 AND p.pid > 0"
    return f"SELECT {shown} FROM comm.ops o {join} process.processes p ON {on} WHERE {where}"


@pytest.mark.parametrize(("join", "where"), JOINS)
def test_joins(fixed: Nodes, join: str, where: str) -> None:
    fixed.check(_join(join, where), kind="ship")


@settings(max_examples=examples(15), deadline=None)
@given(NODES, st.sampled_from(JOINS))
def test_joins_are_those_of_the_union(rows: list[Any], chosen: tuple[str, str]) -> None:
    nodes = Nodes(rows)
    try:
        nodes.check(_join(*chosen), kind="ship")
    finally:
        nodes.close()


@pytest.mark.parametrize(
    ("sql", "kind"),
    [
        ("SELECT * FROM comm.ops", "rows"),
        ("SELECT node, op FROM comm.ops WHERE ts >= today() - INTERVAL 1 DAY", "rows"),
        ("SELECT DISTINCT op, job FROM comm.ops", "rows"),
        ("SELECT * EXCLUDE (ts) FROM comm.ops", "rows"),
        ("SELECT count(*) FROM comm.ops", "aggregate"),
        ("SELECT op AS o, count(*) AS n FROM comm.ops GROUP BY o HAVING n > 3", "aggregate"),
        ("SELECT op, sum(bytes) AS s, s / 2 AS half FROM comm.ops GROUP BY ALL", "aggregate"),
        ("SELECT upper(op) u, max(seq) AS seq FROM comm.ops GROUP BY upper(op)", "aggregate"),
        ("SELECT o.op, avg(o.bytes) FROM comm.ops AS o GROUP BY o.op", "aggregate"),
        ("SELECT max(bytes) FROM comm.ops HAVING count(*) > 1000", "aggregate"),
        ("SELECT op FROM comm.ops GROUP BY op", "aggregate"),
        ("SELECT DISTINCT count(*) FROM comm.ops GROUP BY op", "aggregate"),
        ("SELECT arg_max(seq, ts), arg_min(op, duration_ns) FROM comm.ops", "aggregate"),
        ("SELECT op, arg_max(rank, duration_ns) FILTER (WHERE rank > 0) FROM comm.ops GROUP BY op", "aggregate"),
        ("SELECT node, count(*) AS n FROM comm.ops GROUP BY node ORDER BY n DESC, node LIMIT 1", "aggregate"),
        ("SELECT op, count(*) FROM comm.ops GROUP BY ROLLUP (op)", "ship"),
        ("SELECT op, row_number() OVER (PARTITION BY op ORDER BY ts, seq, node) FROM comm.ops", "ship"),
        ("SELECT op FROM comm.ops UNION SELECT job FROM process.processes", "ship"),
        ("SELECT count(*) FROM (SELECT DISTINCT op, rank FROM comm.ops)", "ship"),
        ("SELECT op FROM comm.ops WHERE bytes = (SELECT max(bytes) FROM comm.ops)", "ship"),
        ("WITH o AS (FROM comm.ops WHERE seq > 2) SELECT a.op, b.op FROM o a JOIN o b USING (seq, rank)", "ship"),
        ("SELECT count(*) FROM comm.ops a, comm.ops b WHERE a.seq = 1 AND b.seq = 2", "ship"),
        ("SELECT geometric_mean(seq + 1) FROM comm.ops", "ship"),
        ("SELECT count(*), count(o) FROM comm.ops o", "ship"),
        ("SELECT op, EXISTS (FROM process.processes p WHERE p.rank = o.rank AND p.pid > 1) FROM comm.ops o", "ship"),
        ("SELECT DISTINCT ON (op) op, seq FROM comm.ops ORDER BY op, seq", "ship"),
        ("SELECT op, sum(seq) OVER (), rank() OVER (ORDER BY seq) FROM comm.ops", "ship"),
        ("SELECT count(*), mode(op), sum(sum(seq)) OVER () FROM comm.ops WHERE op = 'send' GROUP BY op", "ship"),
        ("SELECT 1 + 1 AS two", "local"),
        ("SELECT COLUMNS('.*_ns') FROM comm.ops", "rows"),
        ("FROM process.processes", "rows"),
        ("SELECT t.a FROM comm.ops AS t(a)", "ship"),
    ],
)
def test_shapes(fixed: Nodes, sql: str, kind: str) -> None:
    fixed.check(sql, kind=kind)


@pytest.mark.parametrize(
    "condition",
    [
        "ts > now() - INTERVAL 5 MINUTE",
        "ts > now() - INTERVAL '5 minutes'",
        "ts BETWEEN now() - INTERVAL 1 HOUR AND now()",
        "ts > '2026-01-01'",
        "ts >= today()",
        "ts > current_date - 1",
        "ts < current_timestamp",
        "ts::DATE = current_date",
        "age(ts) < INTERVAL 1 HOUR",
        "now() - ts < INTERVAL 3 MINUTE",
        "epoch_ns(ts) > 0",
        "hour(ts) >= 0",
        "ts > to_timestamp(1600000000)",
        "ts > now()::TIMESTAMP - INTERVAL 2 MINUTE",
        "extract(minute FROM ts) < 30",
        "strftime(ts, '%Y') = '2026'",
        "time_bucket(INTERVAL 5 MINUTE, ts) < now()",
        "date_trunc('hour', ts) <= now()",
        "ts > localtimestamp - INTERVAL 100 SECOND",
        "ts > TIMESTAMP '2026-01-01 00:00:00'",
    ],
)
def test_time_expressions_mean_one_instant(fixed: Nodes, condition: str) -> None:
    fixed.check(f"SELECT node, count(*), max(ts) FROM comm.ops WHERE {condition} GROUP BY node", kind="aggregate")


def test_now_is_put_in_by_the_asker(fixed: Nodes) -> None:
    asked = [part.sql for part in fixed.plan("SELECT max(now() - ts) FROM comm.ops WHERE ts < now()").parts]
    assert "now" not in " ".join(asked).lower()


@pytest.mark.parametrize(
    ("sql", "condition"),
    [
        ("WITH w AS (SELECT * FROM comm.ops) SELECT op, rank() OVER (ORDER BY ts) FROM w WHERE rank = 1", '"rank" = 1'),
        ("SELECT max(s) FROM (SELECT seq AS s FROM comm.ops WHERE bytes > 0) t WHERE s > 1", "bytes > 0 AND seq > 1"),
        ("SELECT max(s) FROM (SELECT t.s FROM (SELECT seq AS s FROM comm.ops) t) u WHERE u.s > 1", "seq > 1"),
        ("SELECT a.op FROM (SELECT op, seq FROM comm.ops) a JOIN comm.ops b USING (op) WHERE a.seq > 1", ""),
        ("WITH w AS (SELECT * FROM comm.ops) SELECT a.op FROM w a JOIN w b USING (ts) WHERE a.rank = 1", ""),
        ("SELECT op FROM (SELECT op, rank() OVER (ORDER BY seq) AS r FROM comm.ops) t WHERE op = 'send'", ""),
        ("SELECT op FROM (SELECT op FROM comm.ops ORDER BY ts LIMIT 3) t WHERE op = 'send'", ""),
        ("SELECT p.pid FROM process.processes p LEFT JOIN (SELECT * FROM comm.ops) o USING (rank) WHERE o.seq > 1", ""),
    ],
)
def test_conditions_reach_the_nodes_where_that_is_sound(fixed: Nodes, sql: str, condition: str) -> None:
    (asked,) = [part.sql for part in fixed.plan(sql).parts if part.table == "comm.ops"]
    assert condition in asked.partition(" WHERE ")[2] if condition else " WHERE " not in asked
    fixed.check(sql, kind="ship")
