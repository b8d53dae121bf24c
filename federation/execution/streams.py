"""Streams the rows of many nodes, for plans that concatenate them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from queue import SimpleQueue
from typing import Any, Protocol

import pyarrow as pa

from probing.api.errors import NO_TABLE, PartialAnswer, PeerError, ProbingError
from probing.api.text import sql_name
from probing.federation.execution.answer import SAME_VERSION, Failed, Gathered, Rows, other_columns, twice
from probing.federation.execution.asking import ONCE, ask_many
from probing.federation.execution.merge import create_part
from probing.federation.planning.catalog import open_database
from probing.federation.planning.shapes import PART, Part
from probing.federation.planning.split import Plan

__all__ = ("NodeStream", "OpenStream", "Start", "concatenates", "pour")

# The maximum number of batches that are buffered for the reader. While so many batches are buffered, the nodes wait.
_WAITING = 8
# The maximum number of rows of a buffered batch; a node sends batches of 16,384 rows.
_MOST_ROWS = 1 << 16


class NodeStream(Protocol):
    """The rows of one node; see probing.client.wire.stream."""

    node: str
    warnings: tuple[str, ...]

    async def schema(self) -> pa.Schema: ...

    async def name(self) -> str: ...

    async def next(self) -> pa.RecordBatch | None: ...

    def close(self) -> None: ...


OpenStream = Callable[[str, str, float], Awaitable[NodeStream]]
# A function that runs work in the event loop of the streams, and returns a function that ends the work.
Start = Callable[[Coroutine[Any, Any, None]], Callable[[], None]]


def concatenates(plan: Plan) -> bool:
    """Returns whether the answer is the concatenation of the nodes' rows, without order or limit."""
    if plan.kind != "rows" or len(plan.parts) != 1 or plan.parts[0].table != PART:
        return False
    body = ", ".join(f"c{i} AS {sql_name(name)}" for i, (name, _) in enumerate(plan.columns))
    return plan.final == f"SELECT {body} FROM {PART}"


def pour(
    plan: Plan,
    addresses: Sequence[str],
    stream: OpenStream,
    start: Start,
    *,
    timeout: float,
    strict: bool = False,
    watch: Callable[[Gathered[Any]], None] = lambda _: None,
) -> Rows:
    """Returns the rows of a plan that ``concatenates``. ``stream(address, sql, seconds)`` opens the rows of a node.

    A node that fails before its first row is left out, as in merge.run_all. If a node fails later, PeerError is raised,
    since some of its rows were returned already. A node that lacks the part's table ``source`` counts as a node without
    rows if another node has that table. ``watch`` gets the outcome.
    """
    with open_database(memory_limit="256MiB", threads=1) as db:
        types = create_part(db, plan.parts[0])
    schema = pa.schema([pa.field(name, kind) for (name, _), kind in zip(plan.columns, types.types, strict=True)])
    source = _Pour(plan.parts[0], schema, stream)
    return Rows(schema, source.batches(start, addresses, timeout, strict, watch), source.warnings)


class _Pour:
    """The streams of all nodes. All methods run in the event loop, except ``batches``, which runs in the reader's
    thread.
    """

    def __init__(self, part: Part, schema: pa.Schema, stream: OpenStream) -> None:
        self.warnings: list[str] = []
        self._part = part
        self._schema = schema
        self._stream = stream
        # SimpleQueue is written in C, so a Ctrl-C of the reader cannot leave its lock held.
        self._queue: SimpleQueue[pa.RecordBatch | BaseException | None] = SimpleQueue()
        self._places = asyncio.Semaphore(_WAITING)
        self._names: dict[str, str] = {}
        self._passed: dict[str, int] = {}
        # The errors of nodes that lack the part's source, by address.
        self._lacking: dict[str, ProbingError] = {}

    def batches(
        self,
        start: Start,
        addresses: Sequence[str],
        timeout: float,
        strict: bool,
        watch: Callable[[Gathered[Any]], None],
    ) -> Generator[pa.RecordBatch, None, None]:
        end = start(self._run(addresses, timeout, strict, watch))
        try:
            while (item := self._queue.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                self._loop.call_soon_threadsafe(self._places.release)
                yield item
        finally:
            # This ends the queries that still run on nodes.
            end()

    async def _run(
        self, addresses: Sequence[str], timeout: float, strict: bool, watch: Callable[[Gathered[Any]], None]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        try:
            gathered = await ask_many(addresses, self._one, timeout, ONCE)
            if all(answered.address in self._lacking for answered in gathered.answered):
                # No node has the table.
                gathered.failed += [Failed(a.address, a.node, self._lacking[a.address]) for a in gathered.answered]
                gathered.answered = []
            watch(gathered)
            gathered.require(strict=strict)
            # A node that timed out may have returned rows already.
            for failed in gathered.failed:
                if rows := self._passed.get(failed.address):
                    raise _broken_off(failed.address, rows, failed.error)
            self._queue.put(None)
        except BaseException as e:
            self._queue.put(e)

    async def _one(self, address: str, seconds: float, _attempt: int) -> tuple[str, int]:
        stream = await self._stream(address, self._part.sql, seconds)
        try:
            return await self._pass_on(address, stream)
        except ProbingError as e:
            if e.code == NO_TABLE and self._part.source and address not in self._passed:
                name = await stream.name()
                self._lacking[address] = e
                return name, 0
            # A PartialAnswer comes last: under --strict, a node that lost rows first sends all its other rows.
            if (rows := self._passed.get(address)) and not isinstance(e, PartialAnswer):
                self._queue.put(_broken_off(address, rows, e))
            raise
        finally:
            stream.close()

    async def _pass_on(self, address: str, stream: NodeStream) -> tuple[str, int]:
        schema = await stream.schema()
        name = await stream.name()
        # The rows of a node that has two addresses would count twice.
        if (other := self._names.setdefault(name, address)) != address:
            raise twice(name, other)
        if len(schema) != len(self._schema):
            raise other_columns(len(schema), len(self._schema))
        while (batch := await stream.next()) is not None:
            # The rows of a hostile node may become much larger when they are cast to our types.
            for start in range(0, batch.num_rows, _MOST_ROWS):
                fitted = self._fitted(batch.slice(start, _MOST_ROWS))
                await self._places.acquire()
                self._queue.put(fitted)
                self._passed[address] = self._passed.get(address, 0) + fitted.num_rows
        self.warnings.extend(f"{stream.node}: {warning}" for warning in stream.warnings)
        return stream.node, self._passed.get(address, 0)

    def _fitted(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        try:
            columns = [column.cast(kind) for column, kind in zip(batch.columns, self._schema.types, strict=True)]
        except pa.ArrowException:
            raise PeerError("its rows do not have the types of this version", hint=SAME_VERSION) from None
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)


def _broken_off(address: str, rows: int, error: ProbingError) -> PeerError:
    return PeerError(f"{address} broke off after {rows} rows: {error.message}", hint=error.hint)
