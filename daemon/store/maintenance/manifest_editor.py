"""Edits the manifest of an open store, and keeps files and state consistent with it."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from probing.daemon.source import Loss
from probing.daemon.store.context import StoreContext
from probing.daemon.store.log.parts import WAL_DIR, Part
from probing.daemon.store.manifest import MANIFEST, Edit, Manifest, Segment
from probing.daemon.store.recovery.set_aside import SetAside

__all__ = ("ManifestEditor",)

_log = logging.getLogger(__name__)


class ManifestEditor:
    """Edits the manifest. Thread-safe. ``lock`` is held during an edit and the corresponding change of state.

    The error of a failed edit is in ``state.problems`` until an edit succeeds.
    """

    def __init__(self, context: StoreContext, manifest: Manifest, aside: SetAside) -> None:
        self._context = context
        self._state = context.state
        self._root = context.root
        self._manifest = manifest
        self._aside = aside
        self.lock = threading.RLock()
        # Files that may exist although the manifest does not name them.
        self._leftovers: set[Path] = set()
        # Paths that the manifest still names although their files are gone.
        self._gone: set[str] = set()

    def commit(self, edit: Edit) -> None:
        """Writes ``edit`` and the pending drops, and removes leftover files. Raises OSError."""
        with self.lock:
            self._manifest.commit(edit._replace(drop=(*edit.drop, *self._gone)))
            self._gone.clear()
            self._state.problems.pop("manifest", None)
            named = {self._root / path for path in self._manifest.state.segments}
            leftovers, self._leftovers = self._leftovers - named, set()
            self._state.remove(leftovers)

    def try_commit(self, edit: Edit = Edit()) -> bool:  # noqa: B008
        """Tries to write ``edit``, and returns whether that succeeded. After a failure retention tries the pending
        drops again.
        """
        try:
            self.commit(edit)
        except OSError as e:
            self._state.problems["manifest"] = f"the manifest cannot be written: {e.strerror or e}"
            return False
        return True

    def add_leftovers(self, paths: Iterable[Path]) -> None:
        """Requests that ``paths`` are removed after the next edit, except paths that the manifest names by then."""
        with self.lock:
            self._leftovers.update(paths)

    def is_written(self, segment: Segment) -> bool:
        """Returns whether the file of a new ``segment`` exists. If an earlier attempt used the same name, another
        thread's edit may have removed the file as a leftover. The answer is valid only while ``lock`` is held.
        """
        try:
            return self._context.files.size(self._root / segment.path) == segment.size
        except FileNotFoundError:
            return False

    def drop(self, doomed: Sequence[Segment]) -> None:
        """Drops segments: first from the manifest, then their files. Raises OSError."""
        if doomed:
            self.commit(Edit(drop=tuple(s.path for s in doomed)))
            self._forget(doomed)

    def drop_files_first(self, doomed: Sequence[Segment]) -> None:
        """Drops segments on a full disk, where the manifest can be written only after files are gone."""
        self._gone.update(s.path for s in doomed)
        self._forget(doomed)
        self.try_commit()

    def replace(self, sources: Sequence[Segment], merged: Segment) -> bool:
        """Puts ``merged`` in place of ``sources`` in one edit. Returns False if a source, or the file of ``merged``,
        was removed meanwhile.

        In that case, and after an OSError, ``merged`` is removed once it is certain that the manifest does not name it.
        """
        with self.lock:
            self._leftovers.add(self._root / merged.path)
            present = all(self._state.segment(s.path) is s for s in sources)
            if not present or not self.is_written(merged):
                self.try_commit()
                return False
            self.commit(Edit((merged,), tuple(s.path for s in sources)))
            self._state.merged(sources, merged)
        self._state.remove(self._root / s.path for s in sources)
        return True

    def set_aside(self, damaged: Segment, rest: Segment | None, losses: Iterable[Loss]) -> None:
        """Moves ``damaged`` to ``corrupt/`` and puts ``rest``, the segment of its good rows, in its place.

        If the file of ``rest`` is gone, ``damaged`` stays and will be checked again.
        """
        if rest and not self.is_written(rest):
            return
        self._gone.add(damaged.path)
        if not self.try_commit(Edit((rest,)) if rest else Edit()) and rest:
            # The manifest does not name the good rows, so the damaged segment stays and will be checked again.
            self._gone.discard(damaged.path)
            return
        self._state.set_aside(damaged, rest)
        self.move_aside(self._root / damaged.path)
        self._state.add_losses(losses)

    def move_aside(self, path: Path) -> None:
        """Moves a bad file to ``corrupt/``, if that is possible."""
        with contextlib.suppress(OSError):
            self._aside.move(path)
            self._state.set_aside_bytes = self._aside.bytes

    def is_deleted(self) -> bool:
        """Returns whether the state directory, its log or its manifest was deleted."""
        names = self._context.files.listdir(self._root)
        # On a full disk the first manifest may not have been written yet.
        return WAL_DIR not in names or (MANIFEST not in names and "manifest" not in self._state.problems)

    def remake(self) -> None:
        """Writes the manifest of a deleted directory again. The rows of missing files are losses. Raises OSError."""
        with self.lock:
            now = self._context.clock.pair().real_ns
            segments = [s for s in self._state.segments if self._is_missing(self._root / s.path)]
            parts = [p for p in self._state.closed_parts if self._is_missing(p.path)]
            self._manifest.close()
            self._gone.update(s.path for s in segments)
            self.commit(Edit())
            self._state.vanished(segments, parts)
        losses = list(_losses_of(segments, parts, now))
        self._state.add_losses(losses)
        rows = sum(loss.count or 0 for loss in losses)
        _log.error("the state directory %s was deleted: it is made again, %d rows are lost", self._root, rows)

    def close(self) -> None:
        with self.lock:
            self._manifest.close()

    def _is_missing(self, path: Path) -> bool:
        try:
            self._context.files.size(path)
        except OSError:
            return True
        return False

    def _forget(self, doomed: Sequence[Segment]) -> None:
        self._state.dropped(doomed)
        self._state.remove(self._root / s.path for s in doomed)


def _losses_of(segments: Sequence[Segment], parts: Sequence[Part], now: int) -> Iterator[Loss]:
    reason = "the state directory was deleted"
    for table in sorted({s.table for s in segments}):
        missing = [s for s in segments if s.table == table]
        first, last = min(s.ts_min for s in missing), max(s.ts_max for s in missing)
        yield Loss("store", table, "store", reason, first, last, sum(s.rows for s in missing))
    for part in parts:
        for table, count in part.rows.items():
            yield Loss("store", table, "log", f"log part {part.number}: {reason}", now, now, count)
