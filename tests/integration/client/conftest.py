"""Fixtures of the client's tests: probingctl run in this process, and two nodes to ask."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import duckdb
import pytest
from client_fake_node import FakeNode, hung_job

from probing.client.main import main
from probing.federation.execution import merge
from probing.federation.planning.catalog import open_database

Run = Callable[..., tuple[int, str, str]]
# Databases of merges by their limit of memory: opening one takes longer than most merges of a test.
_idle: dict[str, list[duckdb.DuckDBPyConnection]] = {}


@contextmanager
def _merge_database(*, memory_limit: str, spill: str, spill_limit: str) -> Iterator[duckdb.DuckDBPyConnection]:
    """In place of ``open_database`` in a merge. One whose merge fails is not used again."""
    idle = _idle.setdefault(memory_limit, [])
    db = idle.pop() if idle else open_database(memory_limit=memory_limit)
    yield db
    idle.append(db)


@pytest.fixture(autouse=True)
def merges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Merges in this process use databases that are open."""
    monkeypatch.setattr(merge, "open_database", _merge_database)


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[FakeNode, FakeNode]]:
    """Two nodes with a job that hangs; the first is the target of commands."""
    nodes = hung_job(tmp_path)
    monkeypatch.setenv("PROBING_TARGET", nodes[0].address)
    yield nodes
    for node in nodes:
        node.stop()


@pytest.fixture
def ctl(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command; returns its exit code, stdout and stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(list(arguments))
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return code, out, err

    return run
