"""Serves the collector's control socket, the only way by which the service reaches it."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from probing.api.errors import InternalError, PrivilegeError, ProbingError, UsageError
from probing.daemon.ipc import Channel, ChannelClosed, Message, peer_credentials

__all__ = ("ControlServer", "Handler")

# Takes the header of a request, returns header and payload of the answer.
Handler = Callable[[dict[str, Any]], tuple[dict[str, Any], bytes]]
MAX_CONNECTIONS = 32
_log = logging.getLogger(__name__)


class ControlServer:
    """Listens on ``path`` with one thread for each connection, and refuses users that are not in ``users``."""

    def __init__(self, path: Path, handlers: Mapping[str, Handler], users: frozenset[int]) -> None:
        self._path = path
        self._handlers = dict(handlers)
        self._users = users | {0, os.getuid()}
        self._socket: socket.socket | None = None
        self._slots = threading.BoundedSemaphore(MAX_CONNECTIONS)
        # Called by the thread of a connection when it ends: it releases snapshots that the client left, for example.
        self.on_disconnect: Callable[[], None] = lambda: None

    def start(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        server.bind(str(self._path))
        # Only the service may enter the directory; peer credentials decide which users may connect.
        self._path.chmod(0o666)
        server.listen(MAX_CONNECTIONS)
        self._socket = server
        threading.Thread(target=self._accept, args=(server,), name="control", daemon=True).start()

    def stop(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()

    def _accept(self, server: socket.socket) -> None:
        while True:
            try:
                client, _ = server.accept()
            except OSError:
                return
            if not self._slots.acquire(blocking=False):
                client.close()
                continue
            threading.Thread(target=self._serve, args=(client,), name="control-client", daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            with Channel(client) as channel:
                _, uid, _ = peer_credentials(client)
                if uid not in self._users:
                    channel.send_error(PrivilegeError(f"user {uid} may not talk to the collector"))
                    return
                while True:
                    self._answer(channel, channel.receive())
        except ChannelClosed:
            pass
        except ProbingError as e:
            _log.warning("a control connection was dropped: %s", e.message)
        finally:
            self.on_disconnect()
            self._slots.release()

    def _answer(self, channel: Channel, request: Message) -> None:
        request.close_fds()
        op = str(request.header.get("op"))
        try:
            handler = self._handlers.get(op)
            if handler is None:
                raise UsageError(f"the collector knows no request {op!r}")
            header, payload = handler(request.header)
        except ProbingError as e:
            channel.send_error(e)
        except Exception as e:  # a bug in one handler must not end the daemon; the client sees it
            _log.exception("request %s failed", op)
            channel.send_error(InternalError(f"the collector failed at {op}: {type(e).__name__}: {e}"))
        else:
            channel.send(header, payload)
