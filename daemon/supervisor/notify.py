"""Notifies systemd of readiness, health and stopping (sd_notify(3)), and stores listening sockets in it while this
process restarts (FDSTORE=1, sd_listen_fds(3)); does nothing without systemd.

systemd closes the sockets once the unit is stopped for good.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Collection, Sequence
from typing import Any

__all__ = (
    "FdStore",
    "Status",
    "notify",
    "watchdog_interval",
)

# systemd reads at most PIPE_BUF bytes.
_MAX_BYTES = 4000


def notify(state: str, fds: Sequence[int] = ()) -> None:
    """Sends ``state`` (``READY=1``, ``WATCHDOG=1``, ``STOPPING=1``...) to ``NOTIFY_SOCKET``, if there is one.

    ``fds``: the descriptors of FDSTORE=1.
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        sock.setblocking(False)
        try:
            sock.connect(address)
            data = state.encode()[:_MAX_BYTES].decode(errors="ignore").encode()
            socket.send_fds(sock, [data], list(fds)) if fds else sock.send(data)
        except OSError:
            # The state is not sent again: the next notification follows soon.
            return


class Status:
    """The line that `systemctl status` shows, as returned by ``summary``, which is not called without systemd."""

    def __init__(self, summary: Callable[[], str]) -> None:
        self._summary = summary
        self._sent = ""

    def ready(self) -> None:
        """Reports that the start is complete."""
        notify("READY=1")
        self.tick()

    def tick(self) -> None:
        """Sends the line if it has changed."""
        if os.environ.get("NOTIFY_SOCKET") and (text := self._summary()) != self._sent:
            notify(f"STATUS={text}")
            self._sent = text


def watchdog_interval() -> float | None:
    """Returns the seconds between two reports, half of WATCHDOG_USEC; None without a watchdog."""
    microseconds = os.environ.get("WATCHDOG_USEC", "")
    if not microseconds.isdigit() or os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    return int(microseconds) / 2e6


_FIRST_FD = 3
_MAX_FDS = 64


class FdStore:
    """Listening sockets by name, stored in systemd. A new FdStore takes over the sockets of the previous process."""

    def __init__(self) -> None:
        self._stored: dict[str, list[socket.socket]] = {}
        count = os.environ.get("LISTEN_FDS", "")
        names = os.environ.get("LISTEN_FDNAMES", "").split(":")
        mine = os.environ.get("LISTEN_PID") == str(os.getpid())
        for variable in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"):
            os.environ.pop(variable, None)
        if not mine or not count.isdigit():
            return
        for fd, name in zip(range(_FIRST_FD, _FIRST_FD + min(int(count), _MAX_FDS)), names, strict=False):
            os.set_inheritable(fd, False)
            try:
                self._stored.setdefault(name, []).append(socket.socket(fileno=fd))
            except OSError:
                os.close(fd)

    def take(self, name: str, family: int, address: Any) -> socket.socket | None:
        """Returns the stored socket that listens on ``address``, or None; other sockets of ``name`` are closed and
        dropped.
        """
        sockets = self._stored.pop(name, [])
        listener = next((sock for sock in sockets if _listens(sock, family, address)), None)
        for sock in sockets:
            if sock is not listener:
                sock.close()
        if listener is None:
            if sockets:
                notify(f"FDSTOREREMOVE=1\nFDNAME={name}")
            return None
        listener.setblocking(False)
        return listener

    def keep(self, name: str, listener: socket.socket) -> None:
        """Asks systemd to store ``listener`` for the next process."""
        notify(f"FDSTORE=1\nFDNAME={name}", (listener.fileno(),))

    def drop(self, name: str) -> None:
        """Asks systemd to close the sockets of ``name``."""
        for sock in self._stored.pop(name, []):
            sock.close()
        notify(f"FDSTOREREMOVE=1\nFDNAME={name}")

    def drop_others(self, names: Collection[str]) -> None:
        """Asks systemd to close all sockets except those of ``names``: their ports are not configured any more."""
        for name in self._stored.keys() - set(names):
            self.drop(name)


def _listens(sock: socket.socket, family: int, address: Any) -> bool:
    try:
        return bool(
            sock.family == family
            and sock.type == socket.SOCK_STREAM
            and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            and sock.getsockname()[:2] == tuple(address[:2])
        )
    except OSError:
        return False
