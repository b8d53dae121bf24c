"""Forks processes that make a communicator, call one all_reduce and exit: too quickly to be read.

``short_lives.py LIBNCCL``: it says ``ready`` on stdout, and for each line N of stdin forks N of them, waits for their
ends, and writes their pids as a list of JSON.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys

COUNT, FLOAT32, SUM = 23, 7, 0


def live(nccl: ctypes.CDLL) -> None:
    room = ctypes.create_string_buffer(4 * COUNT)
    comm = ctypes.c_void_p()
    nccl.ncclCommInitAll(ctypes.byref(comm), 1, None)
    nccl.ncclAllReduce(room, room, ctypes.c_size_t(COUNT), FLOAT32, SUM, comm, None)
    os._exit(0)


def main() -> None:
    nccl = ctypes.CDLL(sys.argv[1])
    print("ready", flush=True)
    for line in sys.stdin:
        pids = []
        for _ in range(int(line)):
            pids.append(os.fork())
            if not pids[-1]:
                live(nccl)
        for pid in pids:
            os.waitpid(pid, 0)
        print(json.dumps(pids), flush=True)


if __name__ == "__main__":
    main()
