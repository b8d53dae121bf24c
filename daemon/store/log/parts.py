"""Log parts, the files of the write-ahead log: appends records to the newest part, and scans the parts that exist when
the daemon starts.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from probing.api.errors import FormatError
from probing.api.tables import TABLES, Table
from probing.daemon.clock import ClockPair
from probing.daemon.store.files import Files, write_all
from probing.daemon.store.format import Positions
from probing.daemon.store.log.records import PartHeader, cut_short, pack_header, pack_record, scan, unpack_header
from probing.daemon.store.log.streams import StreamWriters

__all__ = ("TORN", "WAL_DIR", "Part", "PartWriter", "ScannedPart", "part_number", "part_path", "scan_part")

WAL_DIR = "wal"
TORN = "the last record was not written to its end"
# File names with numbers up to MAX_PART. Larger numbers do not match, because the number of the next part might not fit
# into a file name.
_NAME = re.compile(r"(0\d{11})\.wal", re.ASCII)


def part_path(root: Path, number: int) -> Path:
    return root / WAL_DIR / f"{number:012d}.wal"


def part_number(name: str) -> int | None:
    """Returns the number in a part's file name; None for other files."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


class Part(NamedTuple):
    """A log part up to its last good record.

    ``length``: its length in bytes. ``raw_bytes``: the size of its batches before compression. ``rows``: the number of
    rows by table. ``next_sequence``: the sequence number that follows its last record. ``positions``: the ring
    positions of its last record, or of its header if it has no record.
    """

    number: int
    path: Path
    length: int
    raw_bytes: int
    rows: Mapping[str, int]
    next_sequence: int
    positions: Positions


class PartWriter:
    """Appends records to one part. Raises OSError; after an error nothing may be appended to the part.

    A failed record leaves Arrow's writers ahead of the file, so the part ends at its last good record and the next part
    begins with fresh writers.
    """

    def __init__(self, files: Files, path: Path, header: PartHeader, tables: Mapping[str, Table] = TABLES) -> None:
        self._files = files
        self._header = header
        self._streams = StreamWriters(tables)
        packed = pack_header(header)
        self.part = Part(header.number, path, len(packed), 0, {}, header.first_sequence, header.positions)
        self.fd = files.create(path)
        try:
            write_all(files, self.fd, packed)
        except OSError:
            files.close(self.fd)
            files.unlink(path)
            raise

    @property
    def has_records(self) -> bool:
        return self.part.next_sequence > self._header.first_sequence

    def takes(self, names: Iterable[str]) -> bool:
        """Returns whether the tables ``names`` still have the schemas of the part's streams."""
        return not self._streams.outdated(names)

    def append(
        self, batches: Mapping[str, Sequence[pa.RecordBatch]], boot_id: str, clock: ClockPair, positions: Positions
    ) -> None:
        """Writes one record.

        Raises OSError, InternalError for batches without the schemas of their tables, FormatError for batches that are
        too large.
        """
        part = self.part
        chunks = self._streams.encode(batches)
        record = pack_record(part.next_sequence, boot_id, clock, positions, chunks)
        try:
            write_all(self._files, self.fd, record)
        except OSError:
            # If the whole record stays in the file all the same, it is void: the next part starts with its sequence
            # number.
            with contextlib.suppress(OSError):
                self._files.truncate(self.fd, part.length)
            raise
        rows = dict(part.rows)
        for chunk in chunks:
            rows[chunk.table] = rows.get(chunk.table, 0) + chunk.rows
        self.part = part._replace(
            length=part.length + len(record),
            raw_bytes=part.raw_bytes + sum(len(c.data) for c in chunks),
            rows=rows,
            next_sequence=part.next_sequence + 1,
            positions=positions,
        )


class ScannedPart(NamedTuple):
    """A part of ``size`` bytes, as the daemon reads it when it starts.

    ``problem``: why bytes after ``part.length`` were rejected; empty if no bytes follow, or only void records.
    ``voided``: the number of void records, whose sequence numbers the next part uses again.
    ``last_clock``: the clocks at the last good record.
    """

    part: Part
    header: PartHeader
    size: int
    problem: str
    last_clock: ClockPair | None
    voided: int = 0


def scan_part(files: Files, path: Path, void_from: int | None = None) -> ScannedPart:
    """Reads a part up to its first bad record, or up to the sequence number ``void_from``.

    Raises FormatError for a bad header, NewerFormat for a part of a newer probingd, OSError when it cannot be read.
    """
    data = files.read(path)
    header, end = unpack_header(data)
    if header.number != part_number(path.name):
        raise FormatError(f"{path.name} has the header of log part {header.number}")
    clock, voided = None, 0
    part = Part(header.number, path, end, 0, {}, header.first_sequence, header.positions)
    rows: dict[str, int] = {}
    raw = 0
    for record in scan(data, end):
        if void_from is not None and record.sequence >= void_from:
            voided += 1
            continue
        if record.sequence != part.next_sequence:
            break
        for chunk in record.chunks:
            rows[chunk.table] = rows.get(chunk.table, 0) + chunk.rows
            raw += len(chunk.data)
        clock = record.clock
        part = Part(header.number, path, record.end, raw, rows, record.sequence + 1, record.positions)
    problem = ""
    if part.length < len(data) and not voided:
        problem = TORN if cut_short(data, part.length) else "a record is damaged"
    return ScannedPart(part, header, len(data), problem, clock, voided)
