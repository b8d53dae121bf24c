"""What a launcher reports about its workers: a row for each worker and group."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Literal

from probing.api.errors import FormatError
from probing.api.text import encoded, escape
from probing.api.typed import typed_json
from probing.groups.spec import NAME, is_worker

__all__ = ("MAX_ROWS", "WorkerRow", "WorkerState", "rows_from", "rows_json")

WorkerState = Literal["idle", "waiting", "starting", "running", "ending", "ended", "refused", "fenced"]
MAX_ROWS = 4096
_MAX_BYTES = 1 << 20
_MAX_REASON, _MAX_LOG = 500, 1024
# Limits on numbers: the columns of cluster.workers cannot hold larger numbers.
_MAX_32, _MAX_64 = 1 << 31, 1 << 62


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """The state of ``worker`` in ``group``. ``generation``: the generation of its process, or the
    generation that the worker waits for.

    ``seen``: the newest generation of the group that the launcher knows; ``clear``: no process of an older generation
    is left at this launcher. ``exit_code`` and ``signal``: how the process ended; both None if that is not known.
    ``since_ns``: Unix time at which the state began. ``restarts``: the number of starts without an order of the owner
    within an hour. ``left``: the number of processes that are left of a rank whose first process has ended.
    """

    worker: str
    group: str
    generation: int
    seen: int
    clear: bool
    state: WorkerState
    rank: int | None = None
    pid: int | None = None
    start_ns: int | None = None
    exit_code: int | None = None
    signal: int | None = None
    since_ns: int = 0
    reason: str = ""
    log: str = ""
    restarts: int = 0
    left: int = 0

    @property
    def failed(self) -> bool:
        """Whether the rank was refused or fenced, or has ended without exit status 0."""
        return self.state in ("refused", "fenced") or (self.state == "ended" and self.exit_code != 0)


def rows_json(rows: Iterable[WorkerRow]) -> bytes:
    return json.dumps([asdict(row) for row in rows], separators=(",", ":")).encode()


def rows_from(data: bytes) -> list[WorkerRow]:
    """Returns the rows in ``data``, with texts of bounded length. Raises FormatError if they are malformed or too
    many.
    """
    if len(data) > _MAX_BYTES:
        raise FormatError(f"the report of a launcher has {len(data):,} bytes", hint=f"at most {_MAX_BYTES:,}")
    try:
        rows = typed_json(list[WorkerRow], data) if data else []
    except ValueError as e:
        raise FormatError(f"the report of a launcher is malformed: {escape(str(e), 200)}") from None
    if len(rows) > MAX_ROWS:
        raise FormatError(f"the report of a launcher has {len(rows):,} rows", hint=f"at most {MAX_ROWS:,}")
    if not all(map(_is_bounded, rows)):
        raise FormatError("the report of a launcher has a name or a number out of bounds")
    return [replace(row, reason=escape(row.reason, _MAX_REASON), log=_path(row.log)) for row in rows]


def _is_bounded(row: WorkerRow) -> bool:
    small = (row.rank, row.pid, row.exit_code, row.signal, row.restarts, row.left)
    large = (row.generation, row.seen, row.start_ns, row.since_ns)
    return (
        is_worker(row.worker)
        and NAME.fullmatch(row.group) is not None
        and all(-_MAX_32 < number < _MAX_32 for number in small if number is not None)
        and all(0 <= number < _MAX_64 for number in large if number is not None)
    )


def _path(log: str) -> str:
    """Returns the path of a log file; empty if it is too long for a table, or not Unicode."""
    return log if len(log) <= _MAX_LOG and encoded(log).decode() == log else ""
