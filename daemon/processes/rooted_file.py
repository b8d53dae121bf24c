"""Opening a file by the path that a process has for it: no link leads out of the process's own root directory.

Nothing but a regular file is ever opened: a descriptor of O_PATH is looked at first, so that a pipe is not read from
and a device is not touched.
"""

from __future__ import annotations

import os
import re
import stat
from typing import Any

from probing.api.errors import PrivilegeError, ProcessGone, UnsupportedTarget, UsageError
from probing.daemon.processes.openat2 import O_PATH, handle_below
from probing.daemon.processes.procfs import clean_text, parse_environ, parse_status
from probing.daemon.processes.target import MAX_ENVIRON, Target

__all__ = ("find_files", "open_file")

MAX_PATHS = 16
MAX_PATH = 4_096
MAX_SIZE = 256 << 20
# What a path may begin with, as $NAME/: it is put in here, so that the value need not leave the reader by itself.
_VARIABLES = frozenset(("HOME", "XDG_CACHE_HOME"))
_VARIABLE = re.compile(r"\$([A-Z_]+)(?=/)")
_STATUS_BYTES = 64 << 10


def find_files(target: Target, request: dict[str, Any]) -> dict[str, Any]:
    """Which of ``paths`` are regular files of the process's own user, without opening any.

    ``files``: for each path ``{path, dev, inode, size, mtime_ns, uid}`` or None. A path is absolute, begins with
    ``$HOME/`` or ``$XDG_CACHE_HOME/`` as the process has them, or is relative to its working directory; ``paths`` are
    what they come to, None without such a variable. ``uid`` is the process's; ``witness`` a process that sees the same
    files under the same paths, and will when this one has ended: 1, or 0 for whichever reader is asked; else None.
    """
    paths = request.get("paths")
    if not isinstance(paths, list) or len(paths) > MAX_PATHS or not all(isinstance(path, str) for path in paths):
        raise UsageError(f"files takes {MAX_PATHS} paths at most")
    uid, variables = _owner(target), _variables(target, paths)
    found: list[dict[str, Any] | None] = []
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


def open_file(target: Target, request: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """Open ``path``, absolute or relative to the working directory, and what ``find_files`` tells of it.

    ``uid``: whose the file must be; the process's user where it is left out. Raises UnsupportedTarget for what is no
    regular file of that user, not there, or larger than 256 MB.
    """
    path, uid = request.get("path"), request.get("uid")
    if not isinstance(path, str) or not path:
        raise UsageError("file takes a path")
    if not isinstance(uid, int):
        uid = _owner(target)
    name = clean_text(path, 256)
    handle = _handle(target, path)
    if handle is None:
        raise UnsupportedTarget(f"{name} of process {target.pid} cannot be opened")
    try:
        described = _described(path, os.fstat(handle), uid)
        if described is None:
            raise UnsupportedTarget(f"{name} of process {target.pid} is no regular file of its user")
        if described["size"] > MAX_SIZE:
            raise UnsupportedTarget(f"{name} of process {target.pid} is larger than {MAX_SIZE >> 20} MiB")
        return described, os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except PermissionError as e:
        raise PrivilegeError(f"{name} of process {target.pid} may not be read") from e
    except FileNotFoundError as e:
        raise ProcessGone(f"process {target.pid} exited") from e
    finally:
        os.close(handle)


def _handle(target: Target, path: str) -> int | None:
    """A descriptor that only names the file; None: there is none that the process could reach by this path."""
    encoded = os.fsencode(path)
    if not encoded or len(encoded) > MAX_PATH or b"\0" in encoded:
        return None
    start = "root" if encoded.startswith(b"/") else "cwd"
    try:
        root = os.open(start, O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=target.dir_fd)
    except (FileNotFoundError, ProcessLookupError) as e:
        raise ProcessGone(f"process {target.pid} exited") from e
    except PermissionError as e:
        raise PrivilegeError(f"the files of process {target.pid} may not be read") from e
    try:
        return handle_below(root, encoded)
    except OSError:
        return None
    finally:
        os.close(root)


def _described(path: str, found: os.stat_result, uid: int) -> dict[str, Any] | None:
    # A reader may read every file: a process must not have it read another user's by naming it.
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
    """The user of the process, as files that it makes have it (the fourth number is of the file system)."""
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
            continue  # it may not be looked at
    return None


def _place(target: Target, name: str) -> tuple[int, int]:
    found = os.stat(name, dir_fd=target.dir_fd)
    return found.st_dev, found.st_ino
