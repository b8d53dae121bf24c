"""The parser's answer about a dump, sent as JSON."""

from __future__ import annotations

from typing import TypedDict

__all__ = ("Dump", "RecordRow")

RecordRow = dict[str, str | int | bool | None]
"""Column of ``python.torch_nccl_flight_record`` -> value."""


class Dump(TypedDict):
    """A dump. ``rows`` lack the columns of node, time and process. ``version``: the version of the dump's format.
    ``world_size``: None if unknown. ``skipped``: number of records that were malformed or exceeded a limit."""

    version: str
    world_size: int | None
    skipped: int
    rows: list[RecordRow]
