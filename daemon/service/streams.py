"""Queries whose rows go to the caller as they come: read in a thread, written by the event loop."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable

from probing.api.errors import InternalError, ProbingError, QueryRejected, QueryTimeout
from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.daemon.query.caller import Caller
from probing.daemon.query.engine import End, Engine, Progress
from probing.daemon.service.admission import Admission, Kind
from probing.daemon.service.limits import Context, Limits, seconds_for
from probing.daemon.service.spool import Spool, Spools

__all__ = ("Streams",)

# As max_bytes: the caller takes the rows as they come, so that their sum needs no bound.
UNLIMITED = (1 << 64) - 1
# Says who answers, ahead of the rows.
NODE_KEY = "probing-node-bin"
_UNREAD = "write the rows to a file with -o, aggregate, or add a LIMIT: a query waits only so long for its reader"
_log = logging.getLogger(__name__)
_Part = bytes | Progress | End


class Streams:
    """Answers Query. Belongs to one event loop."""

    def __init__(
        self, node: str, engine: Engine, admission: Admission, limits: Limits, now_ns: Callable[[], int] = time.time_ns
    ) -> None:
        self._node = node
        self._engine = engine
        self._admission = admission
        self._limits = limits
        self._now_ns = now_ns
        self._spools = Spools()

    async def answer(self, request: pb.QueryRequest, context: Context, caller: Caller) -> None:
        """Writes the answer. Raises what the query raises, and QueryTimeout where the caller takes too long to read."""
        if not request.sql.strip():
            raise QueryRejected("the query is empty")
        spool: Spool[_Part] = Spool(self._spools, caller)
        gone = threading.Event()
        running = self._admission.start(Kind.QUERY, caller, self._producer(request, context, caller, spool, gone))
        running.add_done_callback(_log_bug)
        try:
            await context.send_initial_metadata(((NODE_KEY, self._node.encode()),))
            while (part := await spool.take()) is not None:
                await self._write(context, self._reply(part), spool)
        finally:
            gone.set()
            spool.close()

    def _producer(
        self, request: pb.QueryRequest, context: Context, caller: Caller, spool: Spool[_Part], gone: threading.Event
    ) -> Callable[[], None]:
        """What puts the parts of the answer into ``spool``, in a thread."""
        limits = self._limits
        streamed = request.max_bytes == UNLIMITED
        most_s = max(limits.query_s, limits.stream_s) if streamed else limits.query_s
        parts = self._engine.run(
            request.sql,
            timeout=seconds_for(context, request.timeout_ms, limits.query_s, most_s),
            max_bytes=0 if streamed else min(request.max_bytes or limits.max_bytes, limits.max_bytes),
            cancelled=gone.is_set,
            progress=request.progress,
            caller=caller,
            resting=lambda: spool.rests,
        )

        def produce() -> None:
            try:
                for part in parts:
                    spool.put(part, len(part) if isinstance(part, bytes) else 0)
                spool.finish()
            except ProbingError as e:
                spool.fail(e)
            except BaseException as e:
                spool.fail(InternalError(f"Query failed: {type(e).__name__}"))
                raise
            finally:
                parts.close()

        return produce

    async def _write(self, context: Context, reply: pb.QueryReply, spool: Spool[_Part]) -> None:
        """Raises QueryTimeout when the caller takes nothing for too long, or too many others wait as well."""
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
                message = f"the query ended: nobody took rows for {self._limits.unread_s:.0f} s"
                raise QueryTimeout(message, hint=_UNREAD)
        finally:
            for future in both:
                future.cancel()

    def _reply(self, part: bytes | Progress | End) -> pb.QueryReply:
        if isinstance(part, End):
            return pb.QueryReply(end=self._end(part))
        if isinstance(part, Progress):
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


def _log_bug(done: asyncio.Future[None]) -> None:
    if not done.cancelled() and (error := done.exception()) is not None:
        _log.error("Query failed", exc_info=error)
