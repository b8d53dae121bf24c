"""Packs and unpacks the bytes of the write-ahead log: part headers and framed records (docs/format.md)."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pyarrow as pa

from probing.api.errors import FormatError
from probing.daemon.clock import ClockPair
from probing.daemon.store.format import (
    FORMAT_VERSION,
    MAX_NUMBER,
    MAX_PART,
    Positions,
    checked_positions,
    checked_table,
    decoded,
    newer_format,
    number_in,
)

__all__ = (
    "PART_MAGIC",
    "Chunk",
    "PartHeader",
    "Record",
    "ShortHeader",
    "cut_short",
    "pack_header",
    "pack_record",
    "scan",
    "unpack_header",
)

PART_MAGIC = b"PRBNGLOG"
MAX_HEADER = 1 << 20
MAX_RECORD = 1 << 28
# Only small records are compressed: they are mostly Arrow metadata, which is mostly zeros.
COMPRESS_BELOW = 1 << 16

# magic, format version, length of the JSON, CRC32 of these and the JSON
_HEADER = struct.Struct("<8sIII")
# stored length, CRC32 of all bytes after it, sequence, raw length, JSON length, codec
_FRAME = struct.Struct("<IIQIII")
_CRC_END = 8
_PLAIN, _ZSTD = 0, 1


@dataclass(frozen=True, slots=True)
class PartHeader:
    """The header of a part. Records of older parts with sequence numbers from ``first_sequence`` on are void.

    ``positions``: the positions of the rings at the start of the part. ``created_ns``: when it was created, UTC.
    """

    number: int
    first_sequence: int
    node: str
    created_ns: int
    positions: Positions = field(default_factory=dict)
    format_version: int = FORMAT_VERSION


class Chunk(NamedTuple):
    """A piece of the Arrow IPC stream of one table. All chunks of the table in a part, in order, make up the stream."""

    table: str
    data: bytes | memoryview
    rows: int


class Record(NamedTuple):
    """The rows of one drain. ``end``: offset after the record in the part; ``clock``: one instant on three clocks."""

    sequence: int
    boot_id: str
    clock: ClockPair
    positions: Positions
    chunks: tuple[Chunk, ...]
    end: int = 0


def pack_header(header: PartHeader) -> bytes:
    """Returns the bytes of a part's header."""
    text = _json(
        {
            "part": header.number,
            "first_sequence": header.first_sequence,
            "node": header.node,
            "created_ns": header.created_ns,
            "positions": header.positions,
        }
    )
    head = _HEADER.pack(PART_MAGIC, header.format_version, len(text), 0)[:-4]
    return head + struct.pack("<I", zlib.crc32(text, zlib.crc32(head))) + text


def unpack_header(data: bytes | memoryview) -> tuple[PartHeader, int]:
    """Returns the header of a part and its length in bytes.

    Raises NewerFormat for a newer version, ShortHeader when the part ends too early, FormatError for other damage.
    """
    view = memoryview(data)
    if len(view) < _HEADER.size:
        raise ShortHeader("a log part ends within its header")
    magic, version, length, crc = _HEADER.unpack_from(view)
    end = _HEADER.size + length
    if magic != PART_MAGIC or length > MAX_HEADER:
        raise FormatError("a log part has no header")
    if end > len(view):
        raise ShortHeader("a log part ends within its header")
    if zlib.crc32(view[_HEADER.size : end], zlib.crc32(view[: _HEADER.size - 4])) != crc:
        raise FormatError("the header of a log part has a wrong checksum")
    if version > FORMAT_VERSION:
        raise newer_format(version)
    try:
        fields = decoded(bytes(view[_HEADER.size : end]))
        header = PartHeader(
            number_in(fields["part"], most=MAX_PART),
            number_in(fields["first_sequence"]),
            str(fields["node"]),
            number_in(fields["created_ns"], -MAX_NUMBER),
            checked_positions(fields["positions"]),
            version,
        )
    except (ValueError, KeyError, TypeError) as e:
        raise FormatError("the header of a log part cannot be read") from e
    return header, end


class ShortHeader(FormatError):
    """The part ends within its header: its writer was killed before the first record, so no record is missing."""


def pack_record(sequence: int, boot_id: str, clock: ClockPair, positions: Positions, chunks: Sequence[Chunk]) -> bytes:
    """Returns the bytes of a record. Raises FormatError when it is too large."""
    meta = _json(
        {
            "boot_id": boot_id,
            "clock": [clock.mono_ns, clock.boot_ns, clock.real_ns],
            "positions": positions,
            "chunks": [[c.table, len(c.data), c.rows] for c in chunks],
        }
    )
    raw = b"".join((meta, *(c.data for c in chunks)))
    if len(meta) > MAX_HEADER:
        raise FormatError(f"the header of a record has {len(meta)} bytes, more than {MAX_HEADER}")
    if len(raw) > MAX_RECORD:
        raise FormatError(
            f"a record of {len(raw)} bytes is larger than {MAX_RECORD}", hint="drain fewer records at once"
        )
    stored, codec = raw, _PLAIN
    if len(raw) < COMPRESS_BELOW:
        stored, codec = pa.Codec("zstd", 1).compress(raw, asbytes=True), _ZSTD
    tail = _FRAME.pack(len(stored), 0, sequence, len(raw), len(meta), codec)[_CRC_END:]
    return struct.pack("<II", len(stored), zlib.crc32(stored, zlib.crc32(tail))) + tail + stored


def scan(data: bytes | memoryview, start: int) -> Iterator[Record]:
    """Yields the records from offset ``start``, where a record begins, to the first bad record or the end of ``data``.

    The good bytes end at the field ``end`` of the last record.
    """
    view = memoryview(data)
    sequence: int | None = None
    while True:
        record = _unpack(view, start)
        if record is None or (sequence is not None and record.sequence != sequence + 1):
            return
        yield record
        start, sequence = record.end, record.sequence


def cut_short(data: bytes | memoryview, start: int) -> bool:
    """Returns whether the record at ``start`` would end after ``data``: its writer was killed while it wrote."""
    if len(data) - start < _FRAME.size:
        return True
    stored_len: int = _FRAME.unpack_from(data, start)[0]
    return stored_len <= MAX_RECORD and start + _FRAME.size + stored_len > len(data)


def _unpack(view: memoryview, start: int) -> Record | None:
    body = start + _FRAME.size
    if body > len(view):
        return None
    stored_len, crc, sequence, raw_len, meta_len, codec = _FRAME.unpack_from(view, start)
    end = body + stored_len
    if end > len(view) or raw_len > MAX_RECORD or meta_len > min(raw_len, MAX_HEADER) or sequence >= MAX_NUMBER:
        return None
    if zlib.crc32(view[start + _CRC_END : end]) != crc:
        return None
    raw = _raw(view[body:end], raw_len, codec)
    if raw is None:
        return None
    try:
        meta = decoded(bytes(raw[:meta_len]))
        mono, boot, real = (number_in(value, -MAX_NUMBER) for value in meta["clock"])
        chunks = tuple(_chunks(raw[meta_len:], meta["chunks"]))
        positions = checked_positions(meta["positions"])
        return Record(sequence, str(meta["boot_id"]), ClockPair(mono, boot, real), positions, chunks, end)
    except (ValueError, KeyError, TypeError):
        return None


def _raw(stored: memoryview, raw_len: int, codec: int) -> memoryview | None:
    if codec == _PLAIN:
        return stored if len(stored) == raw_len else None
    # The writer compresses only bodies below COMPRESS_BELOW. A larger raw length is refused: a small damaged record
    # must not make the reader allocate much memory.
    if codec != _ZSTD or raw_len >= COMPRESS_BELOW:
        return None
    try:
        return memoryview(pa.Codec("zstd").decompress(stored, decompressed_size=raw_len, asbytes=True))
    except (OSError, pa.ArrowException):
        return None


def _chunks(body: memoryview, listed: list[Any]) -> Iterator[Chunk]:
    at = 0
    for table, length, rows in listed:
        if number_in(length) > len(body) - at:
            raise ValueError("a chunk lies outside its record")
        yield Chunk(checked_table(table), body[at : at + length], number_in(rows, most=MAX_RECORD))
        at += length


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), sort_keys=True).encode()
