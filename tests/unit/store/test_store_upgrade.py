"""A store of another version: fewer columns, other types, dropped tables, in segments and in the log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import store_support as support

from probing.api.tables.schema import I32, I64, NAME, TEXT, TIME, Column, Table, stored
from probing.daemon.store import Store, StoreLimits
from probing.daemon.store.log.decode import read_part
from probing.daemon.store.verify.examine import verify_directory

_BASE = (Column("node", NAME, "Node."), Column("ts", TIME, "Time."))
# What the columns were: a code instead of a name, half the width, whole text instead of a name, one that is gone.
BEFORE = (
    *_BASE,
    Column("id", I32, "Number."),
    Column("name", TEXT, "Some name."),
    Column("note", I64, "A number that is text now."),
    Column("gone", I64, "No longer known."),
)
GONE = Table("t.gone", "No longer known.", BEFORE, stored(BEFORE))
OLD = {"t.small": Table("t.small", "As it was.", BEFORE, stored(BEFORE), sort_by=("ts",)), "t.gone": GONE}
NEW = support.TABLES
ALL = [*range(1, 61)]


def rows(ids: list[int], table: Table) -> pa.RecordBatch:
    columns: dict[str, list[Any]] = {
        "node": ["n1"] * len(ids),
        "ts": [support.START_NS + i for i in ids],
        "id": ids,
        "name": [f"name-{i % 5}" for i in ids],
        "note": ids,
        "gone": ids,
    }
    return pa.RecordBatch.from_arrays(
        [pa.array(columns[f.name], f.type) for f in table.physical], schema=table.physical
    )


def open_store(root: Path, tables: dict[str, Table]) -> Store:
    limits = StoreLimits(keep_free_bytes=0, max_age_s=1e9)
    return Store.open(root, node="n1", clock=support.clock(), limits=limits, tables=tables, background=False)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Stores ids 1 to 40 as the version before: 1 to 20 in two segments, the others in two log parts."""
    root = tmp_path / "state"
    for number in range(4):
        with open_store(root, OLD) as store:
            ids = [*range(1 + 10 * number, 11 + 10 * number)]
            batches = {name: [rows(ids, table)] for name, table in OLD.items()}
            store.append(batches, support.position(ids[-1]))
            if number < 2:
                store.seal(now=True)
    assert len(list((root / "wal").iterdir())) == 2
    assert len(list(root.rglob("*.parquet"))) == 4
    return root


def check(store: Store, ids: list[int]) -> None:
    found = store.rows("t.small").sort_by("id")
    assert found.schema.equals(NEW["t.small"].physical)
    assert found.column("id").to_pylist() == ids
    old = [i for i in ids if i <= 40]
    # A number that is text now is that number's text, and a name is a name.
    assert found.column("note").to_pylist()[: len(old)] == [str(i) for i in old]
    assert found.column("name").cast(pa.string()).to_pylist()[: len(old)] == [f"name-{i % 5}" for i in old]


def test_rows_of_another_layout_are_all_there(root: Path) -> None:
    with open_store(root, NEW) as store:
        # GIVEN what the version before left, in segments and log
        assert store.recovery_losses == ()
        assert store.positions == support.position(40)
        check(store, ALL[:40])
        # WHEN rows of the new layout come in the same part of the log, and all is sealed and merged
        store.append({"t.small": [support.rows(range(41, 51))]}, support.position(50))
        check(store, ALL[:50])
        store.seal(now=True)
        check(store, ALL[:50])
        store.append({"t.small": [support.rows(range(51, 61))]}, support.position(60))
        store.seal(now=True)
        for _ in range(4):
            store.maintain()
        check(store, ALL)
        # THEN no row was lost on the way, and none reported as lost
        assert store.take_losses() == []
        assert store.status()["state"] == "running"
    assert verify_directory(root) == []
    with open_store(root, NEW) as store:
        check(store, ALL)
        assert store.recovery_losses == ()


def test_a_table_that_is_gone_keeps_its_rows_and_goes_with_its_age(root: Path) -> None:
    with open_store(root, NEW) as store:
        store.seal(now=True)
        assert store.take_losses() == []
        tables = store.status()["tables"]
        assert tables["t.gone"]["rows"] == 40
    # A version that knows it again has it.
    with open_store(root, OLD) as store:
        assert sorted(store.rows("t.gone", ["gone"]).column("gone").to_pylist()) == ALL[:40]


def test_a_reader_of_the_log_gets_the_columns_that_it_knows(root: Path) -> None:
    with open_store(root, NEW) as store:
        parts = store.snapshot()["parts"]
        for part in parts:
            tail = read_part(part["path"], part["length"], {"t.small"}, NEW)
            assert tail.problems == ()
            assert tail.tables["t.small"].schema.equals(NEW["t.small"].physical)
            assert tail.tables["t.small"].num_rows == part["tables"]["t.small"] == 10


def test_the_version_before_reads_what_the_new_one_wrote(root: Path) -> None:
    """Going back to an older version for a day loses nothing, as long as only columns were added."""
    with open_store(root, NEW) as store:
        store.append({"t.small": [support.rows([41])], "t.other": [support.rows([1], table=support.OTHER)]}, {})
        store.seal(now=True)
    with open_store(root, OLD) as store:
        assert store.recovery_losses == ()
        assert sorted(store.rows("t.small", ["id"]).column("id").to_pylist()) == ALL[:41]
