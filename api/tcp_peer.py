"""Asks the kernel which user owns the socket at the other end of a TCP connection within this machine.

sock_diag(7) finds a socket by its addresses and ports in some 10 us, regardless of the number of sockets, and needs no
privilege. Layouts are from include/uapi/linux/inet_diag.h.
"""

from __future__ import annotations

import socket
import struct
from typing import Any, Protocol

__all__ = ("CLOSED", "Connection", "peer_user")

CLOSED = -1
"""The value that is returned instead of a uid if the process at the other end has closed its socket. Data that it sent
before can still be read."""

_SOCK_DIAG, _BY_FAMILY, _REQUEST, _ANY_COOKIE = 4, 20, 1, 0xFFFFFFFF
_HEADER = struct.Struct("=IHHII")
# struct inet_diag_req_v2 and the begin of inet_diag_msg; ports are in network order.
_QUESTION = struct.Struct("=BBBBI2s2s16s16s3I")
_SOCKET = struct.Struct("=BBBB2s2s16s16s3I3III")
_LISTEN = 10
_ANSWER_S = 0.5


class Connection(Protocol):
    """A TCP socket, or asyncio's object for it."""

    @property
    def family(self) -> int: ...

    def getpeername(self) -> Any: ...

    def getsockname(self) -> Any: ...


def peer_user(connection: Connection) -> int | None:
    """Returns the uid of the process at the other end, CLOSED if that process has closed its socket, or None if this
    network namespace has no socket for the other end."""
    try:
        remote, local = connection.getpeername()[:2], connection.getsockname()[:2]
        return _owner(connection.family, remote, local)
    except (OSError, ValueError):
        return None


def _owner(family: int, local: tuple[str, int], remote: tuple[str, int]) -> int | None:
    """Returns the uid of the socket that is bound to ``local`` and connected to ``remote``, or CLOSED; None if there is
    no such socket. Raises OSError."""
    ends = [socket.inet_pton(family, host.partition("%")[0]).ljust(16, b"\0") for host, _ in (local, remote)]
    ports = [port.to_bytes(2, "big") for _, port in (local, remote)]
    question = _QUESTION.pack(family, socket.IPPROTO_TCP, 0, 0, 0xFFFFFFFF, *ports, *ends, 0, *[_ANY_COOKIE] * 2)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as kernel:
        kernel.settimeout(_ANSWER_S)
        kernel.send(_HEADER.pack(_HEADER.size + len(question), _BY_FAMILY, _REQUEST, 1, 0) + question)
        answer = kernel.recv(1 << 12)
    if len(answer) < _HEADER.size + _SOCKET.size or _HEADER.unpack_from(answer)[1] != _BY_FAMILY:
        return None
    _, state, _, _, *found, _, _, _, _, _, _, uid, inode = _SOCKET.unpack_from(answer, _HEADER.size)
    # The kernel answers with a listening socket if no connected socket matches.
    if found[:2] != ports or state == _LISTEN:
        return None
    # A closed socket has inode 0 and uid 0.
    return int(uid) if inode else CLOSED
