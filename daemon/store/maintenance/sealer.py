"""Seals closed log parts into segments when enough have gathered."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pyarrow as pa

from probing.api.errors import FormatError
from probing.daemon.source import Loss
from probing.daemon.store.context import StoreContext
from probing.daemon.store.disk_errors import NO_SPACE, store_error
from probing.daemon.store.log.parts import Part
from probing.daemon.store.maintenance.manifest_editor import ManifestEditor
from probing.daemon.store.maintenance.sealing import Sealed, group_parts, seal_parts
from probing.daemon.store.maintenance.space import Space
from probing.daemon.store.manifest import Edit, Segment

__all__ = ("Sealer",)

_MAX_CLOSED_PARTS = 16
# Merging waits while this many times part_bytes wait to be sealed.
_BEHIND_PARTS = 3


class Sealer:
    """Safe to call from any thread."""

    def __init__(self, context: StoreContext, editor: ManifestEditor, space: Space) -> None:
        self._context = context
        self._state = context.state
        self._editor = editor
        self._space = space
        self._sealing = threading.Lock()

    @property
    def is_behind(self) -> bool:
        """Whether the log grows faster than it is sealed."""
        return self._waiting_bytes() >= _BEHIND_PARTS * self._space.limits.part_bytes

    def seal(self, now: bool) -> int:
        """Seals the closed parts, with ``now`` also when they are few; returns how many. Raises StoreError."""
        with self._sealing:
            parts = self._state.closed_parts
            enough = self._waiting_bytes() >= self._space.limits.part_bytes or len(parts) >= _MAX_CLOSED_PARTS
            if not parts or not (now or enough):
                return 0
            try:
                for group in group_parts(parts):
                    self._seal_group(group)
            except OSError as e:
                self._state.problems["seal"] = f"log parts cannot be sealed: {e.strerror or e}"
                if e.errno in NO_SPACE:
                    self._space.drop_oldest(self._space.limits.part_bytes)
                raise store_error(e, self._context.root) from e
            self._state.problems.pop("seal", None)
            return len(parts)

    def _waiting_bytes(self) -> int:
        return sum(p.raw_bytes for p in self._state.closed_parts)

    def _seal_group(self, group: list[Part]) -> None:
        sealed = Sealed()
        try:
            # Without the editor's lock, which appending may wait for: this can take long.
            seal_parts(self._context, group, self._context.clock.pair().real_ns, sealed)
        except (pa.ArrowException, FormatError) as e:
            # One part that cannot be sealed must not keep all later ones in the log.
            if len(group) == 1:
                self._give_up(group[0], str(e))
                return
            for part in group:
                self._seal_group([part])
            return
        finally:
            self._editor.add_leftovers(sealed.written)
        with self._editor.lock:
            self._editor.commit(_sealed_edit(group[-1], sealed.segments))
            self._state.sealed(group, sealed.segments, sealed.losses)
        self._state.remove(p.path for p in group)

    def _give_up(self, part: Part, problem: str) -> None:
        self._editor.commit(_sealed_edit(part, ()))
        now = self._context.clock.pair().real_ns
        reason = f"log part {part.number} cannot be sealed: {problem}"
        losses = [Loss("store", name, "log", reason, now, now, count) for name, count in part.rows.items()]
        self._state.sealed([part], (), losses)
        self._editor.move_aside(part.path)


def _sealed_edit(last: Part, segments: Sequence[Segment]) -> Edit:
    return Edit(tuple(segments), sealed_to=last.number, next_sequence=last.next_sequence, positions=last.positions)
