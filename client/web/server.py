"""The server: uvicorn with limits on the connections of each peer, on slow requests, and on slow readers."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import ssl
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from uvicorn import Config, Server
from uvicorn.protocols.http.h11_impl import H11Protocol

from probing.client.web.guard import App
from probing.client.web.peers import Peer

__all__ = ("WebServer",)

# The maximum number of connections, in total and from one peer. A browser opens six connections to a server.
_MOST, _MOST_OF_ONE = 512, 64
_HANDSHAKE_S = 5.0
# Timeouts, s: for the headers of a request, and for a reader that has stopped reading an answer.
_REQUEST_S = 10.0
_UNREAD_S = 20.0
_IDLE_S = 30
_MOST_HEADERS = 32 << 10
_BACKLOG = 128
# The pause, s, after a failed accept, for example when no file descriptor is free.
_PAUSE_S = 0.1


class WebServer:
    """Serves ``app`` on ``sock``, which listens already, until ``stop``.

    ``peer_of`` returns the other end of a connection; None: the connection is refused.
    """

    def __init__(
        self, app: App, sock: socket.socket, peer_of: Callable[[socket.socket], Peer | None], tls: ssl.SSLContext | None
    ) -> None:
        config = Config(
            app,
            http=_Connection,
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=_IDLE_S,
            timeout_graceful_shutdown=0,
            h11_max_incomplete_event_size=_MOST_HEADERS,
        )
        # Malformed requests of strangers are not logged.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        self._sock = sock
        self._server = _Server(config, _Doorkeeper(peer_of), tls)

    def run(self) -> None:
        """Serves until SIGINT, SIGTERM or ``stop``."""
        self._server.run([self._sock])

    def stop(self) -> None:
        """Ends ``run``, from any thread."""
        self._server.should_exit = True

    @property
    def serving(self) -> bool:
        return self._server.started


class _Doorkeeper:
    """Counts the connections of each peer."""

    def __init__(self, peer_of: Callable[[socket.socket], Peer | None]) -> None:
        self._peer_of = peer_of
        self._here: Counter[str] = Counter()

    def enter(self, near: socket.socket) -> Peer | None:
        """Counts a connection until ``leave``, and returns its peer; None if the connection is refused."""
        peer = self._peer_of(near)
        if peer is None or self._here.total() >= _MOST or self._here[peer.name] >= _MOST_OF_ONE:
            return None
        self._here[peer.name] += 1
        return peer

    def leave(self, peer: Peer) -> None:
        self._here[peer.name] -= 1
        if not self._here[peer.name]:
            del self._here[peer.name]


class _Server(Server):
    def __init__(self, config: Config, door: _Doorkeeper, tls: ssl.SSLContext | None) -> None:
        super().__init__(config)
        self._door = door
        self._tls = tls

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Ends the server at a signal. Does not raise the signal again, because that would act as a second Ctrl-C."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        earlier = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in earlier.items():
                signal.signal(number, handler)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accepts connections itself, so that they are counted before the TLS handshake."""
        self.servers: list[Any] = [_Accepting(sock, self._meet) for sock in sockets or ()]
        self.started = True

    async def _meet(self, near: socket.socket) -> None:
        peer = self._door.enter(near)
        if peer is None:
            near.close()
            return

        made = _Connection(self.config, self.server_state, {"peer": peer}, left=lambda: self._door.leave(peer))
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: made,
                near,
                ssl=self._tls,
                ssl_handshake_timeout=_HANDSHAKE_S if self._tls else None,
            )
        except OSError:
            near.close()
        finally:
            if not made.begun:
                self._door.leave(peer)


class _Accepting:
    """Accepts connections at ``sock`` until it is closed."""

    def __init__(self, sock: socket.socket, meet: Callable[[socket.socket], Any]) -> None:
        self._sock = sock
        self._meet = meet
        self._meeting: set[asyncio.Task[None]] = set()
        self._task = asyncio.get_running_loop().create_task(self._run())

    def close(self) -> None:
        self._task.cancel()

    async def wait_closed(self) -> None:
        with suppress(asyncio.CancelledError):
            await self._task

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        self._sock.setblocking(False)
        while True:
            try:
                near, _ = await loop.sock_accept(self._sock)
            except OSError:
                await asyncio.sleep(_PAUSE_S)
                continue
            near.setblocking(False)
            with suppress(OSError):
                near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            task = loop.create_task(self._meet(near))
            self._meeting.add(task)
            task.add_done_callback(self._meeting.discard)


class _Connection(H11Protocol):
    """A connection that is aborted if a request does not come in time, or if the answer is not read in time."""

    begun = False

    def __init__(self, config: Config, server_state: Any, app_state: dict[str, Any], left: Callable[[], None]) -> None:
        super().__init__(config, server_state, app_state)
        self._left = left
        self._requesting: asyncio.TimerHandle | None = None
        self._reading: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.begun = True
        super().connection_made(transport)
        self._requesting = self._timer(_REQUEST_S)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        in_request = self.cycle is not None and not self.cycle.response_complete
        if in_request and self._requesting is not None:
            self._requesting.cancel()
            self._requesting = None
        elif not in_request and self._requesting is None:
            # The next request begins.
            self._requesting = self._timer(_REQUEST_S)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reading = self._timer(_UNREAD_S)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._requesting, self._reading):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)
        self._left()

    def _timer(self, seconds: float) -> asyncio.TimerHandle:
        return self.loop.call_later(seconds, self.transport.abort)
