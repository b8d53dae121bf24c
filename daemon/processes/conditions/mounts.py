"""Parses the mounts that a process sees (/proc/PID/mountinfo, proc(5)), and finds the mount of a path or descriptor."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from probing.daemon.processes.files import handle_below
from probing.daemon.processes.procfs import clean_text
from probing.daemon.processes.target import Target

__all__ = ("Mount", "handle_of", "mount_of", "parse_mounts", "plain_path", "waits_for_others")

MAX_MOUNTS = 4_096
MAX_MOUNTINFO = 1 << 20
_OCTAL = re.compile(rb"\\([0-7]{3})")
# File systems whose files another machine or program serves: a stat of such a file can wait forever.
_SERVED = re.compile(r"fuse|nfs|lustre|ceph|cifs|smb|gpfs|beegfs|gfs|ocfs|9p|afs|wekafs|virtiofs|orangefs|pvfs|autofs")


class Mount(NamedTuple):
    """A mount. ``root`` is the directory of the file system that is mounted at ``point``. ``options`` and ``device``
    are the options and the major:minor of the file system. ``source`` is the device or server that was mounted.

    ``root`` and ``point`` are the kernel's bytes; the other texts went through ``clean_text``.
    """

    number: int
    root: bytes
    point: bytes
    kind: str
    options: str
    device: str = ""
    source: str = ""

    def text(self) -> str:
        """Returns type and mount point, such as ``fuse.ckptfs /mnt/ckpt``."""
        return f"{self.kind} {clean_text(self.point, 256)}"


def parse_mounts(data: bytes) -> list[Mount]:
    """Returns the first 4,096 mounts in a mountinfo file, in the file's order. Malformed lines are left out."""
    found = []
    for line in data[:MAX_MOUNTINFO].split(b"\n")[:MAX_MOUNTS]:
        before, separator, after = line.partition(b" - ")
        fields, rest = before.split(b" "), after.split(b" ")
        if separator and len(fields) >= 6 and len(rest) >= 3 and fields[0].isdigit() and len(fields[0]) < 12:
            root, point = _unescaped(fields[3]), _unescaped(fields[4])
            kind, source, options = (clean_text(text, 256) for text in rest[:3])
            found.append(Mount(int(fields[0]), root, point, kind[:32], options, clean_text(fields[2], 24), source))
    return found


def mount_of(mounts: list[Mount], *, number: int | None = None, path: bytes = b"") -> Mount | None:
    """Returns the mount with this ``number`` (mnt_id of fdinfo). Without a number, returns the mount that contains the
    absolute ``path``.
    """
    if number is not None:
        return next((mount for mount in mounts if mount.number == number), None)
    holding = [mount for mount in mounts if _holds(mount.point, path)]
    # If two mounts have the same directory, the later mount hides the earlier.
    return max(reversed(holding), key=lambda mount: len(mount.point), default=None)


def waits_for_others(mount: Mount | None) -> bool:
    """Returns whether reading a file's attributes on ``mount`` may wait for another machine or program."""
    return mount is None or bool(_SERVED.search(mount.kind))


def plain_path(path: bytes) -> bytes | None:
    """Returns an absolute path without empty parts and dots; None if ``path`` is relative or contains ``..``."""
    parts = [part for part in path.split(b"/") if part not in (b"", b".")]
    return b"/" + b"/".join(parts) if path.startswith(b"/") and b".." not in parts else None


@contextmanager
def handle_of(target: Target, path: bytes) -> Iterator[int]:
    """Yields an O_PATH descriptor of a plain path in the root of a process. Does not wait if ``waits_for_others`` is
    False for the mount of the path. Raises OSError. A path with a link raises ELOOP, because the link may lead to
    another mount."""
    root = os.open("root", os.O_PATH | os.O_CLOEXEC, dir_fd=target.dir_fd)
    try:
        handle = handle_below(root, path, links=False)
    finally:
        os.close(root)
    try:
        yield handle
    finally:
        os.close(handle)


def _holds(point: bytes, path: bytes) -> bool:
    return path == point or path.startswith(point.rstrip(b"/") + b"/")


def _unescaped(field: bytes) -> bytes:
    # The kernel writes blank, tab, newline and backslash in octal (fs/proc_namespace.c, mangle).
    return _OCTAL.sub(lambda m: bytes([int(m[1], 8) & 0xFF]), field[:4_096])
