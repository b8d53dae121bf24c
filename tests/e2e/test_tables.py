"""Every column is documented, and the time expressions that people type work on `ts`."""

from __future__ import annotations

from pathlib import Path

import pytest
from e2e_support import Daemon
from waiting import until

from probing.api.tables import TABLES
from probing.api.tables.views import VIEWS

EVERYDAY = (
    "ts > now() - interval 5 minute",
    "ts > now() - interval '5 minutes'",
    "ts >= current_timestamp - interval 1 hour",
    "ts < now()",
    "now() - ts < interval 1 day",
    "ts BETWEEN now() - interval 1 hour AND now()",
    "ts > TIMESTAMP '2026-01-01 00:00:00'",
    "ts > '2026-01-01'",
    "ts::date >= DATE '2026-01-01'",
    "ts >= today()",
    "ts >= current_date - 1",
    "date_trunc('minute', ts) <= ts",
    "date_trunc('hour', now()) <= ts + interval 1 hour",
    "time_bucket(interval '10 seconds', ts) <= ts",
    "epoch(ts) > 1.7e9",
    "epoch_ns(ts) > 1700000000000000000",
    "epoch_ms(ts) > 1700000000000",
    "extract(year FROM ts) >= 2026",
    "strftime(ts, '%Y') >= '2026'",
    "t_done_hi - t_call >= interval 0 second",
    "t_done_hi >= t_start AND t_start >= t_call",
    "date_diff('minute', ts, now()) < 60",
    "ts + interval 1 day > now()",
)


@pytest.fixture(scope="module")
def expressions() -> tuple[str, ...]:
    assert len(EVERYDAY) >= 20
    return EVERYDAY


NAMED = (*TABLES.values(), *VIEWS.values())
# What a job on gloo does not do, what nobody asked for, and what comes and goes.
MAY_BE_EMPTY = {
    *("cluster.groups", "cluster.workers"),
    *("comm.inflight", "comm.ras", "cuda.launches", "cuda.memory", "cuda.syncs", "process.logs"),
    # Tests need no GPU.
    *("gpu.devices", "gpu.events", "gpu.links", "gpu.processes", "gpu.utilization"),
    *("probing.audit", "probing.cost", "probing.losses", "probing.views"),
    *("python.torch_modules", "python.torch_nccl_flight_record", "python.trace_event", "train.labels"),
    *("diagnosis.findings", "rdma.ports", "train.steps"),
    *("net.paths", "rdma.qps"),
}


def test_everyday_time_expressions(daemon: Daemon, training: str, expressions: tuple[str, ...]) -> None:
    last = f"SELECT max(seq) AS seq FROM comm.ops WHERE job = '{training}'"
    # The job goes on: only operations that have ended by now count.
    of_job = f"job = '{training}' AND seq <= {until(lambda: daemon.rows(last)[0]['seq'], what='operations')}"
    # The last operations may still arrive, so one query counts all operations and the matches.
    counts = ", ".join(f"count(*) FILTER ({text}) AS n{number}" for number, text in enumerate(expressions))
    (row,) = daemon.rows(f"SELECT count(*) AS total, {counts} FROM comm.ops WHERE {of_job}")
    assert row["total"] > 0
    matched = {text: row[f"n{number}"] for number, text in enumerate(expressions)}
    assert matched == dict.fromkeys(expressions, row["total"])
    (span,) = daemon.rows("SELECT max(ts) - min(ts) AS span, now() - max(ts) AS ago, age(max(ts)) AS age FROM comm.ops")
    assert None not in span.values()


def test_every_column_has_a_doc(daemon: Daemon) -> None:
    rows = daemon.rows(
        "SELECT table_schema || '.' || table_name AS t, column_name AS c, description AS d FROM probing.column_docs"
    )
    assert {(r["t"], r["c"]) for r in rows} == {(t.name, c.name) for t in NAMED for c in t.columns}
    assert all(len(r["d"]) > 10 for r in rows)
    documented = daemon.rows("SELECT table_schema || '.' || table_name AS t, description AS d FROM probing.table_docs")
    assert {r["t"] for r in documented} == {t.name for t in NAMED}


def test_every_table_answers_with_its_columns(daemon: Daemon) -> None:
    for start in range(0, len(NAMED), 8):
        # The rows as values, so that no column can be left out.
        rows = [
            f"(SELECT count(r) FROM (SELECT {', '.join(c.name for c in table.columns)} FROM {table.name} LIMIT 1) r)"
            for table in NAMED[start : start + 8]
        ]
        (found,) = daemon.rows(f"SELECT {', '.join(f'{row} AS t{i}' for i, row in enumerate(rows))}")
        assert set(found.values()) <= {0, 1}


def test_every_row_has_node_and_time(daemon: Daemon, training: str) -> None:
    daemon.ctl("vars", "--job", training, "step", "loss", "--watch")
    awaited = (
        "comm.ops",
        "process.memory",
        "python.samples",
        "python.training_metrics",
        "net.interfaces",
        "net.tcp",
        "host.file_systems",
        "process.kmsg",
    )
    Path("/dev/kmsg").write_text("a line of the tests of probingd\n")
    for table in awaited:
        until(lambda table=table: daemon.rows(f"SELECT 1 AS one FROM {table} LIMIT 1"), what=table)
    daemon.ctl("vars", "--job", training, "--unwatch")
    counts = [
        f"SELECT '{table}' AS name, count(*) AS n, count(ts) AS ts, count(node) AS node FROM {table}"
        for table in TABLES
    ]
    rows = daemon.rows(" UNION ALL ".join(counts))
    assert {row["name"] for row in rows} == set(TABLES)
    for row in rows:
        assert row["n"] == row["ts"] == row["node"], row
        assert row["name"] in MAY_BE_EMPTY or row["n"], f"{row['name']} has no row: see `awaited` and MAY_BE_EMPTY"
