"""Queries count exactly while what they read is appended to, sealed, merged and dropped."""

from __future__ import annotations

import time
from pathlib import Path

from query_helpers import answer
from sealing_load import ROWS, Counts, count, running


def test_counts_are_exact_while_all_changes(open_tmp_path: Path) -> None:
    # tests/soak/counting.py does this for any length of time.
    with running(open_tmp_path) as machine:
        seen, deadline = Counts(), time.monotonic() + 60
        while True:
            count(machine, seen)
            status = machine.store.status()
            if status["merged_segments"] >= 10 and status["dropped_rows"] and seen.queries >= 10:
                break
            assert time.monotonic() < deadline, status
        assert status["state"] == "running", status["reason"]
        count(machine, seen)
        assert machine.store.take_losses() == []
    assert seen.rows >= ROWS
    assert machine.store.status()["rows"] >= seen.rows


def test_rows_that_are_not_in_the_log_yet_are_a_warning(open_tmp_path: Path) -> None:
    reasons = ["", "no space"]
    with running(open_tmp_path, flush=lambda: reasons[-1]) as machine:
        end = answer(machine.engine, "SELECT count(*) FROM comm.ops")[1]
        assert end.warnings == ["rows of the last seconds are missing: no space"]
        reasons.pop()
        assert answer(machine.engine, "SELECT count(*) FROM comm.ops")[1].warnings == []
