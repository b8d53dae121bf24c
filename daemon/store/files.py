"""The store's calls to the file system, as a protocol so that tests can make each call fail. ``store_error`` turns an
OSError into an error of the store.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
import zlib
from pathlib import Path
from typing import Protocol

from probing.api.errors import FormatError, StoreError, StoreFull

__all__ = (
    "FILE_MODE",
    "NO_SPACE",
    "TRANSIENT",
    "FileReader",
    "Files",
    "SystemFiles",
    "checksum",
    "open_file",
    "read_file",
    "store_error",
    "write_all",
)

# SQL workers of the same group read the files. The set-group-id bit gives a new file the group of its directory.
FILE_MODE = 0o640
_DIR_MODE = 0o2750
_CHECKED_AT_ONCE = 1 << 20


class Files(Protocol):
    """A file system. Calls raise OSError; ``write`` may write fewer bytes than it gets, and returns their number."""

    def create(self, path: Path) -> int:
        """Creates a file and returns its descriptor, open for writing. Raises OSError when the file exists."""

    def write(self, fd: int, data: bytes | memoryview) -> int: ...

    def truncate(self, fd: int, length: int) -> None: ...

    def fsync(self, fd: int) -> None: ...

    def close(self, fd: int) -> None: ...

    def cut(self, path: Path, length: int) -> None:
        """Shortens the file at ``path`` to ``length`` bytes, and syncs it."""

    def read(self, path: Path, length: int | None = None, offset: int = 0) -> bytes:
        """Returns up to ``length`` bytes (all by default) of a regular file; links are not followed."""

    def size(self, path: Path) -> int: ...

    def rename(self, source: Path, target: Path) -> None: ...

    def unlink(self, path: Path) -> None:
        """Removes a file; does nothing if there is no such file."""

    def listdir(self, path: Path) -> list[str]:
        """Returns the names in a directory, sorted; empty if there is no such directory."""

    def make_dir(self, path: Path) -> None:
        """Makes a directory and its parents; does nothing if the directory exists."""

    def fsync_dir(self, path: Path) -> None: ...

    def space(self, path: Path) -> tuple[int, int]:
        """Returns the free bytes for unprivileged processes, and the size, of the file system of ``path``."""


class SystemFiles:
    """The file system of the operating system."""

    def create(self, path: Path) -> int:
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
        os.fchmod(fd, FILE_MODE)
        return fd

    def write(self, fd: int, data: bytes | memoryview) -> int:
        return os.write(fd, data)

    def truncate(self, fd: int, length: int) -> None:
        os.ftruncate(fd, length)
        os.lseek(fd, length, os.SEEK_SET)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def cut(self, path: Path, length: int) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.ftruncate(fd, length)
            os.fsync(fd)
        finally:
            os.close(fd)

    def read(self, path: Path, length: int | None = None, offset: int = 0) -> bytes:
        return read_file(path, length, offset)

    def size(self, path: Path) -> int:
        return os.lstat(path).st_size

    def rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)  # noqa: PTH104

    def unlink(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def listdir(self, path: Path) -> list[str]:
        try:
            return sorted(os.listdir(path))  # noqa: PTH208
        except (FileNotFoundError, NotADirectoryError):
            return []

    def make_dir(self, path: Path) -> None:
        if path.is_dir():
            return
        if path.parent != path:
            self.make_dir(path.parent)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=_DIR_MODE & 0o777)
            # RestrictSUIDSGID= of the unit forbids setting the bit, but the directory inherits it from its parent.
            with contextlib.suppress(PermissionError):
                path.chmod(_DIR_MODE)

    def fsync_dir(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def space(self, path: Path) -> tuple[int, int]:
        state = os.statvfs(path)
        return state.f_bavail * state.f_frsize, state.f_blocks * state.f_frsize


class FileReader(io.RawIOBase):
    """A file of ``size`` bytes, for Arrow, which reads it piece by piece through ``Files``."""

    def __init__(self, files: Files, path: Path, size: int) -> None:
        self._files = files
        self._path = path
        self._size = size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, count: int | None = -1) -> bytes:
        data = self._files.read(self._path, None if count is None or count < 0 else count, self._at)
        self._at += len(data)
        return data


def open_file(path: Path) -> int:
    """Returns a descriptor for reading a regular file; links are not followed. Raises OSError or FormatError."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise FormatError("it is not a regular file")
    return fd


def read_file(path: Path | str, length: int | None = None, offset: int = 0) -> bytes:
    """Returns bytes of a regular file. The file is not mapped: shortening a mapped file kills its readers (SIGBUS).

    Raises OSError, and FormatError when it is not a regular file.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        state = os.fstat(fd)
        if not stat.S_ISREG(state.st_mode):
            raise FormatError(f"{Path(path).name} is not a regular file")
        left = max(0, state.st_size - offset)
        if length is not None:
            left = min(left, length)
        data = bytearray(left)
        view = memoryview(data)
        done = 0
        while done < left and (count := os.preadv(fd, [view[done:]], offset + done)):
            done += count
        view.release()
        del data[done:]
        return bytes(data)
    finally:
        os.close(fd)


def write_all(files: Files, fd: int, data: bytes | memoryview) -> None:
    """Writes all of ``data``. Raises OSError, after which part of ``data`` may be in the file."""
    view = memoryview(data)
    while view:
        count = files.write(fd, view)
        if count <= 0:
            raise OSError("nothing could be written")
        view = view[count:]


def checksum(files: Files, path: Path) -> tuple[int, int]:
    """Returns length and CRC32 of a file, read piece by piece, since the file may not fit in memory.

    Raises OSError, and FormatError when it is not a regular file.
    """
    length = crc = 0
    while data := files.read(path, _CHECKED_AT_ONCE, length):
        crc = zlib.crc32(data, crc)
        length += len(data)
    return length, crc


# An exhausted quota counts as a full disk.
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
# Temporary errors, which the file itself does not cause.
TRANSIENT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def store_error(e: OSError, root: Path) -> StoreError:
    """Returns ``e``, raised in the state directory ``root``, as StoreFull or StoreError with a hint."""
    reason = e.strerror or str(e)
    if e.errno in NO_SPACE:
        return StoreFull(f"the state directory {root} is full: {reason}")
    if e.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        hint = "give it to the user that the collector runs as, or choose another --state-dir"
        return StoreError(f"the state directory {root} is not writable: {reason}", hint=hint)
    hint = "look for errors of the disk in the kernel log"
    return StoreError(f"the state directory {root} cannot be used: {reason}", hint=hint)
