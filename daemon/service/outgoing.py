"""Opens channels to the daemons of other nodes, with this node's certificate and its token for peers."""

from __future__ import annotations

import ipaddress

import grpc
import grpc.aio

from probing.daemon.service.tls import Tls
from probing.daemon.service.tokens import Tokens

__all__ = ("Outgoing", "is_loopback")

_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
    # A node that comes back is found within a few heartbeats.
    ("grpc.initial_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 2000),
)
Metadata = tuple[tuple[str, str], ...]


class Outgoing:
    """A node that speaks TLS on its own port speaks it to all others. Belongs to one event loop."""

    def __init__(self, tokens: Tokens | None = None, tls: Tls | None = None) -> None:
        self._tokens = tokens
        self._tls = tls

    def channel(self, address: str, *, anonymous: bool = False) -> grpc.aio.Channel:
        """Returns a channel to ``address`` (unix:PATH or HOST:PORT).

        ``anonymous``: it shows no certificate, as for calls in the name of somebody else.
        """
        if address.startswith("unix:"):
            return grpc.aio.insecure_channel(address, options=_OPTIONS)
        target = f"dns:///{address}"
        if self._secure(address):
            authorities, key, certificate = self._files()
            shown = (None, None) if anonymous else (key, certificate)
            credentials = grpc.ssl_channel_credentials(authorities, *shown)
            return grpc.aio.secure_channel(target, credentials, options=_OPTIONS)
        return grpc.aio.insecure_channel(target, options=_OPTIONS)

    def key(self, address: str) -> tuple[str, int]:
        """Returns the key of a channel that is kept: another one after the certificates of this node changed."""
        return address, self._tls.loads if self._tls is not None and self._secure(address) else 0

    def metadata(self, address: str) -> Metadata:
        """Returns the metadata of a call: the token, which travels in the clear to loopback alone."""
        token = self._tokens.text if self._tokens else ""
        return self.passed_on(address, f"Bearer {token}" if token else "")

    def passed_on(self, address: str, authorization: str) -> Metadata:
        """Returns the metadata of a call that shows what somebody else has shown, within the same bounds."""
        if authorization and (self._secure(address) or is_loopback(address)):
            return (("authorization", authorization),)
        return ()

    def _secure(self, address: str) -> bool:
        return self._tls is not None and self._tls.wanted and not address.startswith("unix:")

    def _files(self) -> tuple[bytes | None, bytes | None, bytes | None]:
        assert self._tls is not None
        return self._tls.files()


def is_loopback(address: str) -> bool:
    """Returns whether ``address`` (HOST:PORT) is of this machine alone."""
    host = address.rpartition(":")[0]
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
