"""Starts workers of queries: a program that has imported what they import, and forks for each request.

Its argument is the descriptor of a socket. A message on it has the worker's arguments, as a JSON list, and its
connection; the answer is the worker's pid.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import socket
import sys
import traceback

from probing.api.numpy_import import hide_numpy
from probing.daemon.confined import sql_worker

# What a worker imports when it has started.
_LATE = ("probing.daemon.confined.sql_checker", "probing.daemon.query.database", "probing.daemon.query.job")


def main() -> None:
    hide_numpy()
    for name in _LATE:
        importlib.import_module(name)
    asker = socket.socket(fileno=int(sys.argv[1]))
    # Nobody waits for the workers.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    os.chdir("/")
    gc.freeze()
    while True:
        words, given, _, _ = socket.recv_fds(asker, 1 << 16, 1)
        if not words:
            return
        if pid := os.fork():
            os.close(given[0])
            asker.send(str(pid).encode())
        else:
            asker.close()
            _work(json.loads(words), given[0])


def _work(arguments: list[str], connection: int) -> None:
    try:
        os.dup2(connection, 0)
        os.close(connection)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        sys.argv[1:] = arguments
        sql_worker.main()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main()
    # As a worker ends: an orderly exit would write a report of DuckDB's objects as leaks.
    os._exit(0)
