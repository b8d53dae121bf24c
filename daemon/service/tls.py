"""TLS of the public ports: makes TLS contexts from files, loads the files again when one has changed, and reads the
identity in a certificate.
"""

from __future__ import annotations

import logging
import re
import ssl
import stat
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from cryptography import x509

from probing.api.errors import ConfigError, Unauthenticated
from probing.daemon.config import TlsConfig

__all__ = ("Certificate", "Tls")

MAX_FILE = 1 << 20
# The minimum version. With TLS 1.2 a client could resume a session without showing its certificate.
_LEAST = ssl.TLSVersion.TLSv1_3
_PEM = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.S)
_UNSAFE = re.compile(r"[^\w.:@ -]", re.ASCII)
_CA_HINT = "packaging/test-ca.sh shows how to make certificates"
_log = logging.getLogger(__name__)


class Certificate(NamedTuple):
    """The certificate of a caller. ``peer``: peer_ca signed it. ``ends``: when it expires, UTC s. ``made``: the
    generation of the trusted CA certificates against which it was verified; 0 if the connection uses an older context.

    ``nodes``: the names of nodes that the certificate proves: the DNS names of a peer's certificate, in lower case.
    """

    name: str
    peer: bool
    ends: float
    made: int
    nodes: frozenset[str] = frozenset()


class Tls:
    """The TLS contexts from the files of ``config``. Belongs to one event loop."""

    def __init__(self, config: TlsConfig) -> None:
        """Raises ConfigError for files that cannot be used."""
        self._config = config
        self._stamps: tuple[tuple[int, int, int], ...] = ()
        self._peer_cas: frozenset[bytes] = frozenset()
        self._cas: frozenset[bytes] = frozenset()
        self._made = 0
        self._loads = 0
        self._pem: tuple[bytes | None, bytes | None, bytes | None] = (None, None, None)
        self._problem = ""
        # The names in this node's certificate, and the number of the load in which they were read.
        self._own_names: frozenset[str] = frozenset()
        self._names_of = -1
        self._context: ssl.SSLContext | None = None
        if config.cert or config.key or config.client_ca or config.peer_ca:
            self._load(self._stats())

    @property
    def wanted(self) -> bool:
        """Whether the ports use TLS."""
        return self._context is not None

    @property
    def has_peers(self) -> bool:
        """Whether ``peer_ca`` is set. If it is set, a node with a certificate needs no token."""
        return bool(self._config.peer_ca)

    @property
    def certificate_needed(self) -> bool:
        """Whether each connection has to show a certificate."""
        return bool(self._config.client_ca)

    def server(self) -> ssl.SSLContext:
        """Returns the context for the next connection. If the files cannot be used, this is the last good context."""
        try:
            stamps = self._stats()
            if stamps != self._stamps:
                # The stamps are set before the attempt, so that unusable files are tried only once.
                self._stamps = stamps
                self._load(stamps)
                self._problem = ""
                _log.warning("the certificates of %s are used now", self._config.cert)
        except ConfigError as e:
            if e.message != self._problem:
                _log.error("%s: the last certificates stay", e.message)
            self._problem = e.message
        assert self._context is not None
        return self._context

    def certificate(self, connection: Any) -> Certificate | None:
        """Returns the certificate that the other end of ``connection`` (an SSLObject) showed, or None."""
        shown = connection.getpeercert()
        if not shown:
            return None
        names = (value for part in shown["subject"] for key, value in part if key == "commonName")
        chain = _verified_chain(connection)
        peer = bool(chain) and chain[-1] in self._peer_cas
        return Certificate(
            name=_UNSAFE.sub("?", next(names, ""))[:64] or "unnamed",
            peer=peer,
            ends=ssl.cert_time_to_seconds(shown["notAfter"]),
            made=self._made if connection.context is self._context else 0,
            nodes=_nodes(shown.get("subjectAltName", ())) if peer else frozenset(),
        )

    def check(self, certificate: Certificate) -> None:
        """Raises Unauthenticated if a certificate that was accepted before has expired, or the authorities have
        changed.
        """
        if time.time() > certificate.ends:
            raise Unauthenticated("the certificate has expired", hint="connect again with a new one")
        if certificate.made != self._made:
            raise Unauthenticated("the certificate authorities of this node changed", hint="connect again")

    @property
    def loads(self) -> int:
        """The number of times that the files were loaded. A connection that was opened before the last load may use an
        old certificate.
        """
        if self.wanted:
            self.server()
        return self._loads

    def names(self) -> frozenset[str]:
        """Returns the names of nodes that this node's certificate proves; empty without TLS."""
        if not self.wanted:
            return frozenset()
        if self._names_of != self._loads:
            own = x509.load_pem_x509_certificate(self._pem[2] or b"")
            try:
                shown = own.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
                names = shown.get_values_for_type(x509.DNSName)
            except (ValueError, x509.ExtensionNotFound):
                names = []
            self._own_names, self._names_of = _nodes(("DNS", name) for name in names), self._loads
        return self._own_names

    def files(self) -> tuple[bytes | None, bytes | None, bytes | None]:
        """Returns PEM for a call to a peer: (the peer's authorities, our key, our chain); None for a file that is not
        configured.
        """
        self.server()
        return self._pem

    def _stats(self) -> tuple[tuple[int, int, int], ...]:
        return tuple(_stamp(Path(name)) for name in self._names())

    def _names(self) -> Iterator[str]:
        config = self._config
        if not config.cert or not config.key:
            raise ConfigError("[tls] needs both cert and key", hint=_CA_HINT)
        yield from filter(None, (config.cert, config.key, config.client_ca, config.peer_ca))

    def _load(self, stamps: tuple[tuple[int, int, int], ...]) -> None:
        config = self._config
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = _LEAST
        context.num_tickets = 0
        context.set_alpn_protocols(["h2", "http/1.1"])
        try:
            if Path(config.key).stat().st_mode & 0o007:
                raise ConfigError(f"tls.key {config.key} is open to everybody", hint=f"chmod o= {config.key}")
            context.load_cert_chain(config.cert, config.key, password=_no_password)
        except (OSError, ValueError) as e:
            raise ConfigError(f"tls.cert and tls.key cannot be used: {_reason(e)}", hint=_CA_HINT) from e
        peers = _authorities(config.peer_ca, "tls.peer_ca")
        clients = _authorities(config.client_ca, "tls.client_ca")
        for der in peers | clients:
            context.load_verify_locations(cadata=der)
        if peers or clients:
            context.verify_mode = ssl.CERT_REQUIRED if config.client_ca else ssl.CERT_OPTIONAL
        if peers & clients:
            _log.warning("tls.client_ca and tls.peer_ca share an authority: its clients count as nodes")
        if peers | clients != self._cas or peers != self._peer_cas:
            self._made += 1
        names = (config.peer_ca, config.key, config.cert)
        authorities, key, cert = (_read(Path(name)) if name else None for name in names)
        self._pem = authorities, key, cert
        self._loads += 1
        self._stamps, self._context, self._peer_cas, self._cas = stamps, context, peers, peers | clients


def _authorities(name: str, key: str) -> frozenset[bytes]:
    """Returns the certificates in the file, as DER."""
    if not name:
        return frozenset()
    try:
        found = frozenset(map(ssl.PEM_cert_to_DER_cert, _PEM.findall(_read(Path(name)).decode("latin-1"))))
        for der in found:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(cadata=der)
    except (ValueError, ssl.SSLError) as e:
        raise ConfigError(f"{key} {name} cannot be used: {_reason(e)}", hint=_CA_HINT) from e
    if not found:
        raise ConfigError(f"{key} {name} has no certificate", hint=_CA_HINT)
    return found


def _nodes(names: Iterable[tuple[str, str]]) -> frozenset[str]:
    """Returns the names of nodes among the alternative ``names`` of a certificate (RFC 5280, 4.2.1.6).

    A wildcard stands for many nodes, so it proves no name.
    """
    return frozenset(name.lower() for kind, name in names if kind == "DNS" and "*" not in name)


def _verified_chain(connection: Any) -> list[bytes]:
    """Returns the chain from the caller's certificate to the authority, as DER."""
    if sys.version_info >= (3, 13):
        return list(connection.get_verified_chain())
    # The public method exists from Python 3.13 on; before, the inner object has the method. The 2 stands for DER.
    return [certificate.public_bytes(2) for certificate in connection._sslobj.get_verified_chain()]


def _stamp(path: Path) -> tuple[int, int, int]:
    try:
        found = path.stat()
    except OSError as e:
        raise ConfigError(f"cannot read {path}: {e.strerror}", hint="the service's user must be able to read it") from e
    if not stat.S_ISREG(found.st_mode):
        raise ConfigError(f"{path} is not a file")
    # Unlike st_mtime, st_ctime also changes when the mode of the file changes.
    return found.st_ctime_ns, found.st_size, found.st_ino


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(MAX_FILE)
    except OSError as e:
        raise ConfigError(f"cannot read {path}: {e.strerror}", hint="the service's user must be able to read it") from e


def _no_password() -> str:
    """Raises ValueError; without it OpenSSL would prompt for a password on the terminal."""
    raise ValueError("the key has a password")


def _reason(error: Exception) -> str:
    reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
    return str(reason).replace("_", " ").lower()
