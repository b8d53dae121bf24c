"""Accepts connections of a TLS port. A handshake has a time limit, and a place among few."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from probing.daemon.query.caller import Caller
from probing.daemon.service.audit import Audit
from probing.daemon.service.peer_name import peer_name
from probing.daemon.service.places import Places
from probing.daemon.service.tls import Tls

__all__ = ("Handshakes",)

HANDSHAKE_S = 5.0
SHUTDOWN_S = 2.0
# Connections in their handshake: of one port, and of one address or local user.
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
        self._running: set[asyncio.Task[None]] = set()
        self._places: Places[asyncio.Task[None]] = Places(MOST, EACH)
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
                    sock, _ = await loop.sock_accept(listener)
                except OSError as e:
                    _log.error("cannot accept connections: %s", e.strerror)
                    await asyncio.sleep(PAUSE_S)
                    continue
                sock.setblocking(False)
                who = peer_name(sock)
                task = loop.create_task(self._shake(sock, who))
                self._running.add(task)
                task.add_done_callback(partial(self._ended, who))
                if (lost := self._places.take(who, task)) is not None:
                    crowd, oldest = lost
                    oldest.cancel()
                    self._audit.refused(Caller(self._name, crowd), "TLS", "too many handshakes at once")

    def _ended(self, who: str, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._places.leave(who, task)

    async def _shake(self, sock: socket.socket, who: str) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                self._make,
                sock,
                ssl=self._tls.server(),
                ssl_handshake_timeout=HANDSHAKE_S,
                **_SHUTDOWN,
            )
        except (OSError, ValueError) as e:
            self._audit.refused(Caller(self._name, who), "TLS", _why(e))
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
