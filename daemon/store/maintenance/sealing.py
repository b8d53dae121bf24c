"""Seals closed log parts once enough of them wait: a worker process decodes the parts and sends segments, and this
module writes the segments to files.
"""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from probing.api.errors import FormatError
from probing.daemon.source import Loss
from probing.daemon.store.context import StoreContext
from probing.daemon.store.files import NO_SPACE, store_error
from probing.daemon.store.log.parts import Part
from probing.daemon.store.maintenance.manifest_editor import ManifestEditor
from probing.daemon.store.maintenance.space import Space
from probing.daemon.store.manifest import Edit, Segment
from probing.daemon.store.segments.files import SegmentFile, is_date_dir, segment_path
from probing.daemon.store.tasks.messages import Data, Made, PartDecoded, SegmentBegun, Step
from probing.daemon.store.tasks.seal import pack_tables

__all__ = (
    "Sealer",
    "made_segment",
)

_MAX_GROUP_BYTES = 16 << 20
_MAX_GROUP_PARTS = 64


@dataclass(slots=True)
class _Sealed:
    """The result of sealing. ``written``: the files that may exist, even after an error."""

    segments: list[Segment] = field(default_factory=list)
    losses: list[Loss] = field(default_factory=list)
    written: set[Path] = field(default_factory=set)


def _group_parts(parts: Sequence[Part]) -> list[list[Part]]:
    """Returns groups of neighbours to seal together: the small parts that restarts leave become one segment."""
    groups: list[list[Part]] = []
    size = 0
    for part in parts:
        if not groups or size + part.raw_bytes > _MAX_GROUP_BYTES or len(groups[-1]) == _MAX_GROUP_PARTS:
            groups.append([])
            size = 0
        groups[-1].append(part)
        size += part.raw_bytes
    return groups


def _seal_parts(context: StoreContext, parts: Sequence[Part], now_ns: int, sealed: _Sealed) -> None:
    """Writes the rows of ``parts`` as segments and adds them to ``sealed``.

    The segments are valid once the manifest names them. Raises OSError, WorkerFailed, or FormatError when a segment
    cannot be written correctly.
    """
    present = []
    for part in parts:
        try:
            context.files.size(part.path)
            present.append(part)
        except FileNotFoundError as e:
            sealed.losses.extend(_losses(part, part.rows, f"it cannot be read: {e}", now_ns, now_ns))
    if not present:
        return
    tables = {name: context.tables[name] for part in present for name in part.rows if name in context.tables}
    task = context.worker.start(
        "seal",
        [(part.path, part.length) for part in present],
        lengths=[part.length for part in present],
        tables=pack_tables(tables),
    )
    writing = _Writing(context, present, now_ns, sealed)
    try:
        while not task.done:
            for step in task.turn():
                writing.take(step)
        writing.check()
    finally:
        task.close()
        writing.close()


class _Writing:
    """Executes the steps of a sealing task. Refuses segments of tables or parts that were not given to the task."""

    def __init__(self, context: StoreContext, parts: Sequence[Part], now_ns: int, sealed: _Sealed) -> None:
        self._context = context
        self._parts = parts
        self._now_ns = now_ns
        self._sealed = sealed
        self._numbers = (parts[0].number, parts[-1].number)
        # The number of decoded rows, by table, that are in no segment yet.
        self._left: dict[str, int] = {}
        self._file: SegmentFile | None = None
        self._table = ""

    def take(self, step: Step) -> None:
        match step:
            case Data(data) if self._file is not None:
                self._file.write(data)
            case PartDecoded():
                self._decoded(step)
            case SegmentBegun(table, date) if table in self._left and is_date_dir(f"date={date}"):
                self._table = table
                path = segment_path(table, date, self._numbers)
                self._file = SegmentFile(self._context.files, self._context.root, path, self._context.synced)
            case Made() if self._file is not None:
                self._file.finish(step.size, step.crc, self._sealed.written)
                self._left[self._table] -= step.rows
                self._sealed.segments.append(made_segment(self._table, self._file.path, self._numbers, step))
                self._file = None
            case _:
                raise FormatError(f"a sealing task sent an unexpected message: {type(step).__name__}")

    def check(self) -> None:
        """Raises FormatError if decoded rows are missing from the segments."""
        if self._file is not None or any(self._left.values()):
            raise FormatError(f"log parts {self._numbers} have decoded rows that are in no segment")

    def close(self) -> None:
        """Removes an unfinished segment."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.abort()

    def _decoded(self, step: PartDecoded) -> None:
        if not 0 <= step.part < len(self._parts):
            raise FormatError(f"a sealing task of {len(self._parts)} log parts answered for part {step.part}")
        part = self._parts[step.part]
        for name, count in step.rows.items():
            self._left[name] = self._left.get(name, 0) + count
        missing = {name: n - step.rows.get(name, 0) for name, n in part.rows.items() if n > step.rows.get(name, 0)}
        start = step.created_ns or self._now_ns
        self._sealed.losses.extend(_losses(part, missing, step.problem, start, self._now_ns))


def made_segment(table: str, path: str, parts: tuple[int, int], made: Made) -> Segment:
    """Returns the manifest's entry of a finished segment. Raises FormatError if the task sent no times."""
    if made.ts_min is None or made.ts_max is None:
        raise FormatError(f"the segment {path} has no times")
    return Segment(table, path, made.size, made.crc, made.rows, made.ts_min, made.ts_max, parts, made.jobs)


def _losses(part: Part, rows: Mapping[str, int], reason: str, start: int, end: int) -> Iterable[Loss]:
    for name, count in rows.items():
        yield Loss("store", name, "log", f"log part {part.number}: {reason}", min(start, end), end, count)


_MAX_CLOSED_PARTS = 16
# Sealing is behind while at least this many times part_bytes wait to be sealed.
_BEHIND_PARTS = 3


class Sealer:
    """Seals log parts. Thread-safe."""

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
        """Seals closed parts if there are enough; with ``now`` even if there are few. Returns the number of sealed
        parts. Raises StoreError.
        """
        with self._sealing:
            parts = self._state.closed_parts
            enough = self._waiting_bytes() >= self._space.limits.part_bytes or len(parts) >= _MAX_CLOSED_PARTS
            if not parts or not (now or enough):
                return 0
            try:
                for group in _group_parts(parts):
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
        sealed = _Sealed()
        try:
            with contextlib.ExitStack() as failed:
                failed.callback(self._editor.add_leftovers, sealed.written)
                # The editor's lock, for which appending may wait, is not held: sealing can take long.
                _seal_parts(self._context, group, self._context.clock.pair().real_ns, sealed)
                failed.pop_all()
        except (pa.ArrowException, FormatError) as e:
            # A part that cannot be sealed must not keep all later parts in the log: it is set aside.
            if len(group) == 1:
                self._give_up(group[0], str(e))
                return
            for part in group:
                self._seal_group([part])
            return
        with self._editor.lock:
            self._editor.add_leftovers(sealed.written)
            if not all(map(self._editor.is_written, sealed.segments)):
                raise FileNotFoundError(errno.ENOENT, "a new segment was removed")
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
