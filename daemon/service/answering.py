"""Wraps the methods of a gRPC service: identifies the caller, checks its rights, writes the audit log, sends errors.

Gives each call a thread, or refuses the call at once.

The number of threads is limited for each kind of call, share (root, other users, TCP), caller, and on TCP for each
token. No call uses threads of another share or kind, so a call about the daemon itself never waits for queries. An
admitted Query then waits for a free slot in ``query/concurrency.py``, which limits how many queries run in SQL workers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from enum import Enum
from functools import wraps
from typing import Any, Protocol, TypeVar

import grpc.aio

from probing.api.errors import InternalError, Overloaded, PeerError, ProbingError
from probing.daemon.query.caller import Caller, Scope
from probing.daemon.service.audit import Audit, described
from probing.daemon.service.auth import permit
from probing.daemon.service.errors import abort
from probing.daemon.service.limits import Context

__all__ = (
    "CallAdmission",
    "CallKind",
    "Guarded",
    "Timed",
    "answering",
)

_log = logging.getLogger(__name__)
_Reply = TypeVar("_Reply")
Timed = Callable[[str, float, str], None]


class Guarded(Protocol):
    """A service whose methods are wrapped. ``hints``: whether the text of a status includes the hint of its error.
    ``timed`` is called with the method, the seconds and the outcome of each call: ok, failed or cancelled."""

    audit: Audit
    hints: bool
    timed: Timed

    @property
    def identify(self) -> Callable[[Context], Awaitable[Caller]]:
        """Returns the function that identifies the caller of a call; it raises Unauthenticated or PrivilegeError."""


def answering(method: Callable[..., Awaitable[_Reply]]) -> Callable[..., Awaitable[_Reply]]:
    """Wraps ``method`` of a Guarded: passes the caller to it, ends a failed call as in errors.py, and logs bugs."""

    name = method.__name__

    @wraps(method)
    async def answer(self: Guarded, request: Any, context: Context) -> _Reply:
        begun, outcome = time.monotonic(), "failed"
        try:
            reply = await guarded(self, request, context)
            outcome = "ok"
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        finally:
            self.timed(name, time.monotonic() - begun, outcome)
        return reply

    async def guarded(self: Guarded, request: Any, context: Context) -> _Reply:
        caller, scope = None, Scope.READ
        try:
            caller = await self.identify(context)
            scope = permit(name, request, caller)
            reply = await method(self, request, context, caller)
        except ProbingError as e:
            if caller is not None:
                self.audit.call(caller, described(name, request), scope, e)
            await abort(context, e, with_hint=self.hints)
        except grpc.aio.AbortError:
            raise
        except (asyncio.CancelledError, grpc.aio.InternalError) as e:
            # InternalError: gRPC could not write because the caller went away.
            if caller is not None:
                # The change may take effect although the caller is gone, so it is logged.
                self.audit.call(caller, described(name, request), scope, PeerError("the caller went away"))
            raise asyncio.CancelledError from e
        except Exception as e:
            _log.exception("%s failed", name)
            error = InternalError(f"{name} failed: {type(e).__name__}")
            if caller is not None:
                self.audit.call(caller, described(name, request), scope, error)
            await abort(context, error)
        self.audit.call(caller, described(name, request), scope, None)
        return reply

    return answer


T = TypeVar("T")


class CallKind(Enum):
    """A kind of calls. Calls of one kind and share use the same threads.

    At the same time, a share has at most ``most`` calls, and a caller at most ``each``. The share TCP has at most
    ``most + each / 2`` calls, of which one token or certificate has at most ``most``.
    """

    QUERY = ("queries", 32, 16)
    TARGETS = ("requests for stacks or variables", 8, 4)
    PREFLIGHT = ("requests for facts before a job", 4, 2)
    MANY = ("relayed queries", 8, 4)
    EVAL = ("requests to run code", 4, 2)
    CONTROL = ("requests for status or settings", 12, 8)
    FINDINGS = ("calls that wait for findings", 64, 16)

    def __init__(self, what: str, most: int, each: int) -> None:
        self.what = what
        self.most = most
        self.each = each


class _Share:
    def __init__(self, kind: CallKind, name: str) -> None:
        self.kind = kind
        self.most = kind.most + (kind.each // 2 if name == "tcp" else 0)
        self.calls: Counter[tuple[str, str, str]] = Counter()
        self.holders: Counter[str] = Counter()
        self.executor = ThreadPoolExecutor(self.most, thread_name_prefix=f"{name}-{kind.name.lower()}")

    def enter(self, caller: Caller) -> None:
        kind, end_some = self.kind, "end some of them"
        if self.calls[caller.key] >= kind.each:
            raise Overloaded(f"{kind.each} {kind.what} of {caller} are under way", hint=end_some)
        if self.holders[caller.holder] >= kind.most:
            raise Overloaded(f"{kind.most} {kind.what} of {caller.holder} are under way", hint=end_some)
        if self.calls.total() >= self.most:
            raise Overloaded(f"{self.most} {kind.what} are under way", hint="ask again in a while")
        self.calls[caller.key] += 1
        self.holders[caller.holder] += 1

    def leave(self, caller: Caller) -> None:
        self.calls[caller.key] -= 1
        self.holders[caller.holder] -= 1
        self.calls += Counter()
        self.holders += Counter()


class CallAdmission:
    """Runs calls in threads. Belongs to one event loop."""

    def __init__(self) -> None:
        self._shares = {(kind, name): _Share(kind, name) for kind in CallKind for name in ("root", "unix", "tcp")}

    @property
    def counts(self) -> dict[str, int]:
        """Returns the number of calls in progress, by the name of their kind in lower case."""
        return {
            kind.name.lower(): sum(share.calls.total() for (own, _), share in self._shares.items() if own is kind)
            for kind in CallKind
        }

    def start(self, kind: CallKind, caller: Caller, function: Callable[[], T]) -> asyncio.Future[T]:
        """Runs ``function`` in a thread now, and returns its future. Raises Overloaded if the caller or its share has
        too many calls.

        The call counts until ``function`` returns, even if its caller no longer waits.
        """
        share = self._shares[kind, caller.share]
        share.enter(caller)
        future = asyncio.get_running_loop().run_in_executor(share.executor, function)

        def ended(done: asyncio.Future[T]) -> None:
            share.leave(caller)
            if not done.cancelled():
                # Reads the exception. Otherwise asyncio would log it with a traceback if the caller went away.
                done.exception()

        future.add_done_callback(ended)
        return future

    @contextmanager
    def counted(self, kind: CallKind, caller: Caller) -> Iterator[None]:
        """Returns a context manager for a call that needs no thread: the call counts until the context ends. Raises
        Overloaded in the same cases as ``start``.
        """
        share = self._shares[kind, caller.share]
        share.enter(caller)
        try:
            yield
        finally:
            share.leave(caller)

    async def run(self, kind: CallKind, caller: Caller, function: Callable[[], T]) -> T:
        """Runs ``function`` as ``start`` does, and returns its result."""
        return await asyncio.shield(self.start(kind, caller, function))

    def close(self) -> None:
        for share in self._shares.values():
            share.executor.shutdown(wait=False, cancel_futures=True)
