"""Merging segments: which are chosen, and that no row is lost or doubled, whatever happens meanwhile."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import store_support as support
from hypothesis import given, settings
from hypothesis import strategies as st
from long import LONG, examples

from probing.api.errors import StoreError
from probing.api.tables.schema import I64, TEXT, Column, Table, stored
from probing.daemon.clock import FakeClock
from probing.daemon.store import Store, StoreLimits, TableLimits
from probing.daemon.store.files import Files
from probing.daemon.store.maintenance import compaction, space
from probing.daemon.store.maintenance.compaction import choose
from probing.daemon.store.manifest import Segment
from probing.daemon.store.segments import encoding
from probing.daemon.store.segments.reader import read_segment
from probing.daemon.store.tasks import merge, segment_output
from probing.daemon.store.tasks.worker import File, LocalWorker, Task, Worker

ROOT = Path("/state")
DAY_NS = 86_400_000_000_000
SECOND_NS = 1_000_000_000
LIMITS = StoreLimits(keep_free_bytes=0, max_age_s=1e9, part_bytes=1 << 20)
FOLDER = "t.small/date=2026-09-21"
NOON_NS = support.START_NS
MB = 1 << 20


def segment(number: int, size: int, **other: object) -> Segment:
    path = f"{FOLDER}/{number:012d}-{number:012d}.parquet"
    ts = NOON_NS + number * SECOND_NS
    made = Segment("t.small", path, size, 0, 100, ts, ts + SECOND_NS, (number, number))
    return made._replace(**other)  # type: ignore[arg-type]


def numbers(run: tuple[Segment, ...]) -> list[int]:
    return [s.parts[0] for s in run]


def chosen(segments: list[Segment], now_ns: int = NOON_NS, limits: StoreLimits = LIMITS, **more: object) -> list[int]:
    return numbers(choose(segments, limits, now_ns, **{"first_part": None, **more}))  # type: ignore[arg-type]


def test_many_small_neighbours_are_chosen_and_few_are_left() -> None:
    few = [segment(n, MB) for n in range(1, 10)]
    assert chosen(few) == []
    assert chosen([*reversed(few), segment(10, MB)]) == list(range(1, 11))
    # A large one in front is not written again for some small ones.
    large = segment(0, 20 * MB)
    assert chosen([large, *few]) == []
    assert chosen([large, *few, segment(10, MB)]) == list(range(1, 11))
    assert chosen([segment(n, 9 * MB) for n in range(1, 5)]) == [1, 2, 3, 4]


def test_full_ones_and_what_does_not_fit_are_walls() -> None:
    small = {n: segment(n, MB) for n in range(1, 30) if n != 15}
    assert chosen([*small.values(), segment(15, 40 * MB)]) == list(range(1, 15))
    wall = segment(15, MB)
    assert chosen([*small.values(), wall], unfit={wall.path}) == list(range(1, 15))
    assert chosen([s for n, s in small.items() if n > 15], first_part=28) == list(range(16, 28))
    assert chosen([s for n, s in small.items() if n > 15], first_part=20) == []
    other_table = [segment(n, MB, table="t.other", path=f"t.other/date=2026-09-21/{n}") for n in range(1, 6)]
    assert chosen([*other_table, *(segment(n, MB) for n in range(1, 6))]) == []


def test_a_merged_segment_is_no_more_than_a_share_of_what_its_table_may_keep() -> None:
    small = [segment(n, MB) for n in range(1, 200)]
    assert len(chosen(small)) == 64
    by_bytes = replace(LIMITS, tables={"t.small": TableLimits(max_bytes=96 * MB)})
    assert len(chosen(small, limits=by_bytes)) == 12
    assert len(chosen(small, limits=replace(LIMITS, max_bytes=320 * MB))) == 20
    by_age = replace(LIMITS, tables={"t.small": TableLimits(max_age_s=8 * 15.0)})
    assert len(chosen(small, limits=by_age)) == 15


def test_a_day_that_is_over_is_tidied_up() -> None:
    few = [segment(n, MB) for n in range(1, 6)]
    assert chosen(few, NOON_NS + DAY_NS // 3) == []
    assert chosen(few, NOON_NS + DAY_NS) == [1, 2, 3, 4, 5]
    # Rows that come late do not have all of it written again.
    late = [segment(1, 20 * MB), segment(6, 1000)]
    assert chosen(late, NOON_NS + DAY_NS) == []


def grown(counts: list[int], limits: StoreLimits, footer: int = 0, width: int = 1) -> tuple[list[Segment], float, int]:
    """Merges segments of these rows of ``width`` bytes as they come one by one.

    Returns those that remain, how often a row was rewritten on average, and the most segments at once.
    """
    segments: list[Segment] = []
    written = most = 0
    for number, count in enumerate(counts, 1):
        segments.append(segment(number, footer + count * width, rows=count))
        while run := choose(segments, limits, NOON_NS, None):
            first, last = run[0], run[-1]
            rows = sum(s.rows for s in run)
            assert footer + rows * width <= limits.segment_bytes
            # Nothing of the table lies in between.
            between = [s for s in segments if first.parts[0] <= s.parts[0] <= last.parts[1]]
            assert sorted(numbers(tuple(between))) == numbers(run)
            written += rows
            merged = first._replace(path=f"{FOLDER}/{number}-{rows}", size=footer + rows * width, rows=rows)
            merged = merged._replace(parts=(first.parts[0], last.parts[1]), ts_max=last.ts_max)
            segments = [*(s for s in segments if s not in run), merged]
        most = max(most, len(segments))
    return segments, written / sum(counts), most


def test_an_hour_of_full_load_is_written_three_times_and_leaves_few_files() -> None:
    # 8 MB parts of 100,000 rows a second: one each half second, sealed to 0.5 MB.
    chance = random.Random(1)
    segments, amplification, most = grown([chance.randint(30_000, 70_000) for _ in range(2400)], LIMITS, width=10)
    assert amplification < 2.5
    assert most < 150
    assert sum(s.size * 2 >= LIMITS.segment_bytes for s in segments) > len(segments) / 2


def test_segments_that_are_mostly_footer_are_not_written_again_and_again() -> None:
    _, amplification, most = grown([20] * 3000, LIMITS, footer=4000)
    assert amplification < 4
    assert most < 60


@settings(max_examples=examples(30), deadline=None)
@given(st.lists(st.sampled_from([1, 3, 10, 40, 300, 2000]), min_size=1, max_size=300), st.integers(0, 100))
def test_any_sizes_come_to_rest(counts: list[int], footer: int) -> None:
    segments, amplification, _ = grown(counts, replace(LIMITS, segment_bytes=4096), footer)
    assert amplification < 5
    assert sum(s.rows for s in segments) == sum(counts)


def open_store(
    files: support.MemoryFiles,
    clock: FakeClock | None = None,
    limits: StoreLimits = LIMITS,
    worker: Callable[[Files], Worker] = LocalWorker,
) -> Store:
    return Store.open(
        ROOT,
        node="n1",
        clock=clock or support.clock(),
        limits=limits,
        files=files,
        tables=support.TABLES,
        background=False,
        worker=worker,
    )


def fill(store: Store, first: int = 0, count: int = 12, table: Table = support.SMALL) -> list[int]:
    """Seals segments of ten rows each, from row ``first`` on."""
    for n in range(count):
        start = first + n * 10
        batch = support.rows(range(start, start + 10), support.START_NS + start, table)
        store.append({table.name: [batch]}, support.position(start + 1))
        store.seal(now=True)
    return list(range(first, first + count * 10))


def ids(store: Store, table: str = "t.small") -> list[int]:
    return sorted(store.rows(table, ["id"]).column("id").to_pylist())


def segments_in(files: support.MemoryFiles) -> list[str]:
    return sorted(p.name for p in files.names if p.suffix in (".parquet", ".tmp") and "corrupt" not in p.parts)


def test_merged_rows_are_sorted_and_pruned_as_before() -> None:
    files = support.MemoryFiles()
    store = open_store(files)
    rows = fill(store)
    before = store.snapshot()
    times = [(s["ts_min"], s["ts_max"]) for s in before["tables"]["t.small"]]
    store.maintain()
    # The files of the snapshot stay for as long as it does.
    assert len(segments_in(files)) == 13
    assert store.status()["merged_segments"] == 12
    store.release(before["generation"])
    assert segments_in(files) == ["000000000001-000000000012.parquet"]
    after = store.snapshot()["tables"]["t.small"][0]
    assert (after["rows"], after["ts_min"], after["ts_max"]) == (120, times[0][0], times[-1][1])
    assert (ids(store), store.take_losses()) == (rows, [])
    found = store.rows("t.small").select(["name", "id"]).to_pylist()
    assert found == sorted(found, key=lambda row: (row["name"] or "", row["id"]))
    assert store.verify() == []
    store.close()
    store = open_store(files.after_kill())
    assert (ids(store), store.recovery_losses) == (rows, ())


def test_segments_know_the_jobs_of_those_that_they_are_made_from() -> None:
    columns = (*support.SMALL.columns, Column("job", TEXT, "Job."))
    table = Table("t.small", "Rows with jobs.", columns, stored(columns))
    files = support.MemoryFiles()
    store = Store.open(
        ROOT, node="n1", clock=support.clock(), limits=LIMITS, files=files, tables={"t.small": table}, background=False
    )
    for n in range(12):
        row = {"ts": support.START_NS, "id": n, "job": f"job-{n % 3}"}
        store.append({"t.small": [pa.RecordBatch.from_pylist([row], schema=table.physical)]}, {})
        store.seal(now=True)
    store.maintain()
    assert [s["jobs"] for s in store.snapshot()["tables"]["t.small"]] == [["job-0", "job-1", "job-2"]]


def test_segments_of_before_a_column_came_are_merged_with_those_since() -> None:
    files = support.MemoryFiles()
    columns = (*support.SMALL.columns, Column("more", I64, "Came later."))
    later = Table("t.small", "With one more.", columns, stored(columns), sort_by=("name", "ts"))
    store = open_store(files)
    fill(store, 0, 6)
    store.close()
    store = Store.open(
        ROOT, node="n1", clock=support.clock(), limits=LIMITS, files=files, tables={"t.small": later}, background=False
    )
    for n in range(60, 120, 10):
        rows = [{"ts": support.START_NS, "id": n + i, "more": n} for i in range(10)]
        store.append({"t.small": [pa.RecordBatch.from_pylist(rows, schema=later.physical)]}, {})
        store.seal(now=True)
    store.maintain()
    assert store.status()["segments"] == 1
    assert ids(store) == list(range(120))
    assert sum(value is None for value in store.rows("t.small").column("more").to_pylist()) == 60
    store.close()
    # A version without it keeps it in the file.
    store = open_store(files.after_kill())
    assert ids(store) == list(range(120))


def test_segments_that_do_not_fit_together_stay_as_they_are() -> None:
    files = support.MemoryFiles()
    columns = (*support.SMALL.columns[:-1], Column("note", I64, "Was a text."))
    other = Table("t.small", "Another type.", columns, stored(columns))
    with_other = Store.open(
        ROOT, node="n1", clock=support.clock(), limits=LIMITS, files=files, tables={"t.small": other}, background=False
    )
    for n in range(1000, 1060, 10):
        rows = [{"ts": support.START_NS, "id": n + i, "note": n} for i in range(10)]
        with_other.append({"t.small": [pa.RecordBatch.from_pylist(rows, schema=other.physical)]}, {})
        with_other.seal(now=True)
    with_other.close()
    store = open_store(files)
    fill(store, 0, 6)
    for _ in range(3):
        store.maintain()
    assert store.status()["segments"] == 12
    assert store.take_losses() == []
    # Those that come then are merged as ever.
    fill(store, 100, 12)
    store.maintain()
    assert store.status()["segments"] == 13


def test_what_is_damaged_is_lost_alone() -> None:
    files = support.MemoryFiles()
    store = open_store(files)
    rows = fill(store, count=13)
    path = ROOT / FOLDER / "000000000005-000000000005.parquet"
    files.names[path].data[40] ^= 1
    for _ in range(3):
        store.maintain()
    assert store.status()["segments"] == 1
    assert ids(store) == [i for i in rows if i // 10 != 4]
    assert [(loss.table, loss.count) for loss in store.take_losses()] == [("t.small", 10)]
    assert store.status()["set_aside"] == 1


def test_one_that_is_gone_is_lost_alone() -> None:
    files = support.MemoryFiles()
    store = open_store(files)
    rows = fill(store, count=13)
    del files.names[ROOT / FOLDER / "000000000005-000000000005.parquet"]
    for _ in range(3):
        store.maintain()
    assert ids(store) == [i for i in rows if i // 10 != 4]
    assert [loss.count for loss in store.take_losses()] == [10]


@functools.cache
def _filled() -> support.MemoryFiles:
    files = support.MemoryFiles()
    with open_store(files) as store:
        fill(store)
    return files


def merging() -> tuple[support.MemoryFiles, Store, FakeClock, list[int]]:
    """A store in which the next turn merges and does nothing else."""
    files, clock = _filled().after_kill(), support.clock()
    return files, open_store(files, clock), clock, list(range(120))


def steps_of_a_merge() -> int:
    files, store, _, _ = merging()
    before = files.operations
    store.maintain()
    assert store.status()["segments"] == 1
    return files.operations - before


def at(files: support.MemoryFiles, step: int, what: Callable[[], str | None]) -> None:
    first = files.operations + step
    files.fault = lambda n, operation, path: what() if n == first else None


STEPS = steps_of_a_merge()


@functools.cache
def crashed() -> Sequence[tuple[int, support.MemoryFiles, list[int]]]:
    """Returns the files after each step of a merge at which a process may die. Tests go on with copies of them."""
    found = []
    for step in range(1, STEPS + 1):
        files, store, _, rows = merging()
        at(files, step, lambda: "after")
        with pytest.raises(support.Crash):
            store.maintain()
        found.append((step, files, rows))
    return found


def test_dying_at_each_step_of_a_merge_loses_and_doubles_nothing() -> None:
    assert STEPS > 15
    for step, files, rows in crashed():
        left = files.after_kill()
        store = open_store(left)
        assert ids(store) == rows, f"step {step}"
        assert not store.recovery_losses, f"step {step}"
        assert len(segments_in(left)) in (1, 12), f"step {step}"
        # It goes on: the next turn merges.
        store.maintain()
        assert (ids(store), store.status()["segments"]) == (rows, 1), f"step {step}"


def test_losing_the_manifest_as_well_doubles_nothing() -> None:
    for step, files, rows in crashed():
        left = files.after_kill()
        del left.names[ROOT / "manifest"]
        store = open_store(left)
        assert ids(store) == rows, f"step {step}"
        assert all("the manifest is missing" in loss.reason for loss in store.recovery_losses), f"step {step}"
        assert len(segments_in(left)) == store.status()["segments"]


@pytest.mark.parametrize("lost", [False, True])
def test_a_power_cut_at_each_step_of_a_merge(lost: bool) -> None:
    for step, files, rows in crashed():
        for seed in range(1 if lost else 2):
            left = files.after_power_cut(random.Random(seed + step))
            if lost:
                left.names.pop(ROOT / "manifest", None)
            assert ids(open_store(left)) == rows, f"step {step}, seed {seed}"


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
def test_a_disk_that_fails_at_any_step_costs_nothing_but_the_merge(error: int) -> None:
    def fail() -> str | None:
        raise OSError(error, os.strerror(error))

    # In the gate each step fails in one of both ways.
    for step in range(1, STEPS + 1) if LONG else range(1 + (error == errno.EIO), STEPS + 1, 2):
        files, store, clock, rows = merging()
        at(files, step, fail)
        with contextlib.suppress(StoreError):
            store.maintain()
        files.fault = None
        assert ids(store) == rows, f"step {step}"
        assert not [name for name in segments_in(files) if name.endswith(".tmp")], f"step {step}"
        killed = open_store(files.after_kill())
        assert (ids(killed), killed.recovery_losses) == (rows, ()), f"step {step}"
        clock.advance(61 * SECOND_NS)
        store.maintain()
        store.maintain()
        status = store.status()
        assert (status["state"], status["segments"]) == ("running", 1), f"step {step}"
        assert (ids(store), store.take_losses()) == (rows, []), f"step {step}"
        store.close()
        assert len(segments_in(files)) == 1, f"step {step}"
        assert ids(open_store(files.after_kill())) == rows, f"step {step}"
        assert not files.open


def test_a_disk_that_fails_is_reported_and_left_alone_for_a_while() -> None:
    files, store, clock, _ = merging()

    def fault(_: int, operation: str, path: Path) -> str | None:
        if operation == "write" and path.suffix == ".tmp":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return None

    files.fault = fault
    store.maintain()
    assert "cannot be merged" in store.status()["reason"]
    before = files.operations
    store.maintain()
    assert files.operations == before
    files.fault = None
    clock.advance(61 * SECOND_NS)
    store.maintain()
    assert store.status()["state"] == "running"
    assert store.status()["segments"] == 1


def test_without_space_nothing_is_merged() -> None:
    files = support.MemoryFiles()
    store = open_store(files, limits=replace(LIMITS, keep_free_bytes=1 << 20, part_bytes=4096))
    rows = fill(store)
    before = files.operations
    files.free = (1 << 20) + 8192
    store.maintain()
    assert files.operations == before
    assert (store.status()["state"], ids(store)) == ("running", rows)
    files.free = 1 << 30
    store.maintain()
    assert store.status()["segments"] == 1


def test_a_store_that_is_written_faster_than_it_seals_still_merges() -> None:
    class Busy(LocalWorker):
        """While it seals, more is appended than may wait to be sealed."""

        def start(self, what: str, files: Sequence[File], **fields: Any) -> Task:
            if what == "seal":
                for _ in range(7):
                    append()
            return super().start(what, files, **fields)

    def append() -> None:
        appended.extend(range(len(appended), len(appended) + 10))
        store.append({"t.small": [support.rows(appended[-10:])]}, {})

    appended: list[int] = []
    store = open_store(support.MemoryFiles(), limits=replace(LIMITS, part_bytes=1), worker=Busy)
    append()
    for _ in range(23):
        store.maintain()
        assert store.status()["parts"] == 7
    assert store.status()["segments"] < 15
    assert store.status()["merged_segments"] >= 10
    assert ids(store) == appended


def test_a_store_at_its_limit_still_merges() -> None:
    files, chance = support.MemoryFiles(), random.Random(1)
    store = open_store(files, limits=replace(LIMITS, part_bytes=4096, max_bytes=300_000))
    for n in range(150):
        batch = support.rows(range(n * 10, n * 10 + 10))
        notes = pa.array([chance.randbytes(200).hex() for _ in range(10)])
        store.append({"t.small": [batch.set_column(4, "note", notes)]}, {})
        store.seal(now=True)
        store.maintain()
        assert sum(len(inode.data) for path, inode in files.names.items() if path.suffix) < 300_000
    status = store.status()
    assert status["dropped_segments"] > 2
    assert status["segments"] < 50
    found = ids(store)
    assert found == list(range(found[0], 1500))


def test_rows_that_retention_took_do_not_come_back_with_a_lost_manifest() -> None:
    # GIVEN a segment that is dropped and still held, between others that are merged
    files, clock = support.MemoryFiles(), support.clock()
    limits = replace(LIMITS, max_age_s=3600.0)
    store = open_store(files, clock, limits)
    fill(store, 0, 6)
    store.append({"t.small": [support.rows([777], support.START_NS - 3 * 3600 * SECOND_NS)]}, {})
    store.seal(now=True)
    fill(store, 60, 6)
    store.snapshot()
    store.maintain()
    assert store.status()["dropped_rows"] == 1
    store.maintain()
    assert store.status()["segments"] == 1
    assert len(segments_in(files)) == 14
    # WHEN the manifest is lost
    left = files.after_kill()
    del left.names[ROOT / "manifest"]
    assert ids(open_store(left, clock, limits)) == list(range(120))


def test_a_manifest_that_lost_the_edit_of_a_merge_names_no_losses_of_rows() -> None:
    files, store, _, rows = merging()
    store.maintain()
    store.close()
    left = files.after_kill()
    manifest = left.names[ROOT / "manifest"].data
    lines = bytes(manifest).split(b"\n")
    bad = [i for i, line in enumerate(lines) if b'"drop"' in line]
    assert len(bad) == 1
    lines[bad[0]] = b"0" + lines[bad[0]][1:] if lines[bad[0]][:1] != b"0" else b"1" + lines[bad[0]][1:]
    manifest[:] = b"\n".join(lines)
    store = open_store(left)
    assert ids(store) == rows
    assert [loss.table for loss in store.recovery_losses] == [""]


def test_parts_that_a_query_held_do_not_cost_rows_when_the_manifest_is_lost() -> None:
    # GIVEN a query that holds a log part which is sealed, and others that were sealed and merged around it
    files = support.MemoryFiles()
    store = open_store(files)
    rows = fill(store, 0, 12)
    store.append({"t.small": [support.rows([500])], "t.other": [support.rows([501], table=support.OTHER)]}, {})
    store.snapshot()
    store.seal(now=True)
    rows = [*rows, 500, *fill(store, 1000, 12)]
    store.maintain()
    assert store.status()["merged_segments"] == 12
    assert len(files.listdir(ROOT / "wal")) == 1
    left = files.after_kill()
    del left.names[ROOT / "manifest"]
    store = open_store(left)
    assert (ids(store), ids(store, "t.other")) == (rows, [501])
    assert files.listdir(ROOT / "wal")


def test_a_merge_that_failed_to_be_put_in_place_leaves_no_name_to_a_missing_file() -> None:
    # GIVEN a merge of which only the manifest's edit failed
    files, store, clock, rows = merging()

    def fault(_: int, operation: str, path: Path) -> str | None:
        if operation == "write" and path.name.startswith("manifest"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return None

    files.fault = fault
    store.maintain()
    assert store.status()["state"] == "degraded"
    files.fault = None
    # WHEN something else is written down meanwhile
    more = fill(store, 1000, 1)
    clock.advance(61 * SECOND_NS)
    store.maintain()
    # THEN each segment that is known is there
    assert (ids(store), store.verify(), store.take_losses()) == ([*rows, *more], [], [])
    assert store.status()["segments"] == 1 or len(segments_in(files)) == store.status()["segments"]


def test_what_is_set_aside_is_bounded_in_bytes() -> None:
    files = support.MemoryFiles()
    store = open_store(files, limits=replace(LIMITS, max_bytes=100_000))
    fill(store, count=9)
    for path in list(files.names):
        if path.suffix == ".parquet":
            files.names[path].data[30] ^= 1
    assert len(store.verify()) == 9
    kept = [len(inode.data) for path, inode in files.names.items() if "corrupt" in path.parts]
    assert 2 <= len(kept) < 9
    assert sum(kept) <= 5000
    store.set_limits(replace(LIMITS, max_bytes=40_000))
    kept = [len(inode.data) for path, inode in files.names.items() if "corrupt" in path.parts]
    assert sum(kept) <= 2000
    assert store.status()["bytes"] >= sum(kept)


def test_what_queries_hold_does_not_make_retention_take_more() -> None:
    # GIVEN a disk that is short of space, and a query that holds all segments
    files = support.MemoryFiles()
    store = open_store(files, limits=replace(LIMITS, keep_free_bytes=100_000))
    fill(store, count=9)
    snapshot = store.snapshot()
    files.free = 99_000
    for _ in range(5):
        store.maintain()
    # THEN what was dropped once is enough
    assert store.status()["dropped_segments"] <= 2
    assert store.status()["state"] == "degraded"
    store.release(snapshot["generation"])
    store.maintain()
    assert store.status()["state"] == "running"


def test_each_row_group_of_a_large_one_is_narrow_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    group, count = 1310, 3600
    for module in (encoding, merge, segment_output):
        monkeypatch.setattr(module, "ROW_GROUP", group)
    files, clock = support.MemoryFiles(), support.clock()
    store = open_store(files, clock)
    rows = [support.rows(range(n * 300, (n + 1) * 300)) for n in range(12)]
    for batch in rows:
        store.append({"t.small": [batch]}, {})
        store.seal(now=True)
    store.maintain()
    snapshot = store.snapshot()["tables"]["t.small"]
    assert [s["rows"] for s in snapshot] == [count]
    segment = Segment(
        "t.small",
        str(Path(snapshot[0]["path"]).relative_to(ROOT)),
        snapshot[0]["size"],
        snapshot[0]["crc"],
        count,
        0,
        0,
        (1, 12),
    )
    found = read_segment(files, ROOT, segment, ["id"]).column("id").to_pylist()
    groups = [found[i : i + group] for i in range(0, count, group)]
    assert max(groups[0]) < 2100
    assert sorted(found) == list(range(count))


def test_segments_are_searched_again_once_they_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search looks at each segment of a week, and maintenance runs each second."""
    searches: list[str] = []

    def counted(name: str, search: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            searches.append(name)
            return search(*args)

        return run

    monkeypatch.setattr(compaction, "choose", counted("merge", compaction.choose))
    monkeypatch.setattr(space, "to_drop", counted("drop", space.to_drop))
    clock = support.clock()
    store = Store.open(
        ROOT,
        node="n1",
        clock=clock,
        limits=replace(LIMITS, max_age_s=3600),
        files=support.MemoryFiles(),
        tables=support.TABLES,
        background=False,
    )

    def after(seconds: int) -> list[str]:
        searches.clear()
        clock.advance(seconds * SECOND_NS)
        store.maintain()
        return sorted(searches)

    store.append({"t.small": [support.rows(range(1, 11))]}, {})
    store.seal(now=True)
    assert after(1) == ["drop", "merge"]
    assert after(1) == []
    store.append({"t.small": [support.rows(range(11, 21))]}, {})
    store.seal(now=True)
    assert after(1) == ["drop", "merge"]
    assert after(1) == []
    # Segments become old while nothing changes.
    assert "drop" in after(3600)
    assert store.status()["segments"] == 0
