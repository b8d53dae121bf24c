"""Keys of nodes: Ed25519 (RFC 8032). A node signs its record, which other nodes pass on, and answers challenges with
its key."""

from __future__ import annotations

import json
import secrets
from functools import lru_cache

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from probing.daemon.cluster.record import Record

__all__ = ("KEY_BYTES", "NONCE_BYTES", "SIGNATURE_BYTES", "NodeKey", "answers", "is_signed", "new_nonce")

KEY_BYTES = 32
SIGNATURE_BYTES = 64
NONCE_BYTES = 16
# A signed text begins with its type, so that a signature is valid only for texts of this type.
_RECORD = b"probingd record 1\n"
_ANSWER = b"probingd answer 1\n"


class NodeKey:
    """The private key of a node, made from the 32 bytes of its key file."""

    def __init__(self, secret: bytes) -> None:
        """Raises ValueError if ``secret`` does not have 32 bytes."""
        self._key = Ed25519PrivateKey.from_private_bytes(secret)
        self.public = self._key.public_key().public_bytes_raw()

    @classmethod
    def new(cls) -> NodeKey:
        return cls(secrets.token_bytes(KEY_BYTES))

    def signed(self, record: Record) -> Record:
        """Returns ``record`` with the node's public key, signed by this private key."""
        own = record._replace(key=self.public)
        return own._replace(signature=self._key.sign(_RECORD + _text(own)))

    def answer(self, nonce: bytes, record: Record) -> bytes:
        """Returns the proof that the node of ``record`` is alive and holds this key; empty if ``nonce`` is empty."""
        return self._key.sign(_ANSWER + _asked(nonce, record)) if nonce else b""


@lru_cache(maxsize=4096)
def is_signed(record: Record) -> bool:
    """Returns whether ``record`` is signed by the key that it names."""
    return bool(record.key) and _verified(record.key, record.signature, _RECORD + _text(record))


def answers(proof: bytes, nonce: bytes, record: Record) -> bool:
    """Returns whether ``proof`` is an answer to ``nonce``, signed by the key of ``record``. Nonces are random, so a
    valid answer cannot be older than its nonce.
    """
    return bool(record.key and nonce) and _verified(record.key, proof, _ANSWER + _asked(nonce, record))


def new_nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def _verified(key: bytes, signature: bytes, text: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, text)
    except (InvalidSignature, ValueError):
        return False
    return True


def _text(record: Record) -> bytes:
    """Returns the text to sign: all fields of ``record`` except the signature.

    A new field needs a new type of text, since older nodes leave the field out.
    """
    parts = (*record[:-2], record.key.hex())
    return json.dumps(parts, separators=(",", ":")).encode()


def _asked(nonce: bytes, record: Record) -> bytes:
    return nonce + record.uid.to_bytes(8, "big") + record.name.encode()
