"""The control socket answers on after a connection that could not be accepted."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path
from typing import Any

import pytest

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
