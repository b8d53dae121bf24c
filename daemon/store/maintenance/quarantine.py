"""Checks sealed segments, and sets damaged ones aside with what can be salvaged of them."""

from __future__ import annotations

from collections import deque

from probing.daemon.store.context import StoreContext
from probing.daemon.store.maintenance.manifest_editor import ManifestEditor
from probing.daemon.store.maintenance.salvaging import salvage
from probing.daemon.store.segments.reader import check_segment
from probing.daemon.store.tasks.worker import WorkerFailed

__all__ = ("Quarantine",)

_SCRUB_INTERVAL_NS = 24 * 3_600 * 1_000_000_000
# Bytes of segments that each call of ``scrub`` checks on average.
_SCRUB_BYTES = 16 << 20


class Quarantine:
    """Safe to call from any thread."""

    def __init__(self, context: StoreContext, editor: ManifestEditor) -> None:
        self._context = context
        self._state = context.state
        self._editor = editor
        self._unchecked = deque(s.path for s in context.state.segments)
        self._scrubbed_ns = context.clock.pair().mono_ns
        self._scrub_bytes = 0

    def check_all(self) -> list[str]:
        """Checks all segments and sets bad ones aside; returns "PATH: PROBLEM" of each bad one."""
        paths = [s.path for s in self._state.segments]
        return [f"{path}: {problem}" for path in paths if (problem := self.check(path, ""))]

    def scrub(self) -> None:
        """Checks the next segment, when one is due."""
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
        """Sets the segment ``path`` aside if it is bad. Returns its problem; empty when it is good or gone.

        ``suspicion`` is the reader's error that led to the check.
        """
        context, segment = self._context, self._state.segment(path)
        # Without the lock: a segment can be large.
        problem = check_segment(context.files, context.root, segment) if segment else ""
        if not problem or segment is None:
            return ""
        try:
            salvaged = salvage(context, segment, f"{problem} ({suspicion})" if suspicion else problem)
        except (OSError, WorkerFailed) as e:
            self._state.problems["salvage"] = f"the segment {path} is damaged, and set aside later: {e}"
            with self._editor.lock:
                self._unchecked.append(path)
            return problem
        self._state.problems.pop("salvage", None)
        with self._editor.lock:
            self._editor.add_leftovers(salvaged.written)
            # Meanwhile it may have been dropped, or merged with others.
            if self._state.segment(path) is not segment:
                self._editor.try_commit()
                return ""
            self._editor.set_aside(segment, salvaged.segment, salvaged.losses)
            return problem
