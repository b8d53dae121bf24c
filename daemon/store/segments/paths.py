"""Names of segments: TABLE/date=DATE/FIRST-LAST.parquet, with the numbers of the first and last log part."""

from __future__ import annotations

import re

from probing.api.errors import FormatError

__all__ = ("is_date_dir", "salvaged_path", "segment_parts", "segment_path")

# Numbers of log parts are below 10^11.
_NAME = re.compile(r"(0\d{11})-(0\d{11})(?:-s[1-9]\d?)?\.parquet", re.ASCII)
_DATE_DIR = re.compile(r"date=\d{4}-\d{2}-\d{2}", re.ASCII)
_MAX_SALVAGES = 99


def segment_path(table: str, date: str, parts: tuple[int, int]) -> str:
    """Returns the path relative to the state directory."""
    return f"{table}/date={date}/{parts[0]:012d}-{parts[1]:012d}.parquet"


def salvaged_path(path: str) -> str:
    """Returns the path for the good rows of the segment ``path``: with ``-s1`` behind its parts, then ``-s2``.

    Raises FormatError after 99 times.
    """
    stem, _, times = path.removesuffix(".parquet").partition("-s")
    if int(times or 0) >= _MAX_SALVAGES:
        raise FormatError(f"{path} was damaged too often")
    return f"{stem}-s{int(times or 0) + 1}.parquet"


def segment_parts(name: str) -> tuple[int, int] | None:
    """Returns the first and last log part in a segment's file name; None for other files."""
    found = _NAME.fullmatch(name)
    return (int(found[1]), int(found[2])) if found else None


def is_date_dir(name: str) -> bool:
    """Returns whether ``name`` is that of a folder with the segments of one date."""
    return _DATE_DIR.fullmatch(name) is not None
