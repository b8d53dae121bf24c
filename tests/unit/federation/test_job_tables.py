"""Plans over tables that only some nodes have, or have with other columns."""

from __future__ import annotations

import pytest
from federation_support import NOW_NS

from probing.api.tables.user import job_table
from probing.daemon.query.gate import check
from probing.federation.planning.catalog import Catalog, api_schemas
from probing.federation.planning.split import plan

# As the nodes have it together, and as one of them has it.
ALL, ONE = job_table("losses", {"loss": ["f64"], "lr": ["f64"]}), job_table("losses", {"loss": ["i64"]})
CATALOG = Catalog({**api_schemas(), ALL.name: ALL.logical}, {ALL.name: {"loss", "lr"}})


@pytest.mark.parametrize(
    ("sql", "sources"),
    [
        ("SELECT rank FROM python.losses WHERE loss > 1", ["python.losses"]),
        ("SELECT count(*) FROM python.losses", ["python.losses"]),
        ("SELECT loss, _addr, _rank FROM global.python.losses", ["python.losses"]),
        ("SELECT max(loss) OVER () FROM python.losses, comm.ops", ["python.losses", ""]),
        ("SELECT rank FROM comm.ops", [""]),
    ],
)
def test_the_table_without_which_a_node_has_no_rows(sql: str, sources: list[str]) -> None:
    assert [part.source for part in plan(sql, NOW_NS, CATALOG).parts] == sources


@pytest.mark.parametrize("columns", ["*", "lr", "sum(lr)", "loss, _host", "max(loss) OVER (PARTITION BY rank)"])
def test_a_node_accepts_columns_that_it_lacks_and_prunes_as_before(columns: str) -> None:
    table = "global.python.losses" if "_host" in columns else "python.losses"
    for part in plan(f"SELECT {columns} FROM {table} WHERE job = 'j' AND ts > now()", NOW_NS, CATALOG).parts:
        assert "UNION ALL BY NAME" in part.sql
        need = check(part.sql, NOW_NS, lambda: {ONE.name: ONE}).needs[ONE.name]
        assert need.jobs == {"j"}
        assert need.times.low is not None


def test_columns_that_all_nodes_have_are_read_as_they_are() -> None:
    (part,) = plan("SELECT rank FROM python.losses", NOW_NS, CATALOG).parts
    assert "UNION" not in part.sql
