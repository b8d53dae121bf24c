"""A machine with workers, a gate and files, for tests of queries."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from query_helpers import NOW_NS, Files, Inetd, Machine, gates

from probing.daemon.query.engine import Engine
from probing.daemon.query.pool import QUERY, WorkerPool


@pytest.fixture
def machine(open_tmp_path: Path) -> Iterator[Machine]:
    state = open_tmp_path / "state"
    state.mkdir()
    files = Files(state)
    inetd = Inetd(open_tmp_path / "sql.sock", [f"--state_dir={state}", f"--query.memory_bytes={256 << 20}"])
    pool = WorkerPool(str(open_tmp_path / "sql.sock"), QUERY._replace(kept=2))
    with gates(open_tmp_path) as gate:
        engine = Engine(files, pool, gate, now_ns=lambda: NOW_NS)
        yield Machine(open_tmp_path, files, inetd, pool, engine, gate)
    pool.close()
    inetd.close()
