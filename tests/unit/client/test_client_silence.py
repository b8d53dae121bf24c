"""What is known of ranks that show no operation, for many ranks."""

from __future__ import annotations

from typing import Any, cast

import pytest

from probing.client.cluster import Cluster
from probing.client.collectives import silence

Row = dict[str, Any]


class CountedRow(Row):
    """A row that counts how often rows are read."""

    reads = 0

    def __getitem__(self, name: str) -> Any:
        CountedRow.reads += 1
        return super().__getitem__(name)


class Answers:
    """Answers each question with the rows that it has."""

    def __init__(self, gaps: list[Row], starts: list[Row]) -> None:
        self._rows = {"gaps": gaps, "starts": starts, "last operations": []}

    def query_all(self, statements: dict[str, str]) -> dict[str, list[Row]]:
        return {name: self._rows[name] for name in statements}


@pytest.fixture(autouse=True)
def rows_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(silence, "rows_of", lambda rows: rows)


def _unseen(processes: list[Row], gaps: list[Row], starts: list[Row]) -> dict[Any, Any]:
    return silence._unseen(cast(Cluster, Answers(gaps, starts)), processes)


def _process(rank: int) -> Row:
    return {"node": f"n{rank // 8}", "pid": 1000 + rank, "start_ns": 1}


def _gap(node: str, pid: int | None, until: str, reason: str = "attached late") -> Row:
    return CountedRow(node=node, pid=pid, reason=reason, until=until)


def test_the_newest_gap_of_a_process_or_of_its_node_counts() -> None:
    gaps = [
        _gap("n0", 1000, "T2"),
        _gap("n0", None, "T3", "paused"),
        _gap("n1", 1000, "T9"),
        _gap("n0", 1001, "T4"),
        _gap("n0", 1002, "T4"),
    ]
    starts = [{**_process(2), "ts": "T5"}]
    assert _unseen([_process(rank) for rank in range(3)], gaps, starts) == {
        ("n0", 1000): ("T3", "paused", None),
        ("n0", 1001): ("T4", "attached late", None),
    }


def test_the_work_grows_with_the_ranks_and_not_with_their_square() -> None:
    reads = []
    for ranks in (100, 800):
        processes = [_process(rank) for rank in range(ranks)]
        CountedRow.reads = 0
        found = _unseen(processes, [_gap(row["node"], row["pid"], "T1") for row in processes], [])
        assert len(found) == ranks
        reads.append(CountedRow.reads)
    assert reads[1] <= 10 * reads[0]
