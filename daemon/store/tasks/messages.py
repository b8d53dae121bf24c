"""The steps that a task yields, and their form as messages between processes: a JSON header and a payload."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from probing.api.errors import FormatError
from probing.api.typed import typed
from probing.daemon.ipc import Header

__all__ = (
    "Contents",
    "Data",
    "LostGroup",
    "Made",
    "PartDecoded",
    "Rows",
    "SegmentBegun",
    "Step",
    "Turn",
    "pack_step",
    "unpack_step",
)


class PartDecoded(NamedTuple):
    """A log part, the file ``part`` (from 0) of the task, was decoded. ``rows``: number of rows by table. ``problem``:
    why some rows could not be decoded, or empty.
    """

    part: int
    rows: Mapping[str, int]
    created_ns: int
    problem: str


class SegmentBegun(NamedTuple):
    """The next data belong to a segment of ``table`` and ``date`` ("2026-11-21")."""

    table: str
    date: str


class Data(NamedTuple):
    """The next bytes of the segment."""

    data: bytes | memoryview


class Made(NamedTuple):
    """The segment is complete. ``ts_min``, ``ts_max`` (UTC ns) and ``jobs`` are None if the caller knows them."""

    size: int
    crc: int
    rows: int
    ts_min: int | None = None
    ts_max: int | None = None
    jobs: tuple[str, ...] | None = None


class LostGroup(NamedTuple):
    """A row group that cannot be read, with its rows and times from the footer; the times are None if the footer has
    none.
    """

    group: int
    rows: int
    ts_min: int | None
    ts_max: int | None
    reason: str


class Rows(NamedTuple):
    """Rows of ``table`` in a decoded file, as an Arrow IPC stream."""

    table: str
    stream: bytes | memoryview


class Contents(NamedTuple):
    """The contents of a decoded file; ``tasks.decode`` describes the fields of each task."""

    fields: Mapping[str, Any]


class Turn(NamedTuple):
    """At this step the task can be interrupted for another task."""


Step = PartDecoded | SegmentBegun | Data | Made | LostGroup | Rows | Contents | Turn


_KINDS: dict[str, type[Step]] = {
    "part": PartDecoded,
    "segment": SegmentBegun,
    "data": Data,
    "made": Made,
    "lost": LostGroup,
    "rows": Rows,
    "contents": Contents,
    "turn": Turn,
}
_WORDS = {kind: word for word, kind in _KINDS.items()}


def pack_step(step: Step) -> tuple[Header, bytes | memoryview]:
    """Returns the message of ``step``: header and payload."""
    word = _WORDS[type(step)]
    match step:
        case Data(data):
            return {word: []}, data
        case Rows(table, stream):
            return {word: [table]}, stream
    return {word: step}, b""


def unpack_step(header: Header, payload: bytes) -> Step:
    """Returns the step of a message. Raises FormatError for a message that ``pack_step`` does not make."""
    try:
        ((word, fields),) = header.items()
        kind = _KINDS[word]
        if kind is Data:
            return Data(payload)
        if kind is Rows:
            (table,) = typed(list[str], fields)
            return Rows(table, payload)
        return typed(kind, fields)
    except (KeyError, ValueError) as e:
        raise FormatError(f"a task sent an invalid message with the keys {sorted(header)[:5]}") from e
