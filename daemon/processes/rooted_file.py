"""Finds and opens files by a process's own paths; no link leads out of its root directory.

Only regular files are opened: an O_PATH descriptor is checked first, so no pipe is read and no device touched.
"""

from __future__ import annotations

import os
import re
import stat
from typing import Any

from probing.api.errors import PrivilegeError, ProcessGone, UnsupportedTarget, UsageError
from probing.api.text import size
from probing.daemon.processes.openat2 import O_PATH, handle_below
from probing.daemon.processes.procfs import clean_text, parse_environ, parse_status
from probing.daemon.processes.target import MAX_ENVIRON, Target

__all__ = ("find_files", "open_file")

MAX_PATHS = 16
MAX_PATH = 4_096
MAX_SIZE = 256 << 20
# A path may begin with $NAME/ of these. They are replaced here, so their values do not leave the reader.
_VARIABLES = frozenset(("HOME", "XDG_CACHE_HOME"))
_VARIABLE = re.compile(r"\$([A-Z_]+)(?=/)")
_STATUS_BYTES = 64 << 10


def find_files(target: Target, request: dict[str, Any]) -> dict[str, Any]:
    """Checks which of ``paths`` are regular files of the process's user, without opening any.

    ``files``: for each path ``{path, dev, inode, size, mtime_ns, uid}`` or None. A path is absolute, begins with
    ``$HOME/`` or ``$XDG_CACHE_HOME/`` as the process has them, or is relative to its working directory; ``paths``: the
    resolved paths, None without such a variable. ``uid`` is the process's. ``witness``: a process that sees the same
    files under the same paths, also after this one ended: 1, or 0 for any reader; else None.
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
    """Open ``path``, absolute or relative to the working directory; returns (entry as of ``find_files``, fd).

    ``uid``: the required owner, by default the process's user. Raises UnsupportedTarget when it is no regular file of
    that user, does not exist, or is larger than 256 MiB.
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
            raise UnsupportedTarget(f"{name} of process {target.pid} is larger than {size(MAX_SIZE)}")
        return described, os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except PermissionError as e:
        raise PrivilegeError(f"{name} of process {target.pid} may not be read") from e
    except FileNotFoundError as e:
        raise ProcessGone(f"process {target.pid} exited") from e
    finally:
        os.close(handle)


def _handle(target: Target, path: str) -> int | None:
    """An O_PATH descriptor of the file; None when the process reaches none by this path."""
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
    # A reader may read every file: a process must not make it read another user's.
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
    """The file system uid of the process (the fourth number), which its files have."""
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
            continue  # it may not be read
    return None


def _place(target: Target, name: str) -> tuple[int, int]:
    found = os.stat(name, dir_fd=target.dir_fd)
    return found.st_dev, found.st_ino
