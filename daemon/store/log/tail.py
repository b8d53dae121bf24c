"""What a SQL worker reads of the write-ahead log: the rows of a part that a snapshot names.

Needs no rights but to read the file, and no store: ``read_tail(path, length)`` for each part of the snapshot.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from probing.api.errors import FormatError
from probing.api.tables import TABLES, Table
from probing.daemon.store.files import read_file
from probing.daemon.store.log.records import Record, scan, unpack_header
from probing.daemon.store.log.streams import conform, decode_stream

__all__ = ("Tail", "decode_records", "decode_tail", "read_tail")


@dataclass(frozen=True, slots=True)
class Tail:
    """Rows by table in their physical schema, and what could not be read, one line each."""

    tables: dict[str, pa.Table]
    problems: tuple[str, ...] = ()


def read_tail(
    path: str | Path, length: int, tables: Collection[str] | None = None, known: Mapping[str, Table] = TABLES
) -> Tail:
    """The rows in the first ``length`` bytes of the log part ``path``: of ``tables``, or of all.

    Raises FormatError or OSError when the part cannot be opened; a part that is bad inside gives what is before.
    """
    data = read_file(path, length)
    if len(data) < length:
        raise FormatError(f"the log part {Path(path).name} is shorter than its snapshot says")
    return decode_tail(data, tables, known)


def decode_tail(
    data: bytes | memoryview, tables: Collection[str] | None = None, known: Mapping[str, Table] = TABLES
) -> Tail:
    """Like ``read_tail``, over the bytes of a part."""
    _, start = unpack_header(data)
    records = list(scan(data, start))
    end = records[-1].end if records else start
    tail = decode_records(records, tables, known)
    if end != len(data):
        return Tail(tail.tables, (*tail.problems, f"the log part is bad from byte {end} on"))
    return tail


def decode_records(
    records: Collection[Record], tables: Collection[str] | None = None, known: Mapping[str, Table] = TABLES
) -> Tail:
    """The rows of a part's records. A table that this version does not know keeps the schema it was written with."""
    streams: dict[str, list[bytes | memoryview]] = {}
    for record in records:
        for chunk in record.chunks:
            if tables is None or chunk.table in tables:
                streams.setdefault(chunk.table, []).append(chunk.data)
    rows: dict[str, pa.Table] = {}
    problems = []
    for name, chunks in streams.items():
        decoded, problem = decode_stream(chunks)
        try:
            rows[name] = conform(decoded, known[name].physical) if name in known else decoded
        except pa.ArrowException as e:
            problem = str(e)
        if problem:
            problems.append(f"{name}: {problem.splitlines()[0]}")
    return Tail(rows, tuple(problems))
