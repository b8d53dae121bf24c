"""A source that is one line in the list of sources: its tables answer queries, its state is reported."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import pytest
from query_helpers import T0, Inetd, answer, gates, snapshot_of
from toy_source import planted
from toy_source.source import LoadSource
from toy_source.tables import LOAD, LOAD_NOW

from probing.api.tables import TABLES
from probing.daemon.arrow import ipc_bytes
from probing.daemon.clock import FakeClock
from probing.daemon.collector.drain import DrainLoop
from probing.daemon.collector.row_buffer import RowBuffer
from probing.daemon.collector.source_set import SourceSet
from probing.daemon.config import Config
from probing.daemon.context import Context
from probing.daemon.query.engine import Engine
from probing.daemon.query.pool import WorkerPool
from probing.daemon.query.snapshot import QuerySnapshot
from probing.daemon.source_state import SourceState, Totals
from probing.daemon.store import Store
from probing.daemon.store.needs import Need

PLANTED = (planted.__file__, "probing.daemon.confined.sql_worker")
SOURCES = (LoadSource,)


class Node:
    """The sources of a collector on a real store, as the query engine asks for it."""

    def __init__(self, root: Path) -> None:
        self.clock = FakeClock(10**9, T0)
        self.store = Store.open(root, node="n1", clock=self.clock, background=False)
        self.buffer = RowBuffer("n1", self.clock)
        self.loop = DrainLoop(self.store, {}, {}, self.buffer, self.clock)
        self.sources = SourceSet(self.buffer)
        parts: Any = dict.fromkeys(("session", "readers", "parsers", "settings", "processes"))
        context = Context(config=Config(), node="n1", sink=self.buffer, clock=self.clock, **parts)
        self.sources.build(SOURCES, context, ExitStack())

    def snapshot(
        self, needs: Mapping[str, Need], timeout: float, cancelled: Callable[[], bool]
    ) -> AbstractContextManager[QuerySnapshot]:
        return snapshot_of(self.store, needs)

    def live(self, table: str, timeout: float, cancelled: Callable[[], bool]) -> bytes:
        return ipc_bytes(self.sources.live_tables[table](self.clock.pair()))

    def damaged(self, paths: Sequence[str], timeout: float) -> None:
        raise AssertionError(paths)


@pytest.fixture
def node(open_tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    for table in (LOAD, LOAD_NOW):
        monkeypatch.setitem(TABLES, table.name, table)
    node = Node(open_tmp_path / "state")
    yield node
    node.store.close()


@pytest.fixture
def query(node: Node, open_tmp_path: Path) -> Iterator[Callable[[str], list[dict[str, Any]]]]:
    path = open_tmp_path / "sql.sock"
    inetd = Inetd(path, [f"--state_dir={open_tmp_path / 'state'}"], PLANTED)
    pool = WorkerPool(str(path))
    with gates(open_tmp_path, *PLANTED, f"--state_dir={open_tmp_path / 'state'}") as gate:
        engine = Engine(node, pool, gate)
        yield lambda sql: answer(engine, sql)[0].to_pylist()
    pool.close()
    inetd.close()


def test_its_tables_answer_queries(node: Node, query: Callable[[str], list[dict[str, Any]]]) -> None:
    # GIVEN three ticks, a second apart, in the log
    for _ in range(3):
        for source in node.sources:
            source.tick()
        node.clock.advance(10**9)
        node.loop.once()
    # THEN each is a row, with the loads of this machine
    found = query("SELECT node, epoch_ns(ts) AS ts, load_1m >= 0 AND running > 0 AS sound FROM toy.load ORDER BY ts")
    assert found == [{"node": "n1", "ts": T0 + n * 10**9, "sound": True} for n in range(3)]
    # AND the live table has the row of now, also beside the stored ones
    assert query("SELECT epoch_ns(ts) AS ts FROM toy.load_now") == [{"ts": T0 + 3 * 10**9}]
    assert query("SELECT count(*) AS n FROM toy.load, toy.load_now") == [{"n": 3}]


def test_its_state_counts_its_rows(node: Node) -> None:
    for source in node.sources:
        source.tick()
    node.loop.once()
    totals = Totals("running", node.buffer.rows, node.buffer.lost_rows)
    assert node.sources.states(totals) == [SourceState("load", "running", rows=1)]
