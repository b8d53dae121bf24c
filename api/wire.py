"""The parts of the protocol that node.proto cannot express: constants, tokens, and errors as exceptions."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from probing.api.errors import InternalError, PeerError, ProbingError, error_from

if TYPE_CHECKING:
    from probing.api.proto.probing.v1 import node_pb2 as pb

__all__ = (
    "ERROR_KEY",
    "MAX_PARTS",
    "MAX_PEERS",
    "MAX_STATEMENTS",
    "NODE_KEY",
    "UNLIMITED",
    "WARNINGS_KEY",
    "bound",
    "from_proto",
    "parts_of",
    "reported_error",
    "shown",
)

# The key of trailing metadata of a failed call; the value is a message ``Error``.
ERROR_KEY = "probing-error-bin"
# The key of initial metadata of ``Query``, sent before the rows; the value is the node's name.
NODE_KEY = "probing-node-bin"
# The key of trailing metadata of Flight's ``DoGet``; the value says why rows are missing, one reason on each line.
WARNINGS_KEY = "probing-warnings-bin"
# The maximum number of addresses in one QueryManyRequest.
MAX_PEERS = 128
# The maximum number of statements in one QueryRequest.
MAX_STATEMENTS = 16
# The maximum number of parts in one QueryReply.
MAX_PARTS = 256
# The value of ``max_bytes`` for a caller that processes rows as they arrive: the whole answer needs no size limit.
UNLIMITED = (1 << 64) - 1


def shown(token: str) -> str:
    """Returns a value of the header ``authorization`` that contains the token itself."""
    return f"Bearer {token}"


def bound(token: str, node: str) -> str:
    """Returns a value of the header ``authorization`` that proves to the node named ``node`` that the caller knows
    its token.

    The value is the HMAC-SHA256 (RFC 2104) of the node's name with the token as key, so no other node accepts it.
    """
    text = b"probingd token 1\n" + node.encode()
    return f"Bound {hmac.new(token.encode(), text, hashlib.sha256).hexdigest()}"


def from_proto(error: pb.Error) -> ProbingError:
    """Returns the error that a node has sent."""
    return error_from(error.kind, error.message, error.hint, error.code, error.reason)


def parts_of(message: pb.QueryReply) -> Sequence[pb.QueryReply]:
    """Returns the parts of a message of Query; a message without parts is itself the only part. Raises PeerError for
    too many parts."""
    if len(message.parts) > MAX_PARTS:
        raise PeerError(f"a reply message has {len(message.parts)} parts, more than allowed")
    return message.parts or (message,)


def reported_error(call: Any) -> ProbingError | None:
    """Returns the error that the node itself sent in a failed call (grpc.RpcError); None if the node sent none."""
    from google.protobuf.message import DecodeError

    from probing.api.proto.probing.v1 import node_pb2 as pb

    sent = next((value for key, value in call.trailing_metadata() or () if key == ERROR_KEY), None)
    if not isinstance(sent, bytes):
        return None
    try:
        return from_proto(pb.Error.FromString(sent))
    except DecodeError:
        return InternalError("the node sent an error that cannot be read")
