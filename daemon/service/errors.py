"""Sends errors: as a gRPC status for any client, and as trailing metadata with the whole error for our clients."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, NoReturn

import grpc
import grpc.aio

from probing.api import errors
from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.api.wire import ERROR_KEY

__all__ = ("abort", "status_of", "to_proto")

# The maximum length of a text, characters: HTTP/2 peers commonly refuse more than 8 KiB of metadata.
MAX_TEXT = 2000
# The first match counts, so subclasses come before their bases.
_CODES: tuple[tuple[type[errors.ProbingError], grpc.StatusCode], ...] = (
    (errors.QueryTimeout, grpc.StatusCode.DEADLINE_EXCEEDED),
    (errors.TargetTimeout, grpc.StatusCode.DEADLINE_EXCEEDED),
    (errors.QueryMemory, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.StoreFull, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.Overloaded, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.QueryError, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.UsageError, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.NotFound, grpc.StatusCode.NOT_FOUND),
    (errors.ProcessGone, grpc.StatusCode.NOT_FOUND),
    (errors.TargetError, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.ConfigError, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.Unauthenticated, grpc.StatusCode.UNAUTHENTICATED),
    (errors.PrivilegeError, grpc.StatusCode.PERMISSION_DENIED),
    (errors.PeerError, grpc.StatusCode.UNAVAILABLE),
)


def status_of(error: errors.ProbingError) -> grpc.StatusCode:
    return next((code for kind, code in _CODES if isinstance(error, kind)), grpc.StatusCode.INTERNAL)


def to_proto(error: errors.ProbingError) -> pb.Error:
    reason = "" if error.reason == error.message else _cut(error.reason)
    return pb.Error(
        kind=error.kind, message=_cut(error.message), hint=_cut(error.hint), code=_cut(error.code), reason=reason
    )


async def abort(
    context: grpc.aio.ServicerContext[Any, Any], error: errors.ProbingError, *, with_hint: bool = False
) -> NoReturn:
    """Ends the call with ``error``; the text includes the hint if ``with_hint``. Does nothing if the caller
    went away.
    """
    data = to_proto(error).SerializeToString()
    context.set_trailing_metadata(((ERROR_KEY, data),))
    with suppress(grpc.aio.InternalError):
        text = f"{error.message} ({error.hint})" if with_hint and error.hint else error.message
        await context.abort(status_of(error), _cut(text))
    raise asyncio.CancelledError


def _cut(text: str) -> str:
    return " ".join(text.split())[:MAX_TEXT]
