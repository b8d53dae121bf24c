"""Resolves paths as a process sees them: no link leaves its root, and magic links of /proc are not followed."""

from __future__ import annotations

import ctypes
import os
import struct

__all__ = ("O_PATH", "handle_below")

# include/uapi/linux/openat2.h; the number is the same on all architectures since 5.6.
_OPENAT2 = 437
_RESOLVE_NO_MAGICLINKS = 0x02
_RESOLVE_NO_SYMLINKS = 0x04
_RESOLVE_IN_ROOT = 0x10
O_PATH = 0o10000000
_libc = ctypes.CDLL(None, use_errno=True)


def handle_below(root: int, path: bytes, *, links: bool = True) -> int:
    """An O_PATH descriptor of ``path``, with the directory ``root`` as /. Raises OSError, for a link ELOOP without
    ``links``."""
    resolve = _RESOLVE_IN_ROOT | _RESOLVE_NO_MAGICLINKS | (0 if links else _RESOLVE_NO_SYMLINKS)
    how = struct.pack("QQQ", O_PATH | os.O_CLOEXEC, 0, resolve)
    fd: int = _libc.syscall(_OPENAT2, root, ctypes.c_char_p(path), ctypes.c_char_p(how), ctypes.c_size_t(len(how)))
    if fd < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return fd
