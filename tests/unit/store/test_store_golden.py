"""State directories of all earlier formats open, with every row that was in them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from probing.daemon.clock import FakeClock
from probing.daemon.store import Store, StoreLimits
from probing.daemon.store.format import FORMAT_VERSION

GOLDEN = Path(__file__).parents[2] / "golden"
VERSIONS = sorted(path.name for path in GOLDEN.glob("store-v*") if path.is_dir())


def test_the_format_that_is_written_has_a_golden_directory() -> None:
    assert f"store-v{FORMAT_VERSION}" in VERSIONS


@pytest.mark.parametrize("version", VERSIONS)
def test_golden_directory(version: str, tmp_path: Path) -> None:
    # GIVEN a state directory as that format left it
    shutil.copytree(GOLDEN / version, tmp_path / "state")
    first, *lines = map(json.loads, (GOLDEN / f"{version}.jsonl").read_text().splitlines())
    expected: dict[str, list[str]] = {}
    for line in lines:
        expected.setdefault(line["table"], []).append(key(line["row"]))
    clock = FakeClock(real_ns=1_790_000_000_000_000_000, boot_id="11111111-2222-3333-4444-555555555555")
    limits = StoreLimits(keep_free_bytes=0, max_age_s=1e9)
    # WHEN this version opens it, and once more after it sealed all
    for sealed in (False, True):
        with Store.open(tmp_path / "state", node="golden", clock=clock, limits=limits, background=False) as store:
            # THEN rows, positions and what was torn are as they were
            assert store.positions == first["positions"]
            assert store.recovery_losses == ()
            assert store.status()["torn_records"] == (0 if sealed else 1)
            for table, rows in expected.items():
                assert rows_of(store, table) == sorted(rows), table
            assert store.verify() == []
            store.seal(now=True)


def rows_of(store: Store, table: str) -> list[str]:
    found = store.rows(table)
    times = [f.name for f in found.schema if str(f.type).startswith("timestamp")]
    for name in times:
        found = found.set_column(found.schema.get_field_index(name), name, found.column(name).cast("int64"))
    return sorted(map(key, found.to_pylist()))


def key(row: dict[str, object]) -> str:
    return json.dumps({name: value for name, value in row.items() if value is not None}, sort_keys=True)
