"""Tables of users' probes in the store and in SQL: they grow, outlive their probe, and stay behind the gate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from query_helpers import T0, Inetd, answer, gates, snapshot_of

from probing.api.errors import QueryRejected
from probing.api.tables import TABLES, Table
from probing.api.tables.user import user_table_from
from probing.daemon.clock import FakeClock
from probing.daemon.query.engine import Engine
from probing.daemon.query.pool import WorkerPool
from probing.daemon.query.snapshot import QuerySnapshot
from probing.daemon.store import Store
from probing.daemon.store.needs import Need
from probing.daemon.user_probes.spec import Attach, Field, Spec
from probing.daemon.user_tables import UserTables


class Collector:
    """The store of a collector, as the engine asks for it."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.clock = FakeClock(10**9, T0)
        self.open()

    def open(self) -> None:
        self.known = UserTables(self._root / "user_tables.json")
        self.store = Store.open(self._root, node="n", clock=self.clock, tables=self.known, background=False)

    def restart(self) -> None:
        self.store.close()
        self.open()

    def snapshot(
        self, needs: Mapping[str, Need], timeout: float, cancelled: Callable[[], bool]
    ) -> AbstractContextManager[QuerySnapshot]:
        return snapshot_of(self.store, needs)

    def live(self, table: str, timeout: float, cancelled: Callable[[], bool]) -> bytes:
        raise AssertionError(table)

    def damaged(self, paths: Sequence[str], timeout: float) -> None:
        raise AssertionError(paths)

    def tables(self, timeout: float) -> Mapping[str, Table]:
        return {table.name: table for table in map(user_table_from, self.known.described())}

    def define(self, *fields: tuple[str, str]) -> Table:
        place = Attach("uprobe", "f", "libc.so.6", "read")
        columns = tuple(Field(name, kind, "Doc.", 8 if kind == "text" else 0) for name, kind in fields)
        return self.known.define(Spec("reads", "Reads.", "trainers", 10, (place,), columns, "").table)

    def append(self, table: Table, *rows: dict[str, Any]) -> None:
        self.clock.advance(1000)
        common = {"node": "n", "ts": self.clock.real_ns, "pid": 7}
        columns = [pa.array([{**common, **row}.get(f.name) for row in rows], f.type) for f in table.logical]
        batch = pa.RecordBatch.from_arrays(columns, schema=table.logical).cast(table.physical)
        self.store.append({table.name: [batch]}, {})


@pytest.fixture
def collector(open_tmp_path: Path) -> Iterator[Collector]:
    collector = Collector(open_tmp_path / "state")
    yield collector
    collector.store.close()


@pytest.fixture
def rows(collector: Collector, open_tmp_path: Path) -> Iterator[Callable[[str], list[dict[str, Any]]]]:
    path = open_tmp_path / "sql.sock"
    inetd = Inetd(path, [f"--state_dir={open_tmp_path / 'state'}", f"--query.memory_bytes={256 << 20}"])
    pool = WorkerPool(str(path))
    with gates(open_tmp_path) as gate:
        engine = Engine(collector, pool, gate)
        yield lambda sql: answer(engine, sql)[0].to_pylist()
    pool.close()
    inetd.close()


def test_rows_of_all_versions_are_one_table(collector: Collector, rows: Callable[[str], list[dict[str, Any]]]) -> None:
    sql = "SELECT size_bytes, path, more FROM user.reads ORDER BY ts, size_bytes"
    first = collector.define(("size_bytes", "u32"))
    collector.append(first, {"size_bytes": 2**32 - 1})
    common = dict.fromkeys(first.logical.names) | {"node": "n", "pid": 7, "size_bytes": 2**32 - 1}
    del common["ts"]
    assert rows("SELECT * EXCLUDE (ts) FROM user.reads") == [common]
    # The stream of the open part has the columns of before.
    second = collector.define(("path", "text"), ("size_bytes", "u32"))
    collector.append(second, {"size_bytes": 1, "path": "a"}, {"size_bytes": 2, "path": "b"})
    # Rows that were made before the table grew come after it too.
    collector.append(first, {"size_bytes": 3})
    third = collector.define(("more", "i64"), ("size_bytes", "u32"))
    collector.append(third, {"size_bytes": 4, "more": -5})
    expected = [
        {"size_bytes": 2**32 - 1, "path": None, "more": None},
        {"size_bytes": 1, "path": "a", "more": None},
        {"size_bytes": 2, "path": "b", "more": None},
        {"size_bytes": 3, "path": None, "more": None},
        {"size_bytes": 4, "path": None, "more": -5},
    ]
    assert rows(sql) == expected
    collector.store.seal(now=True)
    assert collector.store.snapshot()["parts"] == []
    assert rows(sql) == expected
    # After a restart nobody has loaded the probe again.
    collector.restart()
    assert rows(sql) == expected
    assert rows('SELECT r.path FROM "user".reads r JOIN process.events e ON r.pid = e.pid') == []
    assert collector.store.rows("user.reads", ["size_bytes"]).num_rows == 5


@pytest.mark.parametrize("name", ["user.none", 'user."a\'b"', "users.reads", "user.process.reads", "reads"])
def test_what_no_probe_has_defined_is_refused(
    collector: Collector, rows: Callable[[str], list[dict[str, Any]]], name: str
) -> None:
    collector.define(("size_bytes", "u32"))
    with pytest.raises(QueryRejected):
        rows(f"SELECT * FROM {name}")


def test_a_near_miss_is_suggested(collector: Collector, rows: Callable[[str], list[dict[str, Any]]]) -> None:
    collector.define(("size_bytes", "u32"))
    with pytest.raises(QueryRejected) as refused:
        rows("SELECT * FROM user.reeds")
    assert "user.reads" in refused.value.hint
    assert "user.reads" not in TABLES
