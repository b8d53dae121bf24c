"""Appends records to the write-ahead log, begins and closes its parts, and syncs them."""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Callable, Mapping, Sequence

import pyarrow as pa

from probing.api.errors import FormatError, StoreError, StoreFull
from probing.daemon.clock import ClockPair
from probing.daemon.store.context import StoreContext
from probing.daemon.store.files import NO_SPACE, store_error
from probing.daemon.store.format import Positions
from probing.daemon.store.log.parts import WAL_DIR, PartWriter, part_path
from probing.daemon.store.log.records import PartHeader
from probing.daemon.store.maintenance.space import Space
from probing.daemon.store.recovery.directory import Recovered

__all__ = ("Appender",)

# A part is closed once its file has part_bytes, or its rows have this many times part_bytes before compression.
_RAW_FACTOR = 2


class Appender:
    """Appends records to the log. Thread-safe. ``wake`` is called when maintenance should run at once."""

    def __init__(
        self,
        context: StoreContext,
        node: str,
        space: Space,
        found: Recovered,
        part_bytes: int,
        wake: Callable[[], object],
    ) -> None:
        self.part_bytes = part_bytes
        self._context = context
        self._files = context.files
        self._state = context.state
        self._node = node
        self._space = space
        self._wake = wake
        self._appending = threading.Lock()
        self._syncing = threading.Lock()
        self._writer: PartWriter | None = None
        self._positions = found.positions
        self._next_sequence = found.next_sequence
        self._next_part = found.next_part
        # Descriptors of closed parts that are not synced yet. Only sync() and close() close descriptors.
        self._retired: list[int] = []
        # Number and length of the part that was synced last.
        self._synced: tuple[int, int] = (0, 0)
        # The number of the newest part, and the number of the newest part whose directory entry is synced.
        self._newest = self._newest_synced = 0
        self._closed = False

    @property
    def positions(self) -> Positions:
        """The ring positions in the last record of the log."""
        return {ring: position.copy() for ring, position in self._positions.items()}

    def append(self, batches: Mapping[str, Sequence[pa.RecordBatch]], positions: Positions, clock: ClockPair) -> None:
        """Writes one record, completely or not at all. See ``Store.append``."""
        with self._appending:
            if self._closed:
                raise StoreError("the store is closed")
            if self._state.full:
                self._make_space()
            merged = {**self._positions, **positions}
            try:
                self._write(batches, clock, merged)
            except OSError as first:
                self._end_part()
                if not self._can_retry(first):
                    raise self._failed(first) from first
                try:
                    self._write(batches, clock, merged)
                except OSError as e:
                    self._end_part()
                    raise self._failed(e) from e
            except FormatError:
                # After an error the part's Arrow streams are ahead of the file, so the part ends.
                self._end_part()
                raise
            self._state.problems.pop("append", None)

    def end_part(self) -> None:
        """Closes the live part: the next record begins a new one."""
        with self._appending:
            self._end_part()

    def sync(self) -> None:
        """Syncs all records appended so far, so that they survive a power cut. Raises StoreError."""
        with self._syncing:
            # The order matters: a part that is begun or closed during these reads is synced in the next round.
            newest, retired, writer = self._newest, list(self._retired), self._writer
            try:
                for fd in retired:
                    self._files.fsync(fd)
                    self._retired.remove(fd)
                    self._files.close(fd)
                # The writer may be retired meanwhile, but only this method closes its descriptor.
                if writer is not None and (written := (writer.part.number, writer.part.length)) != self._synced:
                    self._files.fsync(writer.fd)
                    self._synced = written
                if newest != self._newest_synced:
                    self._files.fsync_dir(self._context.root / WAL_DIR)
                    self._newest_synced = newest
            except OSError as e:
                self._state.problems["sync"] = f"the log cannot be synced: {e.strerror or e}"
                raise store_error(e, self._context.root) from e
            self._state.problems.pop("sync", None)

    def close(self) -> bool:
        """Ends the live part, syncs if possible and closes all descriptors. Returns False if already closed."""
        with self._appending:
            if self._closed:
                return False
            self._closed = True
            self._end_part()
            with contextlib.suppress(StoreError):
                self.sync()
            for fd in self._retired:
                self._files.close(fd)
            return True

    def _write(self, batches: Mapping[str, Sequence[pa.RecordBatch]], clock: ClockPair, positions: Positions) -> None:
        if self._writer is not None and not self._writer.takes(name for name, group in batches.items() if group):
            self._end_part()
        writer = self._writer or self._begin_part(clock)
        before = writer.part
        writer.append(batches, self._context.clock.boot_id, clock, positions)
        after = writer.part
        self._state.appended(before, after)
        self._positions = positions
        self._next_sequence = after.next_sequence
        if after.length >= self.part_bytes or after.raw_bytes >= self.part_bytes * _RAW_FACTOR:
            self._end_part()
            self._wake()

    def _begin_part(self, clock: ClockPair) -> PartWriter:
        header = PartHeader(self._next_part, self._next_sequence, self._node, clock.real_ns, self._positions)
        # Each number is used once: a part that could not be made may have left its file behind.
        self._next_part += 1
        path = part_path(self._context.root, header.number)
        self._writer = PartWriter(self._files, path, header, self._context.tables)
        self._newest = header.number
        return self._writer

    def _end_part(self) -> None:
        writer, self._writer = self._writer, None
        if writer is None:
            return
        self._retired.append(writer.fd)
        self._state.part_closed(writer.part if writer.has_records else None)
        if not writer.has_records:
            self._state.remove([writer.part.path])

    def _can_retry(self, e: OSError) -> bool:
        if e.errno == errno.ENOENT:
            # The directory was deleted. The next maintain() reports the rows that were lost with it.
            with contextlib.suppress(OSError):
                self._files.make_dir(self._context.root / WAL_DIR)
                self._wake()
                return True
        return e.errno in NO_SPACE and self._space.drop_oldest(self.part_bytes)

    def _make_space(self) -> None:
        with contextlib.suppress(StoreError):
            self._space.retain()
        if self._state.full:
            raise StoreFull(f"the state directory {self._context.root} is at its limit: {self._space.excess()}")

    def _failed(self, e: OSError) -> StoreError:
        error = store_error(e, self._context.root)
        self._state.problems["append"] = error.message
        return error
