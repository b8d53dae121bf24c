"""Queries count exactly while what they read is appended to, sealed, merged and dropped."""

from __future__ import annotations

import time
from pathlib import Path

from sealing_load import ROWS, Counts, count, running


def test_counts_are_exact_while_all_changes(open_tmp_path: Path) -> None:
    # tests/soak/counting.py does this for as long as it is told.
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
