"""Relays the public sockets to gRPC: identifies, counts and limits connections before gRPC sees a byte.

gRPC does not report the user at the other end of a Unix socket, and limits neither connections nor callers. So the
service accepts connections itself and passes their bytes to gRPC's inner socket. Each connection to the inner socket
has its own address, which gRPC reports as the peer of a call.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass

from probing.api.errors import Overloaded
from probing.daemon.ipc import peer_credentials
from probing.daemon.query.caller import Caller
from probing.daemon.service.audit import Audit
from probing.daemon.service.connections import Handshakes, Places, peer_name
from probing.daemon.service.tls import Certificate, Tls

__all__ = ("Link", "Relay")

# The maximum numbers of authenticated connections: of a share (see Caller), and of one caller.
MOST = {"root": 48, "unix": 64, "tcp": 64}
EACH = {"root": 40, "unix": 16, "tcp": 16}
# The maximum numbers of TCP connections that have not shown a token yet: in all, and of one address or local user.
# Beyond them a new connection replaces an old one.
MOST_UNKNOWN, EACH_UNKNOWN = 64, 16
# A TCP connection must send the token within this time, s.
UNKNOWN_S = 10.0
# A refused connection ends after this time, s.
REFUSED_S = 1.0
LOG_S = 60.0
_PEER = "unix-abstract:"
_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Link:
    """A connection. ``known``: the authenticated caller for whom the connection is counted; None before the caller is
    authenticated. ``certificate``: the certificate that the caller showed."""

    name: str
    caller: Caller
    front: asyncio.Transport
    known: Caller | None = None
    certificate: Certificate | None = None

    def close(self) -> None:
        """Ends the connection, if it has not ended."""
        # CPython 3.11 raises this error if a TLS transport is aborted after its end.
        with suppress(AttributeError):
            self.front.abort()


class Relay:
    """Relays connections to the Unix socket ``inner``. TLS ends here. Belongs to one event loop."""

    def __init__(self, inner: str, tls: Tls, audit: Audit) -> None:
        self._inner = inner
        self._tls = tls
        self._audit = audit
        # Links by the peer that gRPC reports, the least recently used first.
        self._links: dict[str, Link] = {}
        self._unknown: Places[Link] = Places(MOST_UNKNOWN, EACH_UNKNOWN)
        self._servers: list[asyncio.Server | Handshakes] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._refused: Counter[str] = Counter()
        self._reported = -LOG_S

    def link(self, peer: str) -> Link | None:
        """Returns the connection whose calls come from the gRPC peer ``peer``."""
        return self._links.get(peer.removeprefix(_PEER))

    async def serve(self, listener: socket.socket, *, known: bool) -> None:
        """Accepts connections of ``listener`` and owns it. ``known``: connections need no token. TCP connections use
        TLS if it is configured."""
        make = lambda: _Front(self, known)  # noqa: E731
        loop = asyncio.get_running_loop()
        if listener.family == socket.AF_UNIX:
            self._servers.append(await loop.create_unix_server(make, sock=listener))
        elif self._tls.wanted:
            handshakes = Handshakes("tcp", self._tls, make, self._audit)
            handshakes.start(listener)
            self._servers.append(handshakes)
        else:
            self._servers.append(await loop.create_server(make, sock=listener))

    def close(self) -> None:
        for server in self._servers:
            server.close()
        for link in list(self._links.values()):
            link.close()

    def admit(self, transport: asyncio.Transport, *, known: bool) -> Link | None:
        """Returns the link of a new connection; None if its caller or its share has too many connections. A connection
        of an unknown caller is always admitted, and may replace an old connection of an unknown caller."""
        caller = _caller_of(transport)
        if known and not self._has_room(caller):
            self._report(caller)
            return None
        # The name is random, so that no other process can use it first and block the connection.
        secured = transport.get_extra_info("ssl_object")
        certificate = self._tls.certificate(secured) if secured is not None else None
        name = f"probingd-{secrets.token_hex(12)}"
        link = Link(name, caller, transport, caller if known else None, certificate)
        self._links[link.name] = link
        if not known:
            if (lost := self._unknown.take(caller.user, link)) is not None:
                self._end(lost[1])
            asyncio.get_running_loop().call_later(UNKNOWN_S, self._end_unknown, link)
        return link

    def know(self, link: Link, caller: Caller) -> None:
        """Counts ``link`` as a connection of ``caller``, who was authenticated on it. Raises Overloaded, and ends the
        connection, if the caller or its share has too many connections. In a full share, a connection of a token that
        has many is ended in favor of another token."""
        if link.known is not None:
            if link.name in self._links:
                self._links[link.name] = self._links.pop(link.name)
            return
        if not self._has_room(caller):
            self._report(caller)
            # The connection ends later, so that the answer is sent first.
            asyncio.get_running_loop().call_later(REFUSED_S, link.close)
            raise Overloaded(f"{caller} has too many connections, or no connection is free", hint="close some of them")
        self._unknown.leave(link.caller.user, link)
        link.known = caller

    def _has_room(self, caller: Caller) -> bool:
        """Returns whether ``caller`` may have one more connection. To make room in a full share of TCP, ends a
        connection of the token with the most connections, if that token has at least two more than the caller's token.
        """
        share = [(one, link) for link in self._links.values() if (one := link.known) and one.share == caller.share]
        if sum(one.key == caller.key for one, _ in share) >= EACH[caller.share]:
            return False
        if len(share) < MOST[caller.share]:
            return True
        held = Counter(one.holder for one, _ in share)
        crowd, count = held.most_common(1)[0]
        if caller.listener == "unix" or count <= held[caller.holder] + 1:
            return False
        self._end(next(link for one, link in share if one.holder == crowd))
        return True

    def join(self, front: _Front, link: Link) -> None:
        task = asyncio.get_running_loop().create_task(self._join(front, link))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def forget(self, link: Link) -> None:
        self._links.pop(link.name, None)
        self._unknown.leave(link.caller.user, link)

    async def _join(self, front: _Front, link: Link) -> None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            sock.bind(f"\0{link.name}")
            loop = asyncio.get_running_loop()
            await loop.sock_connect(sock, self._inner)
            # ``front`` is passed at once, because gRPC sends the first bytes on a new connection.
            _, back = await loop.create_connection(lambda: _Side(front), sock=sock)
        except OSError as e:
            _log.warning("a connection could not be passed on: %s", e.strerror)
            sock.close()
            link.close()
            return
        front.pass_to(back)

    def _end_unknown(self, link: Link) -> None:
        if link.known is None:
            link.close()

    def _end(self, link: Link) -> None:
        link.close()
        self.forget(link)

    def _report(self, caller: Caller) -> None:
        self._audit.counts["too many connections"] += 1
        self._refused[f"{caller.listener}: {caller.who}"] += 1
        if time.monotonic() - self._reported >= LOG_S:
            for who, count in self._refused.most_common(5):
                _log.warning("%d connections of %s refused: it has too many", count, who)
            self._refused.clear()
            self._reported = time.monotonic()


class _Side(asyncio.Protocol):
    """One end of a relayed connection. It writes the bytes that it reads to ``other``, no faster than ``other`` can
    send.
    """

    transport: asyncio.Transport

    def __init__(self, other: _Side | None = None) -> None:
        self.other = other

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        if self.other is not None:
            self.other.transport.write(data)

    def pause_writing(self) -> None:
        if self.other is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None:
            with suppress(RuntimeError):
                self.other.transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        del error
        if self.other is not None:
            self.other.transport.close()


class _Front(_Side):
    def __init__(self, relay: Relay, known: bool) -> None:
        super().__init__()
        self._relay = relay
        self._known = known
        self._link: Link | None = None
        # Bytes read before the other end was connected.
        self._early = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._link = self._relay.admit(self.transport, known=self._known)
        if self._link is None:
            self.transport.abort()
            return
        self._relay.join(self, self._link)

    def data_received(self, data: bytes) -> None:
        if self.other is None:
            self._early += data
            self.transport.pause_reading()
        else:
            super().data_received(data)

    def pass_to(self, back: _Side) -> None:
        """Connects the caller's side of the connection with gRPC's side."""
        self.other = back
        back.transport.write(self._early)
        if self.transport.is_closing():
            back.transport.close()
        else:
            self.transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        if self._link is not None:
            self._relay.forget(self._link)


def _caller_of(transport: asyncio.Transport) -> Caller:
    sock = transport.get_extra_info("socket")
    if sock.family == socket.AF_UNIX:
        pid, uid, _ = peer_credentials(sock)
        return Caller("unix", str(uid), pid, reserved=uid in (0, os.getuid()))
    return Caller("tcp", peer_name(sock))
