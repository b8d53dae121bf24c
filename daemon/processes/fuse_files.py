"""Refuses files on FUSE: the kernel lets every user of such a file wait for the program that serves it."""

from __future__ import annotations

import ctypes
import struct

from probing.api.errors import UnsupportedTarget

__all__ = ("refuse_served",)

# include/uapi/linux/magic.h and struct statfs, whose first word it is in.
_FUSE_MAGIC = 0x65735546
_STATFS_BYTES = 256
_libc = ctypes.CDLL(None, use_errno=True)


def refuse_served(handle: int, name: str) -> None:
    """Raise UnsupportedTarget when the file of the descriptor ``handle`` lies on FUSE, or that cannot be known.

    It waits for that program, too: only a reader may call it.
    """
    buffer = ctypes.create_string_buffer(_STATFS_BYTES)
    failed = _libc.fstatfs(handle, buffer)
    if failed or struct.unpack_from("=l", buffer)[0] == _FUSE_MAGIC:
        raise UnsupportedTarget(
            f"{name} lies on a file system that a program serves (FUSE)",
            hint="probes.fuse = true allows it: while such a program keeps a probe waiting, no process forks",
        )
