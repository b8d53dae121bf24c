"""Signatures of a group's owner: of the specification, and of each order to start, stop or restart the group.

A launcher runs only what was signed by its user's key, or by a key that its user trusts. So no node can make the
launcher run anything else.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from probing.api.errors import ConfigError

__all__ = ("OwnerKey", "is_signed", "key_directory", "trusted_keys")

_KEY_BYTES, _MAX_TRUSTED, _MAX_LINES = 32, 64 << 10, 256
_PRIVATE, _TRUSTED = "launch.key", "launch.trusted"
_KEY = re.compile(r"[0-9a-f]{64}")


class OwnerKey:
    """The Ed25519 key (RFC 8032) of a user, by which the user signs specifications and orders."""

    def __init__(self, secret: bytes) -> None:
        """Raises ValueError if ``secret`` does not have 32 bytes."""
        self._key = Ed25519PrivateKey.from_private_bytes(secret)
        self.public = self._key.public_key().public_bytes_raw().hex()

    def sign(self, kind: str, text: bytes) -> str:
        """Returns the signature in hex. ``kind``: the type of text; the signature is valid for no other type."""
        return self._key.sign(_signed(kind, text)).hex()

    @classmethod
    def of_user(cls, directory: Path | None = None) -> OwnerKey:
        """Returns the key in ``directory``, which only the user may read; it is made if it is missing.

        Raises ConfigError if the key cannot be read or made, or if other users can read it.
        """
        path = (directory or key_directory()) / _PRIVATE
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            except FileExistsError:
                return cls(_secret(path))
            with open(fd, "wb") as file:
                file.write(os.urandom(_KEY_BYTES))
                file.flush()
                os.fsync(file.fileno())
            return cls(_secret(path))
        except OSError as e:
            raise ConfigError(f"the key {path} cannot be used: {e.strerror}", hint="set XDG_CONFIG_HOME") from None
        except ValueError:
            raise ConfigError(f"{path} is not a key", hint="remove it, and create the groups again") from None


def is_signed(kind: str, text: bytes, key: str, signature: str) -> bool:
    """Returns whether ``signature`` (hex) of ``text`` was made by the holder of ``key`` (hex)."""
    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(key)).verify(bytes.fromhex(signature), _signed(kind, text))
    except (InvalidSignature, ValueError):
        return False
    return True


def key_directory() -> Path:
    """Returns the directory of the user's keys, which follows XDG_CONFIG_HOME."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "probing"


def trusted_keys(directory: Path | None = None) -> frozenset[str]:
    """Returns the public keys (hex) whose orders this user's launcher obeys: the user's own, and each line of
    launch.trusted.

    Raises ConfigError.
    """
    where = directory or key_directory()
    keys = {OwnerKey.of_user(where).public}
    try:
        with (where / _TRUSTED).open("rb") as file:
            lines = file.read(_MAX_TRUSTED).decode("ascii", "replace").splitlines()[:_MAX_LINES]
    except FileNotFoundError:
        return frozenset(keys)
    except OSError as e:
        raise ConfigError(f"the list of keys {where / _TRUSTED} cannot be read: {e.strerror}") from None
    return frozenset(keys | {line.strip() for line in lines if _KEY.fullmatch(line.strip())})


def _secret(path: Path) -> bytes:
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_mode & 0o077 or status.st_uid != os.getuid():
            raise ConfigError(f"other users may read or write the key {path}", hint=f"chmod 600 {path}")
        return file.read(_KEY_BYTES + 1)


def _signed(kind: str, text: bytes) -> bytes:
    return f"probing {kind} 1\n".encode() + text
