"""Wraps the methods of a gRPC service: who calls, whether it may, what it asked for in the audit log, errors."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any, Protocol, TypeVar

import grpc.aio

from probing.api.errors import InternalError, ProbingError
from probing.daemon.query.caller import Caller, Scope
from probing.daemon.service.audit import Audit, described
from probing.daemon.service.auth import permit
from probing.daemon.service.errors import abort
from probing.daemon.service.limits import Context

__all__ = ("Guarded", "Timed", "answering")

_log = logging.getLogger(__name__)
_Reply = TypeVar("_Reply")
Timed = Callable[[str, float, str], None]


class Guarded(Protocol):
    """A service. ``hints``: the text of a status has the hint of its error. ``timed`` is called with the name of a
    method, the seconds that a call of it took, and its outcome: ok, failed or cancelled."""

    audit: Audit
    hints: bool
    timed: Timed

    @property
    def identify(self) -> Callable[[Context], Awaitable[Caller]]:
        """Returns the caller of a call, or raises Unauthenticated or PrivilegeError."""


def answering(method: Callable[..., Awaitable[_Reply]]) -> Callable[..., Awaitable[_Reply]]:
    """Calls ``method`` of a Guarded with the caller. Errors end the call as in errors.py; a bug is logged."""

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
        except grpc.aio.InternalError as e:
            # gRPC could not write because the caller went away.
            raise asyncio.CancelledError from e
        except Exception as e:
            _log.exception("%s failed", name)
            await abort(context, InternalError(f"{name} failed: {type(e).__name__}"))
        self.audit.call(caller, described(name, request), scope, None)
        return reply

    return answer
