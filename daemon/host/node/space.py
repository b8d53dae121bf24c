"""Reads, in a reader, how full the node's file systems and the shared memory of watched processes are.

A file system that another machine serves is read in a separate request, since it may never answer. psutil reports no
inodes, no devices, and no mounts of other processes.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from typing import Any

from probing.api.errors import ProbingError, TargetError
from probing.daemon.ipc import Header, Message
from probing.daemon.processes.conditions.mounts import (
    MAX_MOUNTINFO,
    Mount,
    mount_of,
    parse_mounts,
    waits_for_others,
)
from probing.daemon.processes.procfs import clean_text
from probing.daemon.processes.target import Target

__all__ = ("answer_space", "chosen_mounts", "space_of")

MAX_LOCAL = 64
MAX_SERVED = 16
MAX_TARGETS = 256
# File systems that are left out: images (always full), FUSE of desktops and containers, automount points.
_NO_SPACE = (
    "squashfs",
    "iso9660",
    "erofs",
    "cramfs",
    "fusectl",
    "fuse.lxcfs",
    "fuse.gvfsd-fuse",
    "fuse.portal",
    "autofs",
)
_SHARED_MEMORY = b"/dev/shm"
_IN_MEMORY = (_SHARED_MEMORY, b"/tmp", b"/run")
# The mount option in which FUSE shows the user who mounted the file system (fs/fuse/inode.c, fuse_show_options).
_USER = re.compile(r"(?:^|,)user_id=(\d{1,10})(?:,|$)")
_ROOT = "0"


def answer_space(request: Header) -> Message:
    """Answers the request ``space``. The payload is JSON.

    * With ``point``, a mount point: the result of ``space_of`` for this file system.
    * Else, with ``targets`` [[pid, start_ns], ...]: ``local``, the results of ``space_of`` for the node's local file
      systems; ``served``, [point, kind, source] of each file system that another machine serves; ``shared``, for each
      target the result for its /dev/shm, or null.
    """
    if point := request.get("point"):
        found: Any = space_of(_root() + os.fsencode(str(point)))
    else:
        found = _all(request.get("targets", ())[:MAX_TARGETS])
    return Message({}, json.dumps(found, separators=(",", ":")).encode())


def space_of(path: bytes | str) -> dict[str, int] | None:
    """Returns size_bytes, used_bytes, available_bytes (to unprivileged users), inodes, inodes_used and read_only; None
    if the file system cannot be read."""
    try:
        found = os.statvfs(path)
    except (OSError, ValueError):
        return None
    unit = found.f_frsize
    return {
        "size_bytes": found.f_blocks * unit,
        "used_bytes": max(0, found.f_blocks - found.f_bfree) * unit,
        "available_bytes": found.f_bavail * unit,
        "inodes": found.f_files,
        "inodes_used": max(0, found.f_files - found.f_ffree),
        "read_only": int(bool(found.f_flag & os.ST_RDONLY)),
    }


def chosen_mounts(mounts: list[Mount]) -> tuple[list[Mount], list[Mount]]:
    """Returns the local mounts with space to report, and the mounts that other machines serve; each device once.

    Any user may mount a FUSE file system, and chooses its source. So such a mount never hides or displaces a mount of
    root.
    """
    local: dict[str, Mount] = {}
    served: dict[tuple[str, str], Mount] = {}
    # If two mounts have the same directory, the later mount hides the earlier.
    shown = {mount.point: mount for mount in mounts}.values()
    for mount in sorted(shown, key=lambda one: (len(one.point), one.number)):
        if mount.kind in _NO_SPACE:
            continue
        if waits_for_others(mount):
            served.setdefault((_user(mount), mount.source), mount)
        elif _has_space(mount):
            local.setdefault(mount.device, mount)
    counts: Counter[str] = Counter()

    def turn(mount: Mount) -> tuple[bool, int]:
        """Returns the sort key of a mount: the mounts of root come first, then the mounts of the other users in
        turn."""
        user = _user(mount)
        counts[user] += 1
        return user != _ROOT, counts[user]

    return list(local.values())[:MAX_LOCAL], sorted(served.values(), key=turn)[:MAX_SERVED]


def _user(mount: Mount) -> str:
    match = _USER.search(mount.options) if mount.kind.startswith("fuse") else None
    return match[1] if match else _ROOT


def _has_space(mount: Mount) -> bool:
    of_a_device = mount.source.startswith("/") or mount.kind in ("zfs", "btrfs") or mount.point == b"/"
    return of_a_device or (mount.kind == "tmpfs" and mount.point in _IN_MEMORY)


def _all(targets: list[list[int]]) -> dict[str, object]:
    root = _root()
    local, served = chosen_mounts(_mounts(1 if root else os.getpid()))
    spaces = ((mount, space_of(root + mount.point)) for mount in local)
    rows = [{**_named(mount), **space} for mount, space in spaces if space is not None and space["size_bytes"]]
    return {
        "local": rows,
        "served": [[os.fsdecode(mount.point), mount.kind, mount.source] for mount in served],
        "shared": [_shared(int(pid), int(start_ns)) for pid, start_ns in targets],
    }


def _shared(pid: int, start_ns: int) -> dict[str, object] | None:
    try:
        with Target(pid, start_ns) as target:
            mount = mount_of(parse_mounts(target.read("mountinfo", MAX_MOUNTINFO)), path=_SHARED_MEMORY)
            # A container may have another file system at /dev/shm, and that file system may not answer.
            if mount is None or mount.kind != "tmpfs":
                return None
            space = space_of(f"/proc/self/fd/{target.dir_fd}/root/dev/shm")
            return None if space is None else {**_named(mount), **space}
    except ProbingError:
        return None  # the process ended, or cannot be read


def _named(mount: Mount) -> dict[str, str]:
    point = clean_text(mount.point, 256)
    return {"mount_point": point, "fs_type": mount.kind, "source": mount.source, "device": mount.device}


def _mounts(pid: int) -> list[Mount]:
    try:
        with Target(pid) as target:
            return parse_mounts(target.read("mountinfo", MAX_MOUNTINFO))
    except (TargetError, ProbingError):
        return []


def _root() -> bytes:
    """Returns the root directory of the node's first process, whose mounts are the mounts of the node. Returns an empty
    path, which means the reader's root, if that directory cannot be read.
    """
    try:
        os.listdir("/proc/1/root/proc/1")  # noqa: PTH208
    except OSError:
        return b""
    return b"/proc/1/root"
