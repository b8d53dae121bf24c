"""Asks NCCL's RAS (reliability, availability, serviceability) for a report, over an open connection.

The protocol comes from NCCL's own client (src/ras/client.cc, 2.24 to 2.30): lines of at most 1024 bytes, then a report
up to the end of the stream. Each process of a job has a RAS thread that listens and answers. The RAS threads pass a
request on to each other, which does not disturb the ranks' own work.

``ras_address`` finds the address of a process's RAS threads; ``connect_ras`` connects to it in the process's network
namespace.

The address comes from the environment of the process, which may name any host: connections go to this machine's own
addresses only, and never to a privileged port.
"""

from __future__ import annotations

import errno
import ipaddress
import re
import socket
import struct
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from probing.api.errors import PrivilegeError, TargetError, TargetTimeout, UnsupportedTarget
from probing.api.text import size
from probing.daemon.processes.namespaces import ListedSocket, socket_in

__all__ = (
    "NobodyListens",
    "RasAddress",
    "RasAnswer",
    "RasSilent",
    "ask_ras",
    "connect_ras",
    "listener_at",
    "ras_address",
)

# The timeout for the greeting, s, as in NCCL's client. A stopped process accepts connections, but does not greet.
GREETING_S = 1.0
# The timeout that the request sets for the peers of RAS, s (RAS_COLLECTIVE_LEG_TIMEOUT_SEC). After it, RAS waits for
# the same time once more.
COLLECT_S = 5
MAX_LINE = 1_024
MAX_REPORT = 16 << 20
_CHUNK = 256 << 10


class RasSilent(TargetTimeout):
    """The peer accepted the connection but did not greet. Another connection may reach another process."""

    default_hint = "a process that is stopped accepts connections but does not answer; continue it (SIGCONT)"


class RasAnswer(NamedTuple):
    """An answer of RAS. ``form``: "json", or "text" from NCCL before 2.28.7. ``protocol``: the server's protocol
    version; 0 if it cannot be read.
    """

    report: bytes
    form: str
    protocol: int


def ask_ras(connection: socket.socket, timeout: float = 30.0) -> RasAnswer:
    """Returns the verbose status of all jobs that the peer knows. ``timeout``: seconds for the whole request.

    Raises RasSilent, TargetTimeout for a report that does not end in time, UnsupportedTarget if the peer is not RAS
    or its report exceeds 16 MiB.
    """
    return _Talk(connection, time.monotonic() + timeout).ask()


class _Talk:
    def __init__(self, connection: socket.socket, deadline: float) -> None:
        self._connection = connection
        self._deadline = deadline
        self._read = bytearray()

    def ask(self) -> RasAnswer:
        whole, self._deadline = self._deadline, min(self._deadline, time.monotonic() + GREETING_S)
        try:
            greeting = self._command(b"CLIENT PROTOCOL 2")
        except TargetTimeout as e:
            raise RasSilent("NCCL RAS accepts the connection but does not answer") from e
        self._deadline = whole
        if not greeting.upper().startswith(b"SERVER PROTOCOL "):
            raise UnsupportedTarget("the listener at this address is not NCCL RAS")
        number = greeting[16:].strip()
        self._command(b"TIMEOUT %d" % COLLECT_S)
        form = "json" if self._command(b"SET FORMAT json").upper() == b"OK" else "text"
        self._send(b"VERBOSE STATUS")
        return RasAnswer(self._rest(), form, int(number) if number.isdigit() and len(number) < 10 else 0)

    def _command(self, command: bytes) -> bytes:
        self._send(command)
        return self._line()

    def _send(self, command: bytes) -> None:
        self._connection.settimeout(self._left())
        try:
            self._connection.sendall(command + b"\n")
        except TimeoutError as e:
            raise TargetTimeout("NCCL RAS did not accept a request in time") from e
        except OSError as e:
            raise UnsupportedTarget(f"NCCL RAS closed the connection: {e.strerror}") from e

    def _line(self) -> bytes:
        while (end := self._read.find(b"\n")) < 0:
            if len(self._read) > MAX_LINE:
                raise UnsupportedTarget("the listener at this address is not NCCL RAS: a line does not end")
            if not self._receive():
                raise UnsupportedTarget("NCCL RAS closed the connection before it answered")
        line = bytes(self._read[:end])
        del self._read[: end + 1]
        return line.strip()

    def _rest(self) -> bytes:
        while self._receive():
            if len(self._read) > MAX_REPORT:
                raise UnsupportedTarget(f"NCCL RAS reports more than {size(MAX_REPORT)}")
        return bytes(self._read)

    def _receive(self) -> int:
        self._connection.settimeout(self._left())
        try:
            part = self._connection.recv(_CHUNK)
        except TimeoutError as e:
            raise TargetTimeout("NCCL RAS did not answer in time") from e
        except OSError as e:
            raise UnsupportedTarget(f"NCCL RAS closed the connection: {e.strerror}") from e
        self._read += part
        return len(part)

    def _left(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TargetTimeout("NCCL RAS did not answer in time")
        return left


CONNECT_S = 1.0
# Forms of ncclSocketGetAddrFromString (src/misc/socket.cc): HOST:PORT, [IPv6]:PORT, also with %INTERFACE.
_ADDRESS = re.compile(r"(?:\[([0-9a-fA-F:.]{2,45})\]|([A-Za-z0-9.-]{1,64})):([0-9]{1,5})")
_LOCALHOST = ("127.0.0.1", "::1")


class NobodyListens(TargetError):
    default_hint = "NCCL has RAS since 2.24, and NCCL_RAS_ENABLE=0 switches it off"


@dataclass(frozen=True, slots=True)
class RasAddress:
    """The address of RAS. ``hosts``: IP addresses; the first address that accepts a connection is used."""

    hosts: tuple[str, ...]
    port: int

    def __str__(self) -> str:
        host = self.hosts[0]
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"


def ras_address(environ: Mapping[str, str], port: int) -> RasAddress | None:
    """Returns the RAS address of a process with this environment; None if RAS is off. ``port``: used if the environment
    names no address.

    Raises UnsupportedTarget for an address that must not be connected to.
    """
    if environ.get("NCCL_RAS_ENABLE", "1").strip() == "0":
        return None
    named = environ.get("NCCL_RAS_ADDR", "")
    if not named:
        return RasAddress(_LOCALHOST, port)
    match = _ADDRESS.fullmatch(named)
    if match is None or not 1024 <= int(match[3]) <= 65535:
        raise UnsupportedTarget(f"NCCL_RAS_ADDR is not a usable address: {named[:64]}")
    return RasAddress(_hosts(match[1] or match[2]), int(match[3]))


_LISTENS = 10
_MAPPED = bytes(10) + b"\xff\xff"


def listener_at(sockets: Iterable[ListedSocket], host: str, port: int) -> int | None:
    """Returns the uid of the sockets that get connections to ``host``:``port``; None if there are none. Sockets that
    share an address (SO_REUSEPORT) belong to one user.

    ``sockets``: the sockets of the network namespace.
    """
    packed = ipaddress.ip_address(host).packed
    wanted = {socket.AF_INET6: {_as_listed(packed), _as_listed(bytes(16))}}
    if len(packed) == 4:
        # If nobody listens on IPv4, a listener on IPv6 gets the connection.
        of_ipv6 = {_as_listed(_MAPPED + packed), _as_listed(bytes(16))}
        wanted = {socket.AF_INET: {_as_listed(packed), _as_listed(bytes(4))}, socket.AF_INET6: of_ipv6}
    listening = [one for one in sockets if one[1] == _LISTENS and one[3] == port]
    for family, addresses in wanted.items():
        for one in listening:
            if one[0] == family and one[2] in addresses:
                return one[7]
    return None


def _as_listed(packed: bytes) -> str:
    """Returns an address as /proc/net/tcp has it: 32-bit words in the byte order of the machine."""
    return "".join(f"{word:08X}" for word in struct.unpack(f"={len(packed) // 4}I", packed))


def connect_ras(address: RasAddress, namespace: int | None = None, timeout: float = CONNECT_S) -> socket.socket:
    """Returns a connection to one of the processes that share ``address``, in ``namespace`` or in our namespace (None).

    Raises NobodyListens, TargetTimeout, PrivilegeError for a namespace that needs more rights, UnsupportedTarget for an
    address of another machine.
    """
    for host in address.hosts:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        connection = _socket(family) if namespace is None else _socket_in(namespace, family)
        try:
            connection.settimeout(timeout)
            if not ipaddress.ip_address(host).is_loopback:
                # Binding fails unless the address is this machine's own.
                connection.bind((host, 0))
            connection.connect((host, address.port))
        except OSError as e:
            connection.close()
            if isinstance(e, TimeoutError):
                raise TargetTimeout(f"NCCL RAS did not accept a connection at {address} in time") from e
            if e.errno == errno.EADDRNOTAVAIL and not ipaddress.ip_address(host).is_loopback:
                raise UnsupportedTarget(f"NCCL_RAS_ADDR is not an address of this machine: {host}") from e
            continue
        return connection
    raise NobodyListens(f"no NCCL RAS listens at {address}")


def _hosts(text: str) -> tuple[str, ...]:
    if text.lower() == "localhost":
        return _LOCALHOST
    try:
        host = ipaddress.ip_address(text)
    except ValueError as e:
        raise UnsupportedTarget(f"NCCL_RAS_ADDR is a name, and names are not looked up: {text}") from e
    if host.is_unspecified:
        return ("::1", "127.0.0.1") if host.version == 6 else ("127.0.0.1",)
    return (str(host),)


def _socket(family: int) -> socket.socket:
    return socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)


def _socket_in(namespace: int, family: int) -> socket.socket:
    try:
        return socket_in(namespace, family, socket.SOCK_STREAM)
    except PrivilegeError as e:
        hint = "give the collector CAP_SYS_ADMIN to ask NCCL RAS in containers, or set nccl.ras to false"
        raise PrivilegeError(e.message, hint=hint) from e
