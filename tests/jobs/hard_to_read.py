"""A rank that is in a state in which it is hard to read; ``hard_to_read.py STATE FLAG [FILE]``.

``vfork``: waits for a child that does not come to its exec, so it cannot be interrupted. ``userfault``: the frames of
one of its threads are on a page that never comes; ``mapped``: on a page of FILE. FLAG is made when it is so.
"""

import ctypes
import fcntl
import mmap
import os
import platform
import struct
import sys
import threading
from pathlib import Path

USERFAULTFD = {"x86_64": 323, "aarch64": 282}[platform.machine()]
UFFDIO_API, UFFDIO_REGISTER, UFFD_API, MISSING = 0xC018AA3F, 0xC020AA00, 0xAA, 1
MAP_PRIVATE, MAP_FIXED, MADV_DONTNEED = 2, 0x10, 4

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
never = threading.Event()


def waits(depth, arrived):
    if depth:
        return waits(depth - 1, arrived)
    arrived.set()
    return never.wait()


def page_of_frames():
    """A page that holds nothing but frames of a thread that sleeps (CPython 3.11: struct _frame.f_frame)."""
    arrived = threading.Event()
    thread = threading.Thread(target=waits, args=(60, arrived), daemon=True)
    thread.start()
    arrived.wait()
    while Path(f"/proc/self/task/{thread.native_id}/stat").read_text().rpartition(")")[2].split()[0] != "S":
        pass
    frame = sys._current_frames()[thread.ident]
    while frame.f_code is not waits.__code__:
        frame = frame.f_back
    for _ in range(30):
        frame = frame.f_back
    return ctypes.c_uint64.from_address(id(frame) + 24).value & -mmap.PAGESIZE


def userfault(page):
    uffd = libc.syscall(USERFAULTFD, os.O_CLOEXEC)
    assert uffd >= 0, os.strerror(ctypes.get_errno())
    fcntl.ioctl(uffd, UFFDIO_API, bytearray(struct.pack("QQQ", UFFD_API, 0, 0)))
    fcntl.ioctl(uffd, UFFDIO_REGISTER, bytearray(struct.pack("QQQQ", page, mmap.PAGESIZE, MISSING, 0)))
    assert libc.madvise(page, mmap.PAGESIZE, MADV_DONTNEED) == 0
    return uffd


def mapped(page, path):
    fd = os.open(path, os.O_RDONLY)
    assert libc.mmap(page, mmap.PAGESIZE, mmap.PROT_READ, MAP_PRIVATE | MAP_FIXED, fd, 0) == page


def vfork(flag):
    os.mkfifo(f"{flag}.fifo")
    Path(flag).touch()
    # The child opens a pipe into which nobody writes, before its exec: until then its parent does not go on.
    os.posix_spawn("/bin/true", ["true"], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 0, f"{flag}.fifo", os.O_RDONLY, 0)])


def main():
    state, flag = sys.argv[1:3]
    if state == "vfork":
        vfork(flag)
        return
    page = page_of_frames()
    kept = userfault(page) if state == "userfault" else mapped(page, sys.argv[3])
    Path(flag).touch()
    libc.pause()
    print(kept)


main()
