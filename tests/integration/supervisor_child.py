"""Stands in for any process of the daemon, so that the supervisor is tested by itself.

Run as ``supervisor_child.py KIND OPTIONS``; the options are the configuration, as the real ones get it.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from pathlib import Path

from probing.api.errors import FormatError, StateLocked
from probing.daemon.config import Config
from probing.daemon.supervisor.health import Watch, report
from probing.daemon.supervisor.runtime import INETD_SOCKETS, INJECTOR


def main() -> int:
    kind, config = sys.argv[1], Config.from_args(sys.argv[2:])
    if kind in (*INETD_SOCKETS, INJECTOR):
        return _helper()
    order = Path(config.state_dir, f"{kind}.order")
    if order.exists():
        return _failing(order)
    path = config.control_socket if kind == "collector" else config.socket
    Path(path).unlink(missing_ok=True)
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.bind(path)
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    watch = Watch(config.hang_s, lambda _: True)
    watch.start()
    watch.step()
    while not ended.wait(0.1):
        watch.step()
    return 0


def _helper() -> int:
    """Say who it is, then end with the connection."""
    connection = socket.socket(fileno=0)
    connection.sendall(Path("/proc/self/status").read_bytes())
    connection.shutdown(socket.SHUT_WR)
    return 0 if connection.recv(1) == b"" else 1


def _grow() -> None:
    kept = []
    while True:
        kept.append(b"x" * (1 << 20))


def _failing(order: Path) -> int:
    what = order.read_text()
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "grow once":
        order.unlink()
        _grow()
    if what == "say nothing":
        signal.pause()
    if what == "locked once":
        order.unlink()
    if what.startswith("locked"):
        report(StateLocked("another daemon uses it"))
    else:
        report(FormatError("the log is of a newer version", hint="install that version"))
    return 1


if __name__ == "__main__":
    sys.exit(main())
