"""Sealing, merging and salvage by a process without rights, which may be killed, stopped or missing at any time."""

from __future__ import annotations

import os
import random
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from processes_helpers import Listener, listening

from probing.api.errors import StoreError
from probing.api.tables import TABLES, Table
from probing.api.tables.user import JOB_TYPES, MAX_JOB_COLUMNS, job_table
from probing.daemon import ipc
from probing.daemon.arrow import batch_of
from probing.daemon.clock import FakeClock
from probing.daemon.ipc import Channel, ChannelClosed
from probing.daemon.store import Store, StoreLimits
from probing.daemon.store.tasks import worker
from probing.daemon.store.tasks.worker import MAINTENANCE, RemoteWorker, WorkerFailed

MODULE = "probing.daemon.confined.store_maintenance"
NOW_NS = 1_790_003_600_000_000_000
LIMITS = StoreLimits(keep_free_bytes=0, part_bytes=1 << 12)
PIECE = 211
Until = Callable[..., object]


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[Listener]:
    with listening(tmp_path / "m.sock", MODULE) as made:
        yield made


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(worker, "LAST_PAUSE_S", 0.0)


def opened(
    root: Path, clock: FakeClock | None = None, idle_s: float = 60.0, tables: Mapping[str, Table] = TABLES
) -> Store:
    remote = partial(RemoteWorker, root / "m.sock", policy=MAINTENANCE._replace(idle_s=idle_s))
    clock = clock or FakeClock(mono_ns=10**9, real_ns=NOW_NS)
    return Store.open(
        root / "state", node="n", limits=LIMITS, background=False, clock=clock, tables=tables, worker=remote
    )


def fill(store: Store, first: int, count: int = PIECE) -> None:
    rows = [{"node": "n", "ts": NOW_NS + i, "job": f"j{i % 3}", "pid": i} for i in range(first, first + count)]
    store.append({"process.events": [batch_of("process.events", rows)]}, {})


def pids(store: Store) -> list[int]:
    return sorted(store.rows("process.events", ["pid"]).column("pid").to_pylist())


def live(listener: Listener) -> list[int]:
    return [process.pid for process in listener.processes if process.poll() is None]


def again(do: Callable[[], object], until: Until) -> None:
    """Repeats ``do`` until it does not fail."""

    def works() -> bool:
        try:
            do()
        except StoreError:
            return False
        return True

    until(works)


def test_the_process_does_it_without_rights_and_ends(tmp_path: Path, listener: Listener, until: Until) -> None:
    with opened(tmp_path, idle_s=2.0) as store:
        fill(store, 0)
        assert store.seal(now=True) == 1
        (pid,) = live(listener)
        status = Path(f"/proc/{pid}/status").read_text()
        assert "NoNewPrivs:\t1" in status
        assert "Seccomp:\t2" in status
        assert pids(store) == list(range(PIECE))
        # WHEN there is nothing to do
        # THEN its memory goes back
        until(lambda: not live(listener))
        assert store.status()["state"] == "running"


def test_many_wide_tables_are_sealed_at_once(tmp_path: Path, listener: Listener) -> None:
    """Their schemas together are longer than the header of a message may be."""
    kinds = {f"column_{i}": list(JOB_TYPES) for i in range(MAX_JOB_COLUMNS)}
    wide = {table.name: table for table in (job_table(f"wide_{i}", kinds) for i in range(50))}
    assert sum(table.physical.serialize().size for table in wide.values()) > ipc.MAX_HEADER // 2
    row = pa.RecordBatch.from_pylist([{"node": "n", "ts": NOW_NS, "column_0": 7}])
    with opened(tmp_path, tables=wide) as store:
        store.append({name: [row] for name in wide}, {})
        assert store.seal(now=True) == 1
        assert store.status()["segments"] == len(wide)
        assert store.rows("python.wide_49", ["column_0"]).column(0).to_pylist() == [7]
        assert len(live(listener)) == 1
        assert store.status()["state"] == "running"


def test_merging_goes_on_beside_sealing(tmp_path: Path, listener: Listener) -> None:
    clock = FakeClock(mono_ns=10**9, real_ns=NOW_NS + 2 * 86_400 * 10**9)
    with opened(tmp_path, clock) as store:
        # More sources than one message has descriptors.
        for number in range(23):
            fill(store, number * PIECE)
            store.seal(now=True)
        fill(store, 23 * PIECE)
        for _ in range(3):
            store.maintain()
            clock.advance(10**9)
        assert store.status()["merged_segments"] >= 23
        assert pids(store) == list(range(24 * PIECE))
        assert len(listener.processes) == 1
        assert store.status()["state"] == "running"


def test_a_damaged_segment_is_salvaged_by_the_process(tmp_path: Path, listener: Listener) -> None:
    with opened(tmp_path) as store:
        for number in range(2):
            fill(store, number * PIECE)
            store.seal(now=True)
        path = min((tmp_path / "state").glob("process.events/*/*.parquet"))
        data = bytearray(path.read_bytes())
        data[pq.read_metadata(path).row_group(0).column(0).data_page_offset + 3] ^= 1
        path.write_bytes(bytes(data))
        assert store.quarantine(path, "a reader said so")
        assert pids(store) == list(range(PIECE, 2 * PIECE))
        (loss,) = store.take_losses()
        assert (loss.count, loss.ts_from_ns, loss.ts_to_ns) == (PIECE, NOW_NS, NOW_NS + PIECE - 1)


def test_killed_at_any_instant(tmp_path: Path, listener: Listener, until: Until) -> None:
    ended, kills = threading.Event(), 0

    def kill() -> None:
        nonlocal kills
        pauses = random.Random(7)
        # Some die while they start, some in the middle of a job, some between two.
        while not ended.wait(pauses.uniform(0.02, 0.7)):
            for pid in live(listener):
                os.kill(pid, signal.SIGKILL)
                kills += 1

    killer = threading.Thread(target=kill)
    with opened(tmp_path) as store:
        killer.start()
        number = 0
        while kills < 12:
            fill(store, number * PIECE)
            number += 1
            try:
                store.maintain()
            except StoreError:
                assert "maintenance process" in store.status()["reason"]
        ended.set()
        killer.join()

        def all_is_well() -> bool:
            nonlocal number
            fill(store, number * PIECE)
            number += 1
            again(lambda: store.seal(now=True), until)
            return store.status()["state"] == "running"

        until(all_is_well)
        assert pids(store) == list(range(number * PIECE))
        assert store.take_losses() == []
    with opened(tmp_path) as store:
        assert pids(store) == list(range(number * PIECE))
        assert store.recovery_losses == ()


def test_a_process_that_hangs_is_given_up(
    tmp_path: Path, listener: Listener, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as store:
        fill(store, 0)
        store.seal(now=True)
        (pid,) = live(listener)
        monkeypatch.setattr(worker, "TIMEOUT_S", 0.2)
        os.kill(pid, signal.SIGSTOP)
        try:
            fill(store, PIECE)
            with pytest.raises(WorkerFailed):
                store.seal(now=True)
            # THEN it is reported, nobody else waits, and another process does it
            assert "no answer in time" in store.status()["reason"]
            fill(store, 2 * PIECE)
            monkeypatch.undo()
            monkeypatch.setattr(worker, "FIRST_PAUSE_S", 0.0)
            again(lambda: store.seal(now=True), until)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert store.status()["state"] == "running"
        assert pids(store) == list(range(3 * PIECE))
        until(lambda: pid not in live(listener))


def test_without_a_process_the_store_does_it_itself(tmp_path: Path, until: Until) -> None:
    with opened(tmp_path) as store:
        fill(store, 0)
        assert store.seal(now=True) == 1
        assert pids(store) == list(range(PIECE))
        status = store.status()
        assert (status["state"], status["parts"]) == ("degraded", 0)
        assert "no maintenance process can be started" in status["reason"]
        # WHEN it can be started again
        with listening(tmp_path / "m.sock", MODULE) as listener:
            fill(store, PIECE)
            store.seal(now=True)
            assert len(live(listener)) == 1
        assert store.status()["state"] == "running"
        assert pids(store) == list(range(2 * PIECE))


def test_a_process_that_always_fails_costs_no_row(tmp_path: Path) -> None:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(tmp_path / "m.sock"))
    listener.listen(16)

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with Channel(connection) as channel:
                channel.receive()
                channel.send({})
                try:
                    while channel.receive().header.get("op") != "next":
                        pass
                except ChannelClosed:
                    pass

    server = threading.Thread(target=serve)
    server.start()
    try:
        with opened(tmp_path) as store:
            fill(store, 0)
            for _ in range(worker.MAX_FAILURES):
                with pytest.raises(WorkerFailed):
                    store.seal(now=True)
            assert store.seal(now=True) == 1
            assert pids(store) == list(range(PIECE))
            assert store.take_losses() == []
            assert "maintenance process" in store.status()["reason"]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        server.join()
