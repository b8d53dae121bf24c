"""Refuses requests that are too large, or no message of their kind.

gRPC alone would log a traceback for each of the latter, token or not, and nothing for the former.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NamedTuple

import grpc.aio

from probing.api.errors import UsageError
from probing.daemon.service.errors import abort

__all__ = ("MalformedRequests",)


class _Refused(NamedTuple):
    why: str


_MALFORMED = _Refused("the request is malformed")


class MalformedRequests(grpc.aio.ServerInterceptor):
    """``refused`` is called with the context of a call that sent one, and why. A request has at most ``most`` bytes."""

    def __init__(self, refused: Callable[[Any, str], None], most: int) -> None:
        self._refused = refused
        self._most = most

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        handler = await continuation(details)
        if handler is None or handler.request_deserializer is None:
            return handler
        deserialized = handler.request_deserializer

        def parsed(data: bytes) -> Any:
            if len(data) > self._most:
                return _Refused(f"the request has {len(data)} bytes, at most {self._most} are read")
            try:
                return deserialized(data)
            except Exception:
                return _MALFORMED

        changed: dict[str, Any] = {"request_deserializer": parsed}
        for kind in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
            if (answer := getattr(handler, kind)) is not None:
                changed[kind] = self._for_stream(answer) if kind.startswith("stream") else self._for_one(answer)
        return handler._replace(**changed)

    def _for_one(self, answer: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
        async def checked(request: Any, context: Any) -> Any:
            if isinstance(request, _Refused):
                await self._abort(context, request.why)
            return await answer(request, context)

        return checked

    def _for_stream(self, answer: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        async def checked(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
            async for request in requests:
                if isinstance(request, _Refused):
                    await self._abort(context, request.why)
                yield request

        # gRPC decides by the kind of the function how it calls it.
        if inspect.isasyncgenfunction(answer):

            async def replies(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
                async for reply in answer(checked(requests, context), context):
                    yield reply

            return replies

        async def reply(requests: AsyncIterator[Any], context: Any) -> Any:
            return await answer(checked(requests, context), context)

        return reply

    async def _abort(self, context: Any, why: str) -> None:
        self._refused(context, why)
        await abort(context, UsageError(why))
