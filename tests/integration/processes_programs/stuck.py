"""Drops a page of its own environment and serves no fault on it: whoever reads it waits for ever.

Usage: stuck.py (with a variable FILLER of 64 KiB, so that whole pages hold nothing else). Prints ``ready``.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import signal
import struct

PAGE = 4096
USERFAULTFD = {"x86_64": 323, "aarch64": 282}[platform.machine()]
UFFDIO_API = 0xC018AA3F
UFFDIO_REGISTER = 0xC020AA00
UFFD_API = 0xAA
REGISTER_MODE_MISSING = 1
MADV_DONTNEED = 4

libc = ctypes.CDLL(None, use_errno=True)


def environment_pages() -> tuple[int, int]:
    """Start and length of the whole pages in the middle of the environment (proc(5): env_start, env_end of stat)."""
    with open("/proc/self/stat") as f:
        fields = f.read().rpartition(")")[2].split()
    start, end = int(fields[47]), int(fields[48])
    first = (start // PAGE + 2) * PAGE
    return first, (end // PAGE - 2) * PAGE - first


def main() -> None:
    start, length = environment_pages()
    assert length > 0, "the environment is too small"
    uffd = libc.syscall(USERFAULTFD, os.O_CLOEXEC)
    assert uffd >= 0, os.strerror(ctypes.get_errno())
    fcntl.ioctl(uffd, UFFDIO_API, bytearray(struct.pack("QQQ", UFFD_API, 0, 0)))
    fcntl.ioctl(uffd, UFFDIO_REGISTER, bytearray(struct.pack("QQQQ", start, length, REGISTER_MODE_MISSING, 0)))
    assert libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), MADV_DONTNEED) == 0
    print("ready", hex(start), flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
