"""Keeps the TCP ports of the service in the supervisor, so that nobody can take a port while the service restarts.

A user who took the port would receive the tokens of clients. The service gets each socket over a channel that it
inherits; if a port is in use at first, the service gets its socket later. Without a supervisor the service binds its
ports itself.
"""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import time
from dataclasses import dataclass
from typing import Any

from probing.api.errors import ProbingError
from probing.daemon.config import Config
from probing.daemon.ipc import Channel
from probing.daemon.supervisor.notify import FdStore

__all__ = ("PORTS_FD", "RETRY_S", "Ports", "bind", "problem_of", "resolved")

# The variable with the number of the channel's descriptor.
PORTS_FD = "PROBINGD_PORTS_FD"
# The time between two attempts to bind a port, s, and between two look-ups of a host name, which may block.
RETRY_S = 5.0
NAME_RETRY_S = 60.0
BACKLOG = 128
# TCP_KEEPIDLE, seconds without a byte before the first probe; TCP_KEEPINTVL, seconds between probes; and their number.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 20), (socket.TCP_KEEPCNT, 3))
_SEND_S = 1.0
_log = logging.getLogger("probingd.supervisor")


@dataclass
class _Port:
    """A port. ``due``: the time of the next attempt to bind, on time.monotonic(). ``problem``: why it does not
    listen.
    """

    address: str
    listener: socket.socket | None = None
    problem: str = ""
    due: float = 0.0


class Ports:
    """The ports of a configuration, for the supervisor's loop."""

    def __init__(self, config: Config) -> None:
        self._store = FdStore()
        self._ports: dict[str, _Port] = {}
        self._channel: Channel | None = None
        self.configure(config)

    @property
    def due(self) -> float:
        """The time of the next attempt to bind a port, on time.monotonic(); infinite while all ports listen."""
        return min((port.due for port in self._ports.values() if port.listener is None), default=math.inf)

    def configure(self, config: Config) -> None:
        """Closes the ports that are not in ``config``. All other ports keep their sockets."""
        addresses = {name: address for name, address in (("tcp", config.listen), ("http", config.http)) if address}
        for name, port in list(self._ports.items()):
            if addresses.get(name) != port.address:
                del self._ports[name]
                if port.listener:
                    port.listener.close()
                    self._store.drop(name)
        for name, address in addresses.items():
            self._ports.setdefault(name, _Port(address))

    def bind(self, *, now: bool = False) -> None:
        """Binds the due ports, or with ``now`` all ports that do not listen, and hands them to the running service."""
        for name, port in self._ports.items():
            if port.listener is None and (now or port.due <= time.monotonic()) and self._bind(name, port):
                self._tell(name, port)
        self._store.drop_others(self._ports)

    def offer(self) -> socket.socket:
        """Returns the service's end of a new channel, over which all listening ports were sent; the caller
        closes it.
        """
        self._hang_up()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._channel = Channel(ours)
        for name, port in self._ports.items():
            self._tell(name, port)
        return theirs

    def close(self) -> None:
        self._hang_up()
        for port in self._ports.values():
            if port.listener:
                port.listener.close()
        self._ports.clear()

    def _bind(self, name: str, port: _Port) -> bool:
        """Tries to bind a port. Returns whether the port listens now or has another problem than before."""
        try:
            family, address = resolved(port.address)
            if (listener := self._store.take(name, family, address)) is None:
                listener = bind(family, address)
                self._store.keep(name, listener)
            port.listener = listener
        except OSError as e:
            port.due = time.monotonic() + (NAME_RETRY_S if isinstance(e, socket.gaierror) else RETRY_S)
            before, port.problem = port.problem, problem_of(port.address, e)
            if port.problem != before:
                _log.error("%s", port.problem)
            return port.problem != before
        if port.problem:
            _log.warning("listening on %s now", port.address)
        port.problem = ""
        return True

    def _tell(self, name: str, port: _Port) -> None:
        if self._channel is not None:
            fds = () if port.listener is None else (port.listener.fileno(),)
            header = {"port": name, "address": port.address, "problem": port.problem}
            # A service that has ended gets all ports when it starts again.
            with contextlib.suppress(ProbingError):
                self._channel.send(header, fds=fds, timeout=_SEND_S)

    def _hang_up(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None


def resolved(address: str) -> tuple[int, Any]:
    """Returns the family and the socket address of HOST:PORT. Raises OSError."""
    host, _, port = address.rpartition(":")
    infos = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    return infos[0][0], infos[0][4]


def problem_of(address: str, error: OSError) -> str:
    """Returns the text in Status about a port that cannot be bound."""
    return f"cannot listen on {address}: {error.strerror or error}; it is tried again every {RETRY_S:.0f} s"


def bind(family: int, address: Any) -> socket.socket:
    """Returns a listening socket that does not block. Raises OSError."""
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        if family != socket.AF_UNIX:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # Connections inherit these options: a connection whose other end is gone frees its place after two minutes.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEPALIVE:
                listener.setsockopt(socket.IPPROTO_TCP, option, value)
        listener.bind(address)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener
