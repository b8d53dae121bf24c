"""Checks sealed segments, and sets damaged segments aside: their readable row groups become a segment, and each
unreadable row group becomes a loss.
"""

from __future__ import annotations

import contextlib
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from probing.api.errors import FormatError
from probing.daemon.source import Loss
from probing.daemon.store.context import StoreContext
from probing.daemon.store.files import TRANSIENT
from probing.daemon.store.maintenance.manifest_editor import ManifestEditor
from probing.daemon.store.maintenance.sealing import made_segment
from probing.daemon.store.manifest import Segment
from probing.daemon.store.segments.files import SegmentFile, salvaged_path
from probing.daemon.store.segments.reader import check_segment
from probing.daemon.store.tasks.messages import Data, LostGroup, Made
from probing.daemon.store.tasks.worker import WorkerFailed

__all__ = (
    "Quarantine",
    "salvage",
)


@dataclass(slots=True)
class _Salvaged:
    """The result of salvaging. ``segment``: the segment of the good rows, None if no row is good. ``losses``: the rows
    that are lost. ``written``: the file of ``segment``.
    """

    segment: Segment | None = None
    losses: list[Loss] = field(default_factory=list)
    written: set[Path] = field(default_factory=set)


def salvage(context: StoreContext, damaged: Segment, problem: str) -> _Salvaged:
    """Salvages the readable rows of ``damaged``, and returns the result. ``problem``: what is wrong with ``damaged``.
    Rows that cannot be read are losses.

    Raises OSError and WorkerFailed if the segment is not the cause: another try may succeed.
    """
    salvaged = _Salvaged()
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


def _salvage(context: StoreContext, damaged: Segment, salvaged: _Salvaged) -> None:
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
                    file = file or SegmentFile(context.files, context.root, salvaged_path(damaged.path), context.synced)
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
        # The damage may be in the footer, so the times from the footer are not trusted.
        times = (max(times[0], lost.ts_min), min(times[1], lost.ts_max))
    return _loss(damaged, reason, min(damaged.rows, max(0, lost.rows)), times)


def _loss(damaged: Segment, reason: str, rows: int, times: tuple[int, int] | None = None) -> Loss:
    first, last = times if times and times[0] <= times[1] else (damaged.ts_min, damaged.ts_max)
    return Loss("store", damaged.table, "store", f"the segment {damaged.path}: {reason}", first, last, rows)


_SCRUB_INTERVAL_NS = 24 * 3_600 * 1_000_000_000
# Each call of ``scrub`` checks at most this many bytes of segments on average.
_SCRUB_BYTES = 16 << 20


class Quarantine:
    """Checks segments and sets bad segments aside. Thread-safe."""

    def __init__(self, context: StoreContext, editor: ManifestEditor) -> None:
        self._context = context
        self._state = context.state
        self._editor = editor
        self._unchecked = deque(s.path for s in context.state.segments)
        self._scrubbed_ns = context.clock.pair().mono_ns
        self._scrub_bytes = 0
        # The paths of the segments that are being salvaged now.
        self._salvaging: set[str] = set()

    def check_all(self) -> list[str]:
        """Checks all segments and sets bad segments aside; returns "PATH: PROBLEM" of each bad segment."""
        paths = [s.path for s in self._state.segments]
        return [f"{path}: {problem}" for path in paths if (problem := self.check(path, ""))]

    def scrub(self) -> None:
        """Checks the next segment, if a check is due."""
        with self._editor.lock:
            now = self._context.clock.pair().mono_ns
            if not self._unchecked and now - self._scrubbed_ns > _SCRUB_INTERVAL_NS:
                self._unchecked, self._scrubbed_ns = deque(s.path for s in self._state.segments), now
            segment = self._state.segment(self._unchecked[0]) if self._unchecked else None
            self._scrub_bytes = _SCRUB_BYTES + min(self._scrub_bytes, segment.size if segment else 0)
            if not self._unchecked or (segment and segment.size > self._scrub_bytes):
                return
            self._scrub_bytes = 0
            path = self._unchecked.popleft()
        self.check(path, "")

    def check(self, path: str, suspicion: str) -> str:
        """Checks the segment ``path``, and sets it aside if it is bad. Returns the problem of the segment; empty if the
        segment is good or gone.

        ``suspicion`` is the reader's error that led to the check.
        """
        context, segment = self._context, self._state.segment(path)
        # The lock is not held, since a check of a large segment takes long.
        problem = check_segment(context.files, context.root, segment) if segment else ""
        if not problem or segment is None:
            self._state.problems.pop(_subject(path), None)
            return ""
        with self._editor.lock:
            if path in self._salvaging:
                # Another thread already salvages the segment; both would write the same file.
                return problem
            self._salvaging.add(path)
        try:
            return self._set_aside(segment, problem, suspicion)
        finally:
            with self._editor.lock:
                self._salvaging.discard(path)

    def _set_aside(self, segment: Segment, problem: str, suspicion: str) -> str:
        """Salvages the damaged ``segment`` and sets it aside. Returns ``problem``, or "" if the segment is gone."""
        path = segment.path
        try:
            salvaged = salvage(self._context, segment, f"{problem} ({suspicion})" if suspicion else problem)
        except (OSError, WorkerFailed) as e:
            self._state.problems[_subject(path)] = f"the segment {path} is damaged, and will be set aside later: {e}"
            with self._editor.lock:
                if path not in self._unchecked:
                    self._unchecked.append(path)
            return problem
        self._state.problems.pop(_subject(path), None)
        with self._editor.lock:
            self._editor.add_leftovers(salvaged.written)
            # The segment may have been dropped meanwhile, or merged with other segments.
            if self._state.segment(path) is not segment:
                self._editor.try_commit()
                return ""
            self._editor.set_aside(segment, salvaged.segment, salvaged.losses)
            if self._state.segment(path) is segment and path not in self._unchecked:
                self._unchecked.append(path)
            return problem


def _subject(path: str) -> str:
    return f"salvage of {path}"
