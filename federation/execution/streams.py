"""Streams the rows of many nodes, for plans that concatenate them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Protocol

import pyarrow as pa

from probing.api.errors import PartialAnswer, PeerError, ProbingError
from probing.api.text import sql_name
from probing.federation.execution.answer import Rows
from probing.federation.execution.fanout import Gathered, fan_out
from probing.federation.execution.merge import SAME_VERSION, create_part
from probing.federation.planning.catalog import open_database
from probing.federation.planning.shapes import PART
from probing.federation.planning.split import Plan

__all__ = ("NodeStream", "OpenStream", "concatenates", "pour")

# Batches that are buffered for the reader; behind that the nodes wait.
_WAITING = 8
_GLANCE_S = 0.1
_JOIN_S = 5.0


class NodeStream(Protocol):
    """The rows of one node; see probing.client.wire.stream."""

    node: str
    warnings: tuple[str, ...]

    @property
    def schema(self) -> pa.Schema: ...

    def name(self) -> str: ...

    def __iter__(self) -> Iterator[pa.RecordBatch]: ...

    def close(self) -> None: ...


OpenStream = Callable[[str, str, float], NodeStream]


def concatenates(plan: Plan) -> bool:
    """Whether the answer is the concatenation of the nodes' rows: no order, no limit."""
    if plan.kind != "rows" or len(plan.parts) != 1 or plan.parts[0].table != PART:
        return False
    body = ", ".join(f"c{i} AS {sql_name(name)}" for i, (name, _) in enumerate(plan.columns))
    return plan.final == f"SELECT {body} FROM {PART}"


def pour(
    plan: Plan,
    addresses: Sequence[str],
    stream: OpenStream,
    *,
    timeout: float,
    strict: bool = False,
    watch: Callable[[Gathered[Any]], None] = lambda _: None,
) -> Rows:
    """Returns the rows of a plan that ``concatenates``; ``stream(address, sql, seconds)`` opens those of a node.

    A node that fails before its first row is left out, as in merge.run; one that fails later raises PeerError, since
    some of its rows were returned already. ``watch`` gets the outcome.
    """
    with open_database(memory_limit="256MiB", threads=1) as db:
        types = create_part(db, plan.parts[0])
    schema = pa.schema([pa.field(name, kind) for (name, _), kind in zip(plan.columns, types.types, strict=True)])
    source = _Pour(plan.parts[0].sql, schema, stream)
    return Rows(schema, source.batches(addresses, timeout, strict, watch), source.warnings)


class _Pour:
    def __init__(self, sql: str, schema: pa.Schema, stream: OpenStream) -> None:
        self.warnings: list[str] = []
        self._sql = sql
        self._schema = schema
        self._stream = stream
        self._queue: queue.Queue[pa.RecordBatch | BaseException | None] = queue.Queue(_WAITING)
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._names: dict[str, str] = {}
        self._open: list[NodeStream] = []
        self._out: dict[str, int] = {}

    def batches(
        self, addresses: Sequence[str], timeout: float, strict: bool, watch: Callable[[Gathered[Any]], None]
    ) -> Generator[pa.RecordBatch, None, None]:
        thread = threading.Thread(target=self._ask_all, args=(addresses, timeout, strict, watch), daemon=True)
        thread.start()
        try:
            while (found := self._queue.get()) is not None:
                if isinstance(found, BaseException):
                    raise found
                yield found
        finally:
            self._stop()
            thread.join(_JOIN_S)

    def _stop(self) -> None:
        """Ends the queries in flight at the nodes."""
        self._stopped.set()
        with self._lock:
            for stream in self._open:
                stream.close()

    def _ask_all(
        self, addresses: Sequence[str], timeout: float, strict: bool, watch: Callable[[Gathered[Any]], None]
    ) -> None:
        try:
            gathered = fan_out(addresses, self._one, timeout)
            watch(gathered)
            gathered.require(strict=strict)
            # A node that timed out may have returned rows already.
            for failed in gathered.failed:
                if rows := self._out.get(failed.address):
                    raise _broken_off(failed.address, rows, failed.error)
            self._put(None)
        except BaseException as e:
            self._put(e)

    def _put(self, found: pa.RecordBatch | BaseException | None) -> bool:
        """Returns False where the reader has stopped."""
        while not self._stopped.is_set():
            try:
                self._queue.put(found, timeout=_GLANCE_S)
            except queue.Full:
                continue
            return True
        return False

    def _one(self, address: str, seconds: float) -> tuple[str, int]:
        stream = self._stream(address, self._sql, seconds)
        with self._lock:
            self._open.append(stream)
        try:
            if self._stopped.is_set():
                raise PeerError("nobody waits for its rows any more")
            return self._pass_on(address, stream)
        except ProbingError as e:
            # Under --strict a node with missing rows has sent all the others.
            if (rows := self._out.get(address)) and not isinstance(e, PartialAnswer):
                self._put(_broken_off(address, rows, e))
            raise
        finally:
            stream.close()

    def _pass_on(self, address: str, stream: NodeStream) -> tuple[str, int]:
        schema = stream.schema
        self._claim(stream.name(), address)
        if len(schema) != len(self._schema):
            raise PeerError(f"it answered {len(schema)} columns for {len(self._schema)}", hint=SAME_VERSION)
        for batch in stream:
            if not self._put(self._fitted(batch)):
                raise PeerError("nobody waits for its rows any more")
            self._out[address] = self._out.get(address, 0) + batch.num_rows
        with self._lock:
            self.warnings.extend(f"{stream.node}: {warning}" for warning in stream.warnings)
        return stream.node, self._out.get(address, 0)

    def _claim(self, name: str, address: str) -> None:
        """Raises PeerError for a node under two addresses, which would count twice."""
        with self._lock:
            other = self._names.setdefault(name, address)
        if other != address:
            raise PeerError(f"it answers as {name}, as {other} does", hint="give every daemon its own --node-name")

    def _fitted(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        try:
            columns = [column.cast(kind) for column, kind in zip(batch.columns, self._schema.types, strict=True)]
        except pa.ArrowException:
            raise PeerError("its rows do not have the types of this version", hint=SAME_VERSION) from None
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)


def _broken_off(address: str, rows: int, error: ProbingError) -> PeerError:
    return PeerError(f"{address} broke off after {rows} rows: {error.message}", hint=error.hint)
