"""Answers Query: a thread runs the engine, and the event loop writes its rows to the caller as they come."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any, TypedDict

from probing.api.errors import InternalError, ProbingError, QueryRejected, QueryTimeout
from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.api.wire import MAX_PARTS, MAX_STATEMENTS, NODE_KEY, UNLIMITED
from probing.daemon.query.answer import End, Item, QueryProgress, StatementEnd
from probing.daemon.query.caller import Caller
from probing.daemon.query.engine import Engine
from probing.daemon.service.answering import CallAdmission, CallKind
from probing.daemon.service.errors import to_proto
from probing.daemon.service.limits import Context, Limits, seconds_for
from probing.daemon.service.spool import Spool, Spools

__all__ = ("Form", "Streams")

MAX_NAME = 100
# A merged reply is written once it has at least this many bytes, MAX_PARTS parts, or the end of the answer.
_GATHERED_BYTES = 64 << 10
_UNREAD = "write the rows to a file with -o, aggregate, or add a LIMIT: a query waits for its reader for a limited time"
_log = logging.getLogger(__name__)


class _Options(TypedDict):
    timeout: float
    max_bytes: int
    cancelled: Callable[[], bool]
    progress: bool
    caller: Caller
    resting: Callable[[], bool]


@dataclass(frozen=True, slots=True)
class Form:
    """The form of an answer's messages. ``cut`` yields parts to buffer, each with its size in bytes; it runs in a
    thread. ``reply`` makes the message of a part when it is written, or returns None."""

    cut: Callable[[Iterator[Item]], Iterator[tuple[Any, int]]]
    reply: Callable[[Any], Any]


class Streams:
    """Answers Query. Belongs to one event loop."""

    def __init__(
        self,
        node: str,
        engine: Engine,
        admission: CallAdmission,
        limits: Limits,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._node = node
        self._engine = engine
        self._admission = admission
        self._limits = limits
        self._now_ns = now_ns
        self._spools = Spools()

    async def answer(
        self, request: pb.QueryRequest, context: Context, caller: Caller, form: Form | None = None
    ) -> None:
        """Writes the answer as replies of Query, or in another ``form``. Raises the query's error, and QueryTimeout if
        the caller takes too long to read."""
        names = _names(request)
        if form is None:
            gather = _Gather(whole=request.whole and not request.progress)
            form = Form(_sized, lambda part: gather.add(self._reply(part, names)))
        spool: Spool[Any] = Spool(self._spools, caller)
        gone = threading.Event()
        produce = self._producer(request, context, caller, spool, gone, form)
        running = self._admission.start(CallKind.QUERY, caller, produce)
        running.add_done_callback(_log_bug)
        try:
            await context.send_initial_metadata(((NODE_KEY, self._node.encode()),))
            while (part := await spool.take()) is not None:
                if (message := form.reply(part)) is not None:
                    await self._write(context, message, spool)
        finally:
            gone.set()
            spool.close()

    def _producer(
        self,
        request: pb.QueryRequest,
        context: Context,
        caller: Caller,
        spool: Spool[Any],
        gone: threading.Event,
        form: Form,
    ) -> Callable[[], None]:
        """Returns a function, to run in a thread, that puts the parts of the answer into ``spool``."""
        limits = self._limits
        streamed = request.max_bytes == UNLIMITED
        most_s = max(limits.query_s, limits.stream_s) if streamed else limits.query_s
        options: _Options = {
            "timeout": seconds_for(context, request.timeout_ms, limits.query_s, most_s),
            "max_bytes": 0 if streamed else min(request.max_bytes or limits.max_bytes, limits.max_bytes),
            "cancelled": gone.is_set,
            "progress": request.progress,
            "caller": caller,
            "resting": lambda: spool.rests,
        }
        parts: Generator[Item, None, None]
        if request.statements:
            parts = self._engine.run_all([statement.sql for statement in request.statements], **options)
        else:
            parts = self._engine.run(request.sql, **options)

        def produce() -> None:
            try:
                for part, size in form.cut(parts):
                    spool.put(part, size)
                spool.finish()
            except ProbingError as e:
                spool.fail(e)
            except BaseException as e:
                spool.fail(InternalError(f"Query failed: {type(e).__name__}"))
                raise
            finally:
                parts.close()

        return produce

    async def _write(self, context: Context, reply: Any, spool: Spool[Any]) -> None:
        """Writes ``reply`` to the caller. Raises QueryTimeout if the caller reads nothing for too long, or if ``spool``
        was evicted.
        """
        writing = asyncio.ensure_future(context.write(reply))
        evicted = asyncio.ensure_future(spool.evicted.wait())
        both = (writing, evicted)
        try:
            await asyncio.wait(both, timeout=self._limits.unread_s, return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                await writing
            elif evicted.done():
                raise QueryTimeout("the query ended: too many queries wait for their readers", hint=_UNREAD)
            else:
                message = f"the query ended: its caller read no rows for {self._limits.unread_s:.0f} s"
                raise QueryTimeout(message, hint=_UNREAD)
        finally:
            for future in both:
                future.cancel()

    def _reply(self, part: Item, names: list[str]) -> pb.QueryReply:
        if isinstance(part, End):
            return pb.QueryReply(end=self._end(part))
        if isinstance(part, StatementEnd):
            return pb.QueryReply(statement=_statement_end(part, names[part.index]))
        if isinstance(part, QueryProgress):
            progress = pb.QueryProgress(
                fraction=part.fraction, rows_to_scan=part.rows_to_scan, elapsed_ms=part.elapsed_ms
            )
            return pb.QueryReply(progress=progress)
        return pb.QueryReply(arrow=part)

    def _end(self, end: End) -> pb.QueryEnd:
        return pb.QueryEnd(
            node=self._node,
            rows=end.rows,
            rows_scanned=end.rows_scanned,
            warnings=end.warnings,
            node_time_ns=self._now_ns(),
        )


class _Gather:
    """Gathers the replies of an answer. ``whole``: whether many small replies are merged into one reply."""

    def __init__(self, *, whole: bool) -> None:
        self._whole = whole
        self._held: list[pb.QueryReply] = []
        self._bytes = 0

    def add(self, reply: pb.QueryReply) -> pb.QueryReply | None:
        """Returns the reply to write next; None while the merged reply has room for more."""
        if not self._whole:
            return reply
        self._held.append(reply)
        self._bytes += len(reply.arrow)
        if self._bytes < _GATHERED_BYTES and len(self._held) < MAX_PARTS and not reply.HasField("end"):
            return None
        held, self._held, self._bytes = self._held, [], 0
        return held[0] if len(held) == 1 else pb.QueryReply(parts=held)


def _sized(parts: Iterator[Item]) -> Iterator[tuple[Item, int]]:
    return ((part, len(part) if isinstance(part, bytes) else 0) for part in parts)


def _names(request: pb.QueryRequest) -> list[str]:
    """Returns the names of the statements; empty for a request of the older form. Raises QueryRejected."""
    names = [statement.name for statement in request.statements]
    texts = [statement.sql for statement in request.statements] or [request.sql]
    if names and request.sql:
        raise QueryRejected("the request has both sql and statements", hint="send one of them")
    if not all(text.strip() for text in texts):
        raise QueryRejected("a statement is empty" if names else "the query is empty")
    if len(names) > MAX_STATEMENTS:
        raise QueryRejected(f"more than {MAX_STATEMENTS} statements in one request", hint="send several requests")
    if len(set(names)) < len(names) or not all(0 < len(name) <= MAX_NAME for name in names):
        raise QueryRejected(f"the names of statements must differ and have 1 to {MAX_NAME} characters")
    return names


def _statement_end(end: StatementEnd, name: str) -> pb.StatementEnd:
    error = None if end.error is None else to_proto(end.error)
    return pb.StatementEnd(name=name, rows=end.rows, warnings=end.warnings, error=error)


def _log_bug(done: asyncio.Future[None]) -> None:
    if not done.cancelled() and (error := done.exception()) is not None:
        _log.error("Query failed", exc_info=error)
