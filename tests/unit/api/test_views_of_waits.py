"""Views of findings, lags and connections over rows that are made up, on one node and merged from two."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from federation_support import run_here

from probing.api.tables import TABLES
from probing.daemon.query.gate import check
from probing.federation.execution.answer import Reply
from probing.federation.planning.catalog import api_catalog
from probing.federation.planning.split import plan
from probing.federation.sql.dialect import parse, table_name, tables_in

SECOND = 10**9
MINUTE, HOUR = 60 * SECOND, 3600 * SECOND
NOW_NS = 1_795_000_000 * SECOND // HOUR * HOUR + 10 * MINUTE
MS = 10**6
Rows = dict[str, list[dict[str, Any]]]
Ask = Callable[[str], list[tuple[Any, ...]]]


def operation(node: str, rank: int, seq: int, took_ms: int, ago_ns: int = MINUTE, **more: Any) -> dict[str, Any]:
    who = {"node": node, "job": "j", "run": "0", "pid": 70 + rank, "start_ns": 7, "rank": rank}
    size = {"comm": "0", "comm_name": "pg", "comm_size": 4, "op": "all_reduce", "bytes": 64, "state": "done"}
    return {**who, **size, "seq": seq, "ts": NOW_NS - ago_ns - took_ms * MS, "duration_ns": took_ms * MS, **more}


def finding(node: str, ago_ns: int, state: str, finding_id: str = "f1", **more: Any) -> dict[str, Any]:
    blamed = [{"rank": 3, "node": "b", "pid": 73, "why": "stopped", "activity": ""}]
    known = {"job": "j", "run": "0", "finding_id": finding_id, "verdict": "not_joined", "severity": "error"}
    times = {"since": NOW_NS - 600 * SECOND, "opened": NOW_NS - 590 * SECOND}
    if state == "closed":
        times["closed"] = NOW_NS - ago_ns
    return {
        **known,
        "node": node,
        "ts": NOW_NS - ago_ns,
        "state": state,
        "sentence": f"rank 3, {state}",
        "ranks": "3",
        "nodes": "b",
        "culprits": json.dumps(blamed),
        **times,
        **more,
    }


def rows_of(node: str) -> Rows:
    ranks = {"a": (0, 1), "b": (2, 3)}[node]
    # Rank 3 calls last in the first two operations, rank 0 in the third; of the fourth rank 3 has no row.
    took = {0: (40, 40, 5, 9), 1: (30, 30, 20, 9), 2: (20, 20, 20, 9), 3: (10, 5, 20, None)}
    operations = [
        operation(node, rank, seq, ms, ago_ns=(5 if seq < 2 else 20) * MINUTE)
        for rank in ranks
        for seq, ms in enumerate(took[rank])
        if ms is not None
    ]
    operations += [operation(node, rank, 10, 1 + rank, op="broadcast") for rank in ranks]
    operations += [operation(node, rank, 11, 1 + rank, state="failed") for rank in ranks]
    operations += [operation(node, rank, 12, 1 + rank, ago_ns=30 * HOUR) for rank in ranks]
    findings = [
        finding(node, 500 * SECOND, "open"),
        finding(node, 400 * SECOND, "closed"),
        finding(node, 60 * SECOND, "closed", "f2", closed=NOW_NS - 60 * SECOND),
        finding(node, 30 * SECOND, "open", "f2", nodes="a,b", culprits=None),
    ]
    me = {"a": "10.0.0.1", "b": "10.0.0.2"}
    who = {"node": node, "ts": NOW_NS, "job": "j", "run": "0", "start_ns": 7, "netns": 1, "role": "trainer"}
    other = "b" if node == "a" else "a"
    ports = {"a": (100, 200), "b": (200, 100)}[node]
    sockets = [
        {
            **who,
            "pid": 70 + ranks[0],
            "rank": ranks[0],
            "state": "open",
            "local_address": me[node],
            "local_port": ports[0],
            "peer_address": me[other],
            "peer_port": ports[1],
        },
        # The same addresses and ports on both nodes, in namespaces with the same number.
        *(
            {
                **who,
                "pid": 70 + rank,
                "rank": rank,
                "state": "open",
                "local_address": "127.0.0.1",
                "local_port": 300 + at,
                "peer_address": "127.0.0.1",
                "peer_port": 301 - at,
            }
            for at, rank in enumerate(ranks)
        ),
        {**who, "pid": 70 + ranks[0], "rank": ranks[0], "state": "listens", "local_address": "0.0.0.0"},
        {
            **who,
            "pid": 70 + ranks[1],
            "rank": ranks[1],
            "state": "closed",
            "local_address": "127.0.0.1",
            "local_port": 301,
            "peer_address": "127.0.0.1",
            "peer_port": 300,
        },
    ]
    return {"comm.ops": operations, "diagnosis.findings": findings, "net.sockets": sockets}


def database(rows: Rows) -> duckdb.DuckDBPyConnection:
    db = duckdb.connect(config={"threads": "1", "python_enable_replacements": "false"})
    for name, own in rows.items():
        schema = TABLES[name].logical
        db.execute(f"CREATE SCHEMA IF NOT EXISTS {name.split('.')[0]}")
        full = [{column: row.get(column) for column in schema.names} for row in own]
        db.register("given", pa.Table.from_pylist(full, schema=schema))
        db.execute(f"CREATE TABLE {name} AS SELECT * FROM given")
        db.unregister("given")
    return db


@pytest.fixture(scope="module")
def nodes() -> Iterator[dict[str, duckdb.DuckDBPyConnection]]:
    made = {node: database(rows_of(node)) for node in ("a", "b")}
    yield made
    for db in made.values():
        db.close()


@pytest.fixture
def together(nodes: dict[str, duckdb.DuckDBPyConnection]) -> Ask:
    """A SELECT over both nodes; each node runs what its gate makes of its part."""

    def reply(address: str, part: str, seconds: float) -> Reply:
        del seconds
        with nodes[address].cursor() as cursor:
            return Reply(address, cursor.sql(check(part, NOW_NS).sql).to_arrow_table())

    def ask(sql: str) -> list[tuple[Any, ...]]:
        found = run_here(plan(sql, NOW_NS, api_catalog()), list(nodes), reply).table
        return [tuple(row.values()) for row in found.to_pylist()]

    return ask


@pytest.fixture
def alone(nodes: dict[str, duckdb.DuckDBPyConnection]) -> Ask:
    """A SELECT at node a."""
    return lambda sql: nodes["a"].sql(check(sql, NOW_NS).sql).fetchall()


@pytest.mark.parametrize(
    "view", ["diagnosis.current", "views.op_lag", "views.waits_by_hour", "views.slow_nodes", "views.connections"]
)
def test_nodes_of_before_are_asked_for_tables_that_they_have(view: str) -> None:
    """The asker expands its views: nodes need not know them."""
    whole = plan(f"SELECT * FROM {view} WHERE job = 'j'", NOW_NS, api_catalog())
    assert whole.parts
    for part in whole.parts:
        named = {table_name(table) for table in tables_in(parse(part.sql))}
        assert named <= {"comm.ops", "diagnosis.findings", "net.sockets"}


def test_who_was_last_in_each_operation(together: Ask) -> None:
    sql = (
        "SELECT seq, op, members, node, last_rank, first_rank, lag_ns / 1e6 AS ms, wait_ns / 1e6 AS all_ms"
        " FROM views.op_lag WHERE job = 'j' ORDER BY seq"
    )
    assert together(sql) == [
        (0, "all_reduce", 4, "b", 3, 0, 30.0, 60.0),
        (1, "all_reduce", 4, "b", 3, 0, 35.0, 75.0),
        (2, "all_reduce", 4, "a", 0, 1, 15.0, 45.0),
        # It is not known who was last without the row of rank 3.
        (3, "all_reduce", 3, None, None, None, None, None),
    ]


def test_on_one_node_of_two_nobody_is_named(alone: Ask) -> None:
    assert alone("SELECT DISTINCT members, last_rank, lag_ns FROM views.op_lag") == [(2, None, None)]
    assert alone("SELECT * FROM views.waits_by_hour") == []
    assert alone("SELECT * FROM views.slow_nodes") == []


def test_who_waits_for_whom_by_hour(together: Ask) -> None:
    sql = (
        "SELECT epoch_ns(ts) AS t, rank, waits_for, waits_for_node, ops, wait_ns / 1e6 AS ms FROM views.waits_by_hour"
        " WHERE job = 'j' ORDER BY ALL"
    )
    this, before = NOW_NS // HOUR * HOUR, NOW_NS // HOUR * HOUR - HOUR
    assert together(sql) == [
        (before, 1, 0, "a", 1, 15.0),
        (before, 2, 0, "a", 1, 15.0),
        (before, 3, 0, "a", 1, 15.0),
        (this, 0, 3, "b", 2, 65.0),
        (this, 1, 3, "b", 2, 45.0),
        (this, 2, 3, "b", 2, 25.0),
    ]


def test_the_slowest_nodes(together: Ask) -> None:
    sql = "SELECT node, last_ops, last_share, lag_ns / 1e6, wait_ns / 1e6 FROM views.slow_nodes ORDER BY wait_ns DESC"
    assert together(sql) == [("b", 2, pytest.approx(2 / 3), 32.5, 135.0), ("a", 1, pytest.approx(1 / 3), 15.0, 45.0)]


@pytest.mark.parametrize("view", ["views.op_lag", "views.waits_by_hour", "views.slow_nodes"])
def test_only_rows_of_the_job_and_the_day_are_read(view: str) -> None:
    need = check(f"SELECT * FROM {view} WHERE job = 'j'", NOW_NS).needs["comm.ops"]
    assert need.jobs == {"j"}
    assert need.times.low is not None
    assert NOW_NS - need.times.low < 25 * HOUR


@pytest.mark.parametrize("ask", ["alone", "together"])
def test_a_finding_is_one_row_as_it_is_now(ask: str, request: pytest.FixtureRequest) -> None:
    sql = (
        "SELECT finding_id, state, node, rank, pid, duration_ns / 1e9 AS s, closed IS NULL, sentence"
        " FROM diagnosis.current WHERE job = 'j' ORDER BY finding_id"
    )
    assert request.getfixturevalue(ask)(sql) == [
        ("f1", "closed", "b", 3, 73, 200.0, False, "rank 3, closed"),
        # It was closed and opened again; nobody is to blame by rank, the first node of two is named.
        ("f2", "open", "a", None, None, 600.0, True, "rank 3, open"),
    ]


def test_the_obvious_queries_of_findings(together: Ask) -> None:
    assert together("SELECT count(*) FROM diagnosis.current WHERE state = 'open'") == [(1,)]
    assert together("SELECT node, count(*) FROM diagnosis.current GROUP BY node ORDER BY node") == [("a", 1), ("b", 1)]


def test_who_talks_to_whom(together: Ask) -> None:
    sql = "SELECT node, rank, peer_node, peer_rank, peer_pid FROM views.connections ORDER BY rank, peer_rank"
    assert together(sql) == [
        ("a", 0, "a", 1, 71),
        ("a", 0, "b", 2, 72),
        ("a", 1, "a", 0, 70),
        ("b", 2, "a", 0, 70),
        ("b", 2, "b", 3, 73),
        ("b", 3, "b", 2, 72),
    ]


def test_a_connection_to_another_node_has_no_rank_without_that_node(alone: Ask) -> None:
    sql = "SELECT rank, peer_address, peer_rank FROM views.connections ORDER BY ALL"
    assert alone(sql) == [(0, "10.0.0.2", None), (0, "127.0.0.1", 1), (1, "127.0.0.1", 0)]
