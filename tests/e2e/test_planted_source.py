"""A daemon whose list of sources has one more line: the tables of that source answer, and status shows it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e_support import Daemon, remove
from toy_source import planted
from waiting import until


class Planted(Daemon):
    @property
    def argv(self) -> list[str]:
        return [sys.executable, "-I", planted.__file__, *super().argv[2:]]


@pytest.fixture
def toy(base: Path) -> Iterator[Daemon]:
    daemon = Planted(base, "toy")
    try:
        yield daemon.start()
    finally:
        remove(daemon)


def test_its_tables_answer(toy: Daemon) -> None:
    rows = until(lambda: toy.rows("SELECT node, load_1m FROM toy.load") or None, what="a tick")
    assert rows[0]["node"] == "toy"
    assert toy.rows("SELECT count(*) AS n FROM toy.load_now WHERE running > 0") == [{"n": 1}]
    (state,) = [s for s in toy.rows("SELECT source, state FROM probing.sources") if s["source"] == "load"]
    assert state["state"] == "running"
