"""Registers a page of memory with userfaultfd and serves no fault on it: who reads it waits for ever.

Prints ``ready ADDRESS``, the address of that page.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import platform
import signal
import struct

USERFAULTFD = {"x86_64": 323, "aarch64": 282}[platform.machine()]
UFFDIO_API = 0xC018AA3F
UFFDIO_REGISTER = 0xC020AA00
UFFD_API = 0xAA
REGISTER_MODE_MISSING = 1

libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    uffd = libc.syscall(USERFAULTFD, os.O_CLOEXEC)
    assert uffd >= 0, os.strerror(ctypes.get_errno())
    fcntl.ioctl(uffd, UFFDIO_API, bytearray(struct.pack("QQQ", UFFD_API, 0, 0)))
    register = struct.pack("QQQQ", address, mmap.PAGESIZE, REGISTER_MODE_MISSING, 0)
    fcntl.ioctl(uffd, UFFDIO_REGISTER, bytearray(register))
    print("ready", address, flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
