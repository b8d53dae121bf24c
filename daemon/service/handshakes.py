"""Accepts connections of a TLS port. A handshake has a time limit and a place among few: the oldest gives way."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

from probing.daemon.query.caller import Caller
from probing.daemon.service.audit import Audit
from probing.daemon.service.tls import Tls

__all__ = ("Handshakes",)

HANDSHAKE_S = 5.0
SHUTDOWN_S = 2.0
# Connections in their handshake: of one port, and of one address.
MOST = 64
EACH = 16
# Pause where the process has no descriptor left, s.
PAUSE_S = 1.0
# OpenSSL's reasons for bytes that are no TLS.
_PLAIN = frozenset(
    (
        "HTTP_REQUEST",
        "WRONG_VERSION_NUMBER",
        "UNKNOWN_PROTOCOL",
        "PACKET_LENGTH_TOO_LONG",
        "UNEXPECTED_MESSAGE",
        "BAD_RECORD_TYPE",
        "RECORD_LAYER_FAILURE",
    )
)
# Python 3.10 does not wait for the other end's farewell.
_SHUTDOWN: dict[str, Any] = {"ssl_shutdown_timeout": SHUTDOWN_S} if sys.version_info >= (3, 11) else {}
_log = logging.getLogger(__name__)


class Handshakes:
    """Gives connections to protocols of ``make`` once their handshake has ended. Belongs to one event loop."""

    def __init__(self, name: str, tls: Tls, make: Callable[[], asyncio.Protocol], audit: Audit) -> None:
        self._name = name
        self._tls = tls
        self._make = make
        self._audit = audit
        # In order of age.
        self._running: dict[asyncio.Task[None], str] = {}
        self._accepting: asyncio.Task[None] | None = None

    def start(self, listener: socket.socket) -> None:
        """Accepts connections of ``listener`` and owns it."""
        self._accepting = asyncio.get_running_loop().create_task(self._accept(listener))

    def close(self) -> None:
        for task in (self._accepting, *self._running):
            if task is not None:
                task.cancel()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with listener:
            while True:
                try:
                    sock, address = await loop.sock_accept(listener)
                except OSError as e:
                    _log.error("cannot accept connections: %s", e.strerror)
                    await asyncio.sleep(PAUSE_S)
                    continue
                sock.setblocking(False)
                host = str(address[0])
                self._make_room(host)
                task = loop.create_task(self._shake(sock, host))
                self._running[task] = host
                task.add_done_callback(lambda done: self._running.pop(done, None))

    def _make_room(self, host: str) -> None:
        """Ends the oldest handshake of ``host`` where it has many, else of the address that has the most."""
        held = Counter(self._running.values())
        crowd = host
        if held[host] < EACH:
            if len(self._running) < MOST:
                return
            crowd = held.most_common(1)[0][0]
        oldest = next(task for task, of in self._running.items() if of == crowd)
        self._running.pop(oldest)
        oldest.cancel()
        self._audit.refused(Caller(self._name, crowd), "TLS", "too many handshakes at once")

    async def _shake(self, sock: socket.socket, host: str) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                self._make,
                sock,
                ssl=self._tls.server(),
                ssl_handshake_timeout=HANDSHAKE_S,
                **_SHUTDOWN,
            )
        except (OSError, ValueError) as e:
            self._audit.refused(Caller(self._name, host), "TLS", _why(e))
            sock.close()
        except asyncio.CancelledError:
            sock.close()
            raise


def _why(error: Exception) -> str:
    """Returns the reason in words of ours or OpenSSL's: none has bytes of the caller."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is refused: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        if error.reason in _PLAIN:
            return "it does not speak TLS"
        return f"TLS: {(error.reason or 'error').replace('_', ' ').lower()}"
    if isinstance(error, ConnectionAbortedError):
        return f"no TLS handshake within {HANDSHAKE_S:.0f} s"
    return "it went away in the handshake"
