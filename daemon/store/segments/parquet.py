"""Opens Parquet files, and decides how their columns are read."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import pyarrow as pa

__all__ = ("open_parquet",)

# Encodings of pages from which Arrow can read text columns as dictionaries.
_CODED = frozenset(("BIT_PACKED", "PLAIN", "PLAIN_DICTIONARY", "RLE", "RLE_DICTIONARY"))


def open_parquet(source: Any, coded: Collection[str] | None = ()) -> Any:
    """Returns a ParquetFile over ``source`` that checks page checksums.

    Text columns ``coded`` (None: all) are read as dictionaries if all their pages allow it. Raises pa.ArrowException,
    or OSError without errno, when ``source`` is not a Parquet file.
    """
    # Imported late: pyarrow.parquet costs memory and start-up time even in a daemon that seals nothing.
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
