"""Hostile bytes in the state directory: typed errors, bounded memory, and no failed start."""

from __future__ import annotations

import json
import random
import struct
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import store_support as support
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from long import examples

from probing.api.errors import FormatError
from probing.daemon.store import Store, StoreLimits
from probing.daemon.store.log.decode import decode_part, decode_stream
from probing.daemon.store.log.parts import WAL_DIR, part_path
from probing.daemon.store.log.records import PART_MAGIC, PartHeader, Record, cut_short, pack_header, scan, unpack_header
from probing.daemon.store.log.streams import StreamWriters
from probing.daemon.store.manifest import load_manifest
from probing.daemon.store.segments.reader import describe_segment

ROOT = Path("/state")
FEW = settings(max_examples=examples(60), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
MANY = settings(FEW, max_examples=examples(150))
HUGE = st.sampled_from([-1, 0, 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64, 10**30, 1e300, float("inf"), float("nan")])
TEXTS = st.sampled_from(["", "t.small", "../../etc/passwd", "/etc", "t.small/../..", "\0", "\ud800", "a" * 5000])
VALUES = st.recursive(
    st.none() | st.booleans() | HUGE | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
DEEP = b"[" * 100_000


def fields(*names: str) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=dict.fromkeys(names, VALUES))


def framed(said: bytes, body: bytes = b"", sequence: int = 1, **claims: int) -> bytes:
    """Returns a record with a right checksum and any content."""
    stored = said + body
    tail = struct.pack(
        "<QIII", sequence, claims.get("raw", len(stored)), claims.get("meta", len(said)), claims.get("codec", 0)
    )
    crc = zlib.crc32(stored, zlib.crc32(tail))
    return struct.pack("<II", claims.get("stored", len(stored)), crc) + tail + stored


def header_of(text: bytes, version: int = 1) -> bytes:
    head = struct.pack("<8sII", PART_MAGIC, version, len(text))
    return head + struct.pack("<I", zlib.crc32(text, zlib.crc32(head))) + text


def line_of(text: bytes) -> bytes:
    return b"%08x %b\n" % (zlib.crc32(text), text)


def dumped(value: Any) -> bytes:
    return json.dumps(value).encode()


GOOD_META = {"boot_id": "b", "clock": [1, 2, 3], "positions": {}, "chunks": []}
GOOD_SEGMENT = {
    "table": "t.small",
    "path": "t.small/date=2026-09-21/000000000001-000000000001.parquet",
    "size": 1,
    "crc": 2,
    "rows": 3,
    "ts_min": 4,
    "ts_max": 5,
    "parts": [1, 1],
}


def check_record(record: Record) -> None:
    """Asserts what the store relies on."""
    assert 0 <= record.sequence < 2**63
    assert all(isinstance(t, int) and abs(t) < 2**63 for t in (record.clock.mono_ns, record.clock.real_ns))
    assert all(isinstance(p, dict) for p in record.positions.values())
    for chunk in record.chunks:
        assert "/" not in chunk.table
        assert not chunk.table.startswith(".")
        assert 0 <= chunk.rows < 2**63


def start(files: support.MemoryFiles) -> list[int]:
    """Starts a store on these files, appends, seals and starts again; returns the ids of ``t.small`` found first."""
    for again in (False, True):
        with Store.open(
            ROOT,
            node="n1",
            clock=support.clock(),
            limits=StoreLimits(keep_free_bytes=0, max_age_s=1e9),
            files=files,
            tables=support.TABLES,
            background=False,
        ) as store:
            found = store.rows("t.small", ["id"]).column("id").to_pylist()
            if not again:
                first = found
                store.append({"t.small": [support.rows([77_777])]}, support.position(5))
                store.seal(now=True)
            store.maintain()
            assert all(len(x.reason) < 2000 for x in store.recovery_losses)
    assert found.count(77_777) == 1
    return list(first)


def files_with(**named: bytes) -> support.MemoryFiles:
    files = support.MemoryFiles()
    files.dirs |= {ROOT, ROOT / WAL_DIR, ROOT / "corrupt"}
    for name, data in named.items():
        path = part_path(ROOT, int(name[4:])) if name.startswith("part") else ROOT / name
        files.names[path] = support.Inode(bytearray(data), data)
    return files


@MANY
@given(st.binary(max_size=200), st.binary(max_size=60))
def test_random_bytes_are_no_log(data: bytes, more: bytes) -> None:
    with pytest.raises(FormatError):
        unpack_header(data)
    for start_at in (0, len(more)):
        assert list(scan(more + data, start_at)) == []
        cut_short(more + data, start_at)


@MANY
@example({"part": float("inf")}, 1)
@given(fields("part", "first_sequence", "node", "created_ns", "positions"), st.integers(0, 2**32 - 1))
def test_a_header_of_anything(said: dict[str, Any], version: int) -> None:
    good = {"part": 1, "first_sequence": 1, "node": "n1", "created_ns": 1, "positions": {}}
    for text in (dumped({**good, **said}), dumped(said), dumped([said])):
        try:
            header, _ = unpack_header(header_of(text, version))
        except FormatError:
            continue
        assert 0 <= header.number < 10**11
        assert 0 <= header.first_sequence < 2**63
        assert all(isinstance(p, dict) for p in header.positions.values())


@MANY
@given(fields(*GOOD_META), st.binary(max_size=80), st.integers(0, 2**64 - 1), VALUES, VALUES)
def test_a_record_of_anything(said: dict[str, Any], body: bytes, sequence: int, table: Any, rows: Any) -> None:
    chunks = {**GOOD_META, "chunks": [[table, len(body), rows]]}
    for meta in (dumped({**GOOD_META, **said}), dumped(chunks), dumped(said), dumped([said])):
        for record in scan(framed(meta, body, sequence), 0):
            check_record(record)


@FEW
@given(fields(*GOOD_META), VALUES, VALUES)
def test_a_start_over_a_log_of_anything(said: dict[str, Any], table: Any, rows: Any) -> None:
    chunks = {**GOOD_META, "chunks": [[table, 0, rows]]}
    for meta in (dumped({**GOOD_META, **said}), dumped(chunks)):
        assert start(files_with(part3=pack_header(PartHeader(3, 1, "n1", 0)) + framed(meta))) == []


@pytest.mark.parametrize(
    "record",
    [
        framed(dumped(GOOD_META), raw=1 << 28, codec=1),
        framed(dumped(GOOD_META), raw=(1 << 32) - 1, codec=1),
        framed(pa.Codec("zstd").compress(bytes(1 << 26), asbytes=True), raw=1 << 26, meta=1 << 26, codec=1),
        framed(dumped(GOOD_META), meta=(1 << 32) - 1, raw=(1 << 32) - 1),
        framed(dumped(GOOD_META), stored=(1 << 32) - 1),
        framed(DEEP),
    ],
    ids=["claims 256 MiB", "claims 4 GiB", "zstd bomb", "JSON of 4 GiB", "stored 4 GiB", "nested"],
)
def test_a_small_record_takes_little_memory(record: bytes) -> None:
    before = pa.total_allocated_bytes()
    tracemalloc.start()
    try:
        assert list(scan(record, 0)) == []
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20
    assert pa.total_allocated_bytes() == before


def stream_of() -> bytes:
    batches = [support.rows(range(1, 30)), support.rows(range(40, 60))]
    chunks = StreamWriters(support.TABLES).encode({"t.small": batches})
    return bytes(chunks[0].data)


STREAM = stream_of()


@MANY
@example(632, 2)
@given(st.integers(0, 1 << 32), st.integers(1, 6))
def test_a_stream_with_other_bytes_in_it(seed: int, count: int) -> None:
    chance, data = random.Random(seed), bytearray(STREAM)
    for _ in range(count):
        at = chance.randrange(len(data) - 8)
        what = chance.choice((b"\xff", b"\0", b"\xff\xff\xff\x7f", b"\xff" * 8, chance.randbytes(4)))
        data[at : at + len(what)] = what
    rows, problem = decode_stream([bytes(data[: chance.choice((len(data), chance.randrange(len(data))))])])
    assert rows.num_rows <= 49 or not problem
    rows.validate(full=True)


def test_codes_of_names_that_are_not_there_are_refused() -> None:
    codes = pa.DictionaryArray.from_arrays(pa.array([0, 1_999_999_999], pa.int32()), pa.array(["a"]), safe=False)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, pa.schema([("name", codes.type)])) as writer:
        writer.write_batch(pa.record_batch([codes], ["name"]))
    rows, problem = decode_stream([bytes(sink.getvalue())])
    assert rows.num_rows == 0
    assert "out of bounds" in problem


@pytest.mark.parametrize("claim", [-5, 1 << 31, 1 << 40, 1 << 62])
def test_a_stream_that_claims_huge_buffers(claim: int) -> None:
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    batch = pa.record_batch({"id": pa.array(range(1000), pa.int64())})
    with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch)
    data = bytes(sink.getvalue())
    said = struct.pack("<q", 8000)
    assert said in data
    before = pa.total_allocated_bytes()
    rows, problem = decode_stream([data.replace(said, struct.pack("<q", claim))])
    assert (rows.num_rows, bool(problem)) == (0, True)
    assert pa.total_allocated_bytes() <= before + (1 << 20)


@MANY
@given(fields("add", "drop", "sealed_to", "next_sequence", "positions"), fields(*GOOD_SEGMENT, "jobs"))
def test_manifest_lines_of_anything(said: dict[str, Any], segment: dict[str, Any]) -> None:
    lines = [said, {"add": [{**GOOD_SEGMENT, **segment}]}, {"add": [segment]}, segment]
    files = files_with(manifest=b"".join(line_of(dumped(line)) for line in lines))
    loaded = load_manifest(files, ROOT)
    for path, found in loaded.segments.items():
        assert path == found.path
        assert path.startswith(f"{found.table}/date=")
        assert ".." not in path
        assert all(type(n) is int for n in (found.size, found.crc, found.rows, found.ts_min, found.ts_max))
        assert all(type(n) is int for n in found.parts)
        assert found.jobs is None or all(type(job) is str for job in found.jobs)
    assert 0 <= loaded.sealed_to < 10**11
    assert 0 <= loaded.next_sequence < 2**63


@FEW
@given(st.lists(st.one_of(fields("add", "drop", "sealed_to", "next_sequence", "positions"), VALUES), max_size=4))
def test_a_start_over_a_manifest_of_anything(lines: list[Any]) -> None:
    first = {"magic": "probingd-manifest", "format_version": 1, "node": "n1", "boot_id": "b"}
    assert start(files_with(manifest=b"".join(line_of(dumped(line)) for line in [first, *lines]))) == []


@pytest.mark.parametrize("data", [line_of(DEEP), b"\n" * 70_000, b"\xff" * 1000, b"1_0 {}\n-0 {}\n", line_of(b"1")])
def test_odd_manifests(data: bytes) -> None:
    assert start(files_with(manifest=data)) == []


@FEW
@given(st.integers(0, 1 << 32), st.integers(1, 6))
def test_segments_with_other_bytes_in_them(seed: int, count: int) -> None:
    files = files_with()
    table = pa.Table.from_batches([support.rows(range(1, 40))])
    segment = support.write_segment(files, ROOT, "t.small", "2026-09-21", (1, 1), table)
    chance, inode = random.Random(seed), files.names[ROOT / segment.path]
    for _ in range(count):
        # Half of them in the footer, which says how much there is of everything.
        at = chance.randrange(len(inode.data) // 2 * chance.randint(0, 1), len(inode.data) - 8)
        what = chance.choice((b"\xff", b"\0", b"\xff\xff\xff\x7f", b"\x80\x80\x80\x80\x08", chance.randbytes(4)))
        inode.data[at : at + len(what)] = what
    try:
        found = describe_segment(files, ROOT, segment.path)
    except (FormatError, OSError):
        return
    assert found.table == "t.small"
    assert found.rows == 39


@pytest.mark.parametrize("number", [10**11, 10**12 - 1])
def test_numbers_that_leave_no_name_for_the_next_part(number: int) -> None:
    files = files_with(**{f"part{number}": pack_header(PartHeader(number, 1, "n1", 0))})
    assert start(files) == []
    assert part_path(ROOT, number) in files.names


def test_a_table_in_the_log_cannot_name_a_folder_elsewhere() -> None:
    chunk = StreamWriters(support.TABLES).encode({"t.small": [support.rows([1, 2])]})[0]
    meta = {**GOOD_META, "chunks": [["../../t.small", len(chunk.data), 2]]}
    files = files_with(part3=pack_header(PartHeader(3, 1, "n1", 0)) + framed(dumped(meta), bytes(chunk.data)))
    assert start(files) == []
    assert all(path.is_relative_to(ROOT) and ".." not in path.parts for path in files.names)
    # The same with a name that is one.
    meta["chunks"] = [["t.small", len(chunk.data), 2]]
    data = pack_header(PartHeader(3, 1, "n1", 0)) + framed(dumped(meta), bytes(chunk.data))
    assert decode_part(data, None, support.TABLES).tables["t.small"].num_rows == 2
