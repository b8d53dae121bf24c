"""The salvaging task makes a segment of the readable row groups of a damaged segment."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from probing.api.errors import FormatError
from probing.daemon.store.segments.encoding import GROUPS, META, SegmentEncoder
from probing.daemon.store.segments.parquet import open_parquet
from probing.daemon.store.tasks.messages import LostGroup, Step, Turn
from probing.daemon.store.tasks.segment_output import RowSpan, Source, data_steps, end_steps, span_of

__all__ = ("salvage",)


def salvage(sources: Sequence[Source], fields: Mapping[str, Any]) -> Iterator[Step]:
    """Makes a segment of the readable row groups of the damaged segment in ``sources``.

    Fields: ``table``, ``rows``, ``ts_min``, ``ts_max`` from the manifest. Raises FormatError when the footer cannot be
    read, or belongs to another segment.
    """
    table = str(fields["table"])
    try:
        file = open_parquet(sources[0], None)
        marks = file.metadata.metadata or {}
    except (pa.ArrowException, OSError) as e:
        raise FormatError(f"its footer cannot be read: {_line(e)}") from e
    if marks.get(META.encode()) != table.encode() or file.metadata.num_rows != fields["rows"]:
        raise FormatError("its footer belongs to another segment")
    # Older segments have no checksums of row groups.
    crcs = marks.get(GROUPS.encode(), b"").split()
    encoder, found = SegmentEncoder(table), list[RowSpan]()
    for group in range(file.metadata.num_row_groups):
        try:
            if crcs:
                _check_group(sources[0], file.metadata.row_group(group), crcs[group])
            rows = _group_rows(file, group)
            span = span_of(rows)
            if not fields["ts_min"] <= span.ts_min <= span.ts_max <= fields["ts_max"]:
                raise FormatError("its rows have times outside the times of the segment")
        except (pa.ArrowException, OSError, FormatError, ValueError, IndexError) as e:
            yield _lost(file.metadata, group, _line(e))
        else:
            found.append(span)
            yield from data_steps(encoder.add(rows))
        yield Turn()
    if found:
        yield from end_steps(encoder, _together(found))


def _group_rows(file: Any, group: int) -> pa.Table:
    rows: pa.Table = file.read_row_group(group, use_threads=False)
    rows.validate(full=True)
    if not rows.num_rows or rows.num_rows != file.metadata.row_group(group).num_rows:
        raise FormatError("its number of rows differs from its footer")
    return rows


def _check_group(source: Source, group: Any, crc: bytes) -> None:
    leaves = [group.column(i) for i in range(group.num_columns)]
    starts = [min(filter(None, (leaf.dictionary_page_offset, leaf.data_page_offset))) for leaf in leaves]
    end = max(start + leaf.total_compressed_size for start, leaf in zip(starts, leaves, strict=True))
    source.seek(min(starts))
    data = source.read(end - min(starts)) or b""
    if zlib.crc32(data) != int(crc, 16):
        raise FormatError("its checksum is wrong")


def _together(spans: Sequence[RowSpan]) -> RowSpan:
    known = [span.jobs for span in spans if span.jobs is not None]
    jobs = tuple(sorted({job for found in known for job in found})) if len(known) == len(spans) else None
    return RowSpan(min(span.ts_min for span in spans), max(span.ts_max for span in spans), jobs)


def _lost(metadata: Any, group: int, reason: str) -> LostGroup:
    found = metadata.row_group(group)
    leaves = (found.column(i) for i in range(found.num_columns))
    times = next((leaf.statistics for leaf in leaves if leaf.path_in_schema == "ts"), None)
    if times is None or not times.has_min_max:
        return LostGroup(group, found.num_rows, None, None, reason)
    return LostGroup(group, found.num_rows, int(times.min_raw), int(times.max_raw), reason)


def _line(e: Exception) -> str:
    return " ".join(str(e).split())[:200] or type(e).__name__
