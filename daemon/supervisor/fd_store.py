"""Keeps listening sockets with systemd while this process restarts: sd_notify(3), FDSTORE=1, and sd_listen_fds(3).

systemd closes them once the unit is stopped for good. Without systemd nothing is kept.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Collection
from typing import Any

from probing.daemon.supervisor.notify import notify

__all__ = ("FdStore",)

_FIRST_FD = 3
_MAX_FDS = 64


class FdStore:
    """Listening sockets by name. Takes over those of the process before, once, when it is made."""

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
        """Returns the stored socket that listens on ``address``; the others of ``name`` are closed and forgotten."""
        sockets = self._stored.pop(name, [])
        found = next((sock for sock in sockets if _listens(sock, family, address)), None)
        for sock in sockets:
            if sock is not found:
                sock.close()
        if found is None:
            if sockets:
                notify(f"FDSTOREREMOVE=1\nFDNAME={name}")
            return None
        found.setblocking(False)
        return found

    def keep(self, name: str, listener: socket.socket) -> None:
        """Has systemd hold ``listener`` for the next process, too."""
        notify(f"FDSTORE=1\nFDNAME={name}", (listener.fileno(),))

    def drop(self, name: str) -> None:
        """Has systemd close the sockets of ``name``."""
        for sock in self._stored.pop(name, []):
            sock.close()
        notify(f"FDSTOREREMOVE=1\nFDNAME={name}")

    def drop_others(self, names: Collection[str]) -> None:
        """Has systemd close the sockets of all but ``names``: ports that are not configured any more."""
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
