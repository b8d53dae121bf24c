"""Reads the IP addresses of network interfaces by netlink (rtnetlink(7), RTM_GETADDR), in a parser.

The collector makes the socket. Only the parser waits for the answer: the kernel does not answer while a driver holds
the lock that all interfaces share.
"""

from __future__ import annotations

import ipaddress
import json
import socket
import struct
from collections.abc import Callable

from probing.api.errors import ProbingError, UsageError
from probing.daemon.ipc import Message
from probing.daemon.net.netlink import attributes, dump, messages

__all__ = ("handlers", "read_addresses")

_GET, _NEW = 22, 20
# struct ifaddrmsg: family, prefix length, flags, scope, interface index.
_MESSAGE = struct.Struct("=BBBBI")
_ADDRESS, _LOCAL = 1, 2
MAX_BYTES = 1 << 20
MAX_ADDRESSES = 4_096
TIMEOUT_S = 1.0


def handlers() -> dict[str, Callable[[Message], bytes]]:
    return {"interface_addresses": _answer}


def read_addresses(sock: socket.socket) -> dict[str, list[str]]:
    """Returns the addresses of each interface of the socket's namespace. The keys are interface indices as text.

    Raises TargetError, CorruptTarget.
    """
    found: dict[str, list[str]] = {}
    pieces = dump(sock, _GET, _MESSAGE.pack(0, 0, 0, 0, 0), most_bytes=MAX_BYTES)
    left = MAX_ADDRESSES
    for piece in pieces:
        for kind, begin, end in messages(piece):
            if kind != _NEW or end - begin < _MESSAGE.size or not left:
                continue
            index = _MESSAGE.unpack_from(piece, begin)[4]
            values = {k: piece[b:e] for k, b, e in attributes(piece, begin + _MESSAGE.size, end)}
            # On a point-to-point link, IFA_ADDRESS is the peer's address.
            raw = values.get(_LOCAL) or values.get(_ADDRESS)
            if raw is not None and len(raw) in (4, 16):
                found.setdefault(str(index), []).append(str(ipaddress.ip_address(raw)))
                left -= 1
    return found


def _answer(request: Message) -> bytes:
    if len(request.fds) != 1:
        raise UsageError("the request interface_addresses takes one socket")
    try:
        with socket.socket(fileno=request.take_fd()) as sock:
            sock.settimeout(TIMEOUT_S)
            return json.dumps(read_addresses(sock)).encode()
    except OSError as e:
        if isinstance(e, ProbingError):
            raise
        raise UsageError(f"the request interface_addresses takes a netlink socket: {e.strerror}") from e
