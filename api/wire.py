"""Constants of the protocol that node.proto cannot express."""

from __future__ import annotations

__all__ = ("ERROR_KEY", "MAX_PEERS", "MAX_STATEMENTS", "NODE_KEY", "UNLIMITED", "WARNINGS_KEY")

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
