"""The SQL of a timeline: nodes accept it, need only files of its time and job, and send rows that need no merge."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from timeline_scene import BEGIN, JOB, SECOND, RowsOfTables, Tables, communication, counters, sample, step, timeline_of

from probing.client.timeline.reading import Timeline
from probing.daemon.query.gate import check
from probing.federation.execution.answer import Rows
from probing.federation.execution.clocks import Offset
from probing.federation.execution.streams import concatenates
from probing.federation.planning.split import plan

_NOW = BEGIN + 60 * SECOND


class Asked(Tables):
    """Tables that keep the questions."""

    def __init__(self, rows: RowsOfTables, ahead: dict[str, Offset]) -> None:
        super().__init__(rows, ahead)
        self.merged: list[str] = []
        self.streamed: list[str] = []

    def query(self, sql: str) -> pa.Table:
        self.merged.append(sql)
        return super().query(sql)

    def stream(self, sql: str) -> Rows:
        self.streamed.append(sql)
        return super().stream(sql)


@pytest.fixture(scope="module", params=[0, 5 * SECOND], ids=["clocks agree", "clocks differ"])
def asked(request: pytest.FixtureRequest) -> Asked:
    rows: RowsOfTables = {
        "comm.ops": communication(),
        "train.steps": [step(0, 0, 0, SECOND)],
        "python.samples": [sample(0, 7, SECOND)],
        **counters(),
    }
    tables = Asked(rows, {"alpha": Offset(0, 0), "beta": Offset(request.param, 0)})
    taken: Timeline = timeline_of(tables, present=True)
    for parts in (taken.operations(), taken.samples(), taken.counters()):
        for _ in parts:
            pass
    taken.stacks([7])
    return tables


def test_nodes_accept_each_question(asked: Asked) -> None:
    assert len(asked.streamed) == 5
    assert len(asked.merged) > 10
    for sql in (*asked.merged, *asked.streamed):
        for part in plan(sql, _NOW).parts:
            check(part.sql, now_ns=_NOW)


def test_streams_need_no_merge(asked: Asked) -> None:
    for sql in asked.streamed:
        assert concatenates(plan(sql, _NOW)), sql


def test_counts_are_added_up_and_not_shipped(asked: Asked) -> None:
    counts = [sql for sql in asked.merged if "AS bucket" in sql]
    assert len(counts) == 5
    assert {plan(sql, _NOW).kind for sql in counts} == {"aggregate"}


def test_nodes_open_files_of_the_time_and_job_only(asked: Asked) -> None:
    for sql in asked.streamed:
        checked: Any = check(plan(sql, _NOW).parts[0].sql, now_ns=_NOW)
        ((_, need),) = checked.needs.items()
        assert need.times.low >= BEGIN - 6 * SECOND
        assert need.times.high <= _NOW + 6 * SECOND
        assert need.jobs in (None, frozenset([JOB]))
    for sql in (sql for sql in asked.merged if "AS bucket" in sql or "DISTINCT node" in sql):
        for part in plan(sql, _NOW).parts:
            ((_, bounds),) = check(part.sql, now_ns=_NOW).needs.items()
            assert bounds.times.low is not None, part.sql
            assert bounds.times.low >= BEGIN - 6 * SECOND
