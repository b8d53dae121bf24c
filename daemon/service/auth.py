"""Who may ask what. The Unix socket is for root and its group; TCP in the clear is for reading, and for loopback."""

from __future__ import annotations

import ipaddress
from enum import Enum

import grpc

from probing.api.errors import ConfigError, PrivilegeError

__all__ = ("Scope", "check_listen", "require")


class Scope(Enum):
    READ = "read"
    PROBE = "probe"


def check_listen(address: str, *, insecure: bool) -> None:
    """Raises ConfigError when ``address`` (HOST:PORT) would carry the service in the clear off loopback."""
    if insecure or _is_loopback(address.rpartition(":")[0].strip("[]")):
        return
    raise ConfigError(
        f"listen = {address} would answer in the clear off loopback",
        hint="listen on 127.0.0.1 and reach it through a tunnel, or set insecure = true where the network is trusted",
    )


def require(context: grpc.ServicerContext, scope: Scope) -> None:
    """Raises PrivilegeError unless the caller has ``scope``: all scopes on the Unix socket, READ elsewhere."""
    if scope is Scope.READ or str(context.peer()).startswith("unix:"):
        return
    raise PrivilegeError(
        f"the scope {scope.value} is needed, and TCP gives only {Scope.READ.value}",
        hint="ask on the node itself, by its Unix socket",
    )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
