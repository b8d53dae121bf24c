"""Runs commands in a guest by QEMU's guest agent: JSON over a virtio serial port (QEMU, qga/qapi-schema.json)."""

from __future__ import annotations

import base64
import json
import socket
import time
from pathlib import Path
from typing import Any

__all__ = ("AgentSilent", "GuestAgent")

# A poll takes the guest some milliseconds, and is a line of its journal.
POLL_S = 0.5


class AgentSilent(Exception):
    """The agent did not answer in time."""


class GuestAgent:
    """``path``: QEMU's end of the port. Raises OSError while nothing listens there."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.connect(str(path))
        except OSError:
            self._socket.close()
            raise
        self._left = b""

    def close(self) -> None:
        self._socket.close()

    def answers(self, seconds: float) -> bool:
        """Returns whether the agent runs; answers to earlier requests are thrown away."""
        number = time.monotonic_ns() % (1 << 31)
        try:
            self._send({"execute": "guest-sync", "arguments": {"id": number}})
            end = time.monotonic() + seconds
            while self._line(end).get("return") != number:
                pass
        except AgentSilent:
            return False
        return True

    def shell(self, command: str, seconds: float) -> tuple[int, str, str]:
        """Runs ``command`` by sh as root; returns its exit status (-signal), stdout and stderr."""
        end = time.monotonic() + seconds
        # An interrupted command leaves an unread answer behind.
        if not self.answers(seconds):
            raise AgentSilent("the guest agent does not answer")
        words = {"path": "/bin/sh", "arg": ["-c", command], "capture-output": True}
        pid = self._call("guest-exec", words, end)["pid"]
        while not (state := self._call("guest-exec-status", {"pid": pid}, end))["exited"]:
            if time.monotonic() > end:
                raise AgentSilent(f"{command!r} did not end within {seconds:g} s")
            time.sleep(POLL_S)
        out, err = (base64.b64decode(state.get(name, "")).decode(errors="replace") for name in ("out-data", "err-data"))
        return state.get("exitcode", -state.get("signal", 0)), out, err

    def _call(self, name: str, arguments: dict[str, Any], end: float) -> Any:
        self._send({"execute": name, "arguments": arguments})
        answer = self._line(end)
        if "error" in answer:
            raise RuntimeError(f"{name}: {answer['error']}")
        return answer["return"]

    def _send(self, request: dict[str, Any]) -> None:
        try:
            self._socket.sendall(json.dumps(request).encode() + b"\n")
        except OSError:
            raise AgentSilent("the guest has ended") from None

    def _line(self, end: float) -> dict[str, Any]:
        while b"\n" not in self._left:
            self._socket.settimeout(max(end - time.monotonic(), 0.001))
            try:
                more = self._socket.recv(1 << 16)
            except TimeoutError:
                raise AgentSilent("the guest agent does not answer") from None
            except ConnectionError:
                more = b""
            if not more:
                raise AgentSilent("the guest has ended")
            self._left += more
        line, _, self._left = self._left.partition(b"\n")
        return dict(json.loads(line.lstrip(b"\xff")))
