"""The format of the state directory: its version, its limits, and checks of values read from JSON (docs/format.md)."""

from __future__ import annotations

import json
import re
from typing import Any, TypedDict, cast

from probing.api.errors import FormatError

__all__ = (
    "FORMAT_VERSION",
    "JOB_ROWS",
    "MAX_NUMBER",
    "MAX_PART",
    "NewerFormat",
    "Positions",
    "RingPosition",
    "checked_positions",
    "checked_table",
    "decoded",
    "newer_format",
    "number_in",
)

FORMAT_VERSION = 1
# The highest number that a log part can have; no store lives long enough to reach it. File names have room for one
# digit more.
MAX_PART = 10**11 - 1
# Sequence numbers, times and counts must fit into a signed 64-bit column.
MAX_NUMBER = (1 << 63) - 1
_MAX_TABLE_NAME = 100
# Only these characters are allowed, because the name of a table becomes the name of a folder.
_TABLE = re.compile(r"[A-Za-z0-9_]+(?:\.[A-Za-z0-9_]+)+")


class RingPosition(TypedDict, total=False):
    """The position up to which a kernel ring was read. ``map_id``: the id of its BPF map; ``lost``: the number of lost
    records that were already reported.

    Two positions do not belong to a kernel ring; they use ``rows``. In the position JOB_ROWS, ``rows`` has the number
    of the next row to read from each memory file that a job fills. In the position of an import, ``rows`` has the
    number of slices (``importing/journal.py``).
    """

    boot_id: str
    map_id: int
    position: int
    lost: int
    rows: dict[str, int]


# Positions by name of the ring.
Positions = dict[str, RingPosition]
JOB_ROWS = "job_rows"
"""The key of the position in the memory files that jobs fill. These files are not a kernel ring."""


class NewerFormat(FormatError):
    """The state directory was written by a newer probingd, and must not be changed."""


def newer_format(version: int) -> NewerFormat:
    """Returns the error for a state directory of the newer format ``version``."""
    return NewerFormat(
        f"the state directory has format {version}, newer than {FORMAT_VERSION}, the newest that this probingd knows",
        hint="install the newer probingd again, or choose another --state-dir",
    )


def decoded(text: bytes) -> dict[str, Any]:
    """Returns the JSON object in ``text``. Raises ValueError if ``text`` is anything else."""
    try:
        value = json.loads(text)
    except RecursionError as e:
        raise ValueError("JSON is nested too deeply") from e
    if not isinstance(value, dict):
        raise ValueError("the JSON is not an object")
    return value


def checked_positions(value: Any) -> Positions:
    """Returns ``value`` if it is a valid set of ring positions; otherwise raises ValueError."""
    if not isinstance(value, dict):
        raise ValueError("positions are not an object")
    for position in value.values():
        if not isinstance(position, dict) or not isinstance(position.get("boot_id", ""), str):
            raise ValueError("a position is not an object with a boot_id")
        for name in ("map_id", "position", "lost"):
            number_in(position.get(name, 0))
        rows = position.get("rows", {})
        if not isinstance(rows, dict):
            raise ValueError("the positions in memory files of jobs are not an object")
        for number in rows.values():
            number_in(number)
    return cast(Positions, value)


def checked_table(name: Any) -> str:
    """Returns ``name`` if it is a valid name of a table and of its folder; otherwise raises ValueError."""
    if not isinstance(name, str) or len(name) > _MAX_TABLE_NAME or not _TABLE.fullmatch(name):
        raise ValueError(f"{str(name)[:80]!r} is not a valid name of a table")
    return name


def number_in(value: Any, least: int = 0, most: int = MAX_NUMBER) -> int:
    """Returns ``value`` if it is an integer from ``least`` to ``most``; otherwise raises ValueError."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError("a number is out of bounds")
    return value
