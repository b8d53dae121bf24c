"""Wraps the methods of a gRPC service: who calls, whether it may, what it asked for in the audit log, errors."""

from __future__ import annotations

import asyncio
import logging
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

__all__ = ("Guarded", "answering")

_log = logging.getLogger(__name__)
_Reply = TypeVar("_Reply")


class Guarded(Protocol):
    """A service. ``hints``: the text of a status has the hint of its error."""

    audit: Audit
    hints: bool

    @property
    def identify(self) -> Callable[[Context], Awaitable[Caller]]:
        """Returns the caller of a call, or raises Unauthenticated or PrivilegeError."""


def answering(method: Callable[..., Awaitable[_Reply]]) -> Callable[..., Awaitable[_Reply]]:
    """Calls ``method`` of a Guarded with the caller. Errors end the call as in errors.py; a bug is logged."""

    @wraps(method)
    async def answer(self: Guarded, request: Any, context: Context) -> _Reply:
        name, caller, scope = method.__name__, None, Scope.READ
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
            _log.exception("%s failed", method.__name__)
            await abort(context, InternalError(f"{method.__name__} failed: {type(e).__name__}"))
        self.audit.call(caller, described(name, request), scope, None)
        return reply

    return answer
