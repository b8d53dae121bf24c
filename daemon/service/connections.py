"""Accepts TCP connections of callers who are not identified yet.

Handshakes are limited in time and number, but no caller can keep other callers out. The kernel reports the user of a
peer on this machine.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

from probing.api.tcp_peer import CLOSED, Connection, peer_user
from probing.daemon.query.caller import Caller
from probing.daemon.service.audit import Audit
from probing.daemon.service.tls import Tls

__all__ = (
    "Handshakes",
    "Places",
    "peer_name",
)


def peer_name(connection: Connection) -> str:
    """Returns ``ADDRESS, uid N`` for a peer whose socket is in this network namespace, and ``ADDRESS`` for other peers.
    Returns ``unknown`` for a connection that has ended."""
    try:
        address = str(connection.getpeername()[0])
    except OSError:
        return "unknown"
    uid = peer_user(connection)
    return address if uid in (None, CLOSED) else f"{address}, uid {uid}"


_C = TypeVar("_C")


class Places(Generic[_C]):
    """Limits connections to ``most`` in total and ``each`` of one holder. A new connection is always accepted. At a
    limit, it replaces an old connection: the oldest of its own holder, if that holder has ``each`` connections or as
    many as any other holder; otherwise the oldest of the holder with the most connections.
    """

    def __init__(self, most: int, each: int) -> None:
        self._most = most
        self._each = each
        # Connections by holder, in order of age.
        self._held: dict[str, list[_C]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._held.values()))

    def take(self, holder: str, connection: _C) -> tuple[str, _C] | None:
        """Adds ``connection``. Returns the holder of the connection that it replaces, and that connection, which the
        caller has to close. Returns None if it replaces no connection.
        """
        held, lost = len(self._held.get(holder, ())), None
        if held >= self._each or len(self) >= self._most:
            crowd = max(self._held, key=lambda one: len(self._held[one]))
            loser = holder if held >= min(self._each, len(self._held[crowd])) else crowd
            lost = loser, self._held[loser][0]
            self.leave(*lost)
        self._held.setdefault(holder, []).append(connection)
        return lost

    def leave(self, holder: str, connection: _C) -> None:
        """Removes ``connection``, unless it was replaced before."""
        held = self._held.get(holder, [])
        if connection in held:
            held.remove(connection)
            if not held:
                del self._held[holder]


HANDSHAKE_S = 5.0
SHUTDOWN_S = 2.0
# The maximum number of simultaneous handshakes on one port, and of one address or local user.
MOST = 64
EACH = 16
# The pause when the process has no descriptor left, s.
PAUSE_S = 1.0
# OpenSSL's reasons for bytes that are not TLS.
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
# Python 3.10 lacks this argument: it does not wait until the other end has closed TLS.
_SHUTDOWN: dict[str, Any] = {"ssl_shutdown_timeout": SHUTDOWN_S} if sys.version_info >= (3, 11) else {}
_log = logging.getLogger(__name__)


class Handshakes:
    """Passes each connection to a protocol of ``make`` after the TLS handshake. Belongs to one event loop."""

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
                caller = Caller(self._name, peer_name(sock))
                task = loop.create_task(self._shake(sock, caller))
                self._running.add(task)
                task.add_done_callback(partial(self._ended, caller.user))
                if (lost := self._places.take(caller.user, task)) is not None:
                    crowd, oldest = lost
                    oldest.cancel()
                    self._audit.refused(Caller(self._name, crowd), "TLS", "too many handshakes at once")

    def _ended(self, holder: str, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._places.leave(holder, task)

    async def _shake(self, sock: socket.socket, caller: Caller) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                self._make,
                sock,
                ssl=self._tls.server(),
                ssl_handshake_timeout=HANDSHAKE_S,
                **_SHUTDOWN,
            )
        except (OSError, ValueError) as e:
            self._audit.refused(caller, "TLS", _why(e))
            sock.close()
        except asyncio.CancelledError:
            sock.close()
            raise


def _why(error: Exception) -> str:
    """Returns the reason of ``error`` in our words or OpenSSL's, without bytes that the caller sent."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is refused: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        if error.reason in _PLAIN:
            return "it does not speak TLS"
        return f"TLS: {(error.reason or 'error').replace('_', ' ').lower()}"
    if isinstance(error, ConnectionAbortedError):
        return f"no TLS handshake within {HANDSHAKE_S:.0f} s"
    return "it closed the connection in the handshake"
