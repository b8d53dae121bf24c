"""Sockets of sock_diag, one in each network namespace in which there are watched processes."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Mapping

from probing.api.errors import PrivilegeError, ProbingError, UnsupportedTarget
from probing.daemon.net.tcp.sock_diag import NETLINK_SOCK_DIAG
from probing.daemon.processes.namespaces import own_namespace, socket_in
from probing.daemon.processes.readers import Readers
from probing.daemon.source import ProcessKey

__all__ = ("DiagSockets",)

TIMEOUT_S = 1.0
# Each keeps its namespace alive, so none stays open longer than a watched process is there.
MAX_NAMESPACES = 256


class DiagSockets:
    """Not safe for two threads at once."""

    def __init__(self, readers: Readers) -> None:
        self._readers = readers
        self._open: dict[int, socket.socket] = {}
        self._refused: dict[int, str] = {}

    @property
    def namespaces(self) -> Iterable[int]:
        """The namespaces with an open socket, by the inode of /proc/PID/ns/net."""
        return list(self._open)

    @property
    def refused(self) -> Iterable[int]:
        """The namespaces without one."""
        return list(self._refused)

    def of(self, netns: int) -> socket.socket:
        return self._open[netns]

    def open(self, processes: Mapping[int, ProcessKey]) -> list[str]:
        """Opens and closes sockets until there is one for each of these namespaces; ``processes`` has one in each.

        Returns why there are none in some of them.
        """
        for netns in [netns for netns in self._open if netns not in processes]:
            self.drop(netns)
        self._refused = {netns: why for netns, why in self._refused.items() if netns in processes}
        for netns, key in list(processes.items())[:MAX_NAMESPACES]:
            if netns not in self._open and netns not in self._refused:
                try:
                    self._open[netns] = self._made(netns, key)
                except ProbingError as e:
                    self._refused[netns] = e.message
        counts: dict[str, int] = {}
        for why in self._refused.values():
            counts[why] = counts.get(why, 0) + 1
        return [f"{count} network namespace{'s'[: count > 1]} not read: {why}" for why, count in counts.items()]

    def drop(self, netns: int) -> None:
        self._open.pop(netns).close()

    def close(self) -> None:
        for netns in list(self._open):
            self.drop(netns)

    def _made(self, netns: int, key: ProcessKey) -> socket.socket:
        kind = socket.SOCK_DGRAM
        if netns == own_namespace()[1]:
            try:
                made = socket.socket(socket.AF_NETLINK, kind | socket.SOCK_CLOEXEC, NETLINK_SOCK_DIAG)
            except OSError as e:
                raise UnsupportedTarget(f"the kernel has no sock_diag: {e.strerror}") from e
        else:
            answer = self._readers.call("network", pid=key.pid, start_ns=key.start_ns)
            namespace = answer.take_fd()
            try:
                made = socket_in(namespace, socket.AF_NETLINK, kind, NETLINK_SOCK_DIAG)
            except PrivilegeError as e:
                raise PrivilegeError("connections in containers need CAP_SYS_ADMIN for the collector") from e
            finally:
                os.close(namespace)
        made.settimeout(TIMEOUT_S)
        return made
