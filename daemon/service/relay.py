"""Relays the public sockets to gRPC: identifies, counts and bounds connections before gRPC sees a byte.

gRPC does not report the user at the other end of a Unix socket, and bounds neither connections nor callers. So the
service accepts connections itself and passes their bytes to gRPC's inner socket. Each goes by an address of its own,
which gRPC reports as the peer of a call.
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

from probing.daemon.ipc import peer_credentials
from probing.daemon.query.caller import Caller
from probing.daemon.service.audit import Audit
from probing.daemon.service.handshakes import Handshakes
from probing.daemon.service.tls import Certificate, Tls

__all__ = ("Link", "Relay")

# Most connections of a share (see Caller), and of one caller.
MOST = {"root": 48, "unix": 64, "tcp": 64}
EACH = {"root": 40, "unix": 16, "tcp": 16}
# A TCP connection must send the token within this time, s.
UNKNOWN_S = 10.0
LOG_S = 60.0
_PEER = "unix-abstract:"
_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Link:
    """A connection. ``known``: its caller is authenticated. ``certificate``: the one that it showed."""

    name: str
    caller: Caller
    front: asyncio.Transport
    known: bool
    certificate: Certificate | None = None

    def close(self) -> None:
        """Ends the connection, if it has not ended."""
        # After its end, a TLS transport of CPython 3.11 has nothing left to abort, and fails.
        with suppress(AttributeError):
            self.front.abort()


class Relay:
    """Relays connections to the Unix socket ``inner``. TLS ends here. Belongs to one event loop."""

    def __init__(self, inner: str, tls: Tls, audit: Audit) -> None:
        self._inner = inner
        self._tls = tls
        self._audit = audit
        self._links: dict[str, Link] = {}
        self._servers: list[asyncio.Server | Handshakes] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._refused: Counter[str] = Counter()
        self._reported = -LOG_S

    def link(self, peer: str) -> Link | None:
        """Returns the connection whose calls have the gRPC peer ``peer``."""
        return self._links.get(peer.removeprefix(_PEER))

    async def serve(self, listener: socket.socket, *, known: bool) -> None:
        """Accepts connections of ``listener`` and owns it. ``known``: they need no token. TCP speaks TLS where it is
        configured."""
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
        """Returns the link of a new connection; None if its caller or its share has too many."""
        caller = _caller_of(transport)
        self._make_room(caller)
        held = [link.caller for link in self._links.values() if link.caller.share == caller.share]
        if len(held) >= MOST[caller.share] or sum(one.key == caller.key for one in held) >= EACH[caller.share]:
            self._report(caller)
            return None
        # Random, so that no other process can take the name first and block the connection.
        secured = transport.get_extra_info("ssl_object")
        certificate = self._tls.certificate(secured) if secured is not None else None
        link = Link(f"probingd-{secrets.token_hex(12)}", caller, transport, known, certificate)
        self._links[link.name] = link
        if not known:
            asyncio.get_running_loop().call_later(UNKNOWN_S, self._end_unknown, link)
        return link

    def join(self, front: _Front, link: Link) -> None:
        task = asyncio.get_running_loop().create_task(self._join(front, link))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def forget(self, link: Link) -> None:
        self._links.pop(link.name, None)

    async def _join(self, front: _Front, link: Link) -> None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            sock.bind(f"\0{link.name}")
            loop = asyncio.get_running_loop()
            await loop.sock_connect(sock, self._inner)
            # gRPC speaks first.
            _, back = await loop.create_connection(lambda: _Side(front), sock=sock)
        except OSError as e:
            _log.warning("a connection could not be passed on: %s", e.strerror)
            sock.close()
            link.close()
            return
        front.pass_to(back)

    def _make_room(self, caller: Caller) -> None:
        """Closes the oldest unauthenticated connection if the caller or its share has no room."""
        mine = [link for link in self._links.values() if link.caller.share == caller.share]
        same = [link for link in mine if link.caller.key == caller.key]
        for found, most in ((same, EACH[caller.share]), (mine, MOST[caller.share])):
            if len(found) >= most and (oldest := next((link for link in found if not link.known), None)):
                oldest.close()
                self.forget(oldest)

    def _end_unknown(self, link: Link) -> None:
        if not link.known:
            link.close()

    def _report(self, caller: Caller) -> None:
        self._audit.counts["too many connections"] += 1
        self._refused[f"{caller.listener}: {caller.who}"] += 1
        if time.monotonic() - self._reported >= LOG_S:
            for who, count in self._refused.most_common(5):
                _log.warning("%d connections of %s refused: it has too many", count, who)
            self._refused.clear()
            self._reported = time.monotonic()


class _Side(asyncio.Protocol):
    """One end of a relayed connection; writes what it reads to ``other``, no faster than that end sends."""

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
        """Connects this end to gRPC's end."""
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
    address = transport.get_extra_info("peername")
    return Caller("tcp", str(address[0]) if address else "unknown")
