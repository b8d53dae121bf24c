"""Chooses what a node is shown: the token itself, a token bound to the node's name, or nothing; and sets up TLS."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import grpc

from probing.api.errors import PeerError, UsageError
from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.api.wire import bound, shown

__all__ = ("Credentials", "Tls", "credentials_of")

_MAX_FILE = 1 << 20


class Credentials:
    """Chooses the authorization of calls to each node. A node that accepts bound tokens, as the target reports, gets a
    token that is bound to the node's name and works nowhere else. All other nodes, such as the target and the nodes
    that the user lists, get ``token`` itself."""

    def __init__(self, token: str = "") -> None:
        self.token = token
        self._nodes: dict[str, str] = {}
        self._names: dict[str, str] = {}

    def bind(self, peers: Iterable[pb.Peer]) -> None:
        """Stores the addresses and names of those ``peers`` of the target that accept a bound token or whose name is
        proven."""
        known = list(peers)
        self._nodes.update((peer.address, peer.node) for peer in known if peer.bound)
        self._names.update((peer.address, peer.node) for peer in known if peer.bound or peer.proof)

    def check(self, address: str, node: str) -> None:
        """Raises PeerError if ``node`` answered at ``address``, but the target says that the address belongs to another
        node. Otherwise the rows of ``node`` would count as rows of that other node."""
        known = self._names.get(address, node)
        if known != node:
            raise PeerError(f"{known} answers as {node[:100]}", hint="its rows are left out")

    def authorization(self, address: str) -> str:
        """Returns the value of ``authorization`` for the node at ``address``; empty without a token."""
        if not self.token:
            return ""
        node = self._nodes.get(address)
        return shown(self.token) if node is None else bound(self.token, node)

    def metadata(self, address: str) -> tuple[tuple[str, str], ...]:
        """Returns the metadata of a call to the node at ``address``."""
        authorization = self.authorization(address)
        return (("authorization", authorization),) if authorization else ()

    def may_be_passed_on(self, address: str) -> bool:
        """Returns whether other nodes may see the ``authorization`` for the node at ``address``."""
        return not self.token or address in self._nodes


@dataclass(frozen=True, slots=True)
class Tls:
    """Paths of PEM files. ``ca``: the authorities that sign nodes' certificates; empty: the system's authorities.
    ``cert`` and ``key``: either both are set or neither is.
    """

    ca: str = ""
    cert: str = ""
    key: str = ""


def credentials_of(tls: Tls) -> grpc.ChannelCredentials:
    """Returns credentials made from the files of ``tls``. Raises UsageError if a file cannot be used."""
    if bool(tls.cert) != bool(tls.key):
        raise UsageError("a certificate and its key are needed together", hint="give both --tls-cert and --tls-key")
    ca, key, cert = (_read(name) if name else None for name in (tls.ca, tls.key, tls.cert))
    for name, text in ((tls.ca, ca), (tls.cert, cert)):
        # gRPC would report a file that it cannot use only in its own log.
        if text is not None and b"-----BEGIN CERTIFICATE-----" not in text:
            raise UsageError(f"{name} has no certificate", hint="it must be PEM")
    return grpc.ssl_channel_credentials(ca, key, cert)


def _read(name: str) -> bytes:
    try:
        with Path(name).open("rb") as file:
            return file.read(_MAX_FILE)
    except OSError as e:
        raise UsageError(f"cannot read {name}: {e.strerror}") from None
