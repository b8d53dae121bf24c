"""A rank that maps NCCL and the CUDA runtime and calls neither: the probes on them stay in place between two jobs."""

from __future__ import annotations

import ctypes
import sys

from lines import serve


def main(*libraries: str) -> None:
    kept = [ctypes.CDLL(path) for path in libraries]
    serve({"count": lambda: {"libraries": len(kept)}})


if __name__ == "__main__":
    main(*sys.argv[1:])
