"""Batches through the log's streams and records, and back."""

from __future__ import annotations

import pyarrow as pa
import pytest
import store_support as support
from hypothesis import given, settings
from hypothesis import strategies as st
from long import examples

from probing.api.errors import FormatError, InternalError
from probing.api.tables import TABLES
from probing.daemon.clock import ClockPair
from probing.daemon.store.format import NewerFormat
from probing.daemon.store.log.decode import decode_part
from probing.daemon.store.log.records import PartHeader, pack_header, pack_record, scan, unpack_header
from probing.daemon.store.log.streams import StreamWriters, conform

PAIR = ClockPair(1, 2, 3)


def part_of(drains: list[dict[str, list[pa.RecordBatch]]]) -> bytes:
    streams = StreamWriters(support.TABLES)
    data = pack_header(PartHeader(1, 1, "n1", support.START_NS))
    for sequence, batches in enumerate(drains, 1):
        data += pack_record(sequence, "boot", PAIR, support.position(sequence), streams.encode(batches))
    return data


def test_drains_with_different_dictionaries_come_back_in_order() -> None:
    # GIVEN drains whose names begin anew each time, and others that repeat
    batches = [support.rows(range(start, start + 15)) for start in range(1, 200, 15)]
    data = part_of(
        [{"t.small": [b], "t.other": [support.rows([i], table=support.OTHER)]} for i, b in enumerate(batches)]
    )
    # WHEN the part is decoded
    tail = decode_part(data, None, support.TABLES)
    # THEN all rows are there, and a name is sent once
    assert tail.problems == ()
    expected = pa.Table.from_batches([conform(pa.table(b), support.SMALL.logical).to_batches()[0] for b in batches])
    assert conform(tail.tables["t.small"], support.SMALL.logical).equals(expected)
    assert tail.tables["t.other"].column("id").to_pylist() == list(range(len(batches)))
    assert data.count(b"note 20") <= 1


def test_only_the_wanted_tables_are_decoded() -> None:
    data = part_of([{"t.small": [support.rows([1])], "t.other": [support.rows([2], table=support.OTHER)]}])
    assert list(decode_part(data, {"t.other"}, support.TABLES).tables) == ["t.other"]


def test_slices_nulls_and_foreign_index_types() -> None:
    batch = support.rows(range(40)).slice(5, 20)
    names = batch.column("name").cast(pa.dictionary(pa.int8(), pa.string()))
    narrow = batch.set_column(batch.schema.get_field_index("name"), "name", names)
    plain = batch.set_column(batch.schema.get_field_index("name"), "name", names.cast(pa.string()))
    tail = decode_part(part_of([{"t.small": [batch, narrow, plain]}]), None, support.TABLES)
    assert tail.tables["t.small"].column("name").to_pylist() == batch.column("name").to_pylist() * 3
    assert tail.tables["t.small"].schema.equals(support.SMALL.physical)


def test_what_does_not_fit_is_refused_and_leaves_the_streams_as_they_were() -> None:
    streams = StreamWriters(support.TABLES)
    good = support.rows([1, 2])
    wrong = pa.record_batch({"id": ["no number"]})
    unknown = good.append_column("more", pa.array([1, 2]))
    for bad in ({"t.small": [good, wrong]}, {"t.small": [unknown]}, {"t.none": [good]}):
        with pytest.raises(InternalError):
            streams.encode(bad)
    data = pack_header(PartHeader(1, 1, "n1", 0))
    data += pack_record(1, "boot", PAIR, {}, streams.encode({"t.small": [good]}))
    assert decode_part(data, None, support.TABLES).tables["t.small"].num_rows == 2


def test_live_tables_are_not_stored() -> None:
    live = TABLES["comm.inflight"]
    with pytest.raises(InternalError):
        StreamWriters(TABLES).encode({"comm.inflight": [pa.RecordBatch.from_pylist([{}], schema=live.physical)]})


def test_missing_columns_are_null() -> None:
    table = conform(pa.table({"id": [1], "name": ["a"]}), support.SMALL.physical)
    assert table.to_pylist() == [{"node": None, "ts": None, "id": 1, "name": "a", "note": None}]


def test_a_newer_format_is_named() -> None:
    with pytest.raises(NewerFormat, match="format 2") as error:
        unpack_header(pack_header(PartHeader(1, 1, "n1", 0, {}, 2)))
    assert error.value.hint


@settings(max_examples=examples(300), deadline=None, derandomize=True)
@given(at=st.integers(0, 1 << 20), cut=st.booleans(), junk=st.binary(min_size=1, max_size=40))
def test_damage_never_gives_rows_that_were_not_written(at: int, cut: bool, junk: bytes) -> None:
    # GIVEN a part of several records
    data = bytearray(part_of([{"t.small": [support.rows(range(i, i + 5))]} for i in range(1, 50, 5)]))
    # WHEN it is cut or overwritten somewhere
    at %= len(data)
    if cut:
        del data[at:]
    else:
        data[at : at + len(junk)] = junk
    # THEN what is read is a prefix of what was written
    try:
        tail = decode_part(bytes(data), None, support.TABLES)
    except FormatError:
        return
    rows = tail.tables["t.small"].column("id").to_pylist() if tail.tables else []
    assert rows == list(range(1, len(rows) + 1))
    assert len(rows) % 5 == 0


@settings(max_examples=examples(200), deadline=None, derandomize=True)
@given(st.binary(max_size=400))
def test_any_bytes_are_no_records_or_a_format_error(data: bytes) -> None:
    assert list(scan(data, 0)) == []
    with pytest.raises(FormatError):
        unpack_header(data)
