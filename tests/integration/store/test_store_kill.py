"""A store that is killed repeatedly while other processes read it."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from store_child import LIMITS, Writers, batch, check, kill_once

from probing.api.errors import StateLocked
from probing.daemon.store import Store
from probing.daemon.store.verify.examine import verify_directory


@pytest.fixture
def writers(tmp_path: Path) -> Iterator[Writers]:
    running = Writers(tmp_path)
    yield running
    running.close()


def rows_of(store: Store) -> list[int]:
    return sorted(store.rows("process.events", ["pid"]).column("pid").to_pylist())


def test_kills_lose_nothing_and_double_nothing(tmp_path: Path, writers: Writers) -> None:
    # tests/soak/kills.py does the same five hundred times.
    root = tmp_path / "state"
    chance = random.Random(4)
    before = acknowledged = 0
    for round_ in range(12):
        # GIVEN a store under load, killed at any instant, also while it starts
        acknowledged = max(acknowledged, kill_once(writers, root, chance, 200))
        # THEN what was acknowledged is there, once, and nothing else but perhaps the record it was writing
        if round_ % 3:
            before = check(root, max(before, acknowledged))
    assert verify_directory(root) == []
    assert before > 0


def test_the_lock_names_who_has_it_and_goes_with_its_owner(tmp_path: Path, writers: Writers) -> None:
    root = tmp_path / "state"
    writers.start(root, 5)
    writers.wait_until_open()
    with pytest.raises(StateLocked, match=f"pid {writers.pid}"):
        Store.open(root, node="n1")
    writers.kill()
    Store.open(root, node="n1", limits=LIMITS).close()


READER = """
import json, sys
from pathlib import Path
import pyarrow.parquet as pq
from probing.daemon.store.log.decode import read_part

snapshot = json.load(sys.stdin)
count = sum(pq.read_table(s["path"], columns=["pid"]).num_rows for s in snapshot["tables"].get("process.events", []))
for part in snapshot["parts"]:
    tail = read_part(part["path"], part["length"], {"process.events"})
    assert not tail.problems
    count += tail.tables["process.events"].num_rows
print(count)
"""


def test_another_process_reads_a_snapshot_while_the_store_goes_on(tmp_path: Path) -> None:
    with Store.open(tmp_path / "state", node="n1", limits=LIMITS) as store:
        done = 0
        for _ in range(6):
            for _ in range(40):
                store.append({"process.events": [batch(done, 100)]}, {})
                done += 100
            snapshot = store.snapshot()
            # Sealing and appending go on while the snapshot is read.
            store.seal(now=True)
            store.append({"process.events": [batch(done, 1)]}, {})
            answer = subprocess.run(
                [sys.executable, "-c", READER], input=json.dumps(snapshot), capture_output=True, text=True, check=True
            )
            assert int(answer.stdout) == done
            done += 1
            store.release(snapshot["generation"])
        assert store.status()["leases"] == 0
        assert rows_of(store) == list(range(done))


def test_threads_of_the_store_sync_and_seal_by_themselves(tmp_path: Path) -> None:
    with Store.open(tmp_path / "state", node="n1", limits=LIMITS) as store:
        done = 0
        deadline = time.monotonic() + 60
        while store.status()["segments"] < 3:
            assert time.monotonic() < deadline
            store.append({"process.events": [batch(done, 500)]}, {})
            done += 500
        assert store.status()["reason"] == ""
        assert rows_of(store) == list(range(done))
