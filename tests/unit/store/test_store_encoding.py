"""Segments hold the rows that were written, in every encoding, for pyarrow and for DuckDB."""

from __future__ import annotations

import functools
import json
import zlib
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from long import LONG
from store_support import START_NS, MemoryFiles, write_segment

from probing.api.tables import TABLES
from probing.daemon.store.files import write_all
from probing.daemon.store.manifest import Edit, LoadedManifest, Manifest, Segment, load_manifest
from probing.daemon.store.segments import encoding
from probing.daemon.store.segments.encoding import ROW_GROUP, SegmentEncoder, sort_rows
from probing.daemon.store.segments.reader import describe_segment, read_segment
from probing.daemon.store.snapshot import snapshot_segment

STORED = sorted(name for name, table in TABLES.items() if not table.live)
ROOT = Path("/state")
TEXT = pa.string()
TEXTS = ["", "a", "größe-组", "\n\t\0", "'\";--", "x" * 3000, *(f"name {i}" for i in range(40))]
FLOATS = [0.0, -0.0, 1.5, float("nan"), float("inf"), float("-inf"), 5e-324, 1.7976931348623157e308]


def encode_rows(table: str, rows: pa.Table) -> bytes:
    """Returns a whole segment of ``table`` with the sorted ``rows``."""
    encoder = SegmentEncoder(table)
    starts = range(0, max(1, rows.num_rows), ROW_GROUP)
    return b"".join([*(encoder.add(rows.slice(start, ROW_GROUP)) for start in starts), encoder.end()])


def values_of(kind: pa.DataType, count: int, rng: np.random.Generator) -> list[Any]:
    """Draws a column of few values, counters, noise, or extremes."""
    style = int(rng.integers(4))
    if pa.types.is_dictionary(kind):
        return values_of(kind.value_type, count, rng)
    if pa.types.is_string(kind):
        if style == 1:
            return [f"/usr/lib/python3/{i:08}.py" for i in range(count)]
        if style == 2:
            return [rng.bytes(int(rng.integers(12))).hex() for _ in range(count)]
        return [TEXTS[i] for i in rng.integers(0, 3 if style == 0 else len(TEXTS), count)]
    if pa.types.is_boolean(kind):
        return [bool(b) for b in rng.integers(0, 2, count)]
    if pa.types.is_floating(kind):
        return [FLOATS[i] for i in rng.integers(0, 8, count)] if style == 3 else list(rng.random(count))
    if pa.types.is_list(kind):
        return [values_of(kind.value_type, int(n), rng) for n in rng.integers(0, 4, count)]
    if pa.types.is_struct(kind):
        fields = [values_of(field.type, count, rng) for field in kind]
        return [dict(zip((f.name for f in kind), row, strict=True)) for row in zip(*fields, strict=True)]
    # DuckDB's times end with 2^63 - 1, which is infinity.
    low, high = {pa.int32(): (-(2**31), 2**31 - 1), pa.uint64(): (0, 2**64 - 1), pa.int64(): (-(2**63), 2**63 - 1)}.get(
        kind, (-(2**62), 2**62)
    )
    if style == 0:
        return [int(i) for i in rng.choice([0, 1, low, high], count)] if kind != pa.uint64() else [high, 0, 1] * count
    if style == 1:
        return [int(i) for i in np.cumsum(rng.integers(0, 1000, count))]
    if style == 2:
        return [int(i) for i in rng.integers(0, 1 << 24, count)]
    return [low + (int(i) % (high - low + 1)) for i in rng.integers(0, 2**63 - 1, count)]


def rows_by_chance(schema: pa.Schema, count: int, seed: int, nulls: float) -> pa.Table:
    rng = np.random.default_rng(seed)
    columns = []
    for field in schema:
        values = values_of(field.type, count, rng)[:count]
        absent = rng.random(count) < rng.choice([0.0, nulls, 1.0], p=[0.5, 0.4, 0.1])
        columns.append(pa.array([None if no else v for v, no in zip(values, absent, strict=True)], field.type))
    return pa.Table.from_arrays(columns, schema=schema)


def plain(rows: pa.Table) -> list[str]:
    """Returns rows as text in which different values differ, and NaN equals NaN; times as ns."""
    columns = {
        name: (column.cast(pa.int64()) if pa.types.is_timestamp(column.type) else column).to_pylist()
        for name, column in zip(rows.column_names, rows.columns, strict=True)
    }
    return [repr(row) for row in zip(*columns.values(), strict=True)]


@functools.cache
def database() -> duckdb.DuckDBPyConnection:
    """One for all tests: opening it takes longer than most of what they ask. It keeps nothing of a file."""
    return duckdb.connect(config={"threads": 1, "enable_external_file_cache": False})


def of_duckdb(data: bytes | memoryview, path: Path) -> pa.Table:
    path.write_bytes(data)
    return database().sql(f"SELECT * FROM read_parquet('{path}')").to_arrow_table()


def check(rows: pa.Table, path: Path) -> None:
    data = encode_rows("t.any", rows)
    assert plain(pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True).read()) == plain(rows)
    assert plain(of_duckdb(data, path)) == plain(rows)


@pytest.mark.parametrize("name", STORED)
def test_rows_of_every_table_come_back(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("encoding") / "s.parquet"

    @settings(max_examples=6 if LONG else 3, deadline=None, derandomize=True, database=None)
    @given(st.integers(1, 400), st.integers(0, 2**32), st.sampled_from([0.1, 0.9]))
    def come_back(count: int, seed: int, nulls: float) -> None:
        check(sort_rows(rows_by_chance(TABLES[name].physical, count, seed, nulls), TABLES[name].sort_by), path)

    come_back()


N = 20_000
RNG = np.random.default_rng(7)
COLUMNS = {
    "DELTA_BINARY_PACKED": pa.array(np.cumsum(RNG.integers(0, 1000, N)) + 2**60),
    "BYTE_STREAM_SPLIT": pa.array((RNG.lognormal(9, 1, N)).astype(np.int64)),
    "RLE_DICTIONARY": pa.array(RNG.integers(0, 3, N) * 2**40),
    "DELTA_BYTE_ARRAY": pa.array([f"/a/path/that/is/long/{i // 3:09}/{i}" for i in range(N)]),
    "DELTA_LENGTH_BYTE_ARRAY": pa.array([RNG.bytes(int(n)).hex() for n in RNG.integers(1, 9, N)]),
}


@pytest.mark.parametrize("encoding", COLUMNS)
def test_each_encoding_is_used_where_it_is_shortest(encoding: str, tmp_path: Path) -> None:
    rows = pa.table({"a": COLUMNS[encoding]})
    data = encode_rows("t.any", rows)
    sizes = {encoding: len(data)}
    assert encoding in pq.read_metadata(pa.BufferReader(data)).row_group(0).column(0).encodings
    for rival in {e for e in COLUMNS if ("ARRAY" in e) == pa.types.is_string(rows.schema[0].type)} - {encoding}:
        sink = pa.BufferOutputStream()
        of_codes = {"use_dictionary": True} if "DICTIONARY" in rival else {"column_encoding": {"a": rival}}
        pq.write_table(rows, sink, compression="zstd", **{"use_dictionary": False, **of_codes})
        sizes[rival] = sink.getvalue().size
    assert sizes[encoding] <= min(sizes.values()) * 1.05
    check(rows, tmp_path / "s.parquet")


@pytest.mark.parametrize(("count", "tries"), [(63, 0), (64, 1)])
def test_encodings_are_not_tried_on_few_rows(
    count: int, tries: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred tables with some rows each are due at once."""
    tried, made = encoding._tried, list[int]()

    def counted(rows: pa.Table, codes: bool, encodings: dict[str, str]) -> dict[str, tuple[str, int]]:
        made.append(rows.num_rows)
        return tried(rows, codes, encodings)

    monkeypatch.setattr(encoding, "_tried", counted)
    check(rows_by_chance(TABLES["comm.ops"].physical, count, 7, 0.1), tmp_path / "s.parquet")
    assert bool(made) == bool(tries)


@pytest.mark.parametrize("kind", [pa.int32(), pa.int64(), pa.uint64(), pa.float64(), pa.timestamp("ns")])
def test_extremes_survive_each_encoding(kind: pa.DataType, tmp_path: Path) -> None:
    ends: list[Any] = {
        pa.int32(): [-(2**31), 2**31 - 1, 0, None],
        pa.int64(): [-(2**63), 2**63 - 1, 0, None],
        pa.uint64(): [0, 2**63, 2**64 - 1, None],
        pa.float64(): [*FLOATS, None],
    }.get(kind, [-(2**62), 2**62, 0, None])
    few = pa.array(ends * 8, kind)
    # What counts up is differences, what comes by chance split: the ends come in among them.
    counted = pa.array([*range(5000), *ends], kind)
    chance = pa.array([*RNG.integers(0, 1 << 20, 5000).tolist(), *ends], kind)
    for values in (few, counted, chance):
        check(pa.table({"a": values}), tmp_path / "s.parquet")


def test_what_the_tried_rows_do_not_show_is_kept(tmp_path: Path) -> None:
    count = ROW_GROUP + 5000
    tried = np.zeros(count, bool)
    tried[::1000] = True
    values = np.where(tried, RNG.integers(0, 2**62, count), 0)
    texts = pa.array([f"seldom {i}" if rare else None for i, rare in enumerate(tried.tolist())])
    rows = pa.table({"a": values, "b": texts, "c": pa.array(np.where(np.arange(count) == 60_000, 1.5, np.nan))})
    data = encode_rows("t.any", rows)
    assert pq.read_metadata(pa.BufferReader(data)).num_row_groups == 2
    check(rows, tmp_path / "s.parquet")


def test_later_row_groups_can_differ_from_the_first(tmp_path: Path) -> None:
    schema = pa.schema([("a", pa.int64()), ("b", pa.string()), ("c", pa.timestamp("ns")), ("d", pa.float64())])
    first = pa.Table.from_pylist([{"b": "same"}] * 1000, schema=schema)
    columns = [RNG.integers(0, 2**50, 5000), [f"{i}" for i in range(5000)], RNG.integers(0, 2**50, 5000)]
    later = pa.table([pa.array(c) for c in (*columns, RNG.random(5000))], names=schema.names).cast(schema)
    encoder = SegmentEncoder("t.any")
    data = b"".join([encoder.add(first), encoder.add(later), encoder.end()])
    both = pa.concat_tables([first, later])
    assert plain(pq.read_table(pa.BufferReader(data))) == plain(both)
    assert plain(of_duckdb(data, tmp_path / "s.parquet")) == plain(both)
    # Seven bytes of each number cannot be had shorter, the eighth is nothing.
    assert len(data) < 5000 * (7 + 7 + 8 + 6)


def test_only_what_queries_narrow_by_has_statistics() -> None:
    rows = rows_by_chance(TABLES["comm.ops"].physical, 300, 3, 0.1)
    group = pq.read_metadata(pa.BufferReader(encode_rows("comm.ops", rows))).row_group(0)
    leaves = {group.column(i).path_in_schema: group.column(i) for i in range(group.num_columns)}
    kept = {name for name, leaf in leaves.items() if leaf.statistics is not None}
    assert kept == {"ts", "job", "pid", "rank", "comm", "seq", "step"}


def test_no_statistics_hide_rows_with_nan(tmp_path: Path) -> None:
    path = tmp_path / "segment.parquet"
    path.write_bytes(encode_rows("python.losses", pa.table({"step": [1.0, float("nan"), 2.0]})))
    large = duckdb.sql(f"SELECT count(*), max(step) > 2 FROM read_parquet('{path}') WHERE step > 1.5")
    assert large.fetchall() == [(2, True)]


# Jobs of a segment


def of_jobs(jobs: list[Any], kind: pa.DataType = TEXT) -> pa.Table:
    times = pa.array([START_NS + i for i in range(len(jobs))], pa.timestamp("ns"))
    return pa.table({"ts": times, "job": pa.array(jobs, kind)})


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (of_jobs(["b", "a", "b"]), ("a", "b")),
        (of_jobs(["a", "b"], pa.dictionary(pa.int32(), pa.string())), ("a", "b")),
        (of_jobs(["a", None]), None),
        (of_jobs([f"job{i}" for i in range(32)]), tuple(sorted(f"job{i}" for i in range(32)))),
        (of_jobs([f"job{i}" for i in range(33)]), None),
        (of_jobs(["x" * 5000]), None),
        (of_jobs([1, 2], pa.int64()), None),
        (of_jobs(["a"]).drop_columns(["job"]), None),
    ],
)
def test_a_segment_knows_its_jobs(rows: pa.Table, expected: tuple[str, ...] | None) -> None:
    files = MemoryFiles()
    files.make_dir(ROOT)
    segment = write_segment(files, ROOT, "t.any", "2026-09-21", (1, 2), rows)
    assert segment.jobs == expected
    assert describe_segment(files, ROOT, segment.path) == segment
    assert read_segment(files, ROOT, segment).num_rows == rows.num_rows
    assert snapshot_segment(ROOT, segment)["jobs"] == (list(expected) if expected else None)


def test_the_manifest_keeps_jobs_and_takes_what_was_written_without() -> None:
    files = MemoryFiles()
    files.make_dir(ROOT)
    known = Segment("t.any", "t.any/date=2026-09-21/a.parquet", 1, 2, 3, 4, 5, (1, 1), ("a", "b"))
    unknown = known._replace(path="t.any/date=2026-09-21/b.parquet", jobs=None)
    manifest = Manifest(files, ROOT, "n1", "boot", LoadedManifest())
    manifest.commit(Edit((known, unknown)))
    manifest.close()
    assert load_manifest(files, ROOT).segments == {s.path: s for s in (known, unknown)}
    # As the first daemons wrote it.
    lines = files.read(ROOT / "manifest").decode().splitlines()
    old = []
    for line in lines:
        fields = json.loads(line.split(" ", 1)[1])
        for added in fields.get("add", ()):
            del added["jobs"]
        text = json.dumps(fields)
        old.append(f"{zlib.crc32(text.encode()):08x} {text}\n")
    files.unlink(ROOT / "manifest")
    fd = files.create(ROOT / "manifest")
    write_all(files, fd, "".join(old).encode())
    files.close(fd)
    loaded = load_manifest(files, ROOT)
    assert loaded.bad_lines == 0
    assert list(loaded.segments.values()) == [known._replace(jobs=None), unknown]


# Stored differences


def shown(rows: list[dict[str, Any]]) -> list[tuple[int | None, ...]]:
    """Draws (launch, start, earliest end, latest end) after the call, and the duration, in ns."""
    stored = pa.Table.from_pylist(rows, schema=TABLES["comm.ops"].physical)
    names = ("t_launch", "t_start", "t_done_lo", "t_done_hi")
    after = ", ".join(f"epoch_ns({name}) - epoch_ns(ts)" for name in names)
    database().register("stored", stored)
    sql = f"SELECT {after}, duration_ns FROM (SELECT {TABLES['comm.ops'].select_list} FROM stored)"
    return database().sql(sql).fetchall()


def test_both_ways_to_store_an_end_show_the_same() -> None:
    rng = np.random.default_rng(11)
    before, after, expected = [], [], []
    for scale in [10, 10**3, 10**6, 10**9, 10**12] * 60:
        call, low = START_NS + int(rng.integers(10**15)), int(rng.integers(scale))
        high = low + int(rng.integers(scale if scale % 3 else scale // 20 + 1))
        launch = None if high % 3 == 0 else int(rng.integers(low + 1))
        common = {"ts": call, "timing_source": "watchdog", "launch_ns_after": launch}
        middle = (low + high) // 2 - (launch or 0)
        before += [common | {"done_lo_ns": low, "done_hi_ns": high}, common | {"done_hi_ns": high}]
        after += [common | {"done_hi": call + high, "done_within_ns": high - low}, common | {"done_hi": call + high}]
        duration = middle if (high - low) * 10 <= middle else None
        expected += [(launch, None, low, high, duration), (launch, None, None, high, None)]
        # One that is not finished for sure has a lower bound only; both bounds of an exact one are its end.
        exact = {"ts": call, "timing_source": "exact", "start_ns_after": low, "done_hi_ns": high}
        for same in (common | {"done_lo_ns": low}, exact, exact | {"done_lo_ns": high}):
            before.append(same)
            after.append(same)
        ended = (None, low, high, high, high - low)
        expected += [(launch, None, low, None, None), ended, ended]
    assert shown(before) == expected
    assert shown(after) == expected
