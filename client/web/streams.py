"""Answers that are sent bit by bit: server-sent events."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from starlette.types import Receive, Scope, Send

from probing.client.web.visitors import Visitor

__all__ = ("EventStream",)

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    # A proxy that collected the events would hold them back.
    (b"x-accel-buffering", b"no"),
]


class EventStream:
    """An answer with the events of ``visitor``'s live view until its reader is gone. Raises Overloaded where the
    visitor has too many."""

    def __init__(self, visitor: Visitor, job: str | None) -> None:
        self._visitor = visitor
        self._job = job
        visitor.enter_stream()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope
        sending = asyncio.ensure_future(self._send(send))
        leaving = asyncio.ensure_future(_left(receive))
        try:
            await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._visitor.leave_stream()
            for task in (sending, leaving):
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        events = self._visitor.live.events(self._job)
        try:
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        finally:
            await events.aclose()  # type: ignore[attr-defined]


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
