"""Log parts into segments: what a sealer does with some closed parts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from probing.api.errors import FormatError
from probing.api.tables import TABLES, Table
from probing.daemon.source import Loss
from probing.daemon.store.files import Files
from probing.daemon.store.manifest import Segment
from probing.daemon.store.records import unpack_header
from probing.daemon.store.segments import split_by_date, write_segment
from probing.daemon.store.tail import decode_tail
from probing.daemon.store.wal import Part

__all__ = ("Sealed", "group_parts", "seal_parts")

_MAX_GROUP_BYTES = 16 << 20


@dataclass(slots=True)
class Sealed:
    segments: list[Segment]
    losses: list[Loss]


def group_parts(parts: Sequence[Part]) -> list[list[Part]]:
    """Neighbours that are sealed together: small parts, as restarts leave them, become one segment."""
    groups: list[list[Part]] = []
    size = 0
    for part in parts:
        if not groups or size + part.raw_bytes > _MAX_GROUP_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(part)
        size += part.raw_bytes
    return groups


def seal_parts(
    files: Files,
    root: Path,
    parts: Sequence[Part],
    now_ns: int,
    written: set[Path],
    known: Mapping[str, Table] = TABLES,
) -> Sealed:
    """Write the rows of ``parts`` as segments. They count from when the manifest names them; until then, and after an
    error, they are only ``written`` files.

    Raises OSError, or FormatError when a segment cannot be written right.
    """
    sealed = Sealed([], [])
    pieces: dict[str, list[pa.Table]] = {}
    for part in parts:
        for name, rows in _decode(files, part, now_ns, known, sealed.losses).items():
            pieces.setdefault(name, []).append(rows)
    numbers = (parts[0].number, parts[-1].number)
    for name in sorted(pieces):
        rows = pa.concat_tables(pieces.pop(name), promote_options="permissive")
        sort_by = known[name].sort_by if name in known else ("ts",)
        for date, day in split_by_date(rows.unify_dictionaries(), sort_by):
            sealed.segments.append(write_segment(files, root, name, date, numbers, day, written))
    return sealed


def _decode(
    files: Files, part: Part, now_ns: int, known: Mapping[str, Table], losses: list[Loss]
) -> Mapping[str, pa.Table]:
    try:
        data = files.read(part.path, part.length)
        created = unpack_header(data)[0].created_ns
        tail = decode_tail(data, None, known)
    except (FormatError, FileNotFoundError) as e:
        losses.extend(_losses(part, part.rows, f"it cannot be read: {e}", now_ns, now_ns))
        return {}
    short = {name: n - _rows(tail.tables, name) for name, n in part.rows.items()}
    missing = {name: n for name, n in short.items() if n > 0}
    losses.extend(_losses(part, missing, "; ".join(tail.problems), created, now_ns))
    return {name: rows for name, rows in tail.tables.items() if rows.num_rows}


def _rows(tables: Mapping[str, pa.Table], name: str) -> int:
    return tables[name].num_rows if name in tables else 0


def _losses(part: Part, rows: Mapping[str, int], reason: str, start: int, end: int) -> Iterable[Loss]:
    for name, count in rows.items():
        yield Loss("store", name, "log", f"log part {part.number}: {reason}", min(start, end), end, count)
