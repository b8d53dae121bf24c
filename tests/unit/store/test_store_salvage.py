"""A damaged byte costs the rows of its row group, and one loss names them."""

from __future__ import annotations

import errno
import random
import threading
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import store_support as support
from long import examples
from waiting import until

from probing.daemon.clock import FakeClock
from probing.daemon.source import Loss
from probing.daemon.store import Store, StoreLimits
from probing.daemon.store.files import SystemFiles
from probing.daemon.store.segments import encoding
from probing.daemon.store.tasks import salvage, segment_output

LIMITS = StoreLimits(keep_free_bytes=0, max_age_s=1e9)
GROUP, ROWS = 101, 5 * 101 + 47
SIZES = [GROUP] * 5 + [47]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state directory with one segment of six row groups."""
    for module in (encoding, segment_output):
        monkeypatch.setattr(module, "ROW_GROUP", GROUP)
    with opened(tmp_path) as store:
        for first in range(0, ROWS, GROUP):
            count = min(GROUP, ROWS - first)
            store.append({"t.other": [batch(first, count)]}, {})
        store.seal(now=True)
    assert [pq.read_metadata(segment(tmp_path)).row_group(i).num_rows for i in range(6)] == SIZES
    return tmp_path


def batch(first: int, count: int) -> pa.RecordBatch:
    """Returns rows with ids from ``first`` on, in the order of their times."""
    return support.rows(range(first, first + count), support.START_NS + first, support.OTHER)


def opened(root: Path) -> Store:
    clock = FakeClock(mono_ns=1, real_ns=support.START_NS)
    return Store.open(root, node="n1", clock=clock, limits=LIMITS, tables=support.TABLES, background=False)


def segment(root: Path) -> Path:
    (path,) = root.glob("t.other/*/*.parquet")
    return path


def flip(path: Path, at: int, mask: int = 0x40) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= mask
    path.write_bytes(bytes(data))


def span(path: Path, group: int) -> range:
    """Returns the offsets of a row group's bytes."""
    found = pq.read_metadata(path).row_group(group)
    leaves = [found.column(i) for i in range(found.num_columns)]
    starts = [leaf.dictionary_page_offset or leaf.data_page_offset for leaf in leaves]
    return range(min(starts), max(s + leaf.total_compressed_size for s, leaf in zip(starts, leaves, strict=True)))


def after_damage(root: Path) -> tuple[list[int], list[Loss]]:
    """Starts the store; returns the ids left and the losses. The next start must find nothing wrong."""
    with opened(root) as store:
        store.verify()
        ids = sorted(store.rows("t.other", ["id"]).column("id").to_pylist())
        losses = [*store.recovery_losses, *store.take_losses()]
    with opened(root) as store:
        assert store.verify() == []
        assert sorted(store.rows("t.other", ["id"]).column("id").to_pylist()) == ids
        assert [*store.recovery_losses, *store.take_losses()] == []
    return ids, losses


def without(group: int) -> list[int]:
    return [i for i in range(ROWS) if i // GROUP != group]


def check_lost(group: int, ids: list[int], losses: list[Loss]) -> None:
    assert ids == without(group)
    first, last = group * GROUP, group * GROUP + SIZES[group] - 1
    (loss,) = losses
    assert (loss.table, loss.stage, loss.count) == ("t.other", "store", SIZES[group])
    assert (loss.ts_from_ns, loss.ts_to_ns) == (support.START_NS + first, support.START_NS + last)
    assert f"row group {group} is set aside" in loss.reason


@pytest.mark.parametrize("group", range(6))
def test_a_byte_costs_its_row_group(root: Path, group: int) -> None:
    bytes_of_it = span(segment(root), group)
    flip(segment(root), bytes_of_it[len(bytes_of_it) // 2])
    check_lost(group, *after_damage(root))
    assert segment(root).name.endswith("-s1.parquet")
    assert len(list((root / "corrupt").iterdir())) == 1


def test_a_byte_of_a_page_header_costs_its_row_group(root: Path) -> None:
    for offset in range(12):
        flip(segment(root), span(segment(root), 2)[offset])
    check_lost(2, *after_damage(root))


def test_bytes_anywhere(root: Path) -> None:
    whole, name = segment(root).read_bytes(), segment(root).name
    footer = span(segment(root), 5).stop
    chance = random.Random(9)
    for at in sorted(chance.sample(range(4, footer), examples(40))):
        group = next(g for g in range(6) if at in span(segment(root), g))
        flip(segment(root), at, 1 << chance.randrange(8))
        check_lost(group, *after_damage(root))
        with_manifest_again(root, name, whole)


def with_manifest_again(root: Path, name: str, whole: bytes) -> None:
    """The manifest is rebuilt from the undamaged segment."""
    folder = segment(root).parent
    segment(root).unlink()
    (root / "manifest").unlink()
    (folder / name).write_bytes(whole)
    with opened(root) as store:
        assert store.rows("t.other", ["id"]).num_rows == ROWS


def test_two_row_groups_are_two_losses(root: Path) -> None:
    for group in (1, 4):
        flip(segment(root), span(segment(root), group)[40])
    ids, losses = after_damage(root)
    assert ids == [i for i in range(ROWS) if i // GROUP not in (1, 4)]
    assert [loss.count for loss in losses] == [GROUP, GROUP]
    # AND a salvaged segment can be salvaged again
    flip(segment(root), span(segment(root), 0)[40])
    ids, losses = after_damage(root)
    assert ids == [i for i in range(GROUP, ROWS) if i // GROUP not in (1, 4)]
    assert [loss.count for loss in losses] == [GROUP]
    assert segment(root).name.endswith("-s2.parquet")


def test_a_byte_of_the_footer_costs_no_row_that_can_be_read(root: Path) -> None:
    flip(segment(root), segment(root).stat().st_size - 6)
    ids, losses = after_damage(root)
    assert ids == []
    assert [(loss.count, loss.ts_from_ns, loss.ts_to_ns) for loss in losses] == [
        (ROWS, support.START_NS, support.START_NS + ROWS - 1)
    ]
    assert "its footer cannot be read" in losses[0].reason


def test_bytes_of_the_footer(root: Path) -> None:
    """Every row is there or lost: never both, and no other row."""
    whole, name = segment(root).read_bytes(), segment(root).name
    footer = span(segment(root), 5).stop
    chance = random.Random(11)
    for at in chance.sample(range(footer, len(whole)), examples(40)):
        flip(segment(root), at, 1 << chance.randrange(8))
        ids, losses = after_damage(root)
        assert set(ids) <= set(range(ROWS))
        assert len(set(ids)) == len(ids)
        assert len(ids) + sum(loss.count or 0 for loss in losses) == ROWS
        if not ids:
            (root / "t.other" / "date=2026-09-21").mkdir(parents=True, exist_ok=True)
            (root / "t.other" / "date=2026-09-21" / name).write_bytes(whole)
        with_manifest_again(root, name, whole)


def test_a_full_disk_puts_it_off(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The segment is not the cause."""
    flip(segment(root), span(segment(root), 2)[40])
    with opened(root) as store:
        with monkeypatch.context() as patch:
            patch.setattr(SystemFiles, "create", lambda *_: full())
            store.maintain()
            assert "damaged, and will be set aside later" in store.status()["reason"]
            assert store.take_losses() == []
        store.maintain()
        assert store.status()["state"] == "running"
        ids = sorted(store.rows("t.other", ["id"]).column("id").to_pylist())
        check_lost(2, ids, store.take_losses())


def test_a_damaged_segment_that_is_dropped_is_no_problem_any_more(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flip(segment(root), span(segment(root), 2)[40])
    with opened(root) as store:
        with monkeypatch.context() as patch:
            patch.setattr(SystemFiles, "create", lambda *_: full())
            for _ in range(3):
                assert store.quarantine(segment(root), "a query could not read it")
        assert "damaged, and will be set aside later" in store.status()["reason"]
        store.set_limits(replace(LIMITS, max_bytes=1))
        for _ in range(2):
            store.maintain()
        assert store.status()["segments"] == 0
        assert "damaged" not in store.status()["reason"]


def test_two_threads_that_find_the_damage_set_it_aside_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flip(segment(root), span(segment(root), 2)[40])
    path, create, fsync = segment(root), SystemFiles.create, SystemFiles.fsync
    writes, first_ended = threading.Event(), threading.Event()

    def create_and_wait(files: SystemFiles, new: Path) -> int:
        fd = create(files, new)
        if threading.current_thread() is second and new.suffix == ".tmp":
            writes.set()
            assert first_ended.wait(60)
        return fd

    def fsync_beside(files: SystemFiles, fd: int) -> None:
        if second.ident is None:
            second.start()
            until(lambda: writes.is_set() or not second.is_alive())
        fsync(files, fd)

    with opened(root) as store:
        second = threading.Thread(target=store.quarantine, args=(path, "another query could not read it"))
        monkeypatch.setattr(SystemFiles, "create", create_and_wait)
        monkeypatch.setattr(SystemFiles, "fsync", fsync_beside)
        assert store.quarantine(path, "a query could not read it")
        first_ended.set()
        second.join()
        ids = sorted(store.rows("t.other", ["id"]).column("id").to_pylist())
        check_lost(2, ids, store.take_losses())


def test_a_kill_before_the_manifest_names_the_salvaged_segment_doubles_no_row(root: Path) -> None:
    """The damaged segment and the segment of its good rows are both on disk."""
    flip(segment(root), span(segment(root), 2)[40])
    damaged, manifest = segment(root), (root / "manifest").read_bytes()
    data = damaged.read_bytes()
    with opened(root) as store:
        store.verify()
    damaged.write_bytes(data)
    # The line with the salvaged segment was not written to its end.
    (root / "manifest").write_bytes(manifest + b'0badc0de {"add":[{')
    check_lost(2, *after_damage(root))


def full() -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_merging_salvages_too(root: Path) -> None:
    flip(segment(root), span(segment(root), 3)[40])
    with opened(root) as store:
        for first in range(1000, 1000 + 9 * GROUP, GROUP):
            store.append({"t.other": [batch(first, GROUP)]}, {})
            store.seal(now=True)
    clock = FakeClock(mono_ns=1, real_ns=support.START_NS + 2 * 86_400 * 10**9)
    with Store.open(root, node="n1", clock=clock, limits=LIMITS, tables=support.TABLES, background=False) as store:
        for _ in range(4):
            store.maintain()
            clock.advance(10**9)
        assert store.status()["merged_segments"] > 0
        ids = sorted(store.rows("t.other", ["id"]).column("id").to_pylist())
        assert ids == [*without(3), *range(1000, 1000 + 9 * GROUP)]
        assert [loss.count for loss in store.take_losses()] == [GROUP]


def test_a_segment_of_before_is_salvaged_by_its_page_checksums(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have no checksums of row groups."""
    monkeypatch.setattr(salvage, "GROUPS", "none")
    flip(segment(root), span(segment(root), 1)[60])
    check_lost(1, *after_damage(root))
