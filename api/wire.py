"""Constants of the protocol that node.proto cannot express."""

from __future__ import annotations

import hashlib
import hmac

__all__ = ("ERROR_KEY", "MAX_PEERS", "MAX_STATEMENTS", "NODE_KEY", "UNLIMITED", "WARNINGS_KEY", "bound", "shown")

# Trailing metadata of a failed call: a message Error.
ERROR_KEY = "probing-error-bin"
# Initial metadata of Query: the node's name, before the rows.
NODE_KEY = "probing-node-bin"
# Trailing metadata of Flight's DoGet: why rows are missing, a line each.
WARNINGS_KEY = "probing-warnings-bin"
# Addresses of one QueryManyRequest.
MAX_PEERS = 128
# Statements of one QueryRequest.
MAX_STATEMENTS = 16
# max_bytes of a caller that takes the rows as they come, so that their sum needs no bound.
UNLIMITED = (1 << 64) - 1


def shown(token: str) -> str:
    """Returns the value of ``authorization`` that shows a token itself."""
    return f"Bearer {token}"


def bound(token: str, node: str) -> str:
    """Returns the value of ``authorization`` that proves to the node of that name, which knows the token, that the
    caller knows it too, and that is worth nothing at another node: HMAC-SHA256 (RFC 2104) of the name by the token."""
    text = b"probingd token 1\n" + node.encode()
    return f"Bound {hmac.new(token.encode(), text, hashlib.sha256).hexdigest()}"
