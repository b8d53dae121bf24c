"""SELECTs and worlds of nodes at random, for the comparison of many nodes with one database.

Every SELECT has one right answer: a LIMIT follows an order over all columns, a window an order over all that it
shows, and ``ts`` differs in every row, so that the first or last row by it is one row. Sums of floats are exact.
"""

from __future__ import annotations

from random import Random
from typing import Any

from federation_support import NOW_NS

__all__ = ("select", "world")

SECOND = 1_000_000_000
_KEYS = ("node", "op", "job", "rank", "seq % 2", "async_op", "coalesce(job, 'none')", "op || 'x'", "rank IS NULL")
_NUMBERS = ("seq", "rank", "bytes", "duration_ns", "seq + rank", "coalesce(rank, -1)", "bytes // 1000", "-seq")
_VALUES = (*_NUMBERS, "op", "job", "node", "bw", "async_op", "ts", "upper(op)", "length(job)", "bw * 2")
_FOLDS = ("sum", "min", "max", "count", "avg")
_AGGREGATES = (
    "count(*)",
    "count(DISTINCT rank)",
    "count(DISTINCT job)",
    "count(DISTINCT bytes)",
    "count(DISTINCT op || job)",
    "count_if(seq > 2)",
    "bool_and(async_op)",
    "bool_or(async_op)",
    "bit_or(seq)",
    "bit_xor(seq)",
    "sum(DISTINCT seq)",
    "min(DISTINCT bytes)",
    "avg(DISTINCT seq)",
    "stddev(duration_ns)",
    "var_pop(seq)",
    "stddev_pop(bw)",
    "sum(bw)",
    "avg(bw)",
    "arg_max(seq, ts)",
    "arg_min(op, ts)",
    "arg_max(rank, ts)",
    "any_value(job) IS NULL",
    "median(seq)",
    "quantile_cont(bw, 0.9)",
    "quantile_disc(seq, 0.5)",
    "list_sort(list(seq))",
    "string_agg(op, ',' ORDER BY ts)",
    "first(seq ORDER BY ts)",
    "max(seq, 2)",
    "max(ts) - min(ts)",
    "corr(seq, duration_ns)",
    "covar_pop(seq, rank)",
    "mode(seq % 1)",
    "histogram(op)",
    "coalesce(sum(bytes), 0) + count(*)",
    "sum(bytes) / nullif(count(bytes), 0)",
    "sum(CASE WHEN op = 'send' THEN bytes ELSE 0 END)",
    "covar_samp(bw, seq)",
    "regr_slope(seq, duration_ns)",
    "max(op) || min(op)",
    "count(job) = count(*)",
    "first(op ORDER BY ts DESC)",
    "last(rank ORDER BY ts)",
    "var_samp(seq) IS NULL",
    "kurtosis(seq)",
    "skewness(seq)",
    "entropy(op)",
    "bit_and(seq)",
    "product(seq)",
)
_CONDITIONS = (
    "seq > 2",
    "rank IS NULL",
    "rank = 1",
    "op = 'send'",
    "op IN ('send', 'barrier')",
    "job IS NOT DISTINCT FROM 'a'",
    "bytes BETWEEN 0 AND 4000",
    "async_op",
    "NOT async_op",
    "op LIKE 'b%'",
    "bw > 0",
    "ts > now() - INTERVAL 5 MINUTE",
    "coalesce(rank, 0) = 0",
    "seq % 2 = 0 OR job IS NULL",
    "node <> 'n0'",
    "job = 'nobody'",
    "NULL",
    "1 = 1",
    "rank NOT IN (0, 2)",
    "CASE WHEN op = 'send' THEN seq > 1 ELSE rank > 0 END",
    "(rank, seq) > (1, 2)",
)
_SUBQUERIES = (
    "rank IN (SELECT rank FROM process.processes WHERE pid > 1)",
    "rank NOT IN (SELECT rank FROM process.processes)",
    "job IN (SELECT p.job FROM process.processes p GROUP BY p.job HAVING count(*) > 1)",
    "EXISTS (SELECT 1 FROM process.processes p WHERE p.rank = o.rank AND p.job = o.job)",
    "NOT EXISTS (FROM process.processes p WHERE p.rank = o.rank)",
    "seq = (SELECT max(seq) FROM comm.ops)",
    "bytes > (SELECT avg(i.bytes) FROM comm.ops i WHERE i.op = o.op)",
    "seq >= ALL (SELECT i.seq FROM comm.ops i WHERE i.node = o.node)",
    "seq > ANY (SELECT pid FROM process.processes)",
)
_WINDOWS = (
    "row_number() OVER (PARTITION BY {key} ORDER BY ts)",
    "sum(seq) OVER (PARTITION BY {key})",
    "rank() OVER (ORDER BY seq)",
    "lag(seq) OVER (PARTITION BY {key} ORDER BY ts)",
    "count(*) OVER ()",
    "sum(seq) OVER (PARTITION BY {key} ORDER BY ts ROWS BETWEEN 1 PRECEDING AND CURRENT ROW)",
    "first_value(op) OVER (PARTITION BY {key} ORDER BY ts)",
    "ntile(3) OVER (ORDER BY ts)",
    "max(seq) FILTER (WHERE rank > 0) OVER (PARTITION BY {key})",
    "dense_rank() OVER (PARTITION BY {key} ORDER BY seq)",
)
_SETS = ("UNION", "UNION ALL", "INTERSECT", "EXCEPT", "EXCEPT ALL", "INTERSECT ALL", "UNION BY NAME")
_TEXTS = frozenset({"op", "job", "node"})
_HOW = ("", " DESC", " NULLS FIRST", " DESC NULLS LAST")
_JOINS = ("JOIN", "LEFT JOIN", "RIGHT JOIN", "FULL JOIN")


def world(random: Random) -> list[dict[str, list[dict[str, Any]]]]:
    """Returns the rows of 1 to 7 nodes by table: some are empty, one may have most of the rows."""
    nodes = random.randint(1, 7)
    heavy = random.randrange(nodes)
    times = random.sample(range(600_000), 64)
    rows: list[dict[str, list[dict[str, Any]]]] = []
    for node in range(nodes):
        size = random.choice((0, 0, 1, 3, 6)) if node != heavy else random.choice((0, 4, 20))
        ops = [_operation(random, NOW_NS - times.pop() * 1_000_000) for _ in range(size)]
        processes = [_process(random) for _ in range(random.choice((0, 1, 3)))]
        rows.append({"comm.ops": ops, "process.processes": processes})
    return rows


def _operation(random: Random, ts: int) -> dict[str, Any]:
    def sometimes(value: Any) -> Any:
        return None if random.random() < 0.2 else value

    return {
        "ts": ts,
        "job": random.choice(("a", "b", None)),
        "rank": sometimes(random.randint(0, 3)),
        "op": random.choice(("all_reduce", "barrier", "send")),
        "seq": random.randint(0, 5),
        "bytes": sometimes(random.randint(-5000, 5000)),
        "duration_ns": sometimes(random.randint(0, 1_000_000)),
        "bw": sometimes(random.randint(-400, 400) / 4),
        "async_op": sometimes(random.random() < 0.5),
    }


def _process(random: Random) -> dict[str, Any]:
    job, rank = random.choice(("a", "b", None)), random.choice((0, 1, 2, None))
    return {"job": job, "rank": rank, "pid": random.randint(1, 4)}


def select(random: Random) -> str:
    """Returns one SELECT."""
    made = random.choices((_groups, _rows, _joined, _windows, _with, _set, _nested), (6, 4, 3, 2, 2, 2, 3))[0]
    return made(random)


def _where(random: Random, *, subqueries: bool = False) -> str:
    found = random.sample(_CONDITIONS, random.choice((0, 0, 1, 1, 2)))
    if subqueries and random.random() < 0.5:
        found.append(random.choice(_SUBQUERIES))
    return f" WHERE {random.choice((' AND ', ' AND ', ' OR ')).join(f'({c})' for c in found)}" if found else ""


def _tail(random: Random, width: int) -> str:
    """Orders by all columns, in any sequence and direction, and cuts."""
    if random.random() < 0.5:
        return ""
    keys = random.sample(range(1, width + 1), width)
    order = ", ".join(f"{key}{random.choice(_HOW)}" for key in keys)
    limit = random.choice(("", " LIMIT 0", " LIMIT 3", " LIMIT 5 OFFSET 2", " OFFSET 1"))
    return f" ORDER BY {order}{limit}"


def _aggregate(random: Random) -> str:
    fold = f"{random.choice(_FOLDS)}({random.choice(_NUMBERS)})"
    call = random.choice((fold, random.choice(_AGGREGATES)))
    if random.random() < 0.2 and call.endswith(")") and call.count("(") == 1:
        call += f" FILTER (WHERE {random.choice(_CONDITIONS)})"
    return call


def _groups(random: Random) -> str:
    keys = random.sample(_KEYS, random.choice((0, 1, 1, 2)))
    calls = [_aggregate(random) for _ in range(random.randint(1, 3))]
    shown = [*(f"{key} AS k{i}" for i, key in enumerate(keys)), *(f"{call} AS a{i}" for i, call in enumerate(calls))]
    group = f" GROUP BY {random.choice((', '.join(keys), ', '.join(map(str, range(1, len(keys) + 1))), 'ALL'))}"
    having = random.choice(("", "", " HAVING count(*) > 1", " HAVING max(seq) > 2 OR min(rank) IS NULL"))
    source = f"FROM comm.ops o{_where(random, subqueries=random.random() < 0.2)}"
    # Ordered by the keys, which are unique; an aggregate may be equal only nearly.
    tail = ""
    if keys and random.random() < 0.5:
        tail = f" ORDER BY {', '.join(f'k{i}{random.choice(_HOW)}' for i in range(len(keys)))}"
        tail += random.choice(("", " LIMIT 2", " LIMIT 2 OFFSET 1", " LIMIT 0"))
    return f"SELECT {', '.join(shown)} {source}{group if keys else ''}{having}{tail}"


def _rows(random: Random) -> str:
    shown = random.sample(_VALUES, random.randint(1, 4))
    if random.random() < 0.15:
        return f"SELECT * FROM comm.ops o{_where(random, subqueries=True)}{_tail(random, 10)}"
    distinct = random.choice(("", "", "DISTINCT "))
    if random.random() < 0.1:
        return f"SELECT DISTINCT ON (op) op, seq, ts FROM comm.ops o{_where(random)} ORDER BY op, ts"
    if random.random() < 0.2:
        shown.append(f"(SELECT count(*) FROM process.processes p WHERE p.rank = o.rank AND p.pid > {len(shown)}) AS n")
    tail = _tail(random, len(shown))
    return f"SELECT {distinct}{', '.join(shown)} FROM comm.ops o{_where(random, subqueries=True)}{tail}"


def _joined(random: Random) -> str:
    join = random.choice(_JOINS)
    on = random.choice(("o.rank = p.rank", "o.rank = p.rank AND o.job = p.job", "o.seq > p.pid AND o.node = p.node"))
    condition = random.choice(("", " WHERE o.seq > 1", " WHERE p.pid > 1", " WHERE p.pid IS NULL", " WHERE o.bw > 0"))
    source = f"FROM comm.ops o {join} process.processes p ON {on}{condition}"
    if random.random() < 0.5:
        call = random.choice(("count(*)", "sum(o.seq)", "count(DISTINCT p.pid)", "max(o.ts)", "avg(p.pid)"))
        return f"SELECT o.op, p.job, {call} AS a {source} GROUP BY o.op, p.job"
    shown = random.sample(("o.op", "o.seq", "p.pid", "p.node", "o.bytes", "o.job", "o.node", "p.rank"), 3)
    return f"SELECT {', '.join(f'{c} AS c{i}' for i, c in enumerate(shown))} {source}{_tail(random, 3)}"


def _windows(random: Random) -> str:
    key = random.choice(("node", "op", "job", "rank", "node, op"))
    shown = ["op", "seq", "ts", *(w.format(key=key) for w in random.sample(_WINDOWS, random.randint(1, 2)))]
    listed = ", ".join(f"{c} AS c{i}" for i, c in enumerate(shown))
    qualify = random.choice(("", "", f" QUALIFY row_number() OVER (PARTITION BY {key} ORDER BY ts DESC) <= 2"))
    return f"SELECT {listed} FROM comm.ops o{_where(random)}{qualify}{_tail(random, len(shown))}"


def _with(random: Random) -> str:
    inner = f"SELECT node, op, rank, seq, bytes, ts FROM comm.ops{_where(random)}"
    if random.random() < 0.5:
        shown = "node, op, rank, max(seq) AS seq, sum(bytes) AS bytes, min(ts) AS ts"
        inner = f"SELECT {shown} FROM comm.ops{_where(random)} GROUP BY ALL"
    outer = random.choice(
        (
            "SELECT op, count(*) AS n, sum(bytes) AS b FROM w GROUP BY op",
            "SELECT a.op, b.seq FROM w a JOIN w b ON a.rank = b.rank AND a.seq < b.seq",
            "SELECT * FROM w WHERE seq > 1",
            "SELECT a.op, b.job FROM w a LEFT JOIN process.processes b USING (rank) WHERE a.seq > 1",
            "SELECT b.op, a.job FROM process.processes a LEFT JOIN w b USING (rank) WHERE b.seq > 1 OR b.seq IS NULL",
            "SELECT ts, row_number() OVER (ORDER BY ts) FROM w WHERE op = 'send' AND seq IS NOT NULL",
            "SELECT op FROM w UNION SELECT job FROM process.processes",
            "SELECT node, max(seq) AS m FROM w WHERE rank = 1 GROUP BY node ORDER BY node LIMIT 3",
            "SELECT (SELECT max(seq) FROM w), count(DISTINCT node) FROM comm.ops",
        )
    )
    return f"WITH w AS ({inner}) {outer}"


def _set(random: Random) -> str:
    columns = random.choice((("op", "job"), ("seq", "rank"), ("node", "op")))
    other = random.choice((("job", "node"), ("pid", "rank")))
    first = f"SELECT {columns[0]} AS x, {columns[1]} AS y FROM comm.ops{_where(random)}"
    if _TEXTS.issuperset((*columns, *other)) and random.random() < 0.4:
        second = f"SELECT {other[0]} AS x, {other[1]} AS y FROM process.processes"
    else:
        second = f"SELECT {columns[0]} AS x, {columns[1]} AS y FROM comm.ops{_where(random)}"
    return f"{first} {random.choice(_SETS)} {second}{_tail(random, 2)}"


def _nested(random: Random) -> str:
    inner = random.choice((_groups, _rows, _windows))(random)
    source = f"FROM comm.ops{_where(random)}"
    union = f"SELECT op {source} UNION ALL SELECT job FROM process.processes"
    return random.choice(
        (
            f"SELECT count(*) FROM ({inner}) AS t",
            f"SELECT * FROM ({inner}) AS t",
            f"SELECT op, sum(n) AS s FROM (SELECT op, node, count(*) AS n {source} GROUP BY ALL) t GROUP BY op",
            f"SELECT node, n FROM (SELECT node, count(*) AS n {source} GROUP BY node) t WHERE n > 1",
            f"SELECT max(d) FROM (SELECT ts - lag(ts) OVER (PARTITION BY node ORDER BY ts) AS d {source}) t",
            f"SELECT * FROM (SELECT op, seq, rank, ts {source}) t WHERE seq > 1 AND op = 'send'",
            f"SELECT op, count(*) FROM ({union}) t GROUP BY ALL",
            f"SELECT a, count(*) FROM (SELECT op AS a, seq AS b {source}) t WHERE b > 1 AND a <> 'x' GROUP BY a",
            f"SELECT x.r FROM (SELECT rank AS r, ts, seq % 3 AS m {source}) x ORDER BY x.ts, x.r LIMIT 3",
            f"SELECT t.ts FROM (SELECT u.* FROM (SELECT * {source}) u WHERE u.seq < 4) t WHERE t.rank = 1",
        )
    )
