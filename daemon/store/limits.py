"""The limits of the store: bytes, free space and age, for the whole store and for each table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

__all__ = ("DEFAULT_FREE_BYTES", "StoreLimits", "TableLimits", "merge_reserve", "on_file_system")

_DAY_S = 86_400
DEFAULT_FREE_BYTES = 1 << 30
_FREE_SHARE = 10
# Merging may temporarily use 1/16 of max_bytes.
_MERGE_SHARE = 16


class TableLimits(NamedTuple):
    """The limits of one table. None: only the limits of the whole store apply."""

    max_bytes: int | None = None
    max_age_s: float | None = None


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """The limits of the whole store. The stricter of ``max_bytes`` (all files) and ``keep_free_bytes`` applies.

    A negative ``keep_free_bytes`` means 1 GiB or a tenth of the file system, whichever is less. Log parts are closed
    at ``part_bytes``, segments are merged up to ``segment_bytes``. A power cut loses the rows of at most
    ``sync_interval_s``. A snapshot that is not released keeps its files for ``lease_s``, and its segments for the time
    of its query if that is longer and space allows. A limit that is made stricter deletes rows only after ``grace_s``.
    """

    max_bytes: int = 4 << 30
    keep_free_bytes: int = 256 << 20
    max_age_s: float = 7 * _DAY_S
    part_bytes: int = 8 << 20
    segment_bytes: int = 64 << 20
    sync_interval_s: float = 1.0
    lease_s: float = 600.0
    grace_s: float = 0.0
    tables: Mapping[str, TableLimits] = field(default_factory=dict)


def on_file_system(limits: StoreLimits, size: int) -> StoreLimits:
    """Returns ``limits`` for a file system of ``size`` bytes, with ``keep_free_bytes`` as a number of bytes."""
    if limits.keep_free_bytes >= 0:
        return limits
    return replace(limits, keep_free_bytes=min(DEFAULT_FREE_BYTES, size // _FREE_SHARE))


def merge_reserve(limits: StoreLimits) -> int:
    """Returns the bytes of ``max_bytes`` that retention leaves for merging; no merged segment is larger."""
    return min(limits.segment_bytes, limits.max_bytes // _MERGE_SHARE)
