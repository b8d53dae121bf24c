"""The SQL of Probing's documents runs on our names, on one node and split over many."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import duckdb
import pytest

from probing.api.errors import QueryRejected
from probing.api.tables import TABLES
from probing.daemon.query.gate import check
from probing.federation.planning.split import plan

NOW_NS = 1_795_000_000_000_000_000
REFUSED = "-- refused: "


def statements() -> list[tuple[str, str]]:
    """(SQL, what its refusal says or nothing) of each statement of the file."""
    found, lines, refusal = [], [], ""
    for line in (Path(__file__).parents[1] / "probing_documents.sql").read_text().splitlines():
        if line.startswith("--"):
            refusal = line.removeprefix(REFUSED) if line.startswith(REFUSED) else refusal
            continue
        lines.append(line)
        if line.endswith(";"):
            found.append(("\n".join(lines).strip().removesuffix(";"), refusal))
            lines, refusal = [], ""
    assert not "".join(lines).strip()
    return found


STATEMENTS = statements()


@pytest.fixture(scope="module")
def empty() -> Iterator[duckdb.DuckDBPyConnection]:
    with duckdb.connect(config={"threads": "1", "python_enable_replacements": "false"}) as db:
        for name, table in TABLES.items():
            db.execute(f'CREATE SCHEMA IF NOT EXISTS "{name.split(".")[0]}"')
            db.register("given", table.logical.empty_table())
            db.execute(f"CREATE TABLE {name} AS SELECT * FROM given")
            db.unregister("given")
        yield db


@pytest.mark.parametrize("sql", [sql for sql, refusal in STATEMENTS if not refusal])
def test_a_statement_is_answered(empty: duckdb.DuckDBPyConnection, sql: str) -> None:
    columns = empty.sql(check(sql, NOW_NS).sql).columns
    assert columns
    assert len(plan(sql, NOW_NS).columns) == len(columns)


@pytest.mark.parametrize(("sql", "refusal"), [(sql, refusal) for sql, refusal in STATEMENTS if refusal])
def test_a_statement_is_refused_with_a_way_out(sql: str, refusal: str) -> None:
    with pytest.raises(QueryRejected) as caught:
        check(sql, NOW_NS)
    assert refusal in f"{caught.value.message} {caught.value.hint}"


def test_all_kinds_of_statements_are_there() -> None:
    assert len(STATEMENTS) > 60
    assert sum(bool(refusal) for _, refusal in STATEMENTS) == 6
