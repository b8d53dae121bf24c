"""Space, age, leases, and a disk that fails."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
import store_support as support
from waiting import until

from probing.api.errors import FormatError, InternalError, StateLocked, StoreError, StoreFull
from probing.api.tables.schema import I64, Column, Stored, Table
from probing.daemon.store import Store, StoreLimits, TableLimits
from probing.daemon.store.files import SystemFiles
from probing.daemon.store.log import records
from probing.daemon.store.log.records import PART_MAGIC
from probing.daemon.store.maintenance.space import to_drop
from probing.daemon.store.manifest import Segment

ROOT = Path("/state")
HOUR_NS = 3_600_000_000_000
GONE = Column("gone", I64, "A column that a later version does not have.")
GONE_FIELD = Stored("gone", I64)
WIDE = StoreLimits(keep_free_bytes=0, max_age_s=1e9)


def segment(number: int, size: int = 100, table: str = "t.small") -> Segment:
    return Segment(table, f"{table}/{number}", size, 0, 10, number * HOUR_NS, (number + 1) * HOUR_NS, (number, number))


def dropped(limits: StoreLimits, segments: list[Segment], now_h: float = 10, free: int = 1 << 40) -> list[str]:
    return [s.path for s in to_drop(segments, limits, int(now_h * HOUR_NS), 50, free)]


def test_age_and_bytes_and_free_space_each_take_the_oldest() -> None:
    segments = [segment(n) for n in (3, 1, 2)]
    assert dropped(WIDE, segments) == []
    assert dropped(StoreLimits(keep_free_bytes=0, max_age_s=7.5 * 3600), segments) == ["t.small/1"]
    assert dropped(StoreLimits(keep_free_bytes=0, max_age_s=1e9, max_bytes=270), segments) == ["t.small/1"]
    limits = StoreLimits(keep_free_bytes=1000, max_age_s=1e9)
    assert dropped(limits, segments, free=850) == ["t.small/1", "t.small/2"]


def test_limits_of_one_table_leave_the_others() -> None:
    segments = [segment(n, table=t) for n in (1, 2, 3) for t in ("t.small", "t.other")]
    by_bytes = StoreLimits(keep_free_bytes=0, max_age_s=1e9, tables={"t.other": TableLimits(max_bytes=150)})
    assert dropped(by_bytes, segments) == ["t.other/1", "t.other/2"]
    by_age = StoreLimits(keep_free_bytes=0, max_age_s=1e9, tables={"t.other": TableLimits(max_age_s=7.5 * 3600)})
    assert dropped(by_age, segments) == ["t.other/1"]


def open_store(files: support.MemoryFiles, limits: StoreLimits = WIDE, clock: object = None) -> Store:
    return Store.open(
        ROOT,
        node="n1",
        clock=clock or support.clock(),  # type: ignore[arg-type]
        limits=limits,
        files=files,
        tables=support.TABLES,
        background=False,
    )


def append(store: Store, first: int, count: int = 10) -> None:
    store.append({"t.small": [support.rows(range(first, first + count))]}, support.position(first))


def ids(store: Store) -> list[int]:
    return sorted(store.rows("t.small", ["id"]).column("id").to_pylist())


def failing(error: int, *operations: str) -> Callable[[int, str, Path], str | None]:
    def fault(_: int, operation: str, __: Path) -> str | None:
        if operation in operations:
            raise OSError(error, os.strerror(error))
        return None

    return fault


def test_a_full_disk_takes_the_oldest_first_and_then_says_so_and_comes_back() -> None:
    # GIVEN a disk with room for a little more, and something old on it
    files = support.MemoryFiles()
    store = open_store(files, StoreLimits(keep_free_bytes=0, max_age_s=1e9, part_bytes=4096))
    append(store, 901, 60)
    store.seal(now=True)
    append(store, 11)
    files.free = 300
    # WHEN it is full
    append(store, 21)
    # THEN what was old went, and what came last is there
    assert ids(store) == list(range(11, 31))
    assert store.status()["dropped_rows"] == 60
    # WHEN there is nothing old any more
    files.free = 300
    with pytest.raises(StoreFull) as error:
        append(store, 31)
    assert "full" in error.value.message
    assert error.value.hint
    status = store.status()
    assert status["state"] == "degraded"
    assert "full" in status["reason"]
    assert store.positions == support.position(21)
    # THEN nothing acknowledged is lost, and with space it goes on by itself
    files.free = 1 << 30
    append(store, 31)
    assert ids(store) == list(range(11, 41))
    store.maintain()
    assert store.status()["state"] == "running"
    store.close()
    assert ids(open_store(files.after_kill())) == list(range(11, 41))


def test_an_edit_beside_sealing_removes_no_new_segment() -> None:
    # GIVEN a disk that was full after the first of two segments: its file is to be removed by the next edit
    files = support.MemoryFiles()
    store = open_store(files)
    other = support.rows(range(1, 11), table=support.OTHER)
    store.append({"t.other": [other], "t.small": [support.rows(range(11, 21))]}, support.position(1))

    def full(_: int, operation: str, path: Path) -> None:
        if path.name.startswith("manifest") or (operation == "create" and "t.small" in path.parts):
            raise support.io_error(errno.ENOSPC)

    files.fault = full
    with pytest.raises(StoreFull):
        store.seal(now=True)

    # WHEN the segment is written again, and an append edits the manifest before the second segment
    def append_beside(_: int, operation: str, path: Path) -> None:
        if operation == "create" and "t.small" in path.parts:
            files.fault = lambda _, __, path: full_log(path)
            with pytest.raises(StoreFull):
                append(store, 21)
            files.fault = None

    def full_log(path: Path) -> None:
        if path.parent.name == "wal":
            raise support.io_error(errno.ENOSPC)

    files.fault = append_beside
    with pytest.raises(StoreError, match="a new segment was removed"):
        store.seal(now=True)
    # THEN the log still has the rows, and the next attempt seals them
    store.seal(now=True)
    for opened in (store, open_store(files.after_kill())):
        assert ids(opened) == list(range(11, 21))
        assert opened.rows("t.other", ["id"]).num_rows == 10
        assert opened.verify() == []


def test_a_log_that_fails_for_long_keeps_no_file_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = SystemFiles.write

    def full(files: SystemFiles, fd: int, data: bytes | memoryview) -> int:
        # The header of a part still fits.
        if opened_file(fd).endswith(".wal") and bytes(data[:8]) != PART_MAGIC:
            raise support.io_error(errno.EDQUOT)
        return write(files, fd, data)

    def opened_file(fd: int | str) -> str:
        try:
            return str(Path(f"/proc/self/fd/{fd}").readlink())
        except OSError:
            return ""

    with Store.open(tmp_path, node="n1", limits=WIDE, tables=support.TABLES) as store:
        monkeypatch.setattr(SystemFiles, "write", full)
        for _ in range(3):
            with pytest.raises(StoreFull):
                append(store, 1)
        until(lambda: not any(".wal" in opened_file(fd.name) for fd in Path("/proc/self/fd").iterdir()))


def test_a_full_disk_drops_no_more_while_a_snapshot_holds_what_was_dropped() -> None:
    files = support.MemoryFiles()
    store = open_store(files, StoreLimits(keep_free_bytes=0, max_age_s=1e9, part_bytes=4096))
    for first in range(1, 800, 100):
        append(store, first, 60)
        store.seal(now=True)
    snapshot = store.snapshot()
    files.free = 0
    with pytest.raises(StoreFull):
        append(store, 901)
    dropped = store.status()["dropped_segments"]
    assert 0 < dropped < 8
    for _ in range(3):
        with pytest.raises(StoreFull):
            append(store, 901)
    assert store.status()["dropped_segments"] == dropped
    assert files.free == 0
    # WHEN the snapshot is released
    store.release(snapshot["generation"])
    append(store, 901)
    # THEN there is space, and no other row was lost
    assert store.status()["dropped_segments"] == dropped
    assert ids(store)[-10:] == list(range(901, 911))


def test_files_that_cannot_be_removed_keep_no_others_on_a_full_disk() -> None:
    files = support.MemoryFiles()
    store = open_store(files, StoreLimits(keep_free_bytes=0, max_age_s=1e9, part_bytes=4096))
    for first in range(1, 800, 100):
        append(store, first, 60)
        store.seal(now=True)
    stuck = sorted(path for path in files.names if path.suffix == ".parquet")[:5]

    def fault(_: int, operation: str, path: Path) -> None:
        if operation == "unlink" and path in stuck:
            raise support.io_error()

    files.fault = fault
    files.free = 0
    for _ in range(4):
        with contextlib.suppress(StoreFull):
            append(store, 901)
            break
    assert ids(store)[-10:] == list(range(901, 911))


def test_keep_free_stops_the_store_and_starts_it_again() -> None:
    files = support.MemoryFiles()
    store = open_store(files, StoreLimits(keep_free_bytes=1 << 20, max_age_s=1e9))
    append(store, 1)
    files.free = 1000
    store.maintain()
    with pytest.raises(StoreFull, match="keep_free_bytes"):
        append(store, 11)
    assert "nothing is stored" in store.status()["reason"]
    files.free = 1 << 30
    append(store, 11)
    assert store.status()["state"] == "running"
    assert ids(store) == list(range(1, 21))


def test_max_bytes_holds_over_many_records() -> None:
    files = support.MemoryFiles()
    store = open_store(files, StoreLimits(keep_free_bytes=0, max_age_s=1e9, part_bytes=4096, max_bytes=20_000))
    for first in range(1, 4000, 20):
        append(store, first, 20)
        store.maintain()
    status = store.status()
    assert status["dropped_segments"] > 0
    assert status["bytes"] <= 20_000
    found = ids(store)
    assert found == list(range(found[0], 4001))
    assert sum(len(i.data) for i in files.names.values()) < 20_000 + 5_000 + 40_000


@pytest.mark.parametrize("operation", ["write", "create"])
def test_a_failing_disk_degrades_and_recovers(operation: str) -> None:
    files = support.MemoryFiles()
    store = open_store(files)
    append(store, 1)
    store.seal(now=True)
    files.fault = failing(errno.EIO, operation)
    if operation == "write":
        append_error = pytest.raises(StoreError, match="cannot be used")
    else:
        append_error = pytest.raises(StoreError)
    with append_error as error:
        append(store, 11)
    assert not isinstance(error.value, StoreFull)
    assert store.status()["state"] == "degraded"
    files.fault = None
    append(store, 11)
    assert store.status()["state"] == "running"
    assert ids(store) == list(range(1, 21))


@pytest.mark.parametrize("operation", ["create", "write", "fsync", "rename", "fsync_dir"])
@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
def test_sealing_that_fails_keeps_the_log_and_is_tried_again(operation: str, error: int) -> None:
    files = support.MemoryFiles()
    store = open_store(files)
    append(store, 1)
    files.fault = failing(error, operation)
    with pytest.raises(StoreError):
        store.seal(now=True)
    assert store.status()["state"] == "degraded"
    assert ids(store) == list(range(1, 11))
    files.fault = None
    append(store, 11)
    assert store.seal(now=True) == 2
    assert store.status()["state"] == "running"
    assert ids(store) == list(range(1, 21))
    assert [n for n in files.listdir(ROOT / "wal") if n.endswith(".wal")] == []
    assert len([p for p in files.names if p.suffix == ".parquet"]) == 1
    store.close()
    assert ids(open_store(files.after_kill())) == list(range(1, 21))


@pytest.mark.parametrize("error", [support.io_error(errno.EMFILE), MemoryError("no memory"), KeyError("t.gone")])
def test_maintenance_that_fails_is_reported_and_goes_on(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(path: Path) -> list[str]:
        raise error

    files = support.MemoryFiles()
    with Store.open(ROOT, node="n1", limits=WIDE, files=files, tables=support.TABLES) as store:
        with monkeypatch.context() as patch:
            patch.setattr(files, "listdir", fail)
            store.set_limits(WIDE)
            until(lambda: str(error) in store.status()["reason"])
        store.set_limits(WIDE)
        until(lambda: store.status()["state"] == "running")


def test_a_sync_that_fails_in_any_way_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    files, synced, fails = support.MemoryFiles(), threading.Event(), threading.Event()
    fsync = files.fsync

    def fsync_later(fd: int) -> None:
        if not fails.is_set():
            fails.set()
            raise MemoryError
        fsync(fd)
        synced.set()

    limits = replace(WIDE, sync_interval_s=0.01)
    with Store.open(ROOT, node="n1", limits=limits, files=files, tables=support.TABLES) as store:
        monkeypatch.setattr(files, "fsync", fsync_later)
        append(store, 1)
        until(synced.is_set)


def test_syncing_that_fails_is_reported_and_tried_again() -> None:
    files = support.MemoryFiles()
    store = open_store(files)
    append(store, 1)
    files.fault = failing(errno.EIO, "fsync")
    with pytest.raises(StoreError):
        store.sync()
    assert "synced" in store.status()["reason"]
    files.fault = None
    store.sync()
    assert store.status()["state"] == "running"


def test_files_of_a_snapshot_stay_until_it_is_released() -> None:
    files, clock = support.MemoryFiles(), support.clock()
    store = open_store(files, StoreLimits(keep_free_bytes=0, max_age_s=3600), clock)
    append(store, 1)
    store.seal(now=True)
    append(store, 11)
    snapshot = store.snapshot()
    named = [Path(s["path"]) for s in snapshot["tables"]["t.small"]] + [Path(p["path"]) for p in snapshot["parts"]]
    assert len(named) == 2
    assert snapshot["parts"][0]["tables"] == {"t.small": 10}
    # WHEN the segment gets too old, and the part is sealed
    store.set_limits(StoreLimits(keep_free_bytes=0, max_age_s=60))
    clock.advance(300 * 1_000_000_000)
    store.seal(now=True)
    store.maintain()
    assert ids(store) == []
    assert all(path in files.names for path in named)
    store.release(snapshot["generation"])
    assert not any(path in files.names for path in named)
    store.release(12345)


def test_a_folder_is_synced_into_the_folders_above_it_once() -> None:
    """Sealing syncs a file for each of a hundred tables; the disk may be busy with checkpoints."""
    files = support.MemoryFiles()
    synced: list[Path] = []

    def note(_: int, operation: str, path: Path) -> None:
        if operation == "fsync_dir" and path != ROOT / "wal":
            synced.append(path)

    def seal(store: Store, first: int) -> list[str]:
        append(store, first)
        synced.clear()
        store.seal(now=True)
        return [path.relative_to(ROOT).as_posix() for path in synced]

    date = "t.small/date=2026-09-21"
    store = open_store(files)
    files.fault = note
    assert seal(store, 1) == [date, "t.small", "."]
    assert seal(store, 11) == [date]
    # A daemon that was killed may not have come so far.
    store = open_store(files.after_kill())
    store._context.files.fault = note  # type: ignore[attr-defined]
    assert seal(store, 21) == [date, "t.small", "."]


def test_a_snapshot_that_nobody_releases_runs_out() -> None:
    files, clock = support.MemoryFiles(), support.clock()
    store = open_store(files, WIDE, clock)
    append(store, 1)
    snapshot = store.snapshot()
    store.seal(now=True)
    path = Path(snapshot["parts"][0]["path"])
    clock.advance(599 * 1_000_000_000)
    store.maintain()
    assert path in files.names
    clock.advance(2 * 1_000_000_000)
    store.maintain()
    assert path not in files.names
    assert store.status()["leases"] == 0


@pytest.mark.parametrize("full", [False, True])
def test_the_segments_of_a_long_query_stay_until_its_deadline_while_there_is_space(full: bool) -> None:
    files, clock = support.MemoryFiles(), support.clock()
    limits = StoreLimits(keep_free_bytes=0, max_age_s=60)
    store = open_store(files, limits, clock)
    append(store, 1)
    store.seal(now=True)
    append(store, 11)
    snapshot = store.snapshot(seconds=1800.0)
    store.seal(now=True)
    segment, part = Path(snapshot["tables"]["t.small"][0]["path"]), Path(snapshot["parts"][0]["path"])
    clock.advance(590 * 1_000_000_000)
    store.maintain()
    assert store.status()["dropped_segments"] == 2
    assert {segment, part} <= files.names.keys()
    # WHEN it lasts longer than other leases
    if full:
        store.set_limits(replace(limits, keep_free_bytes=1 << 41))
        store.maintain()
    clock.advance(20 * 1_000_000_000)
    store.maintain()
    assert (segment in files.names) is not full
    assert part not in files.names
    # THEN it lasts until its deadline, with time for its worker to end
    clock.advance(1_260 * 1_000_000_000)
    store.maintain()
    assert segment not in files.names
    assert store.status()["leases"] == 0


def test_a_long_query_holds_no_space_for_longer_while_no_row_can_be_written() -> None:
    files, clock = support.MemoryFiles(), support.clock()
    store = open_store(files, StoreLimits(keep_free_bytes=0, max_age_s=1e9, part_bytes=4096), clock)
    for first in range(1, 800, 100):
        append(store, first, 60)
        store.seal(now=True)
    store.snapshot(seconds=1800.0)
    # WHEN a write finds no space, although some seems to be free
    files.free = 0
    with pytest.raises(StoreFull):
        append(store, 901)
    assert not store.status()["reason"].startswith("nothing is stored")
    clock.advance(610 * 1_000_000_000)
    with contextlib.suppress(StoreFull):
        store.maintain()
    # THEN the dropped segments go after the time of any lease, not at the end of the query
    assert store.status()["leases"] == 0
    append(store, 901)
    assert ids(store)[-10:] == list(range(901, 911))


def test_small_parts_of_many_starts_become_one_segment() -> None:
    files = support.MemoryFiles()
    for first in range(1, 100, 10):
        store = open_store(files)
        append(store, first)
        store.close()
        files = files.after_kill()
    store = open_store(files)
    assert store.status()["parts"] == 10
    assert store.seal() == 0
    assert store.seal(now=True) == 10
    assert store.status()["segments"] == 1
    assert ids(store) == list(range(1, 101))


def test_rows_of_several_days_lie_in_their_folders() -> None:
    files = support.MemoryFiles()
    store = open_store(files)
    day = 24 * HOUR_NS
    for n in range(3):
        store.append({"t.small": [support.rows([n], support.START_NS + n * day)]}, {})
    store.seal(now=True)
    assert sorted(p.parent.name for p in files.names if p.suffix == ".parquet") == [
        "date=2026-09-21",
        "date=2026-09-22",
        "date=2026-09-23",
    ]
    for n in range(3, 40):
        store.append({"t.small": [support.rows([n], support.START_NS + n * day)]}, {})
    store.seal(now=True)
    assert store.status()["segments"] == 4
    assert ids(store) == list(range(40))


def test_batches_that_do_not_fit_change_nothing() -> None:
    store = open_store(support.MemoryFiles())
    append(store, 1)
    with pytest.raises(InternalError):
        store.append({"t.none": [support.rows([11])]}, support.position(11))
    assert store.positions == support.position(1)
    append(store, 11)
    assert ids(store) == list(range(1, 21))
    store.append({}, {"second": {"boot_id": "b", "map_id": 1, "position": 5}})
    assert sorted(store.positions) == ["ring", "second"]


def test_a_record_that_is_too_large_spoils_no_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(support.MemoryFiles())
    store.append({"t.small": [support.rows([1])]}, {})
    monkeypatch.setattr(records, "MAX_RECORD", 10_000)
    with pytest.raises(FormatError, match="larger than"):
        store.append({"t.small": [support.rows(range(100, 1000))]}, {})
    store.append({"t.small": [support.rows([2])]}, {})
    assert ids(store) == [1, 2]
    store.seal(now=True)
    assert ids(store) == [1, 2]
    store.close()


def test_a_closed_store_takes_nothing() -> None:
    files = support.MemoryFiles()
    store = open_store(files)
    append(store, 1)
    store.close()
    store.close()
    with pytest.raises(StoreError, match="closed"):
        append(store, 11)
    assert files.open == {}


def test_two_stores_cannot_have_one_directory(tmp_path: Path) -> None:
    with Store.open(tmp_path / "s", node="n1", limits=WIDE, tables=support.TABLES):
        with pytest.raises(StateLocked, match=f"pid {os.getpid()}") as error:
            Store.open(tmp_path / "s", node="n1", tables=support.TABLES)
        assert "--state-dir" in error.value.hint
    Store.open(tmp_path / "s", node="n1", tables=support.TABLES).close()


def test_a_path_that_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError) as error:
        Store.open(tmp_path / "file", node="n1")
    assert error.value.hint


def test_modes_let_the_group_read(tmp_path: Path) -> None:
    old = os.umask(0o077)
    try:
        with Store.open(tmp_path / "s", node="n1", limits=WIDE, tables=support.TABLES, background=False) as store:
            append(store, 1)
            store.seal(now=True)
            append(store, 11)
    finally:
        os.umask(old)
    for path in [tmp_path / "s", *(tmp_path / "s").rglob("*")]:
        mode = path.stat().st_mode & 0o7777
        if path.name != "lock":
            assert mode == (0o2750 if path.is_dir() else 0o640), path


def test_a_table_that_gains_and_loses_columns_keeps_its_rows() -> None:
    # GIVEN rows sealed and in the log, written when the table had other columns
    old = Table("t.small", "As it was.", (*support.SMALL.columns[:4], GONE), (*support.SMALL.storage[:4], GONE_FIELD))
    files = support.MemoryFiles()
    store = Store.open(
        ROOT, node="n1", clock=support.clock(), limits=WIDE, files=files, tables={"t.small": old}, background=False
    )
    for number, then in ((1, True), (2, False)):
        row = {"id": number, "name": "a", "gone": 7}
        store.append({"t.small": [pa.RecordBatch.from_pylist([row], schema=old.physical)]}, {})
        if then:
            store.seal(now=True)
    store.close()
    # WHEN a later version opens it
    store = open_store(files.after_kill())
    for _ in range(2):
        found = store.rows("t.small")
        assert found.schema.equals(support.SMALL.physical)
        assert found.column("id").to_pylist() == [1, 2]
        assert found.column("note").to_pylist() == [None, None]
        store.seal(now=True)


def test_rows_of_a_table_that_is_no_more_are_sealed_as_they_were() -> None:
    files = support.MemoryFiles()
    store = open_store(files)
    store.append({"t.other": [support.rows([1, 2], table=support.OTHER)]}, {})
    store.close()
    store = Store.open(
        ROOT,
        node="n1",
        clock=support.clock(),
        limits=WIDE,
        files=files.after_kill(),
        tables={"t.small": support.SMALL},
        background=False,
    )
    store.seal(now=True)
    assert store.status()["tables"]["t.other"]["rows"] == 2
    assert store.take_losses() == []


def test_a_start_on_a_full_disk_serves_what_is_there_and_recovers() -> None:
    files = support.MemoryFiles()
    store = open_store(files)
    append(store, 1)
    store.seal(now=True)
    append(store, 11)
    store.close()
    files = files.after_kill()
    files.free = 0
    store = open_store(files)
    assert "manifest" in store.status()["reason"]
    assert ids(store) == list(range(1, 21))
    files.free = 1 << 30
    store.maintain()
    assert store.status()["state"] == "running"
    append(store, 21)
    store.close()
    assert ids(open_store(files.after_kill())) == list(range(1, 31))


def test_age_holds_for_merged_segments_within_an_eighth() -> None:
    # GIVEN a segment each three minutes, for six hours, of which four are kept
    files, clock = support.MemoryFiles(), support.clock()
    limits = StoreLimits(keep_free_bytes=0, max_age_s=1e9, tables={"t.small": TableLimits(max_age_s=4 * 3600)})
    store = open_store(files, limits, clock)
    step_ns = HOUR_NS // 20
    for n in range(120):
        store.append({"t.small": [support.rows([n], clock.pair().real_ns)]}, {})
        store.seal(now=True)
        store.maintain()
        if n % 4 == 3:
            kept = ids(store)
            # THEN all of them are there, and at most half an hour more
            assert kept == list(range(kept[0], n + 1))
            assert n - kept[0] >= min(n, 79)
            assert n - kept[0] <= 80 + 10
        clock.advance(step_ns)
    assert store.status()["merged_segments"] > 50
    assert store.status()["dropped_segments"] > 2


def test_a_disk_with_no_room_is_known_at_the_start(tmp_path: Path) -> None:
    with Store.open(tmp_path, node="n1", limits=StoreLimits(keep_free_bytes=1 << 62)) as store:
        found = store.status()
        assert found["state"] == "degraded"
        assert "nothing is stored" in found["reason"]
