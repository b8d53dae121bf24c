"""Compaction: merges small neighbouring segments, a little at each turn.

Under load sealing makes a segment of each table every few seconds. Neighbours are merged once they are together many
times the size of the largest one, so that each row is rewritten two or three times until its segment is full.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import pyarrow as pa

from probing.api.errors import FormatError
from probing.daemon.store.context import StoreContext
from probing.daemon.store.disk_errors import NO_SPACE
from probing.daemon.store.log.parts import WAL_DIR
from probing.daemon.store.maintenance.manifest_editor import ManifestEditor
from probing.daemon.store.maintenance.merge_candidates import choose
from probing.daemon.store.maintenance.merging import Merge
from probing.daemon.store.maintenance.quarantine import Quarantine
from probing.daemon.store.maintenance.space import Space
from probing.daemon.store.manifest import Segment
from probing.daemon.store.tasks.worker import WorkerFailed

__all__ = ("Compactor",)

# The time for one turn.
_TURN_NS = 500_000_000
# The pause after a merge that failed.
_REST_NS = 60 * 1_000_000_000
# Segments whose merge fails the worker this often in a row are checked, and stay as they are if they are good.
_MAX_FAILURES = 3


class Compactor:
    """``turn`` and ``stop`` are called by one thread at a time."""

    def __init__(self, context: StoreContext, editor: ManifestEditor, space: Space, quarantine: Quarantine) -> None:
        self._context = context
        self._state = context.state
        self._editor = editor
        self._space = space
        self._quarantine = quarantine
        self._merge: Merge | None = None
        # Paths of good segments that do not fit together.
        self._unfit: set[str] = set()
        # Until then no merge is tried, monotonic.
        self._rest_until_ns = 0
        # Merges in a row that ended or blocked the worker.
        self._failures = 0

    def turn(self) -> int:
        """Merges for half a second; returns how many merges were finished.

        A merge that fails is in the state's ``problems`` and is tried again later; no row depends on it.
        """
        start = self._context.clock.pair().mono_ns
        finished = 0
        try:
            while start >= self._rest_until_ns and self._has_merge():
                finished += self._step()
                if self._context.clock.pair().mono_ns - start >= _TURN_NS:
                    break
        except WorkerFailed as e:
            self._failures += not e.resting
            self._rest_until_ns = start + _REST_NS
            if self._failures < _MAX_FAILURES:
                self.stop()
            else:
                self._failures = 0
                self._check_sources(str(e))
        except (FormatError, FileNotFoundError, pa.ArrowException) as e:
            self._check_sources(str(e))
        except OSError as e:
            self._rest_until_ns = start + _REST_NS
            if e.errno not in NO_SPACE:
                self._state.problems["compaction"] = f"segments cannot be merged: {e.strerror or e}"
            self.stop()
        return finished

    def stop(self) -> None:
        """Gives up the merge in progress and removes its file."""
        merge, self._merge = self._merge, None
        self._state.merging_bytes = 0
        if merge is not None:
            with contextlib.suppress(OSError):
                merge.abort()

    def _has_merge(self) -> bool:
        merge = self._merge
        if merge is not None:
            # Retention and damage remove segments at any time, and other writers use up space.
            there = all(self._state.segment(s.path) is s for s in merge.sources)
            if there and self._space.room() >= _size(merge.sources) - merge.written:
                return True
            self.stop()
        state, now = self._state, self._context.clock.pair().real_ns
        sources = choose(state.segments, self._space.limits, now, state.first_part, self._unfit)
        if not sources or self._space.room() < _size(sources):
            return False
        self._merge = Merge(self._context, sources)
        return True

    def _step(self) -> int:
        merge = self._merge
        assert merge is not None
        merged = merge.step()
        self._state.merging_bytes = merge.written
        if merged is None:
            return 0
        # Else a removed log part could come back with a power cut, and its rows would look unsealed.
        self._context.files.fsync_dir(self._context.root / WAL_DIR)
        self._merge = None
        self._failures = 0
        self._state.merging_bytes = 0
        self._state.problems.pop("compaction", None)
        return int(self._editor.replace(merge.sources, merged))

    def _check_sources(self, reason: str) -> None:
        sources = self._merge.sources if self._merge else ()
        self.stop()
        # Damaged sources are set aside; the others become neighbours.
        bad = [s for s in sources if self._quarantine.check(s.path, reason)]
        known = {s.path for s in self._state.segments}
        if not bad and known.issuperset(s.path for s in sources):
            self._unfit.update(s.path for s in sources)
        self._unfit &= known


def _size(segments: Iterable[Segment]) -> int:
    return sum(s.size for s in segments)
