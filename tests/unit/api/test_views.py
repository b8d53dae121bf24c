"""Views bind, stay out of the way of a query's own names, and let time ranges and jobs through."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest

from probing.api.errors import QueryRejected
from probing.api.tables import TABLES
from probing.api.tables.schema import View
from probing.api.tables.views import VIEWS
from probing.daemon.query.gate import check
from probing.daemon.query.pruning import SLACK_NS
from probing.daemon.store.needs import EVER, Range
from probing.federation.sql.dialect import parse, to_sql
from probing.federation.sql.names import names_user_views, wants_all_nodes
from probing.federation.sql.views import base_tables, expand, views_from

NOW_NS = 1_795_000_000_123_456_789
SECOND = 10**9
SINCE = Range(low=NOW_NS - 300 * SECOND - SLACK_NS)


def row(table: str, **values: Any) -> dict[str, Any]:
    return {column.name: values.get(column.name) for column in TABLES[table].columns}


PROCESS = {"node": "n0", "job": "j", "run": "0", "pid": 7, "start_ns": 70}
ROWS: dict[str, list[dict[str, Any]]] = {
    # Two steps of a second, and one that has not ended.
    "train.steps": [
        row("train.steps", **PROCESS, rank=3, step=n, ts=n * SECOND, t_end=n * SECOND + SECOND - 1, duration_ns=SECOND)
        for n in (10, 11)
    ],
    "comm.ops": [
        row(
            "comm.ops",
            **PROCESS,
            rank=3,
            comm="c",
            comm_rank=1,
            comm_size=2,
            backend="nccl",
            seq=i,
            op=op,
            peer=peer,
            root=root,
            bytes=100,
            dtype="float32",
            async_op=True,
            ts=ts,
            duration_ns=2_000_000,
            state="done",
            t_launch=ts + 500,
        )
        for i, (op, peer, root, ts) in enumerate(
            [
                ("all_reduce", None, None, 10 * SECOND),
                ("send", 0, None, 11 * SECOND - 5_000),
                ("recv", 0, None, 11 * SECOND),
                ("broadcast", None, 0, 11 * SECOND + 5),
                ("reduce", None, 0, 12 * SECOND),
                ("all_reduce", None, None, 9 * SECOND),
            ]
        )
    ],
    "process.processes": [
        row(
            "process.processes",
            **PROCESS,
            rank=3,
            local_rank=1,
            world_size=4,
            node_rank=1,
            role="trainer",
            state="running",
            ts=12 * SECOND,
        )
    ],
    "cluster.members": [row("cluster.members", node="n0", member="n0", address="n0:1", state="healthy", ts=0)],
    "cuda.memory": [
        row("cuda.memory", **PROCESS, rank=3, kind=kind, size_class=1, stack=stack, ts=ts, live_bytes=live << 20)
        for kind, stack, ts, live in [
            ("device", 1, 10 * SECOND + 1, 5),
            ("device", 2, 10 * SECOND + 2, 2),
            ("host", 3, 10 * SECOND + 2, 100),
            ("device", 1, 11 * SECOND + 1, 1),
            ("device", 1, 13 * SECOND, 50),
        ]
    ],
    "python.torch_nccl_flight_record": [
        row(
            "python.torch_nccl_flight_record",
            **PROCESS,
            rank=3,
            snapshot_id=1,
            pg_id=0,
            pg_name="0",
            ts=5,
            collective_seq_id=seq,
            state=state,
            is_p2p=p2p,
        )
        for seq, state, p2p in [
            (1, "completed", False),
            (2, "started", False),
            (3, "scheduled", False),
            (9, "completed", True),
        ]
    ],
    "probing.sources": [row("probing.sources", node="n0", ts=5, source="collectives", rows=6, lost=1)],
}


@pytest.fixture(scope="module")
def database() -> Iterator[duckdb.DuckDBPyConnection]:
    """Every table in its logical schema, with ROWS."""
    db = tables_of(ROWS)
    yield db
    db.close()


def tables_of(rows: dict[str, list[dict[str, Any]]]) -> duckdb.DuckDBPyConnection:
    db = duckdb.connect(config={"threads": "1", "python_enable_replacements": "false"})
    for name, table in TABLES.items():
        given = pa.Table.from_pylist(rows.get(name, []), schema=table.logical)
        db.execute(f'CREATE SCHEMA IF NOT EXISTS "{name.split(".")[0]}"')
        db.register("given", given)
        db.execute(f"CREATE TABLE {name} AS SELECT * FROM given")
        db.unregister("given")
    return db


def ask(db: duckdb.DuckDBPyConnection, sql: str) -> list[tuple[Any, ...]]:
    return db.sql(check(sql, NOW_NS).sql).fetchall()


def test_memory_of_a_step_is_the_drivers_where_cuda_memory_has_nothing() -> None:
    used = [
        row("gpu.processes", **PROCESS, rank=3, ts=ts, device_id=device, used_bytes=size << 20)
        for ts, device, size in [(10 * SECOND, 0, 3), (10 * SECOND, 1, 4), (11 * SECOND, 0, 9)]
    ]
    late = row("train.steps", **PROCESS, rank=3, step=99, ts=50 * SECOND, t_end=51 * SECOND, duration_ns=SECOND)
    rows = {**ROWS, "cuda.memory": [], "gpu.processes": used, "train.steps": [*ROWS["train.steps"], late]}
    db = tables_of(rows)
    found = ask(db, "SELECT step, allocated, cached, allocated_source FROM python.torch_trace ORDER BY step")
    # The sum over the devices; a reading that is older than 30 s says nothing.
    assert found == [(10, 7.0, 7.0, "gpu.processes"), (11, 9.0, 9.0, "gpu.processes"), (99, None, None, None)]
    db.close()


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_has_exactly_its_columns(database: duckdb.DuckDBPyConnection, name: str) -> None:
    view = VIEWS[name]
    got = database.sql(check(f"SELECT * FROM {name}", NOW_NS).sql).to_arrow_table().schema
    want = pa.schema([pa.field(column.name, column.plain_type) for column in view.columns])
    assert got.names == want.names
    assert got.types == want.types
    assert len(set(got.names)) == len(got.names)
    assert set(got.names) >= {"node"}
    assert view.doc
    assert all(len(column.doc) > 10 for column in view.columns)
    assert name not in TABLES


@pytest.mark.parametrize("name", [name for name, view in VIEWS.items() if "JOIN" in view.sql])
def test_each_column_is_the_same_alone(database: duckdb.DuckDBPyConnection, name: str) -> None:
    """Joins that a query does not need are left out: that changes no row."""
    columns = [column.name for column in VIEWS[name].columns]
    whole = ask(database, f"SELECT {', '.join(f'{column}::VARCHAR' for column in columns)} FROM {name}")
    for column, values in zip(columns, zip(*whole, strict=True), strict=False):
        alone = ask(database, f"SELECT {column}::VARCHAR FROM {name}")
        assert sorted(map(str, values)) == sorted(str(value) for (value,) in alone), column


@pytest.mark.parametrize(
    ("sql", "rows"),
    [
        (
            "SELECT step, rank, allocated, max_allocated, allocated_delta, duration, stage, world_size, role"
            " FROM python.torch_trace ORDER BY step",
            [(10, 3, 7.0, 7.0, 7.0, 1.0, "post step", 4, ""), (11, 3, 3.0, 7.0, -4.0, 1.0, "post step", 4, "")],
        ),
        (
            "SELECT operation, src_rank, dst_rank, bytes_transferred, duration_ms, step FROM python.nccl_trace"
            " ORDER BY seq",
            [
                ("all_reduce", None, None, 100, 2.0, 10),
                ("send", 1, 0, 100, 2.0, 10),
                ("recv", 0, 1, 100, 2.0, 11),
                ("broadcast", 0, 1, 100, 2.0, 11),
                ("reduce", 1, 0, 100, 2.0, None),
                ("all_reduce", None, None, 100, 2.0, None),
            ],
        ),
        (
            "SELECT global_step, op, group_rank, group_size, tensor_dtype, async_op, world_size"
            " FROM python.comm_collective ORDER BY seq",
            [
                (10, "all_reduce", 1, 2, "float32", 1, 4),
                (11, "broadcast", 1, 2, "float32", 1, 4),
                (None, "reduce", 1, 2, "float32", 1, 4),
                (None, "all_reduce", 1, 2, "float32", 1, 4),
            ],
        ),
        (
            "SELECT coll_func, is_p2p, exec_time_ns, enqueue_time_ns, algo FROM nccl.coll_perf"
            " WHERE seq < 2 ORDER BY seq",
            [("AllReduce", 0, 2_000_000, 500, None), ("Send", 1, 2_000_000, 500, None)],
        ),
        (
            "SELECT last_enqueued_collective, last_started_collective, last_completed_collective"
            " FROM python.torch_nccl_pg_status",
            [(3, 2, 1)],
        ),
        (
            "SELECT host, addr, local_rank, rank, world_size, group_rank, status, timestamp FROM cluster.nodes",
            [("n0", "n0:1", 1, 3, 4, 1, "running", 12_000_000)],
        ),
        ("SELECT rows_written, ring_rows_overwritten FROM nccl.profiler_counters", [(6, 1)]),
        ("SELECT is_shadow, median(step_duration_sec) FROM python.torch_step_timing GROUP BY 1", [(1, 1.0)]),
        (
            "SELECT DISTINCT _host, _addr, _rank, _node_rank, _local_rank, _role FROM global.comm.ops",
            [("n0", "n0:1", 3, 1, 1, "")],
        ),
        ("SELECT count(*) FROM python.trace_event", [(0,)]),
        ("SELECT count(*) FROM global.nccl.proxy_ops WHERE _rank = 0", [(0,)]),
    ],
)
def test_rows_of_views(database: duckdb.DuckDBPyConnection, sql: str, rows: list[tuple[Any, ...]]) -> None:
    assert ask(database, sql) == rows


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT s.step FROM probe.python.torch_trace AS s ORDER BY s.step",
        "SELECT torch_trace.step FROM python.torch_trace ORDER BY 1",
        "SELECT python.torch_trace.step FROM python.torch_trace ORDER BY python.torch_trace.step",
        "SELECT probe.python.torch_trace.step FROM probe.python.torch_trace ORDER BY 1",
        'SELECT "torch_trace"."step" FROM "python"."torch_trace" ORDER BY step',
        "SELECT STEP FROM PYTHON.Torch_Trace ORDER BY step",
        "WITH torch_trace AS (SELECT 1 AS x) SELECT step FROM python.torch_trace ORDER BY step",
        "WITH train AS (SELECT 1), steps AS (SELECT 2), s AS (SELECT 3), m AS (SELECT 4)"
        " SELECT step FROM python.torch_trace ORDER BY step",
        "WITH torch_trace AS (SELECT step FROM python.torch_trace) SELECT * FROM torch_trace ORDER BY step",
        "SELECT t.a FROM (SELECT step FROM python.torch_trace) AS t(a) ORDER BY 1",
        "SELECT a.step FROM python.torch_trace a JOIN python.torch_trace b USING (pid, step) ORDER BY a.step",
        "SELECT a.step FROM python.torch_trace a, python.torch_trace b WHERE a.step = b.step AND b.rank = 3 ORDER BY 1",
        "SELECT step FROM train.steps s WHERE EXISTS (FROM python.torch_trace t WHERE t.step = s.step) ORDER BY step",
        "SELECT step FROM train.steps s WHERE (SELECT t.duration FROM python.torch_trace t WHERE t.step = s.step) > 0"
        " ORDER BY step",
        "SELECT step FROM train.steps LEFT JOIN python.torch_trace t USING (step) WHERE t.rank = 3 ORDER BY step",
        "SELECT step FROM (SELECT * FROM python.torch_trace WHERE rank = 3) WHERE rank = 3 ORDER BY step",
        "SELECT step FROM python.torch_trace WHERE rank = 3 OR ts < now() ORDER BY step",
        "SELECT rank AS ts, step FROM python.torch_trace WHERE ts < now() ORDER BY step",
        "FROM python.torch_trace SELECT step ORDER BY step",
    ],
)
def test_names_of_a_query_are_its_own(database: duckdb.DuckDBPyConnection, sql: str) -> None:
    assert [values[-1] for values in ask(database, sql)] == [10, 11]


@pytest.mark.parametrize(
    ("sql", "table"),
    [
        ("SELECT * FROM python.comm_collective WHERE ts > now() - INTERVAL 5 MINUTE AND job = 'a'", "comm.ops"),
        ("SELECT op FROM python.comm_collective c WHERE c.ts > now() - INTERVAL 5 MINUTE AND c.job = 'a'", "comm.ops"),
        ("SELECT * FROM python.torch_trace WHERE job = 'a' AND ts > now() - INTERVAL 5 MINUTE", "train.steps"),
        ("SELECT _rank FROM global.comm.ops WHERE job = 'a' AND ts > now() - INTERVAL 5 MINUTE", "comm.ops"),
        ("SELECT * FROM global.python.nccl_trace WHERE job = 'a' AND ts > now() - INTERVAL 5 MINUTE", "comm.ops"),
        ("SELECT * FROM view.long WHERE job = 'a' AND ts > now() - INTERVAL 5 MINUTE", "comm.ops"),
        ("SELECT * FROM view.all_of_it x WHERE x.job = 'a' AND x.ts > now() - INTERVAL 5 MINUTE", "comm.ops"),
        ("SELECT * FROM view.minutes WHERE job = 'a' AND ts > now() - INTERVAL 5 MINUTE", "comm.ops"),
        ("SELECT * FROM view.numbered WHERE job = 'a' AND ts > now() - INTERVAL 5 MINUTE", "comm.ops"),
        ("SELECT * FROM view.deep WHERE job = 'a' AND ts > now() - INTERVAL 5 MINUTE", "comm.ops"),
    ],
)
def test_times_and_jobs_narrow_through_views(sql: str, table: str) -> None:
    views = {
        "view.long": View("view.long", "", (), "SELECT ts, job FROM python.comm_collective WHERE duration_ms > 1"),
        "view.all_of_it": View("view.all_of_it", "", (), "SELECT * FROM comm.ops"),
        # Rows that are put together have their keys in common.
        "view.minutes": View("view.minutes", "", (), "SELECT job, ts, count(*) AS n FROM comm.ops GROUP BY job, ts"),
        "view.numbered": View(
            "view.numbered",
            "",
            (),
            "SELECT job, ts, seq FROM comm.ops QUALIFY row_number() OVER (PARTITION BY ts, job ORDER BY seq) = 1",
        ),
        "view.deep": View(
            "view.deep",
            "",
            (),
            "SELECT q.job, q.ts, q.n FROM (SELECT job, ts, sum(count(*)) OVER (PARTITION BY ts, job) AS n FROM comm.ops"
            " GROUP BY job, ts, op) AS q WHERE q.n > 1",
        ),
    }
    checked = check(sql, NOW_NS, views=lambda: views)
    assert checked.needs[table].times == SINCE
    assert checked.needs[table].jobs == {"a"}


@pytest.mark.parametrize(
    "select",
    [
        "SELECT max(ts) AS ts, op FROM comm.ops GROUP BY op",
        "SELECT ts, count(*) OVER () AS n FROM comm.ops",
        "SELECT ts FROM comm.ops LIMIT 3",
        "SELECT DISTINCT ON (op) ts, op FROM comm.ops",
        "SELECT t_start AS ts FROM comm.ops",
        "SELECT b.ts FROM comm.ops a LEFT JOIN comm.ops b USING (seq)",
        "SELECT ts FROM comm.ops QUALIFY row_number() OVER () = 1",
        "SELECT ts + INTERVAL 1 HOUR AS ts FROM comm.ops",
        "SELECT * FROM comm.ops AS o(ts)",
        "SELECT ts, count(*) AS n FROM comm.ops GROUP BY ROLLUP (ts)",
        "SELECT ts, count(*) AS n FROM comm.ops GROUP BY ALL",
        "SELECT ts, rank() OVER (PARTITION BY job ORDER BY ts) AS n FROM comm.ops",
        "SELECT ts, sum(count(*)) OVER (PARTITION BY job) AS n FROM comm.ops GROUP BY job, ts",
        "SELECT ts, sum(seq) OVER (PARTITION BY ts), sum(seq) OVER (ORDER BY ts) FROM comm.ops",
        "SELECT ts FROM comm.ops GROUP BY ts LIMIT 3",
        "SELECT seq AS ts FROM comm.ops GROUP BY seq, t_call",
    ],
)
def test_what_is_not_certain_inside_a_view_is_not_said_there(select: str) -> None:
    views = {"view.x": View("view.x", "", (), select)}
    checked = check("SELECT * FROM view.x WHERE ts > now()", NOW_NS, views=lambda: views)
    assert checked.needs["comm.ops"].times == EVER


def test_joins_that_are_not_named_are_left_out() -> None:
    assert check("SELECT max(step) FROM python.torch_trace", NOW_NS).tables == ("train.steps",)
    assert check("SELECT op FROM python.comm_collective", NOW_NS).tables == ("comm.ops",)
    assert check("SELECT _host, op FROM global.comm.ops", NOW_NS).tables == ("comm.ops",)
    assert check("SELECT * FROM nccl.proxy_ops", NOW_NS).tables == ()


def test_views_name_views_up_to_a_depth() -> None:
    views = {"view.v0": View("view.v0", "", (), "SELECT seq FROM comm.ops")}
    for i in range(1, 10):
        views[f"view.v{i}"] = View(f"view.v{i}", "", (), f"SELECT a.seq FROM view.v{i - 1} a, view.v{i - 1} b")
    assert check("SELECT * FROM view.v3", NOW_NS, views=lambda: views).tables == ("comm.ops",)
    for name in ("v7", "v9"):
        with pytest.raises(QueryRejected, match="deep"):
            check(f"SELECT * FROM view.{name}", NOW_NS, views=lambda: views)
    itself = {"view.a": View("view.a", "", (), "SELECT * FROM view.a")}
    with pytest.raises(QueryRejected, match="deep"):
        check("SELECT * FROM view.a", NOW_NS, views=lambda: itself)


def test_a_view_sees_none_of_the_names_of_a_query() -> None:
    views = {"view.a": View("view.a", "", (), "SELECT seq FROM ops")}
    with pytest.raises(QueryRejected, match="there is no table ops"):
        check("SELECT * FROM view.a", NOW_NS, views=lambda: views)


@pytest.mark.parametrize(
    ("sql", "message", "hint"),
    [
        (
            "SELECT * FROM python.`time.time()`",
            "python.`time.time()` evaluates code in processes, which a node does not do in a query",
            "`probingctl vars` reads variables from outside",
        ),
        ('SELECT * FROM python."time.time()"', "python.`time.time()` evaluates code", "`probingctl vars`"),
        (
            "SELECT * FROM python.test",
            "there is no table python.test",
            "once the job has written a row (ExternalTable)",
        ),
        ("SELECT * FROM other.comm.ops", "there is no table other.comm.ops", "did you mean comm.ops?"),
        ("SELECT * FROM global.comm.opps", "there is no table global.comm.opps", "did you mean comm.ops"),
        ("SET probing.torch.profiling = on", "SET is not allowed, only SELECT", "`probingctl config KEY=VALUE`"),
    ],
)
def test_refusals_name_what_is_possible(sql: str, message: str, hint: str) -> None:
    with pytest.raises(QueryRejected) as caught:
        check(sql, NOW_NS)
    assert caught.value.message.startswith(message)
    assert hint in caught.value.hint


def test_global_names_are_listed() -> None:
    assert wants_all_nodes("SELECT * FROM Global.comm.ops")
    assert not wants_all_nodes("SELECT 'global.comm.ops' FROM comm.ops")
    assert not wants_all_nodes("SELECT global.x FROM comm.ops AS global")
    assert not wants_all_nodes("no query, global. or not")
    assert names_user_views("SELECT * FROM comm.ops JOIN view.x USING (seq)")
    assert not names_user_views("SELECT 'view.x'")
    assert check("SELECT 1 FROM comm.ops", NOW_NS).warnings == ()
    (warning,) = check("SELECT 1 FROM global.comm.ops", NOW_NS).warnings
    assert "--all-nodes" in warning


def test_views_of_several_nodes_are_one() -> None:
    rows = [
        {"name": "a", "sql": "SELECT 1", "doc": "One."},
        {"name": "a", "sql": "SELECT 2", "doc": "Two."},
        {"name": "b", "sql": None, "doc": "", "problem": "it is empty"},
    ]
    views = views_from(rows)
    assert {name: view.sql for name, view in views.items()} == {"view.a": "SELECT 1", "view.b": ""}
    with pytest.raises(QueryRejected, match=r"view\.b cannot be used: it is empty"):
        expand(parse("SELECT * FROM view.b"), views)
    assert len(views_from({"name": f"v{i}", "sql": "SELECT 1"} for i in range(1000))) == 64


def test_the_tables_of_a_view_are_listed() -> None:
    assert base_tables(VIEWS["python.torch_step_timing"]) == ["process.processes", "train.steps"]
    assert to_sql(expand(parse("SELECT seq FROM probe.comm.ops"))) == "SELECT seq FROM comm.ops"


def test_the_page_on_probings_tables_names_each_view() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "tables-of-probing.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| `")]
    kinds = {name: kind for names, kind, *_ in rows for name in re.findall(r"`([\w.]+)`", names)}
    assert {name for name, kind in kinds.items() if kind == "view"} == {
        name for name in VIEWS if not name.startswith(("views.", "diagnosis."))
    }
    assert {name for name, kind in kinds.items() if kind == "table"} <= set(TABLES)
    for names, kind, made_of, _ in rows:
        views = [VIEWS[name] for name in re.findall(r"`([\w.]+)`", names) if kind == "view"]
        read = {table for view in views for table in base_tables(view)}
        assert set(re.findall(r"`([\w.]+)`", made_of)) == read
