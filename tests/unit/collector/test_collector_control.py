"""The control socket answers on after a connection that could not be accepted."""

from __future__ import annotations

import errno
import os
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from probing.api.errors import ProbingError
from probing.daemon.collector import control
from probing.daemon.collector.control import ControlServer
from probing.daemon.ipc import connect


def test_a_lack_of_descriptors_does_not_end_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = []

    class Socket(socket.socket):
        def accept(self) -> Any:
            if not refused:
                refused.append(1)
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return super().accept()

    with monkeypatch.context() as patched:
        patched.setattr(control.socket, "socket", Socket)
        server = ControlServer(tmp_path / "control.sock", {"ping": lambda _: ({"pong": True}, b"")}, frozenset())
        server.start()
    try:
        with connect(str(tmp_path / "control.sock")) as channel:
            assert channel.request({"op": "ping"}, timeout=20).header == {"pong": True}
    finally:
        server.stop()
    assert refused


def test_a_lack_of_threads_does_not_end_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = []
    start = threading.Thread.start

    def start_later(thread: threading.Thread) -> None:
        if thread.name == "control-client" and len(refused) < 2 * control.MAX_CONNECTIONS:
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_later)
    server = ControlServer(tmp_path / "control.sock", {"ping": lambda _: ({"pong": True}, b"")}, frozenset())
    server.start()
    try:
        for _ in range(2 * control.MAX_CONNECTIONS):
            with connect(str(tmp_path / "control.sock")) as channel, pytest.raises(ProbingError):
                channel.request({"op": "ping"}, timeout=20)
        with connect(str(tmp_path / "control.sock")) as channel:
            assert channel.request({"op": "ping"}, timeout=20).header == {"pong": True}
    finally:
        server.stop()
