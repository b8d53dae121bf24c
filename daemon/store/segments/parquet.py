"""Opens Parquet files: the one place that decides how their columns are read."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import pyarrow as pa

__all__ = ("open_parquet",)

# Arrow reads texts as dictionary codes from pages with these encodings only.
_CODED = frozenset(("BIT_PACKED", "PLAIN", "PLAIN_DICTIONARY", "RLE", "RLE_DICTIONARY"))


def open_parquet(source: Any, coded: Collection[str] | None = ()) -> Any:
    """A ParquetFile over ``source`` that checks page checksums.

    Text columns ``coded`` (None: all) come as dictionaries if all their pages allow it. Raises pa.ArrowException, or
    OSError without a number, for what is no Parquet.
    """
    # pyarrow.parquet costs memory and start-up time that a daemon which seals nothing need not pay.
    import pyarrow.parquet as pq

    try:
        metadata = pq.read_metadata(source)
        if hasattr(source, "seek"):
            source.seek(0)
        names = [name for name in _texts(metadata) if coded is None or name in coded]
        return pq.ParquetFile(source, metadata=metadata, page_checksum_verification=True, read_dictionary=names)
    except UnicodeDecodeError as e:
        raise pa.ArrowInvalid(f"its footer is damaged: {e}") from e


def _texts(metadata: Any) -> Iterator[str]:
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    for i in range(metadata.num_columns):
        leaf = metadata.schema.column(i)
        if leaf.physical_type != "BYTE_ARRAY" or "." in leaf.path:
            continue
        if all(_CODED.issuperset(group.column(i).encodings) for group in groups):
            yield leaf.path
