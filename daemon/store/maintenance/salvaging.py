"""Salvages a damaged segment: its readable row groups become a segment, each other one a loss."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from probing.api.errors import FormatError
from probing.daemon.source import Loss
from probing.daemon.store.context import StoreContext
from probing.daemon.store.disk_errors import TRANSIENT
from probing.daemon.store.maintenance.sealing import made_segment
from probing.daemon.store.manifest import Segment
from probing.daemon.store.segments.paths import salvaged_path
from probing.daemon.store.segments.writer import SegmentFile
from probing.daemon.store.tasks.messages import Data, LostGroup, Made

__all__ = ("Salvaged", "salvage")


@dataclass(slots=True)
class Salvaged:
    """``segment`` has the rows that ``losses`` do not count, None when there are none; ``written``: its file."""

    segment: Segment | None = None
    losses: list[Loss] = field(default_factory=list)
    written: set[Path] = field(default_factory=set)


def salvage(context: StoreContext, damaged: Segment, problem: str) -> Salvaged:
    """Salvages what can be read of ``damaged``, which has this ``problem``. Rows that cannot be read are losses.

    Raises OSError and WorkerFailed when the segment is not the cause, so that it is worth another try.
    """
    salvaged = Salvaged()
    try:
        _salvage(context, damaged, salvaged)
    except (FormatError, pa.ArrowException) as e:
        problem = f"{problem}; none of its row groups could be read: {e}"
        salvaged.segment, salvaged.losses = None, []
    kept = salvaged.segment.rows if salvaged.segment else 0
    missing = damaged.rows - kept - sum(loss.count or 0 for loss in salvaged.losses)
    if missing > 0:
        salvaged.losses.append(_loss(damaged, f"is set aside: {problem}", missing))
    return salvaged


def _salvage(context: StoreContext, damaged: Segment, salvaged: Salvaged) -> None:
    file: SegmentFile | None = None
    try:
        task = context.worker.start(
            "salvage",
            [(context.root / damaged.path, damaged.size)],
            table=damaged.table,
            rows=damaged.rows,
            ts_min=damaged.ts_min,
            ts_max=damaged.ts_max,
        )
    except OSError as e:
        if e.errno in TRANSIENT:
            raise
        raise FormatError(f"it cannot be opened: {e.strerror or e}") from e
    try:
        while not task.done:
            for step in task.turn():
                if isinstance(step, LostGroup):
                    salvaged.losses.append(_group_loss(damaged, step))
                elif isinstance(step, Data):
                    file = file or SegmentFile(context.files, context.root, salvaged_path(damaged.path))
                    file.write(step.data)
                elif isinstance(step, Made) and file is not None:
                    file.finish(step.size, step.crc, salvaged.written)
                    salvaged.segment = made_segment(damaged.table, file.path, damaged.parts, step)
                    file = None
    finally:
        task.close()
        if file is not None:
            with contextlib.suppress(OSError):
                file.abort()


def _group_loss(damaged: Segment, lost: LostGroup) -> Loss:
    reason = f"row group {lost.group} is set aside: {lost.reason}"
    times = (damaged.ts_min, damaged.ts_max)
    if lost.ts_min is not None and lost.ts_max is not None:
        # The damage may be in the footer.
        times = (max(times[0], lost.ts_min), min(times[1], lost.ts_max))
    return _loss(damaged, reason, min(damaged.rows, max(0, lost.rows)), times)


def _loss(damaged: Segment, reason: str, rows: int, times: tuple[int, int] | None = None) -> Loss:
    first, last = times if times and times[0] <= times[1] else (damaged.ts_min, damaged.ts_max)
    return Loss("store", damaged.table, "store", f"the segment {damaged.path}: {reason}", first, last, rows)
