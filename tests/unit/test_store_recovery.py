"""What a start makes of damage: seven corruptions of the log, of segments and of the manifest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import store_support as support

from probing.api.errors import FormatError
from probing.daemon.store import Store, StoreLimits
from probing.daemon.store.manifest import _pack
from probing.daemon.store.records import PartHeader, pack_header, scan, unpack_header
from probing.daemon.store.verify import verify_directory

DAY = "t.small/date=2026-09-21"


def open_store(root: Path) -> Store:
    limits = StoreLimits(keep_free_bytes=0, max_age_s=1e9)
    return Store.open(root, node="n1", clock=support.clock(), limits=limits, tables=support.TABLES, background=False)


def ids(store: Store) -> list[int]:
    return sorted(store.rows("t.small", ["id"]).column("id").to_pylist())


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Ids 1 to 20 in two segments (parts 1 and 2), 21 to 50 in part 3, one record for ten."""
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


LOG_DAMAGE: dict[str, tuple[Callable[[Path], None], list[int], int]] = {
    "torn last record": (lambda r: cut(part(r)), [*range(1, 41)], 0),
    "bad header": (lambda r: flip(part(r), 3), [*range(1, 21)], 1),
    "length": (lambda r: flip(part(r), record_starts(r)[1]), [*range(1, 31)], 1),
    "checksum": (lambda r: flip(part(r), record_starts(r)[1] + 5), [*range(1, 31)], 1),
    "content": (lambda r: flip(part(r), record_starts(r)[1] + 60), [*range(1, 31)], 1),
    "missing file": (lambda r: part(r).unlink(), [*range(1, 21)], 0),
    "foreign file": (lambda r: (r / "wal/000000000004.wal").write_bytes(b"not ours" * 9), [*range(1, 51)], 1),
}


@pytest.mark.parametrize("name", LOG_DAMAGE)
def test_log(root: Path, name: str) -> None:
    damage, expected, losses = LOG_DAMAGE[name]
    damage(root)
    with open_store(root) as store:
        # THEN it starts, has all before the damage, tells the loss, and sets aside what it cannot read
        assert ids(store) == expected
        assert len(store.recovery_losses) == losses
        assert all(loss.stage == "log" and loss.reason for loss in store.recovery_losses)
        assert len(list((root / "corrupt").iterdir())) == (0 if name == "missing file" else 1)
        assert store.positions["ring"]["position"] == (expected[-1] // 10) * 10 - 9
        store.append({"t.small": [support.rows([1000])]}, support.position(1000))
        store.seal(now=True)
    with open_store(root) as store:
        assert ids(store) == [*expected, 1000]
        assert store.recovery_losses == ()


SEGMENT_DAMAGE: dict[str, Callable[[Path], object]] = {
    "torn": lambda r: cut(segment(r)),
    "bad header": lambda r: flip(segment(r), 0),
    "length": lambda r: segment(r).write_bytes(segment(r).read_bytes() + b"more"),
    "checksum": lambda r: flip(segment(r), segment(r).stat().st_size - 6),
    "content": lambda r: flip(segment(r), 200),
    "missing file": lambda r: segment(r).unlink(),
}


@pytest.mark.parametrize("name", SEGMENT_DAMAGE)
def test_segment(root: Path, name: str) -> None:
    SEGMENT_DAMAGE[name](root)
    assert len(verify_directory(root)) == 1
    with open_store(root) as store:
        store.verify()
        losses = [*store.recovery_losses, *store.take_losses()]
        assert ids(store) == list(range(11, 51))
        assert [(x.table, x.stage, x.count) for x in losses] == [("t.small", "store", 10)]
        assert losses[0].ts_from_ns == support.START_NS
        assert "000000000001.parquet" in losses[0].reason
        assert not segment(root).exists()
    assert verify_directory(root) == []


def test_a_segment_damaged_while_it_is_used_is_skipped_and_told(root: Path) -> None:
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


def _swap_crc(path: Path) -> None:
    lines = path.read_bytes().split(b"\n")
    lines[2] = b"00000000" + lines[2][8:]
    path.write_bytes(b"\n".join(lines))


MANIFEST_DAMAGE: dict[str, tuple[Callable[[Path], object], int]] = {
    "torn": (lambda p: cut(p), 1),
    "bad header": (lambda p: flip(p, 12), 1),
    "length": (lambda p: p.write_bytes(p.read_bytes().replace(b'"crc"', b'"c"', 1)), 1),
    "checksum": (_swap_crc, 1),
    "content": (lambda p: flip(p, p.read_bytes().index(b"parquet")), 1),
    "missing file": (lambda p: p.unlink(), 1),
    "foreign file": (lambda p: p.write_bytes(b"something else altogether"), 1),
}


@pytest.mark.parametrize("name", MANIFEST_DAMAGE)
def test_manifest(root: Path, name: str) -> None:
    damage, losses = MANIFEST_DAMAGE[name]
    damage(root / "manifest")
    with open_store(root) as store:
        # THEN it is made again from the files: no row is missing, none is there twice
        assert ids(store) == list(range(1, 51))
        assert len(store.recovery_losses) == losses
        assert store.positions == support.position(41)
        store.append({"t.small": [support.rows([1000])]}, support.position(1000))
        store.seal(now=True)
    with open_store(root) as store:
        assert ids(store) == [*range(1, 51), 1000]
        assert store.recovery_losses == ()
    assert verify_directory(root) == []


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
