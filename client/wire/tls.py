"""TLS to nodes: the authorities that a node's certificate must have, and the certificate that this client shows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import grpc

from probing.api.errors import UsageError

__all__ = ("Tls", "credentials_of")

_MAX_FILE = 1 << 20


@dataclass(frozen=True, slots=True)
class Tls:
    """Paths of PEM files. ``ca``: authorities of nodes, empty for the system's. ``cert``, ``key``: both or none."""

    ca: str = ""
    cert: str = ""
    key: str = ""


def credentials_of(tls: Tls) -> grpc.ChannelCredentials:
    """Reads the files of ``tls``. Raises UsageError."""
    if bool(tls.cert) != bool(tls.key):
        raise UsageError("a certificate and its key are needed together", hint="give both --tls-cert and --tls-key")
    ca, key, cert = (_read(name) if name else None for name in (tls.ca, tls.key, tls.cert))
    for name, text in ((tls.ca, ca), (tls.cert, cert)):
        # gRPC would report what it cannot use in its own log alone.
        if text is not None and b"-----BEGIN CERTIFICATE-----" not in text:
            raise UsageError(f"{name} has no certificate", hint="it must be PEM")
    return grpc.ssl_channel_credentials(ca, key, cert)


def _read(name: str) -> bytes:
    try:
        with Path(name).open("rb") as file:
            return file.read(_MAX_FILE)
    except OSError as e:
        raise UsageError(f"cannot read {name}: {e.strerror}") from None
