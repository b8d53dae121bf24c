"""A store that is killed again and again, and read by others meanwhile."""

from __future__ import annotations

import json
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from store_child import batch

from probing.api.errors import StateLocked
from probing.daemon.store import Store, StoreLimits
from probing.daemon.store.verify import verify_directory

CHILD = Path(__file__).with_name("store_child.py")
LIMITS = StoreLimits(part_bytes=1 << 16, keep_free_bytes=0, max_age_s=1e9)


class Child:
    def __init__(self, root: Path, rows: int) -> None:
        self.process = subprocess.Popen([sys.executable, str(CHILD), str(root), str(rows)], stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        self.out = self.process.stdout
        self.acknowledged = -1
        self._rest = b""

    def read(self, timeout: float) -> bool:
        """Take what it said; False at its end, or after ``timeout`` seconds without a word."""
        if not select.select([self.out], [], [], timeout)[0]:
            return False
        data = self.out.read1(1 << 16)  # type: ignore[attr-defined]
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self.acknowledged = int(line.split()[1])
        return bool(data)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        while self.read(0):
            pass
        self.out.close()


@contextmanager
def child(root: Path, rows: int) -> Iterator[Child]:
    running = Child(root, rows)
    try:
        deadline = time.monotonic() + 60
        while running.acknowledged < 0:
            assert time.monotonic() < deadline, "the store did not open"
            running.read(1)
        yield running
    finally:
        if running.process.poll() is None:
            running.kill()


def rows_of(store: Store) -> list[int]:
    return sorted(store.rows("process.events", ["pid"]).column("pid").to_pylist())


def test_twenty_kills_lose_nothing_and_double_nothing(tmp_path: Path) -> None:
    root = tmp_path / "state"
    chance = random.Random(4)
    before = 0
    for round_ in range(20):
        # GIVEN a store under load, killed at any instant after some more records
        with child(root, chance.choice((3, 400))) as running:
            assert running.acknowledged >= before
            target = running.acknowledged + chance.randint(1, 3000)
            while running.acknowledged < target:
                assert running.read(30), "the child stopped"
            running.kill()
        # THEN what was acknowledged is there, once, and nothing else but perhaps the record it was writing
        with Store.open(root, node="n1", limits=LIMITS, background=False) as store:
            found = rows_of(store)
            last = store.positions["ring"]["position"]
            assert found == list(range(last)), f"round {round_}"
            assert last >= running.acknowledged
            assert store.recovery_losses == ()
            assert store.status()["state"] == "running"
        before = last
    assert verify_directory(root) == []


def test_the_lock_names_who_has_it_and_goes_with_its_owner(tmp_path: Path) -> None:
    with child(tmp_path / "state", 5) as running:
        with pytest.raises(StateLocked, match=f"pid {running.process.pid}"):
            Store.open(tmp_path / "state", node="n1")
        running.kill()
        Store.open(tmp_path / "state", node="n1", limits=LIMITS).close()


READER = """
import json, sys
from pathlib import Path
import pyarrow.parquet as pq
from probing.daemon.store.tail import read_tail

snapshot = json.load(sys.stdin)
count = sum(pq.read_table(s["path"], columns=["pid"]).num_rows for s in snapshot["tables"].get("process.events", []))
for part in snapshot["parts"]:
    tail = read_tail(part["path"], part["length"], {"process.events"})
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
