"""Segments in every encoding that the writer may choose pass verify, import, merging and queries."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import duckdb
import pyarrow.parquet as pq
import pytest

from probing.api.tables import TABLES
from probing.daemon.arrow import batch_of
from probing.daemon.clock import FakeClock
from probing.daemon.store import Store, StoreLimits
from probing.daemon.store.decoder import Decoder
from probing.daemon.store.importing.importer import import_sources
from probing.daemon.store.importing.target import Target
from probing.daemon.store.segments import encoding
from probing.daemon.store.verify.examine import examine

NOW_NS = 1_790_003_600_000_000_000
LIMITS = StoreLimits(keep_free_bytes=0, part_bytes=1 << 10)
ROWS = 97
TEXTS = ("DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY", "PLAIN")
NUMBERS = ("DELTA_BINARY_PACKED", "BYTE_STREAM_SPLIT", "PLAIN")


@pytest.fixture(scope="module")
def decoder() -> Iterator[Decoder]:
    with Decoder() as one:
        yield one


def event(i: int) -> dict[str, object]:
    """Returns a row with long and unique texts."""
    return {
        "node": "n",
        "ts": NOW_NS - 10**9 + i,
        "pid": i,
        "start_ns": i,
        "event": f"event {i:>40}",
        "job": f"{i:04}-/home/user/{'deep/' * 20}{i}",
        "command": f"python train.py --seed {i} {'x' * 200}",
    }


def fill(root: Path, first: int) -> None:
    with Store.open(root, node="n", limits=LIMITS, background=False) as store:
        rows = [event(i) for i in range(first, first + ROWS)]
        store.append({"process.events": [batch_of("process.events", rows)]}, {})
        store.seal(now=True)


def segments(root: Path) -> list[Path]:
    return sorted(root.glob("process.events/*/*.parquet"))


def encodings(path: Path) -> set[str]:
    group = pq.read_metadata(path).row_group(0)
    leaves = [group.column(i) for i in range(group.num_columns)]
    return {name for leaf in leaves if leaf.physical_type == "BYTE_ARRAY" for name in leaf.encodings}


def check(root: Path, count: int, decoder: Decoder) -> None:
    found = examine(root, decoder)
    assert (found.rows, [str(p) for p in found.problems]) == (count, [])
    target = Target(root.parent / "here", "here", LIMITS, TABLES)
    target.root.mkdir()
    done = import_sources(target, [root], decoder, now_ns=NOW_NS)
    assert (done.rows, done.problems) == ({"process.events": count}, [])
    for directory in (root, target.root):
        with Store.open(directory, node="n", limits=LIMITS, background=False) as store:
            assert sorted(store.rows("process.events", ["pid"]).column("pid").to_pylist()) == list(range(count))
        files = [str(path) for path in segments(directory)]
        with duckdb.connect() as connection:
            sql = "SELECT count(DISTINCT job), sum(pid)::BIGINT FROM read_parquet($files)"
            assert connection.execute(sql, {"files": files}).fetchone() == (count, count * (count - 1) // 2)


def test_the_writer_takes_another_encoding_for_long_unique_texts(tmp_path: Path, decoder: Decoder) -> None:
    fill(tmp_path / "far", 0)
    assert "DELTA_BYTE_ARRAY" in encodings(segments(tmp_path / "far")[0])
    check(tmp_path / "far", ROWS, decoder)


@pytest.mark.parametrize("texts", ["", *TEXTS])
@pytest.mark.parametrize("numbers", ["", *NUMBERS])
def test_every_encoding(
    texts: str, numbers: str, tmp_path: Path, decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    force(monkeypatch, {"BYTE_ARRAY": texts, "INT64": numbers, "INT32": numbers})
    fill(tmp_path / "far", 0)
    assert not texts or texts in encodings(segments(tmp_path / "far")[0])
    check(tmp_path / "far", ROWS, decoder)


@pytest.mark.parametrize("first", ["", *TEXTS])
@pytest.mark.parametrize("second", ["", *TEXTS])
def test_segments_of_different_encodings_are_merged(
    first: str, second: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "state"
    for number, texts in enumerate((first, second, first, second)):
        force(monkeypatch, {"BYTE_ARRAY": texts})
        fill(root, number * ROWS)
    # Of a day that is over a few segments are enough.
    clock = FakeClock(mono_ns=10**9, real_ns=NOW_NS + 2 * 86_400 * 10**9)
    with Store.open(root, node="n", limits=LIMITS, background=False, clock=clock) as store:
        store.maintain()
        assert (store.status()["state"], store.status()["merged_rows"]) == ("running", 4 * ROWS)
        assert sorted(store.rows("process.events", ["pid"]).column("pid").to_pylist()) == list(range(4 * ROWS))
    assert len(segments(root)) == 1


def force(monkeypatch: pytest.MonkeyPatch, wanted: dict[str, str]) -> None:
    """Gives columns of these physical types these encodings, and a dictionary for "" and other types."""
    tried = encoding._tried

    def layout(rows: object) -> tuple[list[str], dict[str, str]]:
        kinds = {path: kind for path, (kind, _) in tried(rows, True, {}).items()}  # type: ignore[arg-type]
        encodings = {path: wanted[kind] for path, kind in kinds.items() if wanted.get(kind)}
        return [p for p, kind in kinds.items() if p not in encodings and kind != "BOOLEAN"], encodings

    monkeypatch.setattr(encoding, "_layout", layout)
