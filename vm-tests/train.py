"""A rank that trains without a GPU: ``train.py LIBRARIES FOLDER CALLS_PER_S`` with RANK and WORLD_SIZE.

Every step makes one all_reduce of the double of NCCL in LIBRARIES and waits for its end. ``calls-RANK`` in FOLDER has
the number of calls that have returned. A rank waits in fetch_shard while FOLDER has ``stall-RANK``.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from pathlib import Path

FLOAT32, SUM, COUNT = 7, 0, 1000


class UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * 128),)


class Rank:
    def __init__(self, libraries: Path, folder: Path) -> None:
        self.folder = folder
        self.rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.cuda = ctypes.CDLL(str(libraries / "libcudart.so.12"))
        self.nccl = ctypes.CDLL(str(libraries / "libnccl.so.2"))
        self.comm, self.stream = ctypes.c_void_p(), ctypes.c_void_p()
        self.cuda.cudaStreamCreateWithFlags(ctypes.byref(self.stream), 1)
        self.nccl.ncclCommInitRank(ctypes.byref(self.comm), size, self.unique_id(folder / "id"), self.rank)
        self.buffer = ctypes.create_string_buffer(4 * COUNT)
        self.count = os.open(folder / f"calls-{self.rank}", os.O_WRONLY | os.O_CREAT, 0o644)

    def unique_id(self, place: Path) -> UniqueId:
        made = UniqueId()
        if self.rank == 0:
            self.nccl.ncclGetUniqueId(ctypes.byref(made))
            place.with_suffix(".new").write_bytes(bytes(made))
            place.with_suffix(".new").rename(place)
        while not place.exists():
            time.sleep(0.01)
        return UniqueId.from_buffer_copy(place.read_bytes())

    def fetch_shard(self) -> None:
        while (self.folder / f"stall-{self.rank}").exists():
            time.sleep(0.05)

    def step(self, number: int) -> None:
        self.fetch_shard()
        count = ctypes.c_size_t(COUNT)
        self.nccl.ncclAllReduce(self.buffer, self.buffer, count, FLOAT32, SUM, self.comm, self.stream)
        self.cuda.cudaStreamSynchronize(self.stream)
        os.pwrite(self.count, b"%d\n" % number, 0)


def main(libraries: str, folder: str, per_s: str) -> None:
    rank = Rank(Path(libraries), Path(folder))
    number = 0
    while True:
        number += 1
        rank.step(number)
        time.sleep(1 / float(per_s))


if __name__ == "__main__":
    main(*sys.argv[1:])
