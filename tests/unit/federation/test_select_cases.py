"""Cases that engines get wrong, in the manner of sqllogictest suites, over four nodes; one is empty."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest
from federation_support import Nodes
from select_grammar import world

# Answers whose order is part of them: the last key makes it total.
ORDERED = (
    "SELECT rank, ts FROM comm.ops ORDER BY rank NULLS FIRST, ts",
    "SELECT rank, ts FROM comm.ops ORDER BY rank DESC NULLS LAST, ts DESC",
    "SELECT rank, ts FROM comm.ops ORDER BY rank NULLS LAST, ts LIMIT 3",
    "SELECT job, ts FROM comm.ops ORDER BY job DESC NULLS FIRST, ts LIMIT 4 OFFSET 2",
    "SELECT ts FROM comm.ops ORDER BY -seq, ts LIMIT 5",
    "SELECT ts AS seq FROM comm.ops ORDER BY ts DESC LIMIT 5",
    "SELECT seq, ts FROM comm.ops ORDER BY ALL LIMIT 5",
    "SELECT DISTINCT op FROM comm.ops ORDER BY op DESC LIMIT 2",
    "SELECT DISTINCT rank FROM comm.ops ORDER BY rank NULLS FIRST LIMIT 2 OFFSET 1",
    "SELECT op, count(*) AS n FROM comm.ops GROUP BY op ORDER BY n DESC, op",
    "SELECT op, count(*) FROM comm.ops GROUP BY op ORDER BY max(ts) DESC",
    "SELECT rank, sum(seq) FROM comm.ops GROUP BY rank ORDER BY 1 NULLS FIRST LIMIT 2",
    "SELECT op FROM comm.ops UNION SELECT job FROM comm.ops ORDER BY 1 NULLS FIRST",
    "SELECT ts FROM comm.ops ORDER BY CASE WHEN op = 'send' THEN 0 ELSE 1 END, ts",
    "SELECT DISTINCT ON (op) op, ts FROM comm.ops ORDER BY op, ts DESC",
    "SELECT DISTINCT ON (rank) rank, seq, ts FROM comm.ops ORDER BY rank NULLS LAST, ts",
    "(SELECT ts FROM comm.ops ORDER BY ts LIMIT 2) UNION (SELECT ts FROM comm.ops ORDER BY ts DESC LIMIT 2) ORDER BY 1",
)
CASES = (
    # Conditions on what a subquery puts together: on its keys they reach the nodes, on others they must not.
    "SELECT * FROM (SELECT op, rank, count(*) AS n FROM comm.ops GROUP BY op, rank) AS q WHERE q.op = 'send'",
    "SELECT * FROM (SELECT op, count(*) AS n FROM comm.ops GROUP BY op) AS q WHERE q.n > 2 AND q.op <> 'send'",
    "SELECT * FROM (SELECT op AS job, count(*) AS n FROM comm.ops GROUP BY op) AS q WHERE q.job = 'send'",
    "SELECT * FROM (SELECT rank, op, max(ts) AS ts FROM comm.ops GROUP BY ROLLUP (rank, op)) AS q WHERE q.rank = 1",
    "SELECT * FROM (SELECT rank, count(*) AS n FROM comm.ops GROUP BY ALL) AS q WHERE q.rank IS NULL",
    "SELECT * FROM (SELECT op, ts, row_number() OVER (PARTITION BY op ORDER BY ts) AS n FROM comm.ops) AS q"
    " WHERE q.op = 'send' AND q.ts < now()",
    "SELECT * FROM (SELECT op, ts, count(*) OVER (PARTITION BY op) AS n, count(*) OVER () AS m FROM comm.ops) AS q"
    " WHERE q.op = 'send'",
    "SELECT * FROM (SELECT job, op, sum(count(*)) OVER (PARTITION BY job) AS n FROM comm.ops GROUP BY job, op) AS q"
    " WHERE q.op = 'send' AND q.job IS NOT NULL",
    "SELECT * FROM (SELECT op, ts FROM comm.ops QUALIFY ts = max(ts) OVER (PARTITION BY op)) AS q WHERE q.op = 'send'",
    # No rows, NULLs only, and groups that exist on some nodes.
    "SELECT count(*), count(rank), sum(rank), min(rank), max(rank), avg(rank) FROM comm.ops WHERE false",
    "SELECT op, count(*) FROM comm.ops WHERE false GROUP BY op",
    "SELECT count(*) FROM comm.ops WHERE false HAVING count(*) = 0",
    "SELECT count(*) FROM comm.ops HAVING count(*) < 0",
    "SELECT sum(NULL::INT), avg(NULL::INT), min(NULL::TEXT), count(NULL) FROM comm.ops",
    "SELECT bool_and(NULL::BOOL), bool_or(async_op) FROM comm.ops WHERE rank IS NULL",
    "SELECT stddev(seq), var_samp(seq), stddev_pop(seq) FROM comm.ops WHERE ts = (SELECT max(ts) FROM comm.ops)",
    "SELECT node, stddev(seq), var_pop(seq), covar_samp(seq, rank), corr(seq, seq) FROM comm.ops GROUP BY node",
    "SELECT count(DISTINCT rank), count(DISTINCT NULL::INT) FROM comm.ops",
    "SELECT rank, count(DISTINCT op), count(DISTINCT job) FROM comm.ops GROUP BY rank",
    "SELECT job, count(DISTINCT seq) FILTER (WHERE rank = 1) FROM comm.ops GROUP BY job",
    "SELECT count(DISTINCT (op, rank)) FROM comm.ops",
    "SELECT sum(DISTINCT seq), avg(DISTINCT seq), sum(seq) FROM comm.ops",
    "SELECT sum(bytes) FILTER (WHERE false), count(*) FILTER (WHERE NULL) FROM comm.ops",
    "SELECT sum(9223372036854775807) FROM comm.ops",
    "SELECT sum(seq::TINYINT), avg(seq::UTINYINT), sum(seq::DECIMAL(18, 3)), avg(seq::DECIMAL(18, 3)) FROM comm.ops",
    "SELECT min(op), max(job), min(async_op), max(ts), min(node) FROM comm.ops",
    "SELECT max('nan'::DOUBLE), min(CASE WHEN seq = 1 THEN 'nan'::DOUBLE ELSE bw END) FROM comm.ops",
    "SELECT max(CASE WHEN rank = 1 THEN 'inf'::DOUBLE ELSE bw END) FROM comm.ops",
    "SELECT first(op ORDER BY ts), last(op ORDER BY ts), any_value(node) IS NOT NULL FROM comm.ops",
    "SELECT arg_min(rank, ts), arg_max(job, ts), arg_min(seq, ts) FILTER (WHERE rank IS NULL) FROM comm.ops",
    "SELECT op, arg_max(ts, seq * 1000000 + epoch_ms(ts) % 1000000) IS NULL FROM comm.ops GROUP BY op",
    "SELECT 1 AS one, count(*) FROM comm.ops GROUP BY one",
    "SELECT op AS job, count(*) FROM comm.ops GROUP BY op, comm.ops.job",
    "SELECT op, count(*) FROM comm.ops GROUP BY GROUPING SETS ((op), ())",
    "SELECT op, rank, count(*), grouping(op) FROM comm.ops GROUP BY CUBE (op, rank)",
    "SELECT rank % 2 AS r, sum(seq) FROM comm.ops GROUP BY r HAVING r IS NULL OR sum(seq) > 1",
    "SELECT op, sum(seq) * 1.0 / count(*) - avg(seq) FROM comm.ops GROUP BY op",
    "SELECT upper(op) || max(op), count(*) FROM comm.ops GROUP BY op",
    "SELECT coalesce(job, 'none') AS j, count(*) FROM comm.ops GROUP BY j",
    "SELECT CASE WHEN seq > 2 THEN 'high' WHEN seq > 0 THEN 'low' END AS c, count(*) FROM comm.ops GROUP BY c",
    # Quantiles, modes and histograms.
    "SELECT median(seq), quantile_cont(seq, 0.25), quantile_disc(seq, 0.75) FROM comm.ops",
    "SELECT op, quantile_cont(duration_ns, [0.1, 0.5, 0.9]) FROM comm.ops GROUP BY op",
    "SELECT rank, median(bw), mad(seq) FROM comm.ops GROUP BY rank",
    "SELECT median(rank) FROM comm.ops WHERE rank IS NULL",
    "SELECT mode(1), mode(NULL::INT) FROM comm.ops",
    "SELECT histogram(op), histogram(rank) FROM comm.ops",
    "SELECT node, histogram(async_op) FROM comm.ops GROUP BY node",
    "SELECT approx_count_distinct(ts) FROM comm.ops WHERE false",
    "SELECT list_sort(list(rank)), list_sort(list(DISTINCT op)) FROM comm.ops",
    "SELECT string_agg(op, '-' ORDER BY ts DESC) FROM comm.ops",
    "SELECT entropy(op), skewness(seq), kurtosis(seq) FROM comm.ops",
    "SELECT max(seq, 3), min(op, 2) FROM comm.ops",
    "SELECT percentile_cont(0.5) WITHIN GROUP (ORDER BY seq) FROM comm.ops",
    # Windows.
    "SELECT ts, row_number() OVER (ORDER BY ts) FROM comm.ops",
    "SELECT ts, sum(seq) OVER (PARTITION BY rank ORDER BY ts) FROM comm.ops",
    "SELECT ts, avg(seq) OVER (ORDER BY ts RANGE BETWEEN INTERVAL 1 MINUTE PRECEDING AND CURRENT ROW) FROM comm.ops",
    "SELECT ts, lag(op, 2, 'none') OVER w, lead(rank) OVER w FROM comm.ops WINDOW w AS (PARTITION BY node ORDER BY ts)",
    "SELECT ts, first_value(rank IGNORE NULLS) OVER (PARTITION BY op ORDER BY ts) FROM comm.ops",
    "SELECT op, sum(count(*)) OVER (), rank() OVER (ORDER BY count(*) DESC) FROM comm.ops GROUP BY op",
    "SELECT ts, percent_rank() OVER (ORDER BY seq), cume_dist() OVER (ORDER BY seq) FROM comm.ops",
    "SELECT op, ts FROM comm.ops QUALIFY row_number() OVER (PARTITION BY op ORDER BY ts DESC) = 1",
    "SELECT count(*) FROM (SELECT ts FROM comm.ops QUALIFY rank() OVER (PARTITION BY node ORDER BY seq) = 1)",
    # Sets, with and without copies.
    "SELECT op FROM comm.ops UNION ALL SELECT job FROM process.processes",
    "SELECT rank FROM comm.ops INTERSECT SELECT rank FROM process.processes",
    "SELECT rank FROM comm.ops EXCEPT SELECT rank FROM process.processes",
    "SELECT rank FROM comm.ops EXCEPT ALL SELECT rank FROM process.processes",
    "SELECT rank FROM comm.ops INTERSECT ALL SELECT rank FROM process.processes",
    "SELECT rank, op FROM comm.ops UNION BY NAME SELECT job, rank FROM process.processes",
    "SELECT seq FROM comm.ops UNION SELECT 1.5 UNION ALL SELECT NULL",
    # Subqueries and NULLs in them.
    "SELECT ts FROM comm.ops WHERE rank NOT IN (SELECT rank FROM process.processes WHERE rank IS NOT NULL)",
    "SELECT ts FROM comm.ops WHERE rank NOT IN (SELECT NULL::INT)",
    "SELECT ts, rank IN (SELECT rank FROM process.processes) FROM comm.ops",
    "SELECT o.ts FROM comm.ops o WHERE o.seq = (SELECT max(i.seq) FROM comm.ops i WHERE i.rank = o.rank)",
    "SELECT ts, (SELECT count(*) FROM process.processes p WHERE p.job = o.job) FROM comm.ops o",
    "SELECT (SELECT sum(pid) FROM process.processes), count(*) FROM comm.ops",
    "SELECT o.ts, p.n FROM comm.ops o, LATERAL (SELECT count(*) AS n FROM process.processes p WHERE p.rank = o.rank) p",
    "WITH a AS (SELECT rank, count(*) AS n FROM comm.ops GROUP BY rank), b AS (SELECT max(n) AS n FROM a)"
    " SELECT rank FROM a, b WHERE a.n = b.n",
    "WITH RECURSIVE r(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM r WHERE i < 4)"
    " SELECT i, count(ts) FROM r LEFT JOIN comm.ops ON seq = i GROUP BY i",
    "WITH comm AS (SELECT 1 AS x) SELECT x, count(o.ts) FROM comm, comm.ops o GROUP BY x",
    "SELECT q.r, q.pid FROM comm.ops o, (SELECT o.rank AS r, p.pid FROM process.processes p) q WHERE q.r = 1",
    # Joins.
    "SELECT count(*) FROM comm.ops a JOIN comm.ops b USING (rank, job)",
    "SELECT a.ts, b.pid FROM comm.ops a FULL JOIN process.processes b ON a.rank = b.rank AND a.node = b.node",
    "SELECT a.ts FROM comm.ops a LEFT JOIN process.processes b ON a.rank = b.pid AND b.pid > 2 WHERE b.pid IS NULL",
    "SELECT a.ts, b.ts FROM comm.ops a ASOF JOIN comm.ops b ON a.op = b.op AND a.ts > b.ts",
    "SELECT count(*) FROM comm.ops CROSS JOIN process.processes",
    "SELECT rank, job, count(*) FROM comm.ops NATURAL JOIN process.processes GROUP BY ALL",
    "SELECT DISTINCT rank FROM comm.ops WHERE rank IS NOT DISTINCT FROM (SELECT min(rank) FROM process.processes)",
    "SELECT ts FROM comm.ops LIMIT 0",
    "SELECT count(*) FROM (SELECT * FROM comm.ops LIMIT 3)",
    "SELECT op, unnest([1, 2]) FROM comm.ops",
    "FROM comm.ops SELECT op, seq WHERE seq > 1",
)


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    random = Random(11)
    rows = [*world(random), *world(random), *world(random)]
    rows.sort(key=lambda tables: -len(tables["comm.ops"]))
    made = Nodes([*rows[:3], {}])
    yield made
    made.close()


@pytest.mark.parametrize("sql", CASES)
def test_rows(nodes: Nodes, sql: str) -> None:
    nodes.check(sql)


@pytest.mark.parametrize("sql", ORDERED)
def test_rows_in_order(nodes: Nodes, sql: str) -> None:
    nodes.check(sql, ordered=True)
