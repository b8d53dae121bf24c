"""Opens files as a process sees them: the file of a mapping, or the file at a path.

No link leads out of the root of the process. Files on FUSE can be refused: every process that uses such a file may have
to wait for the program that serves the file.
"""

from __future__ import annotations

import ctypes
import os
import re
import stat
import struct
from collections.abc import Collection
from itertools import islice

from probing.api.errors import PrivilegeError, ProcessGone, UnsupportedTarget, UsageError
from probing.api.text import size
from probing.daemon.ipc import Header
from probing.daemon.processes.memory import ProcessMemory
from probing.daemon.processes.procfs import Mapping, clean_text, parse_environ, parse_maps, parse_status
from probing.daemon.processes.target import MAX_ENVIRON, Target

__all__ = (
    "find_files",
    "handle_below",
    "open_file",
    "open_mapped",
    "open_memory_files",
)

# include/uapi/linux/openat2.h; the number is the same on all architectures since 5.6.
_OPENAT2 = 437
_RESOLVE_NO_MAGICLINKS = 0x02
_RESOLVE_NO_SYMLINKS = 0x04
_RESOLVE_IN_ROOT = 0x10
_libc = ctypes.CDLL(None, use_errno=True)


def handle_below(root: int, path: bytes, *, links: bool = True) -> int:
    """Returns an O_PATH descriptor of ``path``, with the directory ``root`` as /. Raises OSError. With ``links`` False,
    a symbolic link in ``path`` raises ELOOP."""
    resolve = _RESOLVE_IN_ROOT | _RESOLVE_NO_MAGICLINKS | (0 if links else _RESOLVE_NO_SYMLINKS)
    how = struct.pack("QQQ", os.O_PATH | os.O_CLOEXEC, 0, resolve)
    fd: int = _libc.syscall(_OPENAT2, root, ctypes.c_char_p(path), ctypes.c_char_p(how), ctypes.c_size_t(len(how)))
    if fd < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return fd


# Numbers of file systems (include/uapi/linux/magic.h), which the first word of struct statfs holds.
_FUSE_MAGIC = 0x65735546
_TMPFS_MAGIC = 0x01021994
_STATFS_BYTES = 256


def _file_system(handle: int) -> int | None:
    """Returns the magic number of the file system of a descriptor, None if fstatfs(2) fails."""
    buffer = ctypes.create_string_buffer(_STATFS_BYTES)
    return None if _libc.fstatfs(handle, buffer) else int(struct.unpack_from("=l", buffer)[0])


def _refuse_served(handle: int, name: str) -> None:
    """Raises UnsupportedTarget if the file of the descriptor ``handle`` is on FUSE, or its file system is unknown.

    Only readers are allowed to call this function, because it may wait for the program that serves the file.
    """
    if _file_system(handle) in (None, _FUSE_MAGIC):
        raise UnsupportedTarget(
            f"{name} lies on a file system that a program serves (FUSE)",
            hint="probes.fuse = true allows it, but no process can fork while such a program keeps a probe waiting",
        )


MAX_MAPS = 16 << 20
# The bytes that are compared when device and inode differ. They contain the ELF header and the build id.
_HEAD = 4096


def open_mapped(target: Target, request: Header) -> tuple[Header, int]:
    """Opens the file of the mapping at ``start``. Returns the fields of the answer and a read-only descriptor.

    With ``served`` False files on FUSE are refused. ``identity`` is ``exact`` when device and inode of mapping and file
    agree. It is ``content`` when they differ, as on overlayfs, but the first pages of memory and file are equal. Raises
    UnsupportedTarget when the path names another file.
    """
    start = request.get("start")
    if not isinstance(start, int):
        raise UsageError('the request "open" needs the start address of a mapping')
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
        handle = os.open(name, os.O_PATH | os.O_CLOEXEC, dir_fd=target.dir_fd)
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
    root = target.directory("root")
    try:
        handle = handle_below(root, mapping.path)
    except FileNotFoundError as e:
        raise UnsupportedTarget(f"process {target.pid} maps {_name(mapping)}, which does not exist any more") from e
    except OSError as e:
        raise UnsupportedTarget(f"{_name(mapping)} of process {target.pid} cannot be opened: {e.strerror}") from e
    finally:
        os.close(root)
    return _reopen(handle, target, mapping, served)


def _reopen(handle: int, target: Target, mapping: Mapping, served: bool) -> int:
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise UnsupportedTarget(f"{_name(mapping)} of process {target.pid} is not a regular file")
        if not served:
            _refuse_served(handle, _name(mapping))
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


# The maximum number of descriptors of a process that are examined, and of files in one answer.
_MAX_DESCRIPTORS = 4_096
_MAX_MEMORY_FILES = 16


def open_memory_files(
    target: Target, link: bytes, known: Collection[int]
) -> tuple[list[int], list[int], Collection[int]]:
    """Opens the memory files (memfd) of a process whose link in /proc/PID/fd begins with ``link``, except files with an
    inode in ``known``. Returns the inodes and read-only descriptors of at most 16 files, and the inodes in ``known``
    that the process has closed."""
    inodes: list[int] = []
    opened: list[int] = []
    closed = set(known)
    folder = target.open("fd")
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in islice(entries, _MAX_DESCRIPTORS)]
        if len(names) == _MAX_DESCRIPTORS:
            # Any known file may belong to a descriptor that is not examined, so none counts as closed.
            closed = set()
        for name in names:
            try:
                if not os.readlink(os.fsencode(name), dir_fd=folder).startswith(link):
                    continue
                handle = os.open(name, os.O_PATH | os.O_CLOEXEC, dir_fd=folder)
            except FileNotFoundError:
                continue
            except OSError:
                # The file of this descriptor may be any known file, so none counts as closed.
                closed = set()
                continue
            try:
                inode = os.fstat(handle).st_ino
                closed.discard(inode)
                # Any file can have such a name. Only a file on tmpfs is sure to open without waiting for a program.
                if inode in known or inode in inodes or _file_system(handle) != _TMPFS_MAGIC:
                    continue
                if len(opened) < _MAX_MEMORY_FILES:
                    opened.append(os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
                    inodes.append(inode)
            finally:
                os.close(handle)
    except BaseException:
        for fd in opened:
            os.close(fd)
        raise
    finally:
        os.close(folder)
    return inodes, opened, closed


MAX_PATHS = 16
MAX_PATH = 4_096
MAX_SIZE = 256 << 20
# Variables with which a path may begin ($NAME/). The reader replaces them, so it answers with resolved paths only.
_VARIABLES = frozenset(("HOME", "XDG_CACHE_HOME"))
_VARIABLE = re.compile(r"\$([A-Z_]+)(?=/)")
_STATUS_BYTES = 64 << 10


def find_files(target: Target, request: Header) -> Header:
    """Returns which of ``paths`` are regular files of the process's user, without opening them.

    A path is absolute, begins with ``$HOME/`` or ``$XDG_CACHE_HOME/`` as set in the process, or is relative to the
    process's working directory. The answer has ``files``: for each path ``{path, dev, inode, size, mtime_ns, uid}`` or
    None; ``paths``: the resolved paths, or None where the process lacks the variable; ``uid``: the user of the process;
    and ``witness``: a process that sees the same files under the same paths, even after the target has ended. 0 means
    any reader, 1 means pid 1, and None means that neither sees the same files.
    """
    paths = request.get("paths")
    if not isinstance(paths, list) or len(paths) > MAX_PATHS or not all(isinstance(path, str) for path in paths):
        raise UsageError(f'the request "files" takes a list of at most {MAX_PATHS} paths')
    uid, variables = _owner(target), _variables(target, paths)
    found: list[Header | None] = []
    places = [_resolved(path, variables) for path in paths]
    for resolved in places:
        handle = None if resolved is None else _handle(target, resolved)
        if resolved is None or handle is None:
            found.append(None)
            continue
        try:
            found.append(_described(resolved, os.fstat(handle), uid))
        finally:
            os.close(handle)
    shown = [None if path is None else clean_text(path, MAX_PATH) for path in places]
    return {"files": found, "paths": shown, "uid": uid, "witness": _witness(target)}


def open_file(target: Target, request: Header) -> tuple[Header, int]:
    """Opens ``path``, absolute or relative to the working directory. Returns (entry as in ``find_files``, descriptor).

    ``uid``: the required owner of the file, by default the process's user. Raises UnsupportedTarget if ``path`` is not
    a regular file of the owner, does not exist, or is larger than 256 MiB.
    """
    path, uid = request.get("path"), request.get("uid")
    if not isinstance(path, str) or not path:
        raise UsageError('the request "file" needs a path')
    if not isinstance(uid, int):
        uid = _owner(target)
    name = clean_text(path, 256)
    handle = _handle(target, path)
    if handle is None:
        raise UnsupportedTarget(f"{name} of process {target.pid} cannot be opened")
    try:
        described = _described(path, os.fstat(handle), uid)
        if described is None:
            raise UnsupportedTarget(f"{name} of process {target.pid} is not a regular file of its user")
        if described["size"] > MAX_SIZE:
            raise UnsupportedTarget(f"{name} of process {target.pid} is larger than {size(MAX_SIZE)}")
        return described, os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except PermissionError as e:
        raise PrivilegeError(f"no permission to read {name} of process {target.pid}") from e
    except FileNotFoundError as e:
        raise ProcessGone(f"process {target.pid} exited") from e
    finally:
        os.close(handle)


def _handle(target: Target, path: str) -> int | None:
    """Returns an O_PATH descriptor of the file at ``path``; None when the process cannot reach a file at this path."""
    encoded = os.fsencode(path)
    if not encoded or len(encoded) > MAX_PATH or b"\0" in encoded:
        return None
    root = target.directory("root" if encoded.startswith(b"/") else "cwd")
    try:
        return handle_below(root, encoded)
    except OSError:
        return None
    finally:
        os.close(root)


def _described(path: str, found: os.stat_result, uid: int) -> Header | None:
    # A reader can read every file, so a process must not be able to make it read another user's file.
    if not stat.S_ISREG(found.st_mode) or found.st_uid != uid:
        return None
    return {
        "path": clean_text(path, MAX_PATH),
        "dev": found.st_dev,
        "inode": found.st_ino,
        "size": found.st_size,
        "mtime_ns": found.st_mtime_ns,
        "uid": found.st_uid,
    }


def _owner(target: Target) -> int:
    """Returns the file system uid of the process (the fourth number of Uid). It owns the files the process creates."""
    uids = parse_status(target.read("status", _STATUS_BYTES))["Uid"]
    return int(uids[-1])


def _variables(target: Target, paths: list[str]) -> dict[str, str]:
    if not any(path.startswith("$") for path in paths):
        return {}
    return parse_environ(target.read("environ", MAX_ENVIRON), _VARIABLES)


def _resolved(path: str, variables: dict[str, str]) -> str | None:
    match = _VARIABLE.match(path)
    if match is None:
        return path
    value = variables.get(match[1]) if match[1] in _VARIABLES else None
    return value.rstrip("/") + path[match.end() :] if value else None


def _witness(target: Target) -> int | None:
    for pid in (0, 1):
        try:
            with Target(pid or os.getpid()) as other:
                if all(_place(other, name) == _place(target, name) for name in ("root", "ns/mnt")):
                    return pid
        except (OSError, ProcessGone, PrivilegeError):
            continue  # no permission to read this process, or it has ended
    return None


def _place(target: Target, name: str) -> tuple[int, int]:
    found = os.stat(name, dir_fd=target.dir_fd)
    return found.st_dev, found.st_ino
