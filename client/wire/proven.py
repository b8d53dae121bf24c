"""Relays gRPC's connections to a loopback port, after the kernel has said which user listens on the port.

Any user of a machine can listen on a free loopback port, and would receive the token of everybody who connects. gRPC
reconnects on its own, even between two calls, and sends the token with the next call. So gRPC connects to a socket of
this process, and each connection is checked before any byte is relayed. The request to the kernel: sock_diag(7),
include/uapi/linux/inet_diag.h.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import pwd
import secrets
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from probing.api.errors import PrivilegeError, ProbingError
from probing.client.settings import DEFAULT_TARGET
from probing.client.wire.loop import Work

__all__ = ("Listener", "ProvenRoute", "listeners", "require_proven", "trusted_users")

_CREDENTIALS = struct.Struct("3i")
_PIECE = 256 << 10
# The maximum number of attempts to connect. If the listeners change between the checks before and after connecting, for
# example because a daemon starts, the connection is made and checked again.
_ATTEMPTS = 3
_BACKLOG = 16
_SOCK_DIAG, _BY_FAMILY, _DUMP, _LISTEN = 4, 20, 0x301, 1 << 10
_ERROR, _DONE = 2, 3
# struct nlmsghdr, and inet_diag_req_v2 with the local port, and inet_diag_msg up to its inode.
_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBBBI2s46x")
_MESSAGE = struct.Struct("=4x2s2x16s16x4x8x12xII")
_FAMILY = struct.Struct("=B")
# The attribute INET_DIAG_SKV6ONLY: length, type, one byte.
_ATTRIBUTE = struct.Struct("=HH")
_ONLY_IPV6 = 11
_WAIT_S = 5.0
# The user of the service, as packages create it.
_SERVICE = "probing-service"
_HINT = "use the node's Unix socket, or TLS (--tls-ca FILE); a tunnel must run as your own user"
_NOT_SENT = "the token was not sent"


class ProvenRoute:
    """A Unix socket ``target`` for gRPC. Its connections are relayed to ``address`` (HOST:PORT of loopback) if a
    trusted user listens at ``address``.

    ``problem`` says why the last connection was refused; None if it was relayed or nobody listens at ``address``.
    """

    def __init__(self, address: str) -> None:
        self.problem: ProbingError | None = None
        self._address = address
        host, _, port = address.rpartition(":")
        self._host, self._port = host.strip("[]"), int(port)
        name = f"probingctl-{secrets.token_hex(16)}"
        self.target = f"unix-abstract:{name}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(f"\0{name}")
        self._listener.listen(_BACKLOG)
        self._listener.setblocking(False)
        self._serving = Work(self._serve())

    def close(self) -> None:
        """Ends all connections. The channel must be closed first, because another socket may bind ``target`` after
        this.
        """
        self._serving.cancel()

    async def _serve(self) -> None:
        tasks: set[asyncio.Task[None]] = set()
        running = asyncio.get_running_loop()
        try:
            while True:
                near, _ = await running.sock_accept(self._listener)
                task = running.create_task(self._pass_on(near))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
        finally:
            self._listener.close()
            for task in tasks:
                task.cancel()

    async def _pass_on(self, near: socket.socket) -> None:
        with near:
            if _CREDENTIALS.unpack(near.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0] != os.getpid():
                return
            try:
                far = await self._connected()
            except ProbingError as e:
                self.problem = e
                return
            except OSError:
                # The caller finds out the reason by connecting once more.
                self.problem = None
                return
            self.problem = None
            with far:
                await _joined(near, far)

    async def _connected(self) -> socket.socket:
        """Returns a checked connection. Raises OSError if nobody listens, PrivilegeError if an untrusted user does."""
        running = asyncio.get_running_loop()
        infos = await running.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        error: OSError | PrivilegeError = ConnectionRefusedError()
        # A host name can have an IPv4 and an IPv6 address, and each address can have another listener.
        for family, _, _, _, address in infos:
            try:
                return await self._to(family, address)
            except PrivilegeError as e:
                error = e
            except OSError as e:
                error = error if isinstance(error, PrivilegeError) else e
        raise error

    async def _to(self, family: int, address: Any) -> socket.socket:
        running = asyncio.get_running_loop()
        for _ in range(_ATTEMPTS):
            far = socket.socket(family, socket.SOCK_STREAM)
            try:
                far.setblocking(False)
                far.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                before = listeners(str(address[0]), self._port)
                await running.sock_connect(far, address)
                if require_proven(self._address, before, listeners(str(address[0]), self._port)):
                    return far
            except BaseException:
                far.close()
                raise
            far.close()
        what = f"{self._address} changes hands: the user that listens there is unknown"
        raise PrivilegeError(f"{what}; the token was not sent", hint="ask again in a moment")


async def _joined(near: socket.socket, far: socket.socket) -> None:
    """Relays bytes between two sockets, until both directions have ended or one direction is broken."""
    near.setblocking(False)
    ways = [asyncio.ensure_future(_passed(*way)) for way in ((near, far), (far, near))]
    try:
        await asyncio.gather(*ways)
    except OSError:
        # The error need not be reported: gRPC sees that its connection has ended.
        return
    finally:
        for way in ways:
            way.cancel()


async def _passed(source: socket.socket, target: socket.socket) -> None:
    running = asyncio.get_running_loop()
    buffer = memoryview(bytearray(_PIECE))
    while count := await running.sock_recv_into(source, buffer):
        await running.sock_sendall(target, buffer[:count])
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)


class Listener(NamedTuple):
    """A socket that listens. ``user``: the uid of its owner, as this user namespace sees it."""

    inode: int
    user: int


def listeners(host: str, port: int) -> frozenset[Listener]:
    """Returns the sockets of this machine that would get a connection to the IP address ``host`` and ``port``.

    Raises PrivilegeError if the kernel cannot be asked.
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

    ``before`` and ``after``: the listeners right before and after the connection was made. Only one socket at a time
    gets these connections, so the connection went to a socket that is in both sets. Raises PrivilegeError if another
    user listens.
    """
    trusted = trusted_users()
    for listener in (*before, *after):
        if listener.user not in trusted:
            who = _named(listener.user)
            raise PrivilegeError(f"{address} is not probingd's: {who} listens there; {_NOT_SENT}", hint=_HINT)
    return bool(before & after)


def trusted_users() -> frozenset[int]:
    """Returns the uids whose listeners may be shown a token: root, the user of this process, and the user of the
    service.
    """
    users = {0, os.geteuid()}
    with suppress(KeyError):
        users.add(pwd.getpwnam(_SERVICE).pw_uid)
    # If only root can write to the directory of the socket, the owner of the socket is trusted as the service's user.
    path = Path(DEFAULT_TARGET.removeprefix("unix:"))
    with suppress(OSError):
        if path.parent.stat().st_uid == 0 and not path.parent.stat().st_mode & 0o022:
            users.add(path.stat().st_uid)
    # In a user namespace this uid stands for all users that the namespace does not map.
    return frozenset(users - ({_unknown_user()} if not _sees_all_users() else set()))


def _listening(sock: socket.socket, family: int, port: int) -> Iterator[tuple[bytes, bool, Listener]]:
    """Yields (address, whether it accepts only IPv6, listener) for each socket of ``family`` that listens on
    ``port``.
    """
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
    """Returns whether this process is in the initial user namespace, user_namespaces(7)."""
    try:
        return Path("/proc/self/uid_map").read_text().split() == ["0", "0", "4294967295"]
    except OSError:
        return False
