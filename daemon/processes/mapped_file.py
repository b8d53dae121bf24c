"""Opens the file of a mapping as the process sees it, and no other file.

Where permitted (CAP_CHECKPOINT_RESTORE or CAP_SYS_ADMIN) it opens ``/proc/PID/map_files``, which is that very file
even after it was deleted. Else openat2(2) resolves the path under ``/proc/PID/root`` and keeps links inside that root,
and the result is compared with the mapping. Only regular files are opened: an O_PATH descriptor is checked first.
"""

from __future__ import annotations

import os
import stat
from typing import Any

from probing.api.errors import ProcessGone, UnsupportedTarget, UsageError
from probing.daemon.processes.fuse_files import refuse_served
from probing.daemon.processes.memory import ProcessMemory
from probing.daemon.processes.openat2 import O_PATH, handle_below
from probing.daemon.processes.procfs import Mapping, clean_text, parse_maps
from probing.daemon.processes.target import Target

__all__ = ("open_mapped",)

MAX_MAPS = 16 << 20
# Leading bytes that are compared when device and inode cannot be: the ELF header and the build id.
_HEAD = 4096


def open_mapped(target: Target, request: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """Open the file of the mapping at ``start``; returns the fields of the answer and a read-only descriptor.

    With ``served`` False files on FUSE are refused.
    ``identity`` is ``exact`` when device and inode agree, ``content`` when they cannot be compared (overlayfs) and the
    first page of memory and file are equal. Raises UnsupportedTarget when it is another file.
    """
    start = request.get("start")
    if not isinstance(start, int):
        raise UsageError("open takes the start address of a mapping")
    served = bool(request.get("served", True))
    mappings = parse_maps(target.read("maps", MAX_MAPS))
    mapping = next((m for m in mappings if m.start == start), None)
    if mapping is None or not mapping.inode:
        raise UnsupportedTarget(f"process {target.pid} maps no file at {start:#x} any more")
    fd, how = _from_map_files(target, mapping, served), "exact"
    if fd is None:
        fd = _from_path(target, mapping, served)
        try:
            how = _same(target, mapping, mappings, fd)
        except BaseException:
            os.close(fd)
            raise
    found = os.fstat(fd)
    return {
        "identity": how,
        "dev": found.st_dev,
        "inode": found.st_ino,
        "size": found.st_size,
        "mtime_ns": found.st_mtime_ns,
    }, fd


def _from_map_files(target: Target, mapping: Mapping, served: bool) -> int | None:
    name = f"map_files/{mapping.start:x}-{mapping.end:x}"
    try:
        handle = os.open(name, O_PATH | os.O_CLOEXEC, dir_fd=target.dir_fd)
    except (PermissionError, FileNotFoundError):
        return None
    except ProcessLookupError as e:
        raise ProcessGone(f"process {target.pid} exited, or runs another program now") from e
    return _reopen(handle, target, mapping, served)


def _from_path(target: Target, mapping: Mapping, served: bool) -> int:
    if mapping.deleted:
        raise UnsupportedTarget(
            f"{_name(mapping)} was deleted or replaced while process {target.pid} uses it",
            hint="give the readers CAP_CHECKPOINT_RESTORE to read deleted files, or restart the job",
        )
    root = os.open("root", O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=target.dir_fd)
    try:
        handle = handle_below(root, mapping.path)
    except FileNotFoundError as e:
        raise UnsupportedTarget(f"process {target.pid} maps {_name(mapping)}, which is not there any more") from e
    except OSError as e:
        raise UnsupportedTarget(f"{_name(mapping)} of process {target.pid} cannot be opened: {e.strerror}") from e
    finally:
        os.close(root)
    return _reopen(handle, target, mapping, served)


def _reopen(handle: int, target: Target, mapping: Mapping, served: bool) -> int:
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise UnsupportedTarget(f"{_name(mapping)} of process {target.pid} is no regular file")
        if not served:
            refuse_served(handle, _name(mapping))
        return os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError as e:
        raise ProcessGone(f"process {target.pid} exited") from e
    finally:
        os.close(handle)


def _same(target: Target, mapping: Mapping, mappings: list[Mapping], fd: int) -> str:
    found = os.fstat(fd)
    if (os.major(found.st_dev), os.minor(found.st_dev), found.st_ino) == (*mapping.device, mapping.inode):
        return "exact"
    file_id = (mapping.device, mapping.inode)
    first = next((m for m in mappings if (m.device, m.inode) == file_id and m.offset == 0), None)
    if first is not None and first.permissions.startswith("r"):
        size = min(_HEAD, first.end - first.start, found.st_size)
        (memory,) = ProcessMemory(target.pid).read_many([(first.start, size)])
        if memory is not None and memory == os.pread(fd, size, 0):
            return "content"
    raise UnsupportedTarget(f"{_name(mapping)} of process {target.pid} was replaced by another file")


def _name(mapping: Mapping) -> str:
    return clean_text(mapping.path, 256)
