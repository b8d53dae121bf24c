"""The HTTP server of /metrics and /healthz: one request for each connection, limited in bytes and time.

The server runs in the event loop of the service. It waits only for callers; pages are made in another thread. /metrics
needs the same token as gRPC over TCP. /healthz answers one word from memory and needs no token. A new connection is
always accepted: if there are too many connections, an old connection of the address or local user with the most
connections is closed. The syntax follows RFC 9112.

``Metrics`` joins the reading of rows, the HTTP server and its port.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from probing.api.errors import Overloaded, ProbingError, Unauthenticated
from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.daemon.query.caller import Caller, Scope
from probing.daemon.query.engine import Engine
from probing.daemon.service.audit import Audit
from probing.daemon.service.auth import Doorkeeper, require
from probing.daemon.service.connections import Handshakes, Places, peer_name
from probing.daemon.service.listening import Listeners, TcpPort
from probing.daemon.service.metrics.page import RequestTimes
from probing.daemon.service.metrics.scrape import BAD, Scraper
from probing.daemon.service.tls import Certificate, Tls

__all__ = (
    "HttpServer",
    "Metrics",
)

MAX_REQUEST = 8 << 10
# The maximum numbers of connections, and of pages that are being made or sent: for all callers together, and for one
# address or local user.
MAX_CONNECTIONS, EACH = 64, 16
MAX_PAGES, PAGES_EACH = 32, 8
# The time to read a whole request, and to write a whole answer, s.
READ_S = 5.0
WRITE_S = 10.0
# The delay of the answer to a wrong token, s.
WRONG_TOKEN_S = 1.0
_PAGE = "text/plain; version=0.0.4; charset=utf-8"
_TEXT = "text/plain; charset=utf-8"
_REASONS = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    500: "Internal Server Error",
    503: "Service Unavailable",
}
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    body: bytes
    kind: str = _TEXT
    headers: str = ""


class HttpServer:
    """Answers connections of the sockets given to ``serve``. Belongs to one event loop."""

    def __init__(self, pages: Scraper, keeper: Doorkeeper, tls: Tls, audit: Audit) -> None:
        self._pages = pages
        self._keeper = keeper
        self._tls = tls
        self._audit = audit
        self._servers: list[asyncio.Server | Handshakes] = []
        self._places: Places[asyncio.WriteTransport] = Places(MAX_CONNECTIONS, EACH)
        self._pages_held: Counter[tuple[str, ...]] = Counter()

    async def serve(self, listener: socket.socket) -> None:
        """Accepts connections of ``listener`` and owns it. The connections use TLS if it is configured."""
        if self._tls.wanted:
            handshakes = Handshakes("http", self._tls, self._protocol, self._audit)
            handshakes.start(listener)
            self._servers.append(handshakes)
            return
        self._servers.append(await asyncio.start_server(self._connected, sock=listener, limit=MAX_REQUEST))

    def _protocol(self) -> asyncio.Protocol:
        return asyncio.StreamReaderProtocol(asyncio.StreamReader(limit=MAX_REQUEST), self._connected)

    def close(self) -> None:
        for server in self._servers:
            server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        transport = writer.transport
        caller = Caller("http", peer_name(transport.get_extra_info("socket")))
        if (lost := self._places.take(caller.user, transport)) is not None:
            crowd, oldest = lost
            oldest.abort()
            self._audit.refused(Caller("http", crowd), "HTTP", "too many connections at once")
        # With this limit ``drain`` waits until all bytes are sent, so no bytes are left when the connection is closed
        # below.
        transport.set_write_buffer_limits(0)
        try:
            with ExitStack() as held:
                await self._exchange(reader, writer, caller, held)
        except (OSError, asyncio.TimeoutError, asyncio.IncompleteReadError):
            transport.abort()
        finally:
            self._places.leave(caller.user, transport)
            writer.close()

    async def _exchange(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, caller: Caller, held: ExitStack
    ) -> None:
        try:
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), READ_S)
        except asyncio.LimitOverrunError:
            answer, method = _Answer(400, b"the request is too long\n"), "GET"
        else:
            method, path, headers = _parsed(head)
            secured = writer.get_extra_info("ssl_object")
            certificate = self._tls.certificate(secured) if secured is not None else None
            answer = await self._answer(method, path, headers, caller, certificate, held)
        lines = (
            f"HTTP/1.1 {answer.status} {_REASONS[answer.status]}",
            f"Content-Type: {answer.kind}",
            f"Content-Length: {len(answer.body)}",
            "Cache-Control: no-store",
            "Connection: close",
        )
        writer.write(("\r\n".join(lines) + f"\r\n{answer.headers}\r\n").encode())
        if method != "HEAD":
            writer.write(answer.body)
        await asyncio.wait_for(writer.drain(), WRITE_S)
        if writer.can_write_eof():
            writer.write_eof()
        # Unread bytes of the caller would otherwise reset the connection before the caller has read the answer.
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(reader.read(MAX_REQUEST), 1.0)

    async def _answer(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        caller: Caller,
        certificate: Certificate | None,
        held: ExitStack,
    ) -> _Answer:
        """Returns the answer to a request. ``held``: resources that are released once the answer was sent."""
        if not method:
            return _Answer(400, b"this is no HTTP request\n")
        if method not in ("GET", "HEAD"):
            return _Answer(405, b"only GET and HEAD are answered\n", headers="Allow: GET, HEAD\r\n")
        if path == "/healthz":
            state = await self._pages.health()
            return _Answer(503 if state in BAD else 200, f"{state}\n".encode())
        if path != "/metrics":
            return _Answer(404, b"only /metrics and /healthz exist\n")
        try:
            shown = (("authorization", headers.get("authorization", "")),)
            caller = self._keeper.identified(caller, shown, certificate)
            require(caller, Scope.READ)
            if caller.jobs is not None:
                return _Answer(403, b"the token is limited to jobs\n")
            held.enter_context(self._page_place(caller))
            return _Answer(200, await self._pages.page(), _PAGE)
        except Unauthenticated as e:
            await asyncio.sleep(WRONG_TOKEN_S)
            return _Answer(401, f"{e.message}\n".encode(), headers="WWW-Authenticate: Bearer\r\n")
        except ProbingError as e:
            return _Answer(503, f"{e.message}\n".encode())
        except Exception as e:
            _log.exception("/metrics failed")
            return _Answer(500, f"the page failed: {type(e).__name__}\n".encode())

    @contextmanager
    def _page_place(self, caller: Caller) -> Iterator[None]:
        """Counts a page while it is made. Raises Overloaded when the caller, or all callers, have too many pages."""
        if self._pages_held[caller.key] >= PAGES_EACH or self._pages_held.total() >= MAX_PAGES:
            raise Overloaded("too many pages at once", hint="scrape less often")
        self._pages_held[caller.key] += 1
        try:
            yield
        finally:
            self._pages_held[caller.key] -= 1
            self._pages_held += Counter()


def _parsed(head: bytes) -> tuple[str, str, dict[str, str]]:
    """Returns method, path without its query, and headers by lower-case name; an empty method if ``head`` is not a
    request.
    """
    first, *rest = head.decode("latin-1").split("\r\n")
    words = first.split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1.") or not words[0].isalpha():
        return "", "", {}
    pairs = (line.partition(":") for line in rest if ":" in line)
    return words[0], words[1].partition("?")[0], {name.strip().lower(): value.strip() for name, _, value in pairs}


class Metrics:
    """Answers /metrics and /healthz on ``address`` (HOST:PORT). Belongs to one event loop.

    ``status(seconds)`` returns the collector's status within this time, or raises PeerError. ``calls`` and ``hooks``
    return counts: calls in progress by kind, and hooks of findings by outcome.
    """

    def __init__(
        self,
        address: str,
        node: str,
        version: str,
        engine: Engine,
        status: Callable[[float], Mapping[str, Any]],
        keeper: Doorkeeper,
        tls: Tls,
        audit: Audit,
        calls: Callable[[], Mapping[str, int]],
        hooks: Callable[[], Mapping[str, int]],
        listeners: Listeners | None = None,
    ) -> None:
        self._scraper = Scraper(node, version, engine, status, refused=lambda: audit.counts, calls=calls, hooks=hooks)
        self._http = HttpServer(self._scraper, keeper, tls, audit)
        self._port = TcpPort("http", address, self._http.serve, listeners)

    async def start(self) -> None:
        """Starts to listen; a port that is taken is tried again."""
        await self._port.start()

    def stop(self) -> None:
        self._port.stop()
        self._http.close()
        self._scraper.close()

    def sources(self) -> list[pb.Source]:
        """Returns the state of the port for Status if it is degraded."""
        return self._port.sources()

    @property
    def times(self) -> RequestTimes:
        """The counters of calls and queries."""
        return self._scraper.times
