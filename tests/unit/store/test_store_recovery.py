"""Recovery from seven corruptions of the log, of segments and of the manifest."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import store_support as support

from probing.api.errors import FormatError
from probing.daemon.store import Store, StoreLimits
from probing.daemon.store.log.records import PartHeader, pack_header, scan, unpack_header
from probing.daemon.store.manifest import _pack
from probing.daemon.store.verify.examine import verify_directory

DAY = "t.small/date=2026-09-21"


def open_store(root: Path, node: str = "n1") -> Store:
    limits = StoreLimits(keep_free_bytes=0, max_age_s=1e9)
    return Store.open(root, node=node, clock=support.clock(), limits=limits, tables=support.TABLES, background=False)


def ids(store: Store) -> list[int]:
    return sorted(store.rows("t.small", ["id"]).column("id").to_pylist())


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Ids 1 to 20 in two segments (parts 1 and 2), 21 to 50 in part 3, ten in each record."""
    root = tmp_path / "state"
    with open_store(root) as store:
        for start in (1, 11, 21, 31, 41):
            store.append({"t.small": [support.rows(range(start, start + 10))]}, support.position(start))
            if start <= 11:
                store.seal(now=True)
    assert sorted(p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file()) == [
        "lock",
        "manifest",
        f"{DAY}/000000000001-000000000001.parquet",
        f"{DAY}/000000000002-000000000002.parquet",
        "wal/000000000003.wal",
    ]
    assert verify_directory(root) == []
    return root


def part(root: Path) -> Path:
    return root / "wal/000000000003.wal"


def segment(root: Path, number: int = 1) -> Path:
    return root / f"{DAY}/{number:012d}-{number:012d}.parquet"


def cut(path: Path, count: int = 7) -> None:
    path.write_bytes(path.read_bytes()[:-count])


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x55
    path.write_bytes(bytes(data))


def record_starts(root: Path) -> list[int]:
    data = part(root).read_bytes()
    _, start = unpack_header(data)
    ends = [r.end for r in scan(data, start)]
    return [start, *ends[:-1]]


@dataclass(frozen=True)
class Cell:
    """``damage`` leaves ``ids``. ``losses`` are the reported (table, stage, rows), rows None where they are unknown;
    ``reason`` is part of the first one's."""

    damage: Callable[[Path], object]
    ids: list[int]
    losses: list[tuple[str, str, int | None]]
    reason: str = ""


def _another_part(root: Path) -> None:
    with open_store(root) as store:
        store.append({"t.small": [support.rows([51])]}, support.position(51))


def _lose_a_part(root: Path) -> None:
    _another_part(root)
    part(root).unlink()


def _part_of_another_store(root: Path) -> None:
    """Returns a good part of another node, with the next number."""
    other = root.parent / "other"
    with open_store(other, "n2") as store:
        store.append({"t.small": [support.rows(range(900, 910))]}, support.position(1))
    data = (other / "wal/000000000001.wal").read_bytes()
    header, end = unpack_header(data)
    (root / "wal/000000000004.wal").write_bytes(pack_header(replace(header, number=4)) + data[end:])


def _swap_crc(path: Path) -> None:
    lines = path.read_bytes().split(b"\n")
    lines[2] = b"00000000" + lines[2][8:]
    path.write_bytes(b"\n".join(lines))


def _of(number: int) -> list[int]:
    return [*range(1, number)]


ALL = _of(51)
SEGMENT_LOST = ([*range(11, 51)], [("t.small", "store", 10)], "000000000001.parquet")
MANIFEST_MADE = (ALL, [("", "store", None)], "the manifest is")
# Prometheus' seven, as its tests of the write-ahead log have them, for each kind of file.
CELLS: dict[tuple[str, str], Cell] = {
    # Its writer was killed: it was never acknowledged, and the ring has its rows.
    ("log", "torn last record"): Cell(lambda r: cut(part(r)), _of(41), []),
    ("log", "bad header"): Cell(lambda r: flip(part(r), 3), _of(21), [("", "log", None)], "log part 3"),
    ("log", "length"): Cell(lambda r: flip(part(r), record_starts(r)[1]), _of(31), [("", "log", None)], "log part 3"),
    ("log", "checksum"): Cell(
        lambda r: flip(part(r), record_starts(r)[1] + 5), _of(31), [("", "log", None)], "log part 3"
    ),
    ("log", "content"): Cell(
        lambda r: flip(part(r), record_starts(r)[1] + 60), _of(31), [("", "log", None)], "log part 3"
    ),
    ("log", "missing file"): Cell(_lose_a_part, [*_of(21), 51], [("", "log", None)], "3 records are missing"),
    ("log", "foreign file"): Cell(_part_of_another_store, ALL, [("", "log", None)], "log part 4 belongs to another"),
    ("segment", "torn last record"): Cell(lambda r: cut(segment(r)), *SEGMENT_LOST),
    # No row lies in its first bytes.
    ("segment", "bad header"): Cell(lambda r: flip(segment(r), 0), ALL, []),
    ("segment", "length"): Cell(lambda r: segment(r).write_bytes(segment(r).read_bytes() + b"more"), *SEGMENT_LOST),
    ("segment", "checksum"): Cell(lambda r: flip(segment(r), segment(r).stat().st_size - 6), *SEGMENT_LOST),
    ("segment", "content"): Cell(lambda r: flip(segment(r), 200), *SEGMENT_LOST),
    ("segment", "missing file"): Cell(lambda r: segment(r).unlink(), *SEGMENT_LOST),
    ("segment", "foreign file"): Cell(lambda r: segment(r).write_bytes(segment(r, 2).read_bytes()), *SEGMENT_LOST),
    ("manifest", "torn last record"): Cell(lambda r: cut(r / "manifest"), *MANIFEST_MADE),
    ("manifest", "bad header"): Cell(lambda r: flip(r / "manifest", 12), *MANIFEST_MADE),
    ("manifest", "length"): Cell(
        lambda r: (r / "manifest").write_bytes((r / "manifest").read_bytes().replace(b'"crc"', b'"c"', 1)),
        *MANIFEST_MADE,
    ),
    ("manifest", "checksum"): Cell(lambda r: _swap_crc(r / "manifest"), *MANIFEST_MADE),
    ("manifest", "content"): Cell(
        lambda r: flip(r / "manifest", (r / "manifest").read_bytes().index(b"parquet")), *MANIFEST_MADE
    ),
    ("manifest", "missing file"): Cell(lambda r: (r / "manifest").unlink(), *MANIFEST_MADE),
    ("manifest", "foreign file"): Cell(
        lambda r: (r / "manifest").write_bytes(b"something else altogether"), *MANIFEST_MADE
    ),
}


UNNOTICED = {("log", "torn last record"), ("manifest", "missing file")} | {
    ("log", what) for what in ("missing file", "foreign file")
}


@pytest.mark.parametrize(("where", "what"), CELLS)
def test_each_corruption_of_each_kind_of_file(root: Path, where: str, what: str) -> None:
    cell = CELLS[where, what]
    cell.damage(root)
    # GIVEN it is noticed without a start too; what a start mends every day, and what is good by itself, is not
    assert verify_directory(root) != [] or (where, what) in UNNOTICED
    # WHEN the store starts
    with open_store(root) as store:
        store.verify()
        # THEN it answers from the rest, and names the loss
        assert ids(store) == cell.ids
        losses = [*store.recovery_losses, *store.take_losses()]
        assert [(x.table, x.stage, x.count) for x in losses] == cell.losses
        assert cell.reason in "".join(x.reason for x in losses)
        assert all(x.ts_to_ns >= support.START_NS for x in losses)
        last = max(i for i in cell.ids)
        assert store.positions == support.position(last if last == 51 else (last // 10) * 10 - 9)
        # and takes a row more
        store.append({"t.small": [support.rows([1000])]}, support.position(1000))
        store.seal(now=True)
    # THEN the next start finds nothing amiss
    assert verify_directory(root) == []
    with open_store(root) as store:
        store.verify()
        assert ids(store) == [*cell.ids, 1000]
        assert [*store.recovery_losses, *store.take_losses()] == []


@pytest.mark.parametrize(
    "damage",
    [
        lambda r: (r / "wal/000000000004.wal").write_bytes(b"not ours" * 9),
        lambda r: (r / "wal/000000000004.wal").mkdir(),
        lambda r: (r / "wal/000000000004.wal").symlink_to("/etc/hostname"),
        lambda r: os.mkfifo(r / "wal/000000000004.wal"),
        lambda r: (r / f"{DAY}/000000000003-000000000003.parquet").mkdir(),
        lambda r: (r / f"{DAY}/000000000003-000000000003.parquet").symlink_to("/etc/hostname"),
        lambda r: (r / f"{DAY}/000000000003-000000000003.parquet.tmp").mkdir(),
        lambda r: (r / "manifest").unlink() or (r / "manifest").mkdir(),
        lambda r: (r / "manifest").unlink() or (r / "manifest").symlink_to("/etc/hostname"),
        lambda r: (r / "manifest.tmp").mkdir(),
        lambda r: (r / "manifest.tmp").symlink_to("/etc/hostname"),
    ],
)
def test_what_is_no_file_keeps_no_store_from_starting(root: Path, damage: Callable[[Path], object]) -> None:
    damage(root)
    with open_store(root) as store:
        assert ids(store) == ALL
        store.append({"t.small": [support.rows([1000])]}, support.position(1000))
        store.seal(now=True)
        assert store.status()["state"] == "running"
    with open_store(root) as store:
        assert ids(store) == [*ALL, 1000]
        assert store.recovery_losses == ()


def test_a_last_part_that_is_gone_is_no_loss_that_a_store_can_know(root: Path) -> None:
    # The drain loop does, from the ring: tests of it are with it.
    part(root).unlink()
    with open_store(root) as store:
        assert ids(store) == _of(21)
        assert store.recovery_losses == ()
        assert store.positions == support.position(11)


def test_a_segment_damaged_while_it_is_used_is_skipped_and_reported(root: Path) -> None:
    with open_store(root) as store:
        flip(segment(root), 200)
        assert ids(store) == list(range(11, 51))
        assert [x.count for x in store.take_losses()] == [10]
        assert not store.quarantine(segment(root, 2), "a reader said so")
        assert ids(store) == list(range(11, 51))


def test_foreign_files_are_left_alone(root: Path) -> None:
    (root / DAY / "notes.txt").write_text("hello")
    (root / "t.small/date=2026-09-21/000000000001-000000000009.parquet").write_bytes(b"PAR1 not ours")
    (root / "lost+found").mkdir()
    # The collector's own.
    (root / "changes.json").write_text("[]")
    (root / DAY / "000000000007-000000000007.parquet.tmp").write_bytes(b"half")
    with open_store(root) as store:
        assert ids(store) == list(range(1, 51))
        assert store.status()["foreign"] == ["lost+found", f"{DAY}/notes.txt"]
        assert store.recovery_losses == ()
    assert (root / DAY / "notes.txt").read_text() == "hello"
    assert not (root / DAY / "000000000007-000000000007.parquet.tmp").exists()
    assert [p.name.split("-", 2)[2] for p in (root / "corrupt").iterdir()] == [
        "t.small_date=2026-09-21_000000000001-000000000009.parquet.corrupt"
    ]


def test_a_lost_manifest_does_not_double_what_was_being_sealed(root: Path) -> None:
    # GIVEN a start that died after it wrote the segment of part 3 and before the manifest had it
    saved = part(root).read_bytes()
    with open_store(root) as store:
        store.seal(now=True)
    part(root).write_bytes(saved)
    (root / "manifest").unlink()
    # THEN the part counts, and is sealed again
    with open_store(root) as store:
        assert ids(store) == list(range(1, 51))
        store.seal(now=True)
        assert ids(store) == list(range(1, 51))


def test_newer_formats_are_refused_and_not_touched(root: Path) -> None:
    (root / "wal/000000000009.wal").write_bytes(pack_header(PartHeader(9, 99, "n1", 0, {}, 2)))
    before = {p: p.read_bytes() for p in root.rglob("*") if p.is_file() and p.name != "lock"}
    with pytest.raises(FormatError, match="newer than 1"):
        open_store(root)
    assert {p: p.read_bytes() for p in root.rglob("*") if p.is_file() and p.name != "lock"} == before


def test_a_newer_manifest_is_refused(root: Path) -> None:
    (root / "manifest").write_bytes(_pack({"magic": "probingd-manifest", "format_version": 2, "other": 1}))
    with pytest.raises(FormatError) as error:
        open_store(root)
    assert "install the newer probingd" in error.value.hint


def test_a_gap_between_parts_is_a_loss(root: Path) -> None:
    with open_store(root) as store:
        store.append({"t.small": [support.rows([51])]}, support.position(51))
    part(root).unlink()
    with open_store(root) as store:
        assert ids(store) == [*range(1, 21), 51]
        assert [x.reason for x in store.recovery_losses] == ["3 records are missing before log part 4"]


def test_a_torn_record_after_a_reboot_may_have_been_acknowledged(root: Path) -> None:
    cut(part(root))
    clock = support.clock()
    clock.boot_id = "another boot"
    with Store.open(
        root,
        node="n1",
        clock=clock,
        tables=support.TABLES,
        background=False,
        limits=StoreLimits(keep_free_bytes=0, max_age_s=1e9),
    ) as store:
        assert [x.stage for x in store.recovery_losses] == ["log"]
