"""Writes a segment's file so that it is complete and synced, or not there."""

from __future__ import annotations

import zlib
from pathlib import Path

from probing.api.errors import FormatError
from probing.daemon.store.files import Files, checksum, write_all

__all__ = ("SegmentFile",)


class SegmentFile:
    """A segment while it is written, under a temporary name until ``finish``. ``path`` is relative to ``root``.

    Calls raise OSError; after an error only ``abort`` may be called.
    """

    def __init__(self, files: Files, root: Path, path: str) -> None:
        self._files = files
        self._root = root
        self._target = root / path
        self._aside = self._target.with_name(f"{self._target.name}.tmp")
        self.path = path
        self.size = self._crc = 0
        files.make_dir(self._target.parent)
        files.unlink(self._aside)
        self._fd: int | None = files.create(self._aside)

    def write(self, data: bytes | memoryview) -> None:
        assert self._fd is not None
        write_all(self._files, self._fd, data)
        self._crc = zlib.crc32(data, self._crc)
        self.size += len(data)

    def finish(self, size: int, crc: int, written: set[Path]) -> None:
        """Syncs the file, reads it back, renames it, and syncs the folders.

        Adds it to ``written`` before it can exist under its name. Raises FormatError when the bytes read back differ
        from ``size`` or ``crc``.
        """
        assert self._fd is not None
        self._files.fsync(self._fd)
        self._close()
        if not (size, crc) == (self.size, self._crc) == checksum(self._files, self._aside):
            raise FormatError(f"the segment {self.path} reads back differently than it was written")
        written.add(self._target)
        self._files.rename(self._aside, self._target)
        for folder in (self._target.parent, self._target.parent.parent, self._root):
            self._files.fsync_dir(folder)

    def abort(self) -> None:
        """Removes the unfinished file."""
        self._close()
        self._files.unlink(self._aside)

    def _close(self) -> None:
        if self._fd is not None:
            fd, self._fd = self._fd, None
            self._files.close(fd)
