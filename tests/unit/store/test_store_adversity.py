"""Clocks that jump, deleted directories, and disks smaller than ``keep_free_bytes``."""

from __future__ import annotations

import errno
import re
import shutil
import stat
from pathlib import Path

import pyarrow as pa
import pytest
import store_support as support
from long import long_unless

from probing.api.errors import StoreError, StoreFull
from probing.daemon.clock import FakeClock
from probing.daemon.store import Store, StoreLimits
from probing.daemon.store.files import SystemFiles

ROOT = Path("/state")
HOUR_NS = 3_600_000_000_000
DAY_NS = 24 * HOUR_NS
YEAR_NS = 365 * DAY_NS
MINUTE_NS = HOUR_NS // 60
LIMITS = StoreLimits(keep_free_bytes=0)
PIECE = 13


def opened(files: support.MemoryFiles, clock: FakeClock, limits: StoreLimits = LIMITS) -> Store:
    return Store.open(ROOT, node="n1", clock=clock, limits=limits, files=files, tables=support.TABLES, background=False)


def batch(first: int, ts_ns: int) -> pa.RecordBatch:
    return support.rows(range(first, first + PIECE), ts_ns)


def ids(store: Store) -> list[int]:
    return sorted(i for name in support.TABLES for i in store.rows(name, ["id"]).column("id").to_pylist())


def write(store: Store, clock: FakeClock, number: int) -> None:
    """Seals a segment with the present time, and advances the clock by a minute."""
    store.append({"t.small": [batch(number * PIECE, clock.real_ns)]}, support.position(number))
    store.seal(now=True)
    store.maintain()
    clock.advance(MINUTE_NS)


# Clocks


@pytest.mark.parametrize(
    ("step_ns", "back"),
    [
        (-HOUR_NS, False),
        long_unless(False, -HOUR_NS, True),
        (YEAR_NS, False),
        (YEAR_NS, True),
        long_unless(False, -YEAR_NS, False),
        (-YEAR_NS, True),
    ],
)
def test_a_wall_clock_that_jumps_costs_no_row(step_ns: int, back: bool) -> None:
    files, clock = support.MemoryFiles(), support.clock()
    store = opened(files, clock)
    for number in range(60):
        if number == 20:
            clock.real_ns += step_ns
        if number == 40 and back:
            clock.real_ns -= step_ns
        write(store, clock, number)
    # THEN also over a restart everything is there, in the order of the log
    assert ids(store) == list(range(60 * PIECE))
    assert store.status()["dropped_rows"] == 0
    store.close()
    store = opened(files.after_kill(), clock)
    store.maintain()
    assert ids(store) == list(range(60 * PIECE))
    assert store.positions == support.position(59)
    assert store.recovery_losses == ()
    assert store.take_losses() == []


def test_a_clock_that_was_wrong_at_boot_costs_no_row() -> None:
    files, clock = support.MemoryFiles(), support.clock()
    store = opened(files, clock)
    for number in range(20):
        write(store, clock, number)
    store.close()
    # WHEN the machine comes up a year ahead, and is set right an hour later
    clock.real_ns += YEAR_NS
    clock.boot_id = "another boot"
    store = opened(files, clock)
    for number in range(20, 80):
        write(store, clock, number)
    clock.real_ns -= YEAR_NS
    write(store, clock, 80)
    assert ids(store) == list(range(81 * PIECE))


def test_what_is_too_old_goes_a_day_after_a_long_rest() -> None:
    files, clock = support.MemoryFiles(), support.clock()
    store = opened(files, clock)
    write(store, clock, 0)
    store.close()
    # WHEN the machine was off for a month: its clock is right
    clock.real_ns += 30 * DAY_NS
    store = opened(files, clock)
    write(store, clock, 1)
    assert ids(store) == list(range(2 * PIECE))
    clock.advance(DAY_NS + HOUR_NS)
    store.maintain()
    assert ids(store) == list(range(PIECE, 2 * PIECE))


def test_space_is_taken_from_what_came_first_whatever_its_time_says() -> None:
    files, clock = support.MemoryFiles(), support.clock()
    store = opened(files, clock)
    for number in range(30):
        if number == 10:
            clock.real_ns += YEAR_NS
        if number == 20:
            clock.real_ns -= YEAR_NS
        write(store, clock, number)
    used = store.status()["bytes"]
    # Rows of a year ahead are older than the last ones, and go before them.
    for share in (5, 4, 3, 2):
        store.set_limits(StoreLimits(keep_free_bytes=0, max_bytes=used * share // 6, segment_bytes=1))
        store.maintain()
        left = ids(store)
        assert left == list(range(left[0], 30 * PIECE))
    assert left[0] >= 15 * PIECE
    # AND in time they go by their age too
    clock.advance(7 * DAY_NS + HOUR_NS)
    store.set_limits(LIMITS)
    store.maintain()
    assert ids(store) == []


# Disks


def test_a_disk_smaller_than_what_is_to_stay_free_stores_by_default() -> None:
    files, clock = support.MemoryFiles(), support.clock()
    files.total = files.free = 500_000_000
    store = opened(files, clock, StoreLimits(keep_free_bytes=-1))
    write(store, clock, 0)
    assert store.status()["state"] == "running"
    # A tenth of it stays free.
    files.free = 40_000_000
    store.maintain()
    with pytest.raises(StoreFull, match="keep_free_bytes is 50000000"):
        write(store, clock, 1)
    files.free = 60_000_000
    store.maintain()
    write(store, clock, 1)
    store.close()
    # AND of a large one a gibibyte.
    files.total, files.free = 1 << 44, 1 << 29
    store = opened(files, clock, StoreLimits(keep_free_bytes=-1))
    assert f"keep_free_bytes is {1 << 30}" in store.status()["reason"]


def test_a_store_that_is_full_from_its_start_says_so() -> None:
    files = support.MemoryFiles()
    files.free = 1000
    store = opened(files, support.clock(), StoreLimits(keep_free_bytes=1 << 20))
    status = store.status()
    assert status["state"] == "degraded"
    assert re.fullmatch(rf"nothing is stored: \d+ bytes are free, keep_free_bytes is {1 << 20}", status["reason"])
    for number in range(3):
        with pytest.raises(StoreFull):
            store.append({"t.small": [batch(number, 1)]}, {})
    files.free = 1 << 30
    store.maintain()
    assert store.status()["state"] == "running"


def test_a_first_start_on_a_full_disk_is_no_deleted_directory(caplog: pytest.LogCaptureFixture) -> None:
    files, clock = support.MemoryFiles(), support.clock()
    files.free = 0
    store = opened(files, clock)
    assert "the manifest cannot be written" in store.status()["reason"]
    for _ in range(3):
        with pytest.raises(StoreError):
            store.maintain()
    files.free = 1 << 30
    store.maintain()
    write(store, clock, 0)
    assert store.status()["state"] == "running"
    assert "deleted" not in caplog.text
    assert store.take_losses() == []


# Directories


@pytest.mark.parametrize("what", ["", "wal"])
@pytest.mark.parametrize("first", ["append", "maintain"])
def test_a_deleted_directory_is_made_again(
    tmp_path: Path, what: str, first: str, caplog: pytest.LogCaptureFixture
) -> None:
    root, clock = tmp_path / "state", support.clock()
    store = Store.open(root, node="n1", clock=clock, limits=LIMITS, tables=support.TABLES, background=False)
    start = clock.real_ns
    write(store, clock, 0)
    write(store, clock, 1)
    # In the log: a closed part, and one that is appended to.
    store.append({"t.small": [batch(2 * PIECE, clock.real_ns)]}, support.position(2))
    store.append({"t.other": [support.rows(range(3 * PIECE, 4 * PIECE), clock.real_ns, support.OTHER)]}, {})
    # WHEN somebody deletes it
    shutil.rmtree(root / what)
    if first == "append":
        store.append({"t.small": [batch(4 * PIECE, clock.real_ns)]}, support.position(4))
    store.maintain()
    # THEN what was in it is a loss
    assert "was deleted: it is made again" in caplog.text
    lost = {(x.table, x.stage): (x.count, x.ts_from_ns) for x in store.take_losses()}
    unsealed = PIECE if first == "maintain" else 2 * PIECE
    now = clock.real_ns
    expected = {("t.small", "log"): (unsealed, now), ("t.other", "log"): (PIECE, now)}
    if not what:
        expected[("t.small", "store")] = (2 * PIECE, start)
    assert lost == expected
    # AND it goes on, with the lock of the new directory
    store.append({"t.small": [batch(5 * PIECE, clock.real_ns)]}, support.position(5))
    store.seal(now=True)
    store.maintain()
    assert store.status()["state"] == "running"
    kept = list(range(5 * PIECE, 6 * PIECE))
    assert ids(store) == (kept if not what else [*range(2 * PIECE), *kept])
    store.close()
    with Store.open(root, node="n1", clock=clock, limits=LIMITS, tables=support.TABLES, background=False) as store:
        assert store.recovery_losses == ()
        assert ids(store) == (kept if not what else [*range(2 * PIECE), *kept])
        assert store.positions == support.position(5)


def test_files_are_for_the_owner_and_the_group(tmp_path: Path) -> None:
    root, clock = tmp_path / "state", support.clock()
    with Store.open(root, node="n1", clock=clock, limits=LIMITS, tables=support.TABLES, background=False) as store:
        write(store, clock, 0)
        store.append({"t.small": [batch(PIECE, clock.real_ns)]}, support.position(2))
        found = {p.relative_to(root).as_posix(): stat.S_IMODE(p.stat().st_mode) for p in (root, *root.rglob("*"))}
    folders = {".", "wal", "corrupt", "t.small", "t.small/date=2026-09-21"}
    assert {name for name, mode in found.items() if mode == 0o2750} == folders
    assert {name: mode for name, mode in found.items() if name not in folders and mode != 0o640} == {}
    assert len(found) > len(folders) + 2


def test_a_directory_that_cannot_be_made_again_ends_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, clock, files = tmp_path / "state", support.clock(), SystemFiles()
    store = Store.open(root, node="n1", clock=clock, limits=LIMITS, tables=support.TABLES, background=False)
    write(store, clock, 0)
    shutil.rmtree(root)
    # WHEN whoever runs it may not write beside it
    denied = PermissionError(errno.EACCES, "Permission denied")
    monkeypatch.setattr(SystemFiles, "make_dir", lambda *_: raise_it(denied))
    store.check()
    for _ in range(12):
        with pytest.raises(StoreError, match="not writable"):
            store.maintain()
        with pytest.raises(StoreError):
            store.append({"t.small": [batch(PIECE, clock.real_ns)]}, support.position(1))
        clock.advance(10**9)
    assert "cannot be made again: Permission denied" in store.status()["reason"]
    with pytest.raises(StoreError, match="cannot be made again"):
        store.check()
    # AND when somebody makes it, it goes on
    monkeypatch.undo()
    files.make_dir(root)
    store.maintain()
    store.check()
    assert [loss.count for loss in store.take_losses()] == [PIECE]
    store.append({"t.small": [batch(PIECE, clock.real_ns)]}, support.position(1))
    assert store.status()["state"] == "running"
    store.close()


def raise_it(e: Exception) -> None:
    raise e
