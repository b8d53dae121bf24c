"""What is left of a damaged segment: the row groups that can be read, and a loss for each of the others."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from probing.api.errors import FormatError
from probing.daemon.source import Loss
from probing.daemon.store.files import Files
from probing.daemon.store.jobs.runner import Worker
from probing.daemon.store.maintenance.sealing import made_segment
from probing.daemon.store.manifest import Segment
from probing.daemon.store.segments.reader import PASSING, SegmentFile, salvaged_path

__all__ = ("Salvaged", "salvage")


@dataclass(slots=True)
class Salvaged:
    """``segment`` is in its place and has the rows that ``losses`` do not name; None: there are none."""

    segment: Segment | None = None
    losses: list[Loss] = field(default_factory=list)
    written: set[Path] = field(default_factory=set)


def salvage(worker: Worker, files: Files, root: Path, damaged: Segment, problem: str) -> Salvaged:
    """What can be read of ``damaged``, whose ``problem`` is known. All of it is lost where nothing can be read.

    Raises OSError and WorkerFailed for what is not the segment's fault: it is to be tried again.
    """
    salvaged = Salvaged()
    try:
        _salvage(worker, files, root, damaged, salvaged)
    except (FormatError, pa.ArrowException) as e:
        problem = f"{problem}; none of its row groups could be read: {e}"
        salvaged.segment, salvaged.losses = None, []
    kept = salvaged.segment.rows if salvaged.segment else 0
    missing = damaged.rows - kept - sum(loss.count or 0 for loss in salvaged.losses)
    if missing > 0:
        salvaged.losses.append(_loss(damaged, f"is set aside: {problem}", missing))
    return salvaged


def _salvage(worker: Worker, files: Files, root: Path, damaged: Segment, salvaged: Salvaged) -> None:
    file: SegmentFile | None = None
    try:
        job = worker.start(
            "salvage", [(root / damaged.path, damaged.size)],
            table=damaged.table, rows=damaged.rows, ts_min=damaged.ts_min, ts_max=damaged.ts_max,
        )  # fmt: skip
    except OSError as e:
        if e.errno in PASSING:
            raise
        raise FormatError(f"it cannot be opened: {e.strerror or e}") from e
    try:
        while not job.done:
            for header, payload in job.turn():
                if "lost" in header:
                    salvaged.losses.append(_of_group(damaged, header["lost"]))
                elif "data" in header:
                    file = file or SegmentFile(files, root, salvaged_path(damaged.path))
                    file.write(payload)
                elif "made" in header and file is not None:
                    made = header["made"]
                    file.finish(int(made["size"]), int(made["crc"]), salvaged.written)
                    salvaged.segment = made_segment(damaged.table, file.path, damaged.parts, made)
                    file = None
    finally:
        job.close()
        if file is not None:
            with contextlib.suppress(OSError):
                file.abort()


def _of_group(damaged: Segment, lost: Mapping[str, Any]) -> Loss:
    reason = f"row group {int(lost['group'])} is set aside: {lost['why']}"
    times = (damaged.ts_min, damaged.ts_max)
    if lost["ts_min"] is not None:
        # The footer may be the damaged part.
        times = (max(times[0], int(lost["ts_min"])), min(times[1], int(lost["ts_max"])))
    return _loss(damaged, reason, min(damaged.rows, max(0, int(lost["rows"]))), times)


def _loss(damaged: Segment, reason: str, rows: int, times: tuple[int, int] | None = None) -> Loss:
    first, last = times if times and times[0] <= times[1] else (damaged.ts_min, damaged.ts_max)
    return Loss("store", damaged.table, "store", f"the segment {damaged.path}: {reason}", first, last, rows)
