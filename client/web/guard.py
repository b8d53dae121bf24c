"""Checks requests before the page gets them: sender, site, size and rate; and adds headers to all answers.

A browser sends requests for any page that it shows. Cross-site requests are refused by their headers Sec-Fetch-Site and
Origin. Requests for a name that an attacker points to this machine (DNS rebinding) are refused by their Host header. A
POST is refused without the header X-Probing, which only our own page can add.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from fnmatch import fnmatchcase
from typing import Any

from probing.api.errors import Overloaded, PrivilegeError, ProbingError, UsageError
from probing.client.web.answers import encoded, error_body
from probing.client.web.peers import Peer

__all__ = ("Guard", "Rate", "host_of")

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_MOST_BODY = 256 << 10
_BODY_S = 10.0
_PAGE = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "font-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
# Cross-Origin-Opener-Policy is left out: with it the page could not send a trace to a window of ui.perfetto.dev.
_ALWAYS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
    "cross-origin-resource-policy": "same-origin",
}


class Rate:
    """A token bucket for each key: admits bursts of ``burst`` events, and ``a_second`` events a second in the long run.

    Keeps the 4,096 keys that were used last.
    """

    _MOST = 4096

    def __init__(self, burst: float, a_second: float, now: Callable[[], float] = time.monotonic) -> None:
        self._burst = burst
        self._a_second = a_second
        self._now = now
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, key: str) -> bool:
        """Returns whether ``key`` may have one more event now."""
        now = self._now()
        left, at = self._left.pop(key, (self._burst, now))
        left = min(self._burst, left + (now - at) * self._a_second)
        self._left[key] = (left - 1 if left >= 1 else left), now
        while len(self._left) > self._MOST:
            self._left.popitem(last=False)
        return left >= 1


class Guard:
    """Passes valid requests on to ``app``. The Host header, without its port, must match one of ``names``, patterns in
    lower case.
    """

    def __init__(self, app: App, names: Collection[str], *, burst: float = 200, a_second: float = 50) -> None:
        self._app = app
        self._names = tuple(names)
        self._rate = Rate(burst, a_second)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        api = scope["path"].startswith("/api/")

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = _with_headers(message.get("headers", ()), api=api)
            await send(message)

        try:
            body = await self._checked(scope, receive, api=api)
        except _Refused as e:
            await _answer(send_with_headers, e.status, e.error)
            return
        await self._app(scope, _replayed(body, receive) if body is not None else receive, send_with_headers)

    async def _checked(self, scope: Scope, receive: Receive, *, api: bool) -> bytes | None:
        """Returns the body of a POST; None for other requests. Raises _Refused."""
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get("host", "")
        if not any(fnmatchcase(host_of(host), name) for name in self._names):
            hint = f"this server is {' or '.join(self._names)}"
            raise _Refused(421, UsageError("the request is for another host", hint=hint))
        peer: Peer = scope.get("state", {}).get("peer", Peer(""))
        if peer.stranger:
            hint = "start `probingctl web` yourself: the page shows what its caller may see"
            raise _Refused(403, PrivilegeError("this page belongs to another user", hint=hint))
        if scope["method"] not in ("GET", "HEAD", "POST"):
            raise _Refused(405, UsageError("the method is not GET, HEAD or POST", hint=_LIST))
        if not self._rate.take(peer.name):
            raise _Refused(429, Overloaded("too many requests a second"))
        # Only browsers send this header, and pages cannot forge it. A page of another port of this host is "same-site".
        if api and headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            raise _Refused(403, PrivilegeError("the request comes from another site's page", hint=_OWN))
        if scope["method"] != "POST":
            return None
        if "origin" in headers and headers["origin"].lower() != f"{scope['scheme']}://{host.lower()}":
            raise _Refused(403, PrivilegeError("the request comes from another site's page", hint=_OWN))
        if headers.get("x-probing") != "1":
            raise _Refused(403, PrivilegeError("the header X-Probing is missing", hint="send X-Probing: 1 with a POST"))
        length = headers.get("content-length", "0")
        if not length.isdigit() or len(length) > 9 or int(length) > _MOST_BODY:
            raise _Refused(413, UsageError(f"the body has more than {_MOST_BODY} bytes", hint=_LIST))
        try:
            return await asyncio.wait_for(_body(receive), _BODY_S)
        except asyncio.TimeoutError:
            raise _Refused(
                408, UsageError(f"the body did not come within {_BODY_S:g} s", hint="send it again")
            ) from None


_LIST = "docs/web.md lists the addresses and their limits"
_OWN = "open the page of this server itself"


class _Refused(Exception):
    def __init__(self, status: int, error: ProbingError) -> None:
        super().__init__(error.message)
        self.status = status
        self.error = error


async def _body(receive: Receive) -> bytes:
    parts = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return bytes(parts)
        parts += message.get("body", b"")
        if len(parts) > _MOST_BODY:
            raise _Refused(413, UsageError(f"the body has more than {_MOST_BODY} bytes", hint=_LIST))
        if not message.get("more_body", False):
            return bytes(parts)


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Returns a ``receive`` whose first message has ``body``."""
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


def host_of(host: str) -> str:
    """Returns the host name of a Host header, in lower case and without the port."""
    name, bracket, _ = host.rpartition("]")
    return (f"{name}]" if bracket else host.partition(":")[0]).lower()


def _with_headers(given: Collection[tuple[bytes, bytes]], *, api: bool) -> list[tuple[bytes, bytes]]:
    names = {name.lower() for name, _ in given}
    more = {**_ALWAYS, "content-security-policy": _PAGE, **({"cache-control": "no-store"} if api else {})}
    own = [(name.encode(), text.encode()) for name, text in more.items()]
    return [*given, *((name, text) for name, text in own if name not in names)]


async def _answer(send: Send, status: int, error: ProbingError) -> None:
    body = encoded(error_body(error))
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        # The rest of the request is not read, so the connection cannot be used again.
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
