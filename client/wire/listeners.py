"""Who listens on a loopback port, by the kernel: sock_diag(7), include/uapi/linux/inet_diag.h.

Any user of a machine can listen on a loopback port that is free, and would be shown the token of whoever connects.
"""

from __future__ import annotations

import ipaddress
import os
import pwd
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from probing.api.errors import PrivilegeError
from probing.client.settings import DEFAULT_TARGET

__all__ = ("Listener", "listeners", "require_proven", "trusted_users")

_SOCK_DIAG, _BY_FAMILY, _DUMP, _LISTEN = 4, 20, 0x301, 1 << 10
_ERROR, _DONE = 2, 3
# struct nlmsghdr, and inet_diag_req_v2 with the local port, and inet_diag_msg up to its inode.
_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBBBI2s46x")
_MESSAGE = struct.Struct("=4x2s2x16s16x4x8x12xII")
_FAMILY = struct.Struct("=B")
# INET_DIAG_SKV6ONLY, an attribute (length, type, one byte).
_ATTRIBUTE = struct.Struct("=HH")
_ONLY_IPV6 = 11
_WAIT_S = 5.0
# The user of the service, as packages make it.
_SERVICE = "probing-service"
_HINT = "ask by the node's Unix socket, or with TLS (--tls-ca FILE); a tunnel has to be of your own user"
_NOT_SENT = "the token was not sent"


class Listener(NamedTuple):
    """A socket that listens. ``user``: the uid of its owner, as this user namespace sees it."""

    inode: int
    user: int


def listeners(host: str, port: int) -> frozenset[Listener]:
    """Returns the sockets that would get a connection to the IP address ``host`` and ``port`` of this machine.

    Raises PrivilegeError where the kernel cannot be asked.
    """
    wanted = ipaddress.ip_address(host)
    found = set()
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as sock:
            sock.settimeout(_WAIT_S)
            for family in (socket.AF_INET, socket.AF_INET6):
                for address, only_ipv6, listener in _listening(sock, family, port):
                    if _takes(address, wanted, only_ipv6=only_ipv6):
                        found.add(listener)
    except OSError as e:
        what = f"the kernel does not say who listens on port {port}: {e.strerror or e}"
        raise PrivilegeError(f"{what}; {_NOT_SENT}", hint=_HINT) from None
    return frozenset(found)


def require_proven(address: str, before: frozenset[Listener], after: frozenset[Listener]) -> bool:
    """Returns whether a connection to ``address`` went to a listener that may be shown a token.

    ``before`` and ``after``: the listeners right before and after it was made. Of those that take the same connections
    there is one at a time, so the connection went to a socket that is in both. Raises PrivilegeError where another user
    listens.
    """
    trusted = trusted_users()
    for listener in (*before, *after):
        if listener.user not in trusted:
            who = _named(listener.user)
            raise PrivilegeError(f"{address} is not probingd's: {who} listens there; {_NOT_SENT}", hint=_HINT)
    return bool(before & after)


def trusted_users() -> frozenset[int]:
    """Returns the uids whose listeners may be shown a token: root, this process's own, and that of the service."""
    users = {0, os.geteuid()}
    with suppress(KeyError):
        users.add(pwd.getpwnam(_SERVICE).pw_uid)
    # Its directory is root's, or of the one user who runs the daemon.
    path = Path(DEFAULT_TARGET.removeprefix("unix:"))
    with suppress(OSError):
        if path.parent.stat().st_uid == 0 and not path.parent.stat().st_mode & 0o022:
            users.add(path.stat().st_uid)
    # In a user namespace that stands for all users that it does not know.
    return frozenset(users - ({_unknown_user()} if not _sees_all_users() else set()))


def _listening(sock: socket.socket, family: int, port: int) -> Iterator[tuple[bytes, bool, Listener]]:
    """Yields (address, whether it takes IPv6 alone, listener) of the sockets of ``family`` that listen on ``port``."""
    number = struct.pack("!H", port)
    request = _REQUEST.pack(family, socket.IPPROTO_TCP, 0, 0, _LISTEN, number)
    sock.send(_HEADER.pack(_HEADER.size + len(request), _BY_FAMILY, _DUMP, 1, 0) + request)
    while True:
        data, at = sock.recv(1 << 16), 0
        while at + _HEADER.size <= len(data):
            length, kind, _, _, _ = _HEADER.unpack_from(data, at)
            if kind == _ERROR:
                raise OSError(-struct.unpack_from("=i", data, at + _HEADER.size)[0], "netlink refuses")
            if kind == _DONE:
                return
            body = data[at + _HEADER.size : at + length]
            local, address, user, inode = _MESSAGE.unpack_from(body)
            if local == number and _FAMILY.unpack_from(body)[0] == family:
                size = 4 if family == socket.AF_INET else 16
                yield address[:size], _takes_ipv6_alone(body[_MESSAGE.size :]), Listener(inode, user)
            at += max(length + 3 & ~3, _HEADER.size)


def _takes_ipv6_alone(attributes: bytes) -> bool:
    at = 0
    while at + _ATTRIBUTE.size <= len(attributes):
        length, kind = _ATTRIBUTE.unpack_from(attributes, at)
        if kind == _ONLY_IPV6 and length > _ATTRIBUTE.size:
            return attributes[at + _ATTRIBUTE.size] != 0
        at += max(length + 3 & ~3, _ATTRIBUTE.size)
    return False


def _takes(raw: bytes, wanted: ipaddress.IPv4Address | ipaddress.IPv6Address, *, only_ipv6: bool) -> bool:
    own = ipaddress.ip_address(raw)
    if isinstance(own, ipaddress.IPv6Address) and isinstance(wanted, ipaddress.IPv4Address):
        return not only_ipv6 and (own.is_unspecified or own.ipv4_mapped == wanted)
    return own.version == wanted.version and (own.is_unspecified or own == wanted)


def _named(user: int) -> str:
    if user == _unknown_user() and not _sees_all_users():
        return "a user whom this container cannot see"
    try:
        return f"the user {pwd.getpwuid(user).pw_name} (uid {user})"
    except KeyError:
        return f"uid {user}"


def _unknown_user() -> int:
    try:
        return int(Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        return 65534


def _sees_all_users() -> bool:
    """Returns whether this process is in no user namespace but the first, user_namespaces(7)."""
    try:
        return Path("/proc/self/uid_map").read_text().split() == ["0", "0", "4294967295"]
    except OSError:
        return False
