"""The steps that a task yields, and their form as messages between processes: a JSON header and a payload."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from probing.api.errors import FormatError

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


@dataclass(frozen=True, slots=True)
class PartDecoded:
    """Log part ``index`` of a sealing task was decoded: ``rows`` by table, and ``problem`` if some rows could not be
    decoded.
    """

    index: int
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
    """The segment is complete. ``ts_min`` and ``ts_max`` (UTC ns) and ``jobs`` are None if the caller has them."""

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
    """The task may be interrupted here for another task."""


Step = PartDecoded | SegmentBegun | Data | Made | LostGroup | Rows | Contents | Turn


def pack_step(step: Step) -> tuple[dict[str, Any], bytes | memoryview]:
    """Returns the message of ``step``: header and payload."""
    match step:
        case Data(data):
            return {"data": True}, data
        case PartDecoded(index, rows, created_ns, problem):
            return {"part": index, "rows": dict(rows), "created_ns": created_ns, "problem": problem}, b""
        case SegmentBegun(table, date):
            return {"segment": table, "date": date}, b""
        case Made(size, crc, rows, first, last, jobs):
            times = {"ts_min": first, "ts_max": last, "jobs": None if jobs is None else list(jobs)}
            return {"made": {"size": size, "crc": crc, "rows": rows, **times}}, b""
        case LostGroup(group, rows, first, last, reason):
            return {"lost": {"group": group, "rows": rows, "ts_min": first, "ts_max": last, "why": reason}}, b""
        case Rows(table, stream):
            return {"rows": table}, stream
        case Contents(fields):
            return {"contents": dict(fields)}, b""
        case Turn():
            return {"turn": True}, b""


def unpack_step(header: Mapping[str, Any], payload: bytes) -> Step:
    """Returns the step of a message. Raises FormatError for a message that ``pack_step`` does not make."""
    try:
        if "data" in header:
            return Data(payload)
        if "turn" in header:
            return Turn()
        if "part" in header:
            rows = {str(name): int(count) for name, count in header["rows"].items()}
            return PartDecoded(int(header["part"]), rows, int(header["created_ns"]), str(header["problem"]))
        if "segment" in header:
            return SegmentBegun(str(header["segment"]), str(header["date"]))
        if "rows" in header:
            return Rows(str(header["rows"]), payload)
        if "contents" in header:
            return Contents(dict(header["contents"]))
        if "made" in header:
            made = header["made"]
            jobs = None if made["jobs"] is None else tuple(map(str, made["jobs"]))
            first, last = _number(made["ts_min"]), _number(made["ts_max"])
            return Made(int(made["size"]), int(made["crc"]), int(made["rows"]), first, last, jobs)
        lost = header["lost"]
        first, last = _number(lost["ts_min"]), _number(lost["ts_max"])
        return LostGroup(int(lost["group"]), int(lost["rows"]), first, last, str(lost["why"]))
    except (AttributeError, KeyError, TypeError, ValueError) as e:
        raise FormatError(f"a task answered {sorted(header)[:5]}") from e


def _number(value: Any) -> int | None:
    return None if value is None else int(value)
