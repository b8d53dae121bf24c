"""Reads record batches from the messages of one call, in bounded memory.

The node is not trusted. Each message of the Arrow stream is checked before it is decoded (its size, its number of rows,
and that it is not compressed, because it could expand to any size), and each batch is validated before it is returned.
https://arrow.apache.org/docs/format/Columnar.html#serialization-and-interprocess-communication-ipc
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import grpc

from probing.api.errors import PartialAnswer, ProbingError
from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.api.wire import NODE_KEY, UNLIMITED
from probing.client.interrupt import closed, sheltered
from probing.client.wire.arrow_checks import no_stream
from probing.client.wire.arrow_source import ArrowSource, broken_off

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ("MAX_WARNINGS", "Stream", "require_all_rows")

MAX_WARNINGS = 1000


class Stream:
    """The rows of one SELECT at one node: iterate for record batches, and close it. Not for several threads.

    ``schema`` waits for the first rows; ``node``, ``rows_scanned``, ``node_time_ns`` and ``warnings`` are set after the
    last batch. All raise the node's errors, or PeerError.
    """

    def __init__(
        self,
        call: Any,
        translate: Callable[[grpc.RpcError], ProbingError],
        *,
        max_bytes: int = UNLIMITED,
        watch: Callable[[pb.QueryProgress], None] | None = None,
        ask_name: Callable[[], str] = str,
        check: Callable[[str], None] = lambda _: None,
        strict: bool = False,
    ) -> None:
        """``call`` yields QueryReply messages; ``translate`` converts gRPC's errors to ours.

        ``ask_name`` asks a node for its name where the call does not contain it, and ``check`` raises for the name of
        another one. Raises QueryMemory above
        ``max_bytes``, and under ``strict`` PartialAnswer behind the last row where the node lacks rows.
        """
        self.node = ""
        self.rows = 0
        self.rows_scanned = 0
        self.node_time_ns = 0
        self.warnings: tuple[str, ...] = ()
        self._call = call
        self._translate = translate
        self._source = ArrowSource(call, max_bytes, watch)
        self._reader: Any = None
        self._ask_name = ask_name
        self._check = check
        self._strict = strict

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the call; the node stops working on it."""
        closed(self._call.cancel)

    @property
    def schema(self) -> pa.Schema:
        if self._reader is None:
            self._reader = self._guarded(self._source.open)
        schema: pa.Schema = self._reader.schema
        return schema

    def name(self) -> str:
        """Returns the node's name before its rows end."""
        sent = dict(sheltered(self._call.initial_metadata) or ()).get(NODE_KEY)
        name = sent[:256].decode("utf-8", "replace") if isinstance(sent, bytes) else self._ask_name()
        self._check(name)
        return name

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        _ = self.schema
        while (batch := self._guarded(self._next)) is not None:
            self.rows += batch.num_rows
            yield batch
        end = self._guarded(self._source.end)
        if end.rows != self.rows:
            raise broken_off()
        self._check(end.node)
        self.node, self.rows_scanned, self.warnings = end.node, end.rows_scanned, tuple(end.warnings[:MAX_WARNINGS])
        self.node_time_ns = end.node_time_ns
        require_all_rows(self.node, self.warnings, strict=self._strict)

    def _next(self) -> pa.RecordBatch | None:
        batch = next(self._reader, None)
        if batch is not None:
            # Offsets may be out of bounds.
            batch.validate(full=True)
        return batch

    def _guarded(self, step: Callable[[], Any]) -> Any:
        import pyarrow as pa

        try:
            return step()
        except grpc.RpcError as e:
            raise self._translate(e) from None
        except (pa.ArrowException, OSError, EOFError) as e:
            # Arrow may have wrapped the error that stopped the reading.
            if isinstance(self._source.error, grpc.RpcError):
                raise self._translate(self._source.error) from None
            if self._source.error is not None:
                raise self._source.error from None
            raise no_stream(str(e)) from None


def require_all_rows(node: str, warnings: Sequence[str], *, strict: bool) -> None:
    """Raises PartialAnswer if ``strict`` and the node warns of missing rows."""
    if strict and warnings:
        raise PartialAnswer(f"{node} does not have all rows: {'; '.join(warnings[:8])}")
