"""SELECTs at random over worlds at random: many nodes answer as one database does. `make selects` runs thousands."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import NamedTuple

import pytest
from federation_support import Nodes, assert_same, rows_of
from long import long_unless
from select_grammar import select, world

_EACH = 8
_OLDER = ("ALTER TABLE comm.ops DROP COLUMN bw", "ALTER TABLE comm.ops RENAME COLUMN bw TO bandwidth")


@pytest.mark.parametrize("seed", [long_unless(seed < 4, seed) for seed in range(20)])
def test_the_rows_are_those_of_the_union(seed: int) -> None:
    random = Random(seed)
    nodes = Nodes(world(random))
    try:
        for _ in range(_EACH):
            nodes.check(select(random))
    finally:
        nodes.close()


class Older(NamedTuple):
    """Nodes of which one, ``name``, has an older table."""

    nodes: Nodes
    name: str


@pytest.fixture(scope="module", params=_OLDER)
def older(request: pytest.FixtureRequest) -> Iterator[Older]:
    random = Random(4)
    rows = [*world(random), *world(random)]
    nodes = Nodes(rows)
    old = max(range(len(rows)), key=lambda i: len(rows[i]["comm.ops"]))
    nodes.change(f"n{old}", request.param)
    yield Older(nodes, f"n{old}")
    nodes.close()


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT * FROM comm.ops{}",
        "SELECT o.*, seq + 1 AS next FROM comm.ops o{}",
        "SELECT * EXCLUDE (ts) FROM comm.ops{}",
        "SELECT op, max(bw), corr(bw, seq) FROM comm.ops{} GROUP BY op",
        "SELECT op, row_number() OVER (ORDER BY bw, ts) FROM comm.ops{}",
        "SELECT a.ts FROM (SELECT * FROM comm.ops{}) a WHERE a.bw > 0",
    ],
)
def test_rows_of_an_older_node_are_left_out_and_never_mixed(older: Older, sql: str) -> None:
    nodes, old = older
    answer = nodes.together(sql.format(""))
    assert [failed.address for failed in answer.gathered.failed] == [old]
    want = nodes.reference(sql.format(f" WHERE node <> '{old}'"))
    assert_same(rows_of(answer.table), rows_of(want), sql)


def test_an_older_node_is_asked_for_the_columns_that_it_has(older: Older) -> None:
    older.nodes.check("SELECT op, count(*), min(seq) FROM comm.ops GROUP BY op")
    older.nodes.check("SELECT ts, rank() OVER (ORDER BY seq, ts) FROM comm.ops")
