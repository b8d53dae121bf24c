"""Files of segments: TABLE/date=DATE/FIRST-LAST.parquet, where FIRST and LAST are the numbers of the first and last log
part of their rows.

A file is either complete and synced, or does not exist.
"""

from __future__ import annotations

import re
import zlib
from pathlib import Path

from probing.api.errors import FormatError
from probing.daemon.store.files import Files, checksum, write_all

__all__ = (
    "SegmentFile",
    "is_date_dir",
    "salvaged_path",
    "segment_parts",
    "segment_path",
)

# Numbers of log parts are below 10^11, so the first of their twelve digits is 0.
_NAME = re.compile(r"(0\d{11})-(0\d{11})(?:-s[1-9]\d?)?\.parquet", re.ASCII)
_DATE_DIR = re.compile(r"date=\d{4}-\d{2}-\d{2}", re.ASCII)
_MAX_SALVAGES = 99


def segment_path(table: str, date: str, parts: tuple[int, int]) -> str:
    """Returns the path of a segment relative to the state directory."""
    return f"{table}/date={date}/{parts[0]:012d}-{parts[1]:012d}.parquet"


def salvaged_path(path: str) -> str:
    """Returns the path for the good rows of the segment ``path``: its name with ``-s1``, the next time with ``-s2``.

    Raises FormatError after ``-s99``.
    """
    stem, _, times = path.removesuffix(".parquet").partition("-s")
    if int(times or 0) >= _MAX_SALVAGES:
        raise FormatError(f"{path} was salvaged {_MAX_SALVAGES} times already")
    return f"{stem}-s{int(times or 0) + 1}.parquet"


def segment_parts(name: str) -> tuple[int, int] | None:
    """Returns the first and last log part in a segment's file name; None for other files."""
    match = _NAME.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


def is_date_dir(name: str) -> bool:
    """Returns whether a folder of this name contains the segments of one date."""
    return _DATE_DIR.fullmatch(name) is not None


class SegmentFile:
    """A segment while it is written. It has a temporary name until ``finish``. ``path`` is relative to ``root``.

    ``synced``: the date folders whose entries in their parent folders are already synced; ``finish`` adds to the set.
    Calls raise OSError; after an error only ``abort`` may be called.
    """

    def __init__(self, files: Files, root: Path, path: str, synced: set[Path] | None = None) -> None:
        self._files = files
        self._synced = set[Path]() if synced is None else synced
        self._root = root
        self._target = root / path
        self._aside = self._target.with_name(f"{self._target.name}.tmp")
        self.path = path
        self.size = self._crc = 0
        folder = self._target.parent
        if folder.name not in files.listdir(folder.parent):
            # Another program may have deleted the folder, so the new folder has to be synced again.
            self._synced.discard(folder)
        files.make_dir(folder)
        files.unlink(self._aside)
        self._fd: int | None = files.create(self._aside)

    def write(self, data: bytes | memoryview) -> None:
        assert self._fd is not None
        write_all(self._files, self._fd, data)
        self._crc = zlib.crc32(data, self._crc)
        self.size += len(data)

    def finish(self, size: int, crc: int, written: set[Path]) -> None:
        """Syncs the file, reads it back, renames it, and syncs the folders.

        Adds the file to ``written`` before the file can exist under its name. Raises FormatError when the bytes read
        back differ from ``size`` or ``crc``.
        """
        assert self._fd is not None
        self._files.fsync(self._fd)
        self._close()
        if not (size, crc) == (self.size, self._crc) == checksum(self._files, self._aside):
            raise FormatError(f"the bytes read back from the segment {self.path} differ from the written bytes")
        written.add(self._target)
        self._files.rename(self._aside, self._target)
        folder = self._target.parent
        self._files.fsync_dir(folder)
        if folder not in self._synced:
            self._files.fsync_dir(folder.parent)
            self._files.fsync_dir(self._root)
            self._synced.add(folder)

    def abort(self) -> None:
        """Removes the unfinished file."""
        self._close()
        self._files.unlink(self._aside)

    def _close(self) -> None:
        if self._fd is not None:
            fd, self._fd = self._fd, None
            self._files.close(fd)
