"""Reads the rows of one node from the messages of one call: the rows of one SELECT, or of several statements one after
the other.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from probing.api.errors import NO_TABLE, TOO_LARGE, PartialAnswer, PeerError, ProbingError, QueryMemory, error_from
from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.api.wire import parts_of
from probing.client.wire.arrow import ArrowReader, Next, broken_off, ended
from probing.client.wire.loop import in_loop, wait
from probing.federation.execution.answer import Reply

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ("Messages", "Room", "Stream", "batches", "read_replies")

_MAX_WARNINGS = 1000
_HELD = "narrow the time range, or aggregate; `probingctl query` and Cluster.stream have no such limit"
Watch = Callable[[pb.QueryProgress], None]


class Room:
    """Counts the bytes of answers that are in memory at the same time."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._left = max_bytes

    def take(self, size: int) -> None:
        """Raises QueryMemory if there is no room for ``size`` more bytes."""
        self._left -= size
        if self._left < 0:
            raise QueryMemory(f"the answer is larger than {self.max_bytes} bytes", hint=_HELD, code=TOO_LARGE)

    def give_back(self, size: int) -> None:
        self._left += size


class Messages:
    """The messages of a call, except messages about progress, which go to ``watch``. ``size``: bytes so far, counted
    in ``room``.
    """

    def __init__(self, receive: Next, room: Room, watch: Watch | None = None) -> None:
        self.size = 0
        # When the last message came (time.monotonic_ns()).
        self.last_ns = 0
        self._receive = receive
        self._parts: deque[pb.QueryReply] = deque()
        self._room = room
        self._watch = watch

    async def next(self) -> pb.QueryReply | None:
        """Returns the next message; None after the last. Raises QueryMemory, and PeerError for too many parts."""
        while (part := await self._part()) is not None:
            if part.WhichOneof("part") != "progress":
                self.size += len(part.arrow)
                self._room.take(len(part.arrow))
                return part
            if self._watch is not None:
                self._watch(part.progress)
        return None

    async def _part(self) -> pb.QueryReply | None:
        if self._parts:
            return self._parts.popleft()
        if (message := await self._receive()) is None:
            return None
        self.last_ns = time.monotonic_ns()
        self._parts.extend(parts_of(message))
        return self._parts.popleft()


class Stream:
    """Reads the rows of one SELECT from one node. Its coroutines run in the loop.

    ``node``, ``rows_scanned``, ``node_time_ns`` and ``warnings`` are set after the last batch. The coroutines raise the
    node's errors, or PeerError.
    """

    def __init__(
        self,
        messages: Next,
        *,
        name: Callable[[], Awaitable[str]] | None = None,
        check: Callable[[str], None] = lambda _: None,
        end: Callable[[], None] = lambda: None,
        strict: bool = False,
    ) -> None:
        """Makes the stream. ``name`` returns the node's name without waiting for the last row; ``check`` raises for
        another node's name. ``end`` ends the call. Under ``strict`` PartialAnswer is raised after the last row if the
        node lacks rows."""
        self.node = ""
        self.rows = 0
        self.rows_scanned = 0
        self.node_time_ns = 0
        self.warnings: tuple[str, ...] = ()
        self._reader = ArrowReader(messages)
        self._name = name
        self._check = check
        self._end = end
        self._strict = strict

    def close(self) -> None:
        """Ends the call, so that the node stops working on it. Any thread may call this."""
        in_loop(self._end)

    async def schema(self) -> pa.Schema:
        return await self._reader.schema()

    async def name(self) -> str:
        name = await self._name() if self._name is not None else ""
        self._check(name)
        return name

    async def next(self) -> pa.RecordBatch | None:
        """Returns the next batch; None after the last batch."""
        if (batch := await self._reader.next()) is not None:
            self.rows += batch.num_rows
            return batch
        end = await self._reader.end()
        if end.rows != self.rows:
            raise broken_off()
        self._check(end.node)
        self.node, self.rows_scanned, self.warnings = end.node, end.rows_scanned, tuple(end.warnings[:_MAX_WARNINGS])
        self.node_time_ns = end.node_time_ns
        _require_all_rows(self.node, self.warnings, strict=self._strict)
        return None

    async def table(self) -> pa.Table:
        schema, parts = await self.schema(), []
        while (batch := await self.next()) is not None:
            parts.append(batch)
        import pyarrow as pa

        return pa.Table.from_batches(parts, schema)


def batches(stream: Stream) -> Iterator[pa.RecordBatch]:
    """Yields the batches of ``stream``. Must not be called in the thread of the loop."""
    while (batch := wait(stream.next())) is not None:
        yield batch


async def read_replies(messages: Next, request: pb.QueryRequest, *, strict: bool) -> tuple[list[Reply], int]:
    """Returns the rows of the SELECT of ``request``, or of each of its statements, and the node's clock (UTC ns).

    If the node lacks a table of a statement, ``lacks`` of the reply is the error. Raises the error of the first
    statement that failed for another reason, with the statement's name if there are several, and the errors of
    ``Stream``.
    """
    if not request.statements:
        stream = Stream(messages, strict=strict)
        table = await stream.table()
        return [Reply(stream.node, table, stream.rows_scanned, stream.warnings)], stream.node_time_ns
    several = len(request.statements) > 1
    parts = [_Statement(messages, statement.name, several=several) for statement in request.statements]
    tables = [await part.table() for part in parts]
    last = await messages()
    if last is None or last.WhichOneof("part") != "end":
        raise PeerError("the answer broke off", hint="ask again; `probingctl status` shows the node's state")
    await ended(messages)
    end = last.end
    of_all = tuple(end.warnings[:_MAX_WARNINGS])
    replies = [
        Reply(end.node, table, end.rows_scanned, (*part.warnings, *of_all), lacks=part.lacks)
        for table, part in zip(tables, parts, strict=True)
    ]
    _require_all_rows(end.node, [warning for reply in replies for warning in reply.warnings], strict=strict)
    return replies, end.node_time_ns


class _Statement:
    """The messages of one statement of a call. ``next`` returns them as if the call had only this statement.

    ``several``: whether the request has several statements, so that errors need the statement's name. ``lacks``: the
    error for a table that the node lacks, set after the last message.
    """

    def __init__(self, messages: Next, name: str, *, several: bool) -> None:
        self.warnings: tuple[str, ...] = ()
        self.lacks: ProbingError | None = None
        self._messages = messages
        self._name = name
        self._several = several
        self._over = False

    async def table(self) -> pa.Table:
        """Returns the rows; an empty table if the node lacks a table of the statement."""
        try:
            return await Stream(self.next).table()
        except ProbingError as e:
            if e.code != NO_TABLE:
                raise
            self.lacks = e
        import pyarrow as pa

        return pa.table({})

    async def next(self) -> pb.QueryReply | None:
        part = None if self._over else await self._messages()
        kind = None if part is None else part.WhichOneof("part")
        self._over = kind != "arrow"
        if part is None or kind == "end":
            return None
        return pb.QueryReply(end=self._end(part.statement)) if kind == "statement" else part

    def _end(self, end: pb.StatementEnd) -> pb.QueryEnd:
        if end.name != self._name:
            raise PeerError(f"the node sent the result of a statement other than {self._name}", hint="ask again")
        if end.HasField("error"):
            prefix = f"{self._name}: " if self._several else ""
            raise error_from(end.error.kind, f"{prefix}{end.error.message}", end.error.hint, end.error.code)
        self.warnings = tuple(end.warnings[:_MAX_WARNINGS])
        return pb.QueryEnd(rows=end.rows)


def _require_all_rows(node: str, warnings: Sequence[str], *, strict: bool) -> None:
    """Raises PartialAnswer if ``strict`` and the node warns that rows are missing."""
    if strict and warnings:
        raise PartialAnswer(f"{node} does not have all rows: {'; '.join(warnings[:8])}")
