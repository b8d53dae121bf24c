"""Answers that are sent in pieces: server-sent events, and the code that they share with files."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from starlette.types import ASGIApp, Receive, Scope, Send

from probing.client.web.live import Live
from probing.client.web.visitors import Visitor

__all__ = ("EventStream", "Placed", "left")

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    # Keeps proxies from buffering events.
    (b"x-accel-buffering", b"no"),
]


class Placed:
    """An answer that counts as one of ``visitor``'s streams until it is sent. Raises Overloaded for too many."""

    def __init__(self, visitor: Visitor, answer: ASGIApp) -> None:
        self._visitor = visitor
        self._answer = answer
        visitor.enter_stream()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._answer(scope, receive, send)
        finally:
            self._visitor.leave_stream()


class EventStream:
    """An answer with the events of ``live``, of all jobs or of ``job``, until the reader leaves or its session ends."""

    def __init__(self, live: Live, job: str | None, may_go_on: Callable[[], bool]) -> None:
        self._live = live
        self._job = job
        self._may_go_on = may_go_on

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope
        sending = asyncio.ensure_future(self._send(send))
        leaving = asyncio.ensure_future(left(receive))
        try:
            await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sending, leaving):
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        events = self._live.events(self._job)
        try:
            async for event in events:
                if not self._may_go_on():
                    await send({"type": "http.response.body", "body": b""})
                    return
                await send({"type": "http.response.body", "body": event, "more_body": True})
        finally:
            await events.aclose()  # type: ignore[attr-defined]


async def left(receive: Receive) -> None:
    """Returns when the reader of an answer is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
