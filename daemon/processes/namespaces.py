"""Identifies the network namespace of this process, and makes sockets in the namespaces of other processes."""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import threading
from pathlib import Path

from probing.api.errors import PrivilegeError, UnsupportedTarget

__all__ = ("ListedSocket", "own_namespace", "socket_in")

ListedSocket = tuple[int, int, str, int, str, int, int, int]
"""A TCP socket of a network namespace: family, state (include/net/tcp_states.h), local address and port, remote address
and port, inode, uid of the owner. Addresses have the format of /proc/PID/net/tcp."""

_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


def own_namespace() -> tuple[int, int]:
    """Returns (device, inode) of the network namespace of this process."""
    found = Path("/proc/self/ns/net").stat()
    return found.st_dev, found.st_ino


def socket_in(namespace: int, family: int, kind: int, protocol: int = 0) -> socket.socket:
    """Returns a socket in the network namespace with the descriptor ``namespace``.

    A new thread enters the namespace, makes the socket, and ends; the socket stays in the namespace. Raises
    PrivilegeError without CAP_SYS_ADMIN, UnsupportedTarget for a namespace that cannot be entered.
    """
    made: list[socket.socket | int] = []

    def make() -> None:
        if _libc.setns(namespace, _CLONE_NEWNET):
            made.append(ctypes.get_errno())
            return
        try:
            made.append(socket.socket(family, kind | socket.SOCK_CLOEXEC, protocol))
        except OSError as e:
            made.append(e.errno or errno.EIO)

    thread = threading.Thread(target=make, name="namespace")
    thread.start()
    thread.join()
    (result,) = made
    if isinstance(result, socket.socket):
        return result
    if result == errno.EPERM:
        raise PrivilegeError("the process is in another network namespace, which needs CAP_SYS_ADMIN")
    raise UnsupportedTarget(f"the network namespace of the process cannot be entered: {os.strerror(result)}")
