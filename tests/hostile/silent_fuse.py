"""A file system that shows one file, by any name, and never answers a read or write of it; prints ``ready``.

``silent_fuse.py DIRECTORY``

It speaks the kernel's protocol (include/uapi/linux/fuse.h, 7.31) on /dev/fuse itself, as far as one file needs it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
import sys

LOOKUP, GETATTR, SETATTR, OPEN, READ, WRITE = 1, 3, 4, 14, 15, 16
RELEASE, FLUSH, INIT, OPENDIR, ACCESS = 18, 25, 26, 27, 34
HEADER = struct.Struct("<IIQQIIII")
ANSWER = struct.Struct("<IiQ")
# ino, size, blocks, three times, three parts of ns, mode, nlink, uid, gid, rdev, blksize, flags.
ATTRIBUTES = struct.Struct("<6Q10I")


def attributes(node: int) -> bytes:
    mode = stat.S_IFDIR | 0o755 if node == 1 else stat.S_IFREG | 0o644
    return ATTRIBUTES.pack(node, 4096, 8, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)


def answer(operation: int, node: int, body: bytes) -> bytes | int | None:
    """The body of the answer, the number of an error, or None: never an answer."""
    if operation == INIT:
        return struct.pack("<IIIIHHIIHHI7I", 7, 31, 65536, 0, 16, 12, 65536, 1, 0, 0, 0, *[0] * 7)
    if operation == LOOKUP:
        return struct.pack("<QQQQII", 2, 1, 3600, 3600, 0, 0) + attributes(2)
    if operation in (GETATTR, SETATTR):
        return struct.pack("<QII", 3600, 0, 0) + attributes(node)
    if operation in (OPEN, OPENDIR):
        return struct.pack("<QII", 1, 0, 0)
    if operation in (READ, WRITE):
        return None
    return b"" if operation in (FLUSH, RELEASE, ACCESS) else errno.ENOSYS


def main() -> None:
    fd = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={fd},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"silent", os.fsencode(sys.argv[1]), b"fuse.silent", 6, options):
        raise SystemExit(f"mount: {os.strerror(ctypes.get_errno())}")
    print("ready", flush=True)
    while True:
        request = os.read(fd, 1 << 20)
        _, operation, unique, node, *_ = HEADER.unpack_from(request)
        made = answer(operation, node, request[HEADER.size :])
        if made is None:
            continue
        error, body = (-made, b"") if isinstance(made, int) else (0, made)
        os.write(fd, ANSWER.pack(ANSWER.size + len(body), error, unique) + body)


if __name__ == "__main__":
    main()
