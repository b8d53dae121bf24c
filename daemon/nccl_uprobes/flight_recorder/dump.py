"""Parses dumps of PyTorch's flight recorder into rows of ``python.torch_nccl_flight_record``. Runs in the parser.

Keys are from torch/csrc/distributed/c10d/FlightRecorder.hpp, format versions 1.0 to 2.10 (torch 2.3 to 2.13); older
versions have the sequence number in ``seq_id``, and times in microseconds. A dump is a pickle, or JSON if the job asked
its WorkerServer for the dump.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from probing.api.errors import CorruptTarget, UnsupportedTarget, UsageError
from probing.daemon.ipc import Message
from probing.daemon.nccl_uprobes.flight_recorder.report import Dump, RecordRow
from probing.daemon.processes.procfs import clean_text
from probing.diagnosis.flight_recorder.dump import MAX_FILE, MAX_RECORDS, load_dump

__all__ = ("dump_rows", "handlers")

T = TypeVar("T")
MAX_TENSORS = 256
MAX_DIMENSIONS = 16
MAX_FRAMES = 64
MAX_TEXT = 256
MAX_JSON = 8_192
MAX_ROWS_TEXT = 16 << 20
MAX_RANKS_TEXT = 1 << 20
_TEXTS = ("frames", "top_frame", "input_sizes", "output_sizes", "input_dtypes", "output_dtypes")
_INT64 = 1 << 63
_STATES = ("scheduled", "started", "completed")


def handlers() -> dict[str, Callable[[Message], bytes]]:
    """Returns the handler of the parser's request ``flight_dump``: takes one descriptor, answers a Dump as JSON."""
    return {"flight_dump": _answer}


def dump_rows(dump: Any) -> Dump:
    """Returns the rows of a loaded dump. Raises CorruptTarget for a dump without a list of records."""
    version, entries, config = "", dump, None
    if isinstance(dump, dict):
        version, entries, config = dump.get("version", ""), dump.get("entries", []), dump.get("pg_config")
    if not isinstance(entries, list):
        raise CorruptTarget("the dump has no list of records")
    rows = _newest(entries)
    return {
        "version": clean_text(version, MAX_TEXT) if isinstance(version, str) else "",
        "world_size": _world_size(config),
        "skipped": len(entries) - len(rows),
        "rows": rows,
    }


def _answer(request: Message) -> bytes:
    if len(request.fds) != 1:
        raise UsageError('the request "flight_dump" takes one descriptor')
    fd = request.fds[0]
    size = os.fstat(fd).st_size
    if size > MAX_FILE:
        raise UnsupportedTarget(f"the dump has {size} bytes, and at most {MAX_FILE} are read")
    dump = dump_rows(load_dump(_content(fd, size)))
    return json.dumps(dump, separators=(",", ":")).encode()


def _content(fd: int, size: int) -> bytes:
    parts, at = [], 0
    while at < size and (part := os.pread(fd, min(size - at, 16 << 20), at)):
        parts.append(part)
        at += len(part)
    return b"".join(parts)


def _newest(entries: list[Any]) -> list[RecordRow]:
    """Returns the rows of the last entries, in their order and within the limits of number and size."""
    shared, rows, left = _Shared(), list[RecordRow](), MAX_ROWS_TEXT
    for entry in reversed(entries[-MAX_RECORDS:]):
        if not isinstance(entry, dict):
            continue
        row = _row(entry, shared)
        left -= sum(len(text) for name in _TEXTS if isinstance(text := row[name], str))
        if left < 0:
            break
        rows.append(row)
    return rows[::-1]


class _Shared:
    """Converts each value of a dump only once: a short pickle can refer to one value many times."""

    def __init__(self) -> None:
        self._clean: dict[str, str] = {}
        # The keys are id() of values, which the dump keeps alive meanwhile, so no id is used again.
        self._made: dict[tuple[int, Callable[..., Any]], Any] = {}

    def once(self, make: Callable[[Any, _Shared], T], value: Any) -> T:
        key = (id(value), make)
        if key not in self._made:
            self._made[key] = make(value, self)
        made: T = self._made[key]
        return made

    def text(self, value: Any) -> str | None:
        if not isinstance(value, str):
            return None
        known = self._clean.get(value) if len(value) <= MAX_TEXT else None
        if known is None:
            known = clean_text(value, MAX_TEXT)
            if len(value) <= MAX_TEXT and len(self._clean) < MAX_RECORDS:
                self._clean[value] = known
        return known


def _row(entry: Mapping[str, Any], shared: _Shared) -> RecordRow:
    group = entry.get("process_group")
    name, desc = group[:2] if isinstance(group, list | tuple) and len(group) >= 2 else (None, None)
    frames, top_frame = shared.once(_frames, entry.get("frames"))
    state = entry.get("state")
    return {
        "record_id": _integer(entry.get("record_id", entry.get("id"))),
        "pg_id": _integer(entry.get("pg_id")),
        "pg_name": shared.text(name),
        "pg_desc": shared.text(desc),
        "collective_seq_id": _integer(entry.get("collective_seq_id", entry.get("seq_id"))),
        "p2p_seq_id": _integer(entry.get("p2p_seq_id")),
        "op_id": _integer(entry.get("op_id")),
        "profiling_name": shared.text(entry.get("profiling_name")),
        "state": state if state in _STATES else None,
        "input_sizes": shared.once(_sizes, entry.get("input_sizes")),
        "input_dtypes": shared.once(_names, entry.get("input_dtypes")),
        "output_sizes": shared.once(_sizes, entry.get("output_sizes")),
        "output_dtypes": shared.once(_names, entry.get("output_dtypes")),
        "time_created_ns": _time(entry, "time_created"),
        # In JSON dumps 0 stands for an event that did not happen.
        "time_discovered_started_ns": _time(entry, "time_discovered_started") or None,
        "time_discovered_completed_ns": _time(entry, "time_discovered_completed") or None,
        "duration_ns": _scaled(entry.get("duration_ms"), 1_000_000),
        "timeout_ms": _integer(entry.get("timeout_ms")),
        "retired": _flag(entry.get("retired")),
        "is_p2p": _flag(entry.get("is_p2p")),
        "frames": frames,
        "top_frame": top_frame,
    }


def _time(entry: Mapping[str, Any], name: str) -> int | None:
    exact = _integer(entry.get(f"{name}_ns"))
    return exact if exact is not None else _scaled(entry.get(f"{name}_us"), 1_000)


def _scaled(value: Any, factor: int) -> int | None:
    """Returns ``value`` (int or float) times ``factor`` as an integer; None for other types and values that are too
    large.
    """
    if type(value) not in (int, float):
        return None
    # This comparison also refuses nan and infinity.
    if not abs(value) < _INT64 // factor:
        return None
    whole = int(value)
    return whole * factor + int((value - whole) * factor)


def _integer(value: Any) -> int | None:
    return value if type(value) is int and -_INT64 <= value < _INT64 else None


def _flag(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def _sizes(value: Any, shared: _Shared) -> str | None:
    return _json([shared.once(_shape, shape) for shape in value[:MAX_TENSORS]]) if isinstance(value, list) else None


def _shape(value: Any, _: _Shared) -> list[int | None] | None:
    return [_integer(size) for size in value[:MAX_DIMENSIONS]] if isinstance(value, list) else None


def _names(value: Any, shared: _Shared) -> str | None:
    return _json([shared.text(name) for name in value[:MAX_TENSORS]]) if isinstance(value, list) else None


def _frames(value: Any, shared: _Shared) -> tuple[str | None, str | None]:
    """Returns (the frames as JSON, the innermost frame as FILE:LINE NAME)."""
    if not isinstance(value, list):
        return None, None
    frames = [shared.once(_frame, frame) for frame in value[:MAX_FRAMES] if isinstance(frame, dict)]
    if not frames:
        return None, None
    return _json(frames), f"{frames[0]['filename']}:{frames[0]['line']} {frames[0]['name']}"


def _frame(value: Mapping[str, Any], shared: _Shared) -> dict[str, str | int]:
    return {
        "name": shared.text(value.get("name")) or "",
        "filename": shared.text(value.get("filename")) or "",
        "line": _integer(value.get("line")) or 0,
    }


def _json(items: list[Any]) -> str:
    """Returns ``items`` as JSON; only the first items if the text would exceed MAX_JSON."""
    text = json.dumps(items, separators=(",", ":"))
    while len(text) > MAX_JSON and items:
        items = items[: len(items) // 2]
        text = json.dumps(items, separators=(",", ":"))
    return text


def _world_size(config: Any) -> int | None:
    """Returns the number of ranks of the largest group; the first group has all ranks (FlightRecorder::getPgConfig)."""
    if not isinstance(config, dict):
        return None
    sizes = [_count(group.get("ranks")) for group in list(config.values())[:MAX_TEXT] if isinstance(group, dict)]
    return max(sizes, default=0) or None


def _count(ranks: Any) -> int:
    # The text is "[0, 1, 2]", made by ranks_str of NCCLUtils.hpp.
    if not isinstance(ranks, str) or len(ranks) > MAX_RANKS_TEXT or (ranks[:1], ranks[-1:]) != ("[", "]"):
        return 0
    inner = ranks[1:-1].strip()
    return inner.count(",") + 1 if inner else 0
