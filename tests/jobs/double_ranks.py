"""A rank that makes a communicator of the double of NCCL: ``double_ranks.py LIBRARY FOLDER`` with RANK, WORLD_SIZE.

Rank 0 leaves the unique id in FOLDER. The last rank comes when it reads a line, the others at once; each then waits for
its input to end.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from pathlib import Path


class UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * 128),)


def unique_id(nccl: ctypes.CDLL, place: Path, rank: int) -> UniqueId:
    made = UniqueId()
    if rank == 0:
        nccl.ncclGetUniqueId(ctypes.byref(made))
        place.with_suffix(".new").write_bytes(bytes(made))
        place.with_suffix(".new").rename(place)
    while not place.exists():
        time.sleep(0.01)
    return UniqueId.from_buffer_copy(place.read_bytes())


def wait_for_my_turn() -> None:
    sys.stdin.readline()


def main(library: str, folder: str) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    nccl = ctypes.CDLL(library)
    comm = ctypes.c_void_p()
    made = unique_id(nccl, Path(folder) / "id", rank)
    print("ready", flush=True)
    if rank == size - 1:
        wait_for_my_turn()
    nccl.ncclCommInitRank(ctypes.byref(comm), size, made, rank)
    print("made", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
