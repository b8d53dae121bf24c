"""Certificates for tests, made by packaging/test-ca.sh."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

import grpc

__all__ = ("Authority",)

SCRIPT = Path(__file__).parents[1] / "packaging" / "test-ca.sh"


@dataclass(frozen=True)
class Authority:
    """An authority ``name`` with its files in ``directory``, and the certificates that it signs."""

    directory: Path
    name: str = "ca"

    def __post_init__(self) -> None:
        self._make("ca", self.name)

    @property
    def file(self) -> str:
        return str(self.directory / f"{self.name}.pem")

    def node(self, name: str, addresses: str = "127.0.0.1,localhost") -> tuple[str, str]:
        """Returns the files of a node's certificate and its key."""
        self._make("node", self.name, name, addresses)
        return self._files(name)

    def host(self, name: str, addresses: str = "127.0.0.1,localhost") -> tuple[str, str]:
        """Returns the files of a certificate of addresses, which names no node, and its key."""
        self._make("host", self.name, name, addresses)
        return self._files(name)

    def client(self, name: str, days: int = 1) -> tuple[str, str]:
        """Returns the files of a client's certificate and its key; it has expired where ``days`` is negative."""
        self._make("client", self.name, name, str(days))
        return self._files(name)

    def channel(self, address: str, shown: tuple[str, str] | None = None) -> grpc.Channel:
        """Returns a channel to ``address`` that trusts this authority and shows a certificate."""
        cert, key = (Path(name).read_bytes() for name in shown) if shown else (None, None)
        credentials = grpc.ssl_channel_credentials(Path(self.file).read_bytes(), key, cert)
        return grpc.secure_channel(address, credentials, options=[("grpc.use_local_subchannel_pool", 1)])

    def _make(self, *args: str) -> None:
        subprocess.run([SCRIPT, self.directory, *args], check=True, timeout=60)
        for key in self.directory.glob("*.key"):
            key.chmod(0o640)

    def _files(self, name: str) -> tuple[str, str]:
        return str(self.directory / f"{name}.pem"), str(self.directory / f"{name}.key")
