"""Rows of findings: stored with the collector's node and time; what is no such row is refused."""

from __future__ import annotations

from typing import Any

import pytest
from fakes import Sink

from probing.api.errors import UsageError
from probing.daemon.clock import FakeClock
from probing.daemon.collector.daemon_rows import FindingRows

ROW = {
    "job": "j",
    "run": "r",
    "finding_id": "f",
    "verdict": "not_joined",
    "severity": "error",
    "state": "open",
    "confidence": 0.9,
    "sentence": "rank 1 holds up 1 rank",
    "ranks": "1",
    "evidence": '["e"]',
    "since": 5,
    "opened": 7,
    "closed": None,
}


def put(rows: object) -> list[dict[str, Any]]:
    sink = Sink("diagnosis.findings", may_lose=False)
    FindingRows("n1", sink, FakeClock(real_ns=11)).put(rows)
    return sink.rows


def test_a_finding_is_a_row_of_its_node() -> None:
    (row,) = put([ROW])
    assert {name: row[name] for name in ("node", "job", "verdict", "confidence", "ranks", "closed")} == {
        "node": "n1",
        "job": "j",
        "verdict": "not_joined",
        "confidence": 0.9,
        "ranks": "1",
        "closed": None,
    }
    assert [row[name] for name in ("ts", "since", "opened")] == [11, 5, 7]


@pytest.mark.parametrize(
    "rows",
    [
        None,
        {},
        [3],
        [ROW] * 257,
        [{**ROW, "node": "another"}],
        [{**ROW, "pid": 3}],
        [{**ROW, "job": 3}],
        [{**ROW, "job": "j" * 4097}],
        [{**ROW, "stacks": "s" * ((1 << 19) + 1)}],
        [{**ROW, "opened": "now"}],
        [{**ROW, "opened": 1 << 64}],
        [{**ROW, "confidence": True}],
    ],
)
def test_what_is_no_row_is_refused(rows: object) -> None:
    with pytest.raises(UsageError):
        put(rows)
