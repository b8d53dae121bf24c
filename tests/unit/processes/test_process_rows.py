"""Rows of processes: every process has one, whatever its numbers are."""

from __future__ import annotations

import pytest
from fakes import rows_of

from probing.daemon.arrow import batch_of
from probing.daemon.processes.facts import Facts
from probing.daemon.processes.registry import Process
from probing.daemon.processes.rows import process_row
from probing.daemon.source import Identity


@pytest.mark.parametrize(("uid", "shown"), [(1000, 1000), ((1 << 31) - 1, (1 << 31) - 1), ((1 << 32) - 2, None)])
def test_a_process_of_any_user_has_a_row(uid: int, shown: int | None) -> None:
    facts, who = Facts(7, 10, uid=uid), Identity(7, 10, "j", "r", "trainer", owner=uid)
    row = process_row("n1", 0, Process(facts, who, "pid", None, None, None, "train.py", "3.11"), "running")
    (stored,) = rows_of(batch_of("process.processes", [row]))
    assert (stored["uid"], stored["owner"]) == (shown, uid)
