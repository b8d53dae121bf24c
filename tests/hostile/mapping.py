"""Processes of an ordinary user that map files as libraries are mapped: many files, again and again, many processes."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ("NOBODY", "long_names", "mapping")

NOBODY = 65_534
_PROGRAM = """
import ctypes, os, signal, sys
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
READ_EXEC, PRIVATE = 5, 2

def mapped(path):
    fd = os.open(path, os.O_RDONLY)
    address = libc.mmap(None, 4096, READ_EXEC, PRIVATE, fd, 0)
    os.close(fd)
    assert address != ctypes.c_void_p(-1).value, path
    return address

how, copies, paths = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
for _ in range(copies - 1):
    if not os.fork():
        # It ends with whoever started the first one.
        libc.prctl(1, signal.SIGKILL)
        break
else:
    os.write(1, b"mapped\\n") if how == "loop" else None
if how == "hold":
    for path in paths:
        mapped(path)
    os.write(1, b"mapped\\n")
    signal.pause()
while True:
    for path in paths:
        libc.munmap(mapped(path), 4096)
"""


def mapping(
    paths: Sequence[Path], *, how: str = "hold", copies: int = 1, user: int | None = NOBODY
) -> subprocess.Popen[Any]:
    """Starts ``copies`` processes that ``hold`` mappings of all paths, or ``loop``: map and unmap without a pause.

    Returns when all hold their mappings, or when the loops run. The copies end with the returned process.
    """
    argv = ["/usr/bin/env", "python3", "-c", _PROGRAM, how, str(copies), *map(str, paths)]
    if user is not None:
        # Popen(user=) forks with Python code in the child, which crashes beside the threads of gRPC.
        argv = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", *argv]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, cwd="/")
    assert process.stdout is not None
    for _ in range(copies if how == "hold" else 1):
        assert process.stdout.readline() == b"mapped\n"
    return process


def long_names(folder: Path, count: int = 400) -> list[Path]:
    """Files that are no libraries, ``libnccl.so.N`` below 3,000 characters of directories."""
    deep = folder.joinpath(*(["d" * 250] * 12))
    deep.mkdir(parents=True)
    paths = [deep / f"libnccl.so.{number}" for number in range(count)]
    for path in paths:
        path.write_bytes(b"no library".ljust(4096))
    return paths
