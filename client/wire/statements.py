"""Reads the answer to a request with several statements: the rows of each, in turn, from the messages of one call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import grpc

from probing.api.errors import PeerError, ProbingError, error_from
from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.client.interrupt import sheltered
from probing.client.wire.stream import MAX_WARNINGS, Stream, require_all_rows
from probing.federation.execution.answer import Reply

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ("read_statements",)


def read_statements(
    call: Any,
    names: Sequence[str],
    translate: Callable[[grpc.RpcError], ProbingError],
    *,
    max_bytes: int,
    watch: Callable[[pb.QueryProgress], None] | None = None,
    strict: bool = False,
) -> list[Reply]:
    """Returns a reply for each of ``names``. The arguments are those of ``Stream``; ``max_bytes`` bounds all rows
    together.

    Raises the error of the first statement that failed, with its name, and whatever ``Stream`` raises.
    """
    parts = iter(call)
    left = max_bytes
    slices: list[_Slice] = []
    tables: list[pa.Table] = []
    for name in names:
        part = _Slice(parts, name)
        with_rows = Stream(part, translate, max_bytes=left, watch=watch)
        tables.append(_table(with_rows))
        left -= part.size
        slices.append(part)
    end = _request_end(parts, translate)
    warnings = tuple(end.warnings[:MAX_WARNINGS])
    replies = [
        Reply(end.node, table, end.rows_scanned, (*part.warnings, *warnings))
        for table, part in zip(tables, slices, strict=True)
    ]
    require_all_rows(end.node, [warning for reply in replies for warning in reply.warnings], strict=strict)
    return replies


def _table(stream: Stream) -> pa.Table:
    # Imported while the node works on the request.
    import pyarrow as pa

    return pa.Table.from_batches(list(stream), stream.schema)


def _request_end(parts: Iterator[pb.QueryReply], translate: Callable[[grpc.RpcError], ProbingError]) -> pb.QueryEnd:
    try:
        last = sheltered(lambda: next(parts, None))
    except grpc.RpcError as e:
        raise translate(e) from None
    if last is None or last.WhichOneof("part") != "end":
        raise PeerError("the answer has no end", hint="ask again; `probingctl status` shows the node's state")
    return last.end


class _Slice:
    """The messages of one statement, as those of a call that answers this statement alone."""

    def __init__(self, parts: Iterator[pb.QueryReply], name: str) -> None:
        self.warnings: tuple[str, ...] = ()
        self.size = 0
        self._parts = parts
        self._name = name

    def __iter__(self) -> Iterator[pb.QueryReply]:
        for part in self._parts:
            kind = part.WhichOneof("part")
            if kind == "end":
                return
            if kind == "statement":
                yield pb.QueryReply(end=self._end(part.statement))
                return
            self.size += len(part.arrow)
            yield part

    def _end(self, end: pb.StatementEnd) -> pb.QueryEnd:
        if end.name != self._name:
            raise PeerError(f"the node answered another statement than {self._name}", hint="ask again")
        if end.HasField("error"):
            raise error_from(end.error.kind, f"{self._name}: {end.error.message}", end.error.hint)
        self.warnings = tuple(end.warnings[:MAX_WARNINGS])
        return pb.QueryEnd(rows=end.rows)
