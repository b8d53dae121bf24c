"""What a launcher reports about its workers: a row for each worker and group."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Literal

from probing.api.errors import FormatError
from probing.api.text import escape
from probing.api.typed import typed_json

__all__ = ("MAX_ROWS", "WorkerRow", "WorkerState", "rows_from", "rows_json")

WorkerState = Literal["idle", "waiting", "starting", "running", "ending", "ended", "refused", "fenced"]
MAX_ROWS = 4096
_MAX_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """The state of ``worker`` in ``group``. ``generation``: that of its process, or the generation that it waits for.

    ``seen``: the newest generation of the group that the launcher knows; ``clear``: no process of an older generation
    is left at this launcher. ``exit_code`` and ``signal`` of a process that ended; both None if they are not known.
    ``since_ns``: Unix time at which the state began. ``restarts``: starts without the owner's order within an hour.
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

    @property
    def failed(self) -> bool:
        """Whether the rank ended otherwise than by exit status 0."""
        return self.state in ("refused", "fenced") or (self.state == "ended" and self.exit_code != 0)


def rows_json(rows: Iterable[WorkerRow]) -> bytes:
    return json.dumps([asdict(row) for row in rows], separators=(",", ":")).encode()


def rows_from(data: bytes) -> list[WorkerRow]:
    """Returns the rows in ``data``. Raises FormatError if they are malformed or too many."""
    try:
        rows = typed_json(list[WorkerRow], data) if 0 < len(data) <= _MAX_BYTES else []
    except ValueError as e:
        raise FormatError(f"the report of a launcher is malformed: {escape(str(e), 200)}") from None
    if len(data) > _MAX_BYTES or len(rows) > MAX_ROWS:
        raise FormatError(f"the report of a launcher has {len(rows):,} rows", hint=f"at most {MAX_ROWS:,}")
    return rows
