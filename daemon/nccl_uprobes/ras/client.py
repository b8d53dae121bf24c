"""Asks NCCL's RAS (reliability, availability, serviceability) for a report, over an open connection.

The protocol is that of NCCL's own client (src/ras/client.cc, 2.24 to 2.30): lines of at most 1024 bytes, then a report
up to the end of the stream. Each process of a job has a RAS thread that listens and answers; a request travels through
the network of these threads and does not involve the ranks' own work.
"""

from __future__ import annotations

import socket
import time
from typing import NamedTuple

from probing.api.errors import TargetTimeout, UnsupportedTarget

__all__ = ("RasAnswer", "RasSilent", "ask_ras")

# The time for the greeting, as in NCCL's client: a stopped process accepts connections and does not greet.
GREETING_S = 1.0
# The time that RAS gives its peers to answer (RAS_COLLECTIVE_LEG_TIMEOUT_SEC); it then waits as long again.
COLLECT_S = 5
MAX_LINE = 1_024
MAX_REPORT = 16 << 20
_CHUNK = 256 << 10


class RasSilent(TargetTimeout):
    """The other end accepted the connection and did not greet. Another connection may reach another process."""

    default_hint = "a process that is stopped takes connections and does not answer them"


class RasAnswer(NamedTuple):
    """``form``: json, or text from NCCL before 2.28.7. ``protocol``: the server's protocol version, 0 if unreadable."""

    report: bytes
    form: str
    protocol: int


def ask_ras(connection: socket.socket, timeout: float = 30.0) -> RasAnswer:
    """The verbose status of all jobs that the process at the other end knows. ``timeout``: seconds for all of it.

    Raises RasSilent, TargetTimeout for a report that does not end in time, UnsupportedTarget if the peer is no RAS or
    its report exceeds 16 MiB.
    """
    return _Talk(connection, time.monotonic() + timeout).ask()


class _Talk:
    def __init__(self, connection: socket.socket, deadline: float) -> None:
        self._connection = connection
        self._deadline = deadline
        self._read = bytearray()

    def ask(self) -> RasAnswer:
        whole, self._deadline = self._deadline, min(self._deadline, time.monotonic() + GREETING_S)
        try:
            greeting = self._command(b"CLIENT PROTOCOL 2")
        except TargetTimeout as e:
            raise RasSilent("NCCL RAS takes the connection and does not answer") from e
        self._deadline = whole
        if not greeting.upper().startswith(b"SERVER PROTOCOL "):
            raise UnsupportedTarget("what listens there is no NCCL RAS")
        number = greeting[16:].strip()
        self._command(b"TIMEOUT %d" % COLLECT_S)
        form = "json" if self._command(b"SET FORMAT json").upper() == b"OK" else "text"
        self._send(b"VERBOSE STATUS")
        return RasAnswer(self._rest(), form, int(number) if number.isdigit() and len(number) < 10 else 0)

    def _command(self, command: bytes) -> bytes:
        self._send(command)
        return self._line()

    def _send(self, command: bytes) -> None:
        self._connection.settimeout(self._left())
        try:
            self._connection.sendall(command + b"\n")
        except TimeoutError as e:
            raise TargetTimeout("NCCL RAS does not take a question") from e
        except OSError as e:
            raise UnsupportedTarget(f"NCCL RAS closed the connection: {e.strerror}") from e

    def _line(self) -> bytes:
        while (end := self._read.find(b"\n")) < 0:
            if len(self._read) > MAX_LINE:
                raise UnsupportedTarget("what listens there is no NCCL RAS: a line does not end")
            if not self._receive():
                raise UnsupportedTarget("NCCL RAS closed the connection before it answered")
        line = bytes(self._read[:end])
        del self._read[: end + 1]
        return line.strip()

    def _rest(self) -> bytes:
        while self._receive():
            if len(self._read) > MAX_REPORT:
                raise UnsupportedTarget(f"NCCL RAS reports more than {MAX_REPORT >> 20} MiB")
        return bytes(self._read)

    def _receive(self) -> int:
        self._connection.settimeout(self._left())
        try:
            part = self._connection.recv(_CHUNK)
        except TimeoutError as e:
            raise TargetTimeout("NCCL RAS did not answer in time") from e
        except OSError as e:
            raise UnsupportedTarget(f"NCCL RAS closed the connection: {e.strerror}") from e
        self._read += part
        return len(part)

    def _left(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TargetTimeout("NCCL RAS did not answer in time")
        return left
