"""A rank that calls NCCL by CuPy on GPU 0; ``cupy_rank.py --folder D``. Its truth: the calls that it made."""

from __future__ import annotations

import argparse
import os
import pickle
import time
from pathlib import Path
from typing import Any

from lines import here_is_no, serve

try:
    import cupy
    from cupy.cuda import nccl
except ImportError as e:
    here_is_no(f"cupy: {e}")


class Rank:
    """Everything that the commands work on."""

    def __init__(self, folder: Path) -> None:
        self.rank, self.size, self.folder = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), folder

    def init(self) -> dict[str, Any]:
        place = self.folder / "cupy-id"
        if self.rank == 0:
            place.with_suffix(".new").write_bytes(pickle.dumps(nccl.get_unique_id()))
            place.with_suffix(".new").replace(place)
        while not place.exists():
            time.sleep(0.005)
        self.comm = nccl.NcclCommunicator(self.size, pickle.loads(place.read_bytes()), self.rank)
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.data = cupy.ones(1 << 16, dtype=cupy.float32)
        return {"version": nccl.get_version(), "cupy": cupy.__version__}

    def warm(self) -> dict[str, Any]:
        self._all_reduce(1)
        self.stream.synchronize()
        return {}

    def burst(self, reduces: str, count: str) -> dict[str, Any]:
        begun = time.time_ns()
        for number in range(int(reduces)):
            self._all_reduce(int(count) + number)
        self.stream.synchronize()
        counts = [int(count) + number for number in range(int(reduces))]
        return {"begun": begun, "calls": [{"op": "all_reduce", "count": n, "root": None, "peer": None} for n in counts]}

    def _all_reduce(self, count: int) -> None:
        pointer = self.data.data.ptr
        self.comm.allReduce(pointer, pointer, count, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, self.stream.ptr)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", required=True)
    folder = Path(parser.parse_args().folder)
    if not nccl.available:
        here_is_no("CuPy has no NCCL here")
    if not cupy.cuda.is_available():
        here_is_no("CuPy finds no GPU")
    rank = Rank(folder)
    serve({name: getattr(rank, name) for name in ("init", "warm", "burst")})


if __name__ == "__main__":
    main()
