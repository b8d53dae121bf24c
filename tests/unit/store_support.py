"""A file system in memory that fails, stops and loses power at chosen points, and small tables to store in it."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from probing.api.tables.schema import I64, NAME, TEXT, TIME, Column, Table, stored
from probing.daemon.clock import FakeClock
from probing.daemon.store.files import Files
from probing.daemon.store.maintenance.sealing import made_segment
from probing.daemon.store.manifest import Segment
from probing.daemon.store.segments.files import SegmentFile, segment_path
from probing.daemon.store.tasks.messages import Data, Made
from probing.daemon.store.tasks.segment_output import segment_steps

_COLUMNS = (
    Column("node", NAME, "Node."),
    Column("ts", TIME, "Time."),
    Column("id", I64, "Number of the row, never twice."),
    Column("name", NAME, "Some name."),
    Column("note", TEXT, "Some text."),
)
SMALL = Table("t.small", "Rows for tests.", _COLUMNS, stored(_COLUMNS), sort_by=("name", "ts"))
OTHER = Table("t.other", "More rows for tests.", _COLUMNS, stored(_COLUMNS))
TABLES = {t.name: t for t in (SMALL, OTHER)}
START_NS = 1_790_000_000_000_000_000


def rows(ids: Iterable[int], ts_ns: int = START_NS, table: Table = SMALL) -> pa.RecordBatch:
    """Returns a batch with these ids, one ns apart, and names that differ from batch to batch."""
    ids = list(ids)
    columns = {
        "node": ["n1"] * len(ids),
        "ts": [ts_ns + i for i in range(len(ids))],
        "id": ids,
        "name": [None if i % 7 == 0 else f"name-{i % 5}-{ids[0] // 20}" for i in ids],
        "note": [f"note {i}" for i in ids],
    }
    return pa.RecordBatch.from_arrays(
        [pa.array(columns[f.name], f.type) for f in table.physical], schema=table.physical
    )


def write_segment(files: Files, root: Path, table: str, date: str, parts: tuple[int, int], rows: pa.Table) -> Segment:
    """Writes a segment that no manifest names."""
    file = SegmentFile(files, root, segment_path(table, date, parts))
    made: Made | None = None
    for step in segment_steps(table, date, rows):
        if isinstance(step, Data):
            file.write(step.data)
        elif isinstance(step, Made):
            made = step
    assert made is not None
    file.finish(made.size, made.crc, set())
    return made_segment(table, file.path, parts, made)


def position(n: int) -> dict[str, dict[str, object]]:
    return {"ring": {"boot_id": "00000000-test", "map_id": 7, "position": n}}


def clock() -> FakeClock:
    return FakeClock(mono_ns=1_000_000_000, real_ns=START_NS)


# What a disk writes at once: small, so that small files have many.
PAGE = 64


class Crash(BaseException):
    """The process dies here; a BaseException, so that no handler of errors catches it."""


@dataclass(frozen=True)
class Torn:
    """Only the first ``kept`` bytes of a write (from its end, when negative) reach the file; raises ``error``."""

    kept: int
    error: BaseException


def io_error(number: int = errno.EIO) -> OSError:
    return OSError(number, os.strerror(number))


@dataclass
class Inode:
    """``sizes``: all sizes since the file was synced; after a power cut it may have any of them."""

    data: bytearray = field(default_factory=bytearray)
    durable: bytes = b""
    sizes: set[int] = field(default_factory=set)

    def resize(self) -> None:
        self.sizes.add(len(self.data))

    def sync(self) -> None:
        self.durable = bytes(self.data)
        self.sizes.clear()


Fault = Callable[[int, str, Path], "str | Torn | None"]


class MemoryFiles:
    """``fault(n, operation, path)`` is called before the n-th operation that changes something.

    It may raise, or return a ``Torn`` for a write, "short" (half of a write, then EIO), "whole" (all of it, then EIO)
    or "after" (the operation, then Crash).
    """

    def __init__(self) -> None:
        self.names: dict[Path, Inode] = {}
        self.durable_names: dict[Path, Inode] = {}
        self.dirs: set[Path] = set()
        self.durable_dirs: set[Path] = set()
        self.open: dict[int, tuple[Path, Inode]] = {}
        self.free = 1 << 40
        self.total = 1 << 40
        self.operations = 0
        self.fault: Fault | None = None
        self._next_fd = 1000

    def _step(self, operation: str, path: Path) -> str | Torn | None:
        self.operations += 1
        return self.fault(self.operations, operation, path) if self.fault else None

    def create(self, path: Path) -> int:
        after = self._step("create", path)
        if path in self.names:
            raise FileExistsError(errno.EEXIST, "exists", str(path))
        if path.parent not in self.dirs:
            raise FileNotFoundError(errno.ENOENT, "missing", str(path.parent))
        self._next_fd += 1
        self.names[path] = inode = Inode()
        self.open[self._next_fd] = (path, inode)
        _stop(after)
        return self._next_fd

    def write(self, fd: int, data: bytes | memoryview) -> int:
        path, inode = self.open[fd]
        after = self._step("write", path)
        # Half of it, when it is much: callers must go on with the rest.
        count, error = (len(data) if len(data) <= 4 * PAGE else len(data) // 2), None
        if isinstance(after, Torn):
            kept = after.kept if after.kept >= 0 else len(data) + after.kept
            count, error = max(0, min(kept, len(data))), after.error
        elif after in ("short", "whole"):
            count, error = len(data) if after == "whole" else len(data) // 2, io_error()
        elif len(data) > self.free:
            count, error = self.free, io_error(errno.ENOSPC)
        inode.data += data[:count]
        inode.resize()
        self.free -= min(count, self.free)
        if error is not None:
            raise error
        _stop(after)
        return count

    def truncate(self, fd: int, length: int) -> None:
        path, inode = self.open[fd]
        after = self._step("truncate", path)
        del inode.data[length:]
        inode.resize()
        _stop(after)

    def cut(self, path: Path, length: int) -> None:
        after = self._step("cut", path)
        inode = self._inode(path)
        del inode.data[length:]
        inode.sync()
        _stop(after)

    def fsync(self, fd: int) -> None:
        path, inode = self.open[fd]
        after = self._step("fsync", path)
        inode.sync()
        _stop(after)

    def close(self, fd: int) -> None:
        del self.open[fd]

    def read(self, path: Path, length: int | None = None, offset: int = 0) -> bytes:
        data = self._inode(path).data
        return bytes(data[offset : None if length is None else offset + length])

    def size(self, path: Path) -> int:
        return len(self._inode(path).data)

    def rename(self, source: Path, target: Path) -> None:
        after = self._step("rename", target)
        self.names[target] = self._inode(source)
        del self.names[source]
        _stop(after)

    def unlink(self, path: Path) -> None:
        after = self._step("unlink", path)
        inode = self.names.pop(path, None)
        if inode:
            self.free += len(inode.data)
        _stop(after)

    def listdir(self, path: Path) -> list[str]:
        inside = [p.relative_to(path).parts[0] for p in {*self.names, *self.dirs} if path in p.parents]
        return sorted(set(inside))

    def make_dir(self, path: Path) -> None:
        self.dirs |= {path, *path.parents}

    def fsync_dir(self, path: Path) -> None:
        after = self._step("fsync_dir", path)
        kept = {p: i for p, i in self.durable_names.items() if p.parent != path}
        self.durable_names = kept | {p: i for p, i in self.names.items() if p.parent == path}
        self.durable_dirs |= {d for d in self.dirs if d.parent == path}
        _stop(after)

    def space(self, path: Path) -> tuple[int, int]:
        return self.free, self.total

    def after_kill(self) -> MemoryFiles:
        """Returns the files that the next process finds: all that was written."""
        return self._next({p: bytes(i.data) for p, i in self.names.items()}, self.dirs)

    def after_power_cut(self, chance: random.Random) -> MemoryFiles:
        """Returns files that may be found after a power cut.

        Unsynced changes survive in any part and order: any page of a file, at any size that it had; any old or new name
        in a folder; any new folder.
        """
        # A store's own folder is there from its installation on.
        first = min((d for d in self.dirs if d.parent in d.parents), key=lambda d: len(d.parts), default=None)
        old = self.durable_dirs | {d for d in self.dirs if first is not None and len(d.parts) <= len(first.parts)}
        dirs = {d for d in self.dirs if d in old or chance.random() < 0.5}
        dirs = {d for d in dirs if all(parent in dirs for parent in d.parents)}
        found: dict[Path, bytes] = {}
        for path in sorted({*self.names, *self.durable_names}):
            now, then = self.names.get(path), self.durable_names.get(path)
            inode = now if now is then or chance.random() < 0.5 else then
            if inode is not None and path.parent in dirs:
                found[path] = _cut_off(inode, chance)
        return self._next(found, dirs)

    def _inode(self, path: Path) -> Inode:
        try:
            return self.names[path]
        except KeyError:
            raise FileNotFoundError(errno.ENOENT, "missing", str(path)) from None

    def _next(self, found: dict[Path, bytes], dirs: set[Path]) -> MemoryFiles:
        fresh = MemoryFiles()
        fresh.names = {path: Inode(bytearray(data), data) for path, data in found.items()}
        fresh.durable_names = dict(fresh.names)
        fresh.dirs, fresh.durable_dirs = set(dirs), set(dirs)
        return fresh


def _cut_off(inode: Inode, chance: random.Random) -> bytes:
    """Returns a file of which some unsynced pages reached the disk."""
    size = chance.choice(sorted({len(inode.durable), *inode.sizes}))
    if chance.random() < 0.5:
        size = min(size, max(len(inode.durable), chance.randint(0, len(inode.data) // PAGE + 1) * PAGE))
    found = bytearray(inode.durable[:size].ljust(size, b"\0"))
    likely = chance.choice((0.0, 0.5, 0.9, 1.0))
    for start in range(0, size, PAGE):
        page = bytes(inode.data[start : min(start + PAGE, size)])
        if chance.random() < likely:
            # A page may have been written before all of it was there.
            kept = len(page) if chance.random() < 0.8 else chance.randint(0, len(page))
            kept = max(kept, min(len(page), len(inode.durable) - start))
            found[start : start + kept] = page[:kept]
    return bytes(found)


def _stop(after: str | Torn | None) -> None:
    if after == "after":
        raise Crash
