"""The recipes of docs/query.md: each runs as it stands there, on one node and over two, and finds something."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from cluster_scene import NOW_NS, databases
from federation_support import run_here

from probing.daemon.query.gate import check
from probing.federation.execution.answer import Reply
from probing.federation.planning.catalog import api_catalog
from probing.federation.planning.split import plan

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "query.md").read_text()
RECIPES = dict(re.findall(r"^\*\*(.+?)\*\*\n\n```sql\n(.+?)\n```$", PAGE, re.DOTALL | re.MULTILINE))
# What the story of the cluster has as the first row, where one is certain.
FIRST: dict[str, dict[str, Any]] = {
    "What is wrong now? The worst first": {"job": "b/127.0.0.1:29505", "node": "b", "rank": 1, "minutes": 2.0},
    "What went wrong in the last week, how often, for how long?": {"verdict": "slow_rank", "times": 1, "hours": 20.0},
    "Each culprit of each finding as a row (JSON)": {"finding_id": "f-died", "rank": 0, "node": "a", "pid": 300},
    "The evidence of a finding, a line each (JSON)": {"line": "it is last in 100% of the operations"},
    "Who is in which operation now, and since when?": {"rank": 0, "op": "all_reduce", "seconds": 120.0},
    "Who called last, operation by operation, and by how much?": {"last_rank": 3, "node": "b", "late_ms": 30.0},
    "Who waits for whom, by hour?": {"waits_for": 3, "waiting": [0, 1, 2]},
    "The slowest nodes of the last day": {"node": "b", "pct_of_operations": 100.0},
    "The slowest nodes of another time": {"node": "b", "operations": 212, "seconds": pytest.approx(6.36)},
    "Steps a minute, and how long they take": {"steps": 1, "median_ms": 1000.0, "p99_ms": 1000.0},
    "The training step in which each operation ran (ASOF join)": {"step": 139},
    "Who talks to whom": {"rank": 0, "node": "a", "peer_rank": 2, "peer_node": "b", "connections": 1},
    "Which paths between nodes resend": {"node": "b", "rtt_ms": 4.0},
    "Which GPUs idle": {"node": "b", "device_id": 1, "busy_pct": 0.0},
    "Whose memory grows, in MB an hour": {"rank": 1, "mb_an_hour": pytest.approx(3000)},
    "A column for each value, as PIVOT would make it": {"rank": 0, "all_reduce": 140, "barrier": 140},
    "Is anything missing in what I look at?": {"node": "b", "table_name": "comm.ops", "rows": 12},
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[tuple[duckdb.DuckDBPyConnection, dict[str, duckdb.DuckDBPyConnection]]]:
    with databases() as made:
        yield made


def ask(db: duckdb.DuckDBPyConnection, sql: str) -> pa.Table:
    with db.cursor() as cursor:
        return cursor.sql(check(sql, NOW_NS).sql).to_arrow_table()


@pytest.mark.parametrize("title", RECIPES)
def test_a_recipe_finds_what_it_is_for(cluster: Any, title: str) -> None:
    whole, nodes = cluster
    sql = RECIPES[title]

    def reply(address: str, part: str, seconds: float) -> Reply:
        del seconds
        return Reply(address, ask(nodes[address], part))

    alone, together = ask(whole, sql), run_here(plan(sql, NOW_NS, api_catalog()), list(nodes), reply).table
    assert alone.num_rows
    assert alone.column_names == together.column_names
    assert sorted(map(str, alone.to_pylist())) == sorted(map(str, together.to_pylist()))
    empty = [name for name in alone.column_names if alone.column(name).null_count == alone.num_rows]
    assert set(empty) <= {"exit_code"}
    row = alone.slice(0, 1).to_pylist()[0]
    assert {name: row[name] for name in FIRST.get(title, {})} == FIRST.get(title, {})


def test_there_are_twenty_recipes() -> None:
    assert len(RECIPES) == 20
    assert FIRST.keys() <= RECIPES.keys()
