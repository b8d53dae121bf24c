"""views.rank_second over rows that are made up, on one node and merged from two."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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

SECOND = 10**9
NOW_NS = 1_795_000_000 * SECOND + 123
NOW = 1_795_000_000
READ = ("comm.ops", "comm.inflight", "python.samples", "python.stacks", "train.steps", "cpu.utilization")


def ns(seconds_ago: float) -> int:
    return NOW * SECOND - round(seconds_ago * SECOND)


def rows_of(node: str, rank: int) -> dict[str, list[dict[str, Any]]]:
    who = {"node": node, "job": "j", "run": "0", "pid": 70 + rank, "start_ns": 7, "rank": rank}

    def done(op: str, ago: float, took: float) -> dict[str, Any]:
        return {**who, "op": op, "ts": ns(ago), "t_done_hi": ns(ago - took), "seq": 1, "comm": "0"}

    def sample(stack: int, ago: float, took: float, on_cpu: bool, tid: int = 70 + rank) -> dict[str, Any]:
        return {
            **who,
            "tid": tid,
            "stack_id": stack,
            "ts": ns(ago),
            "duration_ns": round(took * SECOND),
            "on_cpu": on_cpu,
        }

    return {
        # An interval counts for each second that it touches; of the ninth and the third second nothing is known.
        "cpu.utilization": [
            {**who, "ts": ns(ago), "scope": scope, "wall_ns": SECOND, "run_delay_ns": round(share * SECOND)}
            for ago, scope, share in (
                (9.5, "process", 0.25),
                (9.5, "thread", 0.5),
                (6.75, "process", 3.5),
                (1, "process", 0),
            )
        ],
        # The barrier lasts from the ninth to the seventh second before now.
        "comm.ops": [done("all_reduce", 9.75, 0.25), done("barrier", 8.5, 1.75), done("all_reduce", 3_700, 0.5)],
        "comm.inflight": [{**who, "op": "broadcast", "ts": ns(2.5), "age_ns": 2 * SECOND + SECOND // 2}],
        "python.samples": [
            sample(1, 10, 0.5, True),
            sample(2, 9.5, 0.25, True),
            sample(2, 9.5, 0.5, True, tid=9),
            # Off the CPU until the sixth second.
            sample(3, 8.5, 1.75, False),
        ],
        "python.stacks": [
            {
                "node": node,
                "stack_id": stack,
                "ts": ns(hours * 3600 + 60),
                "complete": True,
                "frames": [{"func": func, "file": "m.py", "lineno": 1}, {"func": "main", "file": "m.py", "lineno": 9}],
            }
            for stack, func in ((1, "forward"), (2, "augment"), (3, "wait"))
            for hours in (0, 1)
        ],
        "train.steps": [
            {**who, "step": 40 + n, "ts": ns(12 - 4 * n), "t_end": ns(8 - 4 * n), "duration_ns": 4 * SECOND}
            for n in range(2)
        ],
    }


def database(tables: Sequence[dict[str, list[dict[str, Any]]]]) -> duckdb.DuckDBPyConnection:
    db = duckdb.connect(config={"threads": "1", "python_enable_replacements": "false"})
    for name in READ:
        schema = TABLES[name].logical
        full = [{column: row.get(column) for column in schema.names} for rows in tables for row in rows[name]]
        db.execute(f"CREATE SCHEMA IF NOT EXISTS {name.split('.')[0]}")
        db.register("given", pa.Table.from_pylist(full, schema=schema))
        db.execute(f"CREATE TABLE {name} AS SELECT * FROM given")
        db.unregister("given")
    return db


@pytest.fixture(scope="module")
def nodes() -> Iterator[dict[str, duckdb.DuckDBPyConnection]]:
    made = {"a": database([rows_of("a", 0)]), "b": database([rows_of("b", 1)])}
    yield made
    for db in made.values():
        db.close()


def ask(db: duckdb.DuckDBPyConnection, sql: str) -> list[tuple[Any, ...]]:
    return db.sql(check(sql, NOW_NS).sql).fetchall()


def test_a_row_for_each_second(nodes: dict[str, duckdb.DuckDBPyConnection]) -> None:
    sql = (
        f"SELECT epoch(ts)::BIGINT - {NOW}, rank, step, comm_share, op, top_func, cpus, run_queue_share"
        " FROM views.rank_second ORDER BY ts"
    )
    assert ask(nodes["a"], sql) == [
        (-10, 0, 40, 0.25, "all_reduce", "forward", 1.25, 0.25),
        (-9, 0, 40, 0.5, "barrier", "wait", None, None),
        (-8, 0, 41, 1.0, "barrier", "wait", None, 1.0),
        (-7, 0, 41, 0.25, "barrier", "wait", None, 1.0),
        (-3, 0, 41, 0.5, "broadcast", None, None, None),
        (-2, 0, 41, 1.0, "broadcast", None, None, 0.0),
        (-1, 0, 41, 1.0, "broadcast", None, None, 0.0),
    ]


def test_who_waits_and_who_computes(nodes: dict[str, duckdb.DuckDBPyConnection]) -> None:
    sql = "SELECT rank, count(*), sum(comm_share), mode(top_func) FROM views.rank_second WHERE job = 'j' GROUP BY rank"
    assert ask(nodes["b"], sql) == [(1, 7, 4.5, "wait")]


def test_older_operations_than_an_hour_are_not_read() -> None:
    needs = check("SELECT * FROM views.rank_second", NOW_NS).needs
    for name in ("comm.ops", "python.samples", "train.steps"):
        assert needs[name].times.low is not None
        assert NOW_NS - needs[name].times.low < 3_700 * SECOND


def test_the_rows_of_all_nodes(nodes: dict[str, duckdb.DuckDBPyConnection]) -> None:
    def reply(address: str, part: str, seconds: float) -> Reply:
        del seconds
        with nodes[address].cursor() as cursor:
            return Reply(address, cursor.sql(part).to_arrow_table())

    sql = "SELECT node, rank, count(*) AS n FROM views.rank_second GROUP BY ALL ORDER BY node"
    found = run_here(plan(sql, NOW_NS, api_catalog()), list(nodes), reply).table
    assert found.to_pylist() == [{"node": "a", "rank": 0, "n": 7}, {"node": "b", "rank": 1, "n": 7}]
