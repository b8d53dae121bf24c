"""Finds the address of a process's RAS threads and connects to it, in the process's network namespace.

The address comes from the environment of the process, which may name any host: connections go to this machine's own
addresses only, and never to a privileged port.
"""

from __future__ import annotations

import errno
import ipaddress
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from probing.api.errors import PrivilegeError, TargetError, TargetTimeout, UnsupportedTarget
from probing.daemon.processes.namespaces import socket_in

__all__ = ("NobodyListens", "RasAddress", "connect_ras", "ras_address")

CONNECT_S = 1.0
# ncclSocketGetAddrFromString (src/misc/socket.cc): HOST:PORT, or [IPv6]:PORT, also with %INTERFACE.
_ADDRESS = re.compile(r"(?:\[([0-9a-fA-F:.]{2,45})\]|([A-Za-z0-9.-]{1,64})):([0-9]{1,5})")
_LOCALHOST = ("127.0.0.1", "::1")


class NobodyListens(TargetError):
    default_hint = "NCCL has RAS since 2.24, and NCCL_RAS_ENABLE=0 switches it off"


@dataclass(frozen=True, slots=True)
class RasAddress:
    """``hosts``: IP addresses; the first that accepts a connection is used."""

    hosts: tuple[str, ...]
    port: int

    def __str__(self) -> str:
        host = self.hosts[0]
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"


def ras_address(environ: Mapping[str, str], port: int) -> RasAddress | None:
    """The address at which a process with this environment listens, by default at ``port``; None: its RAS is off.

    Raises UnsupportedTarget for an address that must not be connected to.
    """
    if environ.get("NCCL_RAS_ENABLE", "1").strip() == "0":
        return None
    named = environ.get("NCCL_RAS_ADDR", "")
    if not named:
        return RasAddress(_LOCALHOST, port)
    match = _ADDRESS.fullmatch(named)
    if match is None or not 1024 <= int(match[3]) <= 65535:
        raise UnsupportedTarget(f"NCCL_RAS_ADDR is no address that can be asked: {named[:64]}")
    return RasAddress(_hosts(match[1] or match[2]), int(match[3]))


def connect_ras(address: RasAddress, namespace: int | None = None, timeout: float = CONNECT_S) -> socket.socket:
    """A connection to one of the processes that share ``address``, in the network namespace ``namespace`` or ours.

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
                raise TargetTimeout(f"NCCL RAS does not take a connection at {address}") from e
            if e.errno == errno.EADDRNOTAVAIL and not ipaddress.ip_address(host).is_loopback:
                raise UnsupportedTarget(f"NCCL_RAS_ADDR is no address of this machine: {host}") from e
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
        hint = "give the collector CAP_SYS_ADMIN to ask NCCL RAS in containers, or do without that witness"
        raise PrivilegeError(e.message, hint=hint) from e
