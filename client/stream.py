"""Reads record batches from the messages of one call, in bounded memory.

The node is not trusted. Each message of the Arrow stream is checked before it is decoded (its size, its number of rows,
and that it is not compressed, because it could expand to any size), and each batch is validated before it is returned.
https://arrow.apache.org/docs/format/Columnar.html#serialization-and-interprocess-communication-ipc
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import grpc

from probing.api.errors import PartialAnswer, PeerError, ProbingError, QueryMemory
from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.api.wire import NODE_KEY, UNLIMITED
from probing.client.interrupt import closed, sheltered

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ("MAX_WARNINGS", "Stream", "require_all_rows")

_MAX_METADATA = 16 << 20
_MAX_BODY = 256 << 20
_MAX_ROWS = 1 << 24
MAX_WARNINGS = 1000
_HELD = "narrow the time range, or aggregate; `probingctl query` and Cluster.stream have no such bound"
_CONTINUATION = b"\xff\xff\xff\xff"
_DICTIONARY, _BATCH = 2, 3


class Stream:
    """The rows of one SELECT at one node: iterate for record batches, and close it. Not for several threads.

    ``schema`` waits for the first rows; ``node``, ``rows_scanned`` and ``warnings`` are set after the last batch. All
    raise the node's errors, or PeerError.
    """

    def __init__(
        self,
        call: Any,
        translate: Callable[[grpc.RpcError], ProbingError],
        *,
        max_bytes: int = UNLIMITED,
        watch: Callable[[pb.QueryProgress], None] | None = None,
        ask_name: Callable[[], str] = str,
        strict: bool = False,
    ) -> None:
        """``call`` yields QueryReply messages; ``translate`` converts gRPC's errors to ours.

        ``ask_name`` asks a node for its name where the call does not contain it. Raises QueryMemory above
        ``max_bytes``, and under ``strict`` PartialAnswer behind the last row where the node lacks rows.
        """
        self.node = ""
        self.rows = 0
        self.rows_scanned = 0
        self.warnings: tuple[str, ...] = ()
        self._call = call
        self._translate = translate
        self._source = _Source(call, max_bytes, watch)
        self._reader: Any = None
        self._ask_name = ask_name
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
        return sent[:256].decode("utf-8", "replace") if isinstance(sent, bytes) else self._ask_name()

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        _ = self.schema
        while (batch := self._guarded(self._next)) is not None:
            self.rows += batch.num_rows
            yield batch
        end = self._guarded(self._source.end)
        if end.rows != self.rows:
            raise _broken_off()
        self.node, self.rows_scanned, self.warnings = end.node, end.rows_scanned, tuple(end.warnings[:MAX_WARNINGS])
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
            raise _no_stream(str(e)) from None


def require_all_rows(node: str, warnings: Sequence[str], *, strict: bool) -> None:
    """Raises PartialAnswer if ``strict`` and the node warns of missing rows."""
    if strict and warnings:
        raise PartialAnswer(f"{node} does not have all rows: {'; '.join(warnings[:8])}")


class _Source:
    """The file that Arrow reads: messages that were checked."""

    closed = False

    def __init__(self, call: Any, max_bytes: int, watch: Callable[[pb.QueryProgress], None] | None) -> None:
        self.error: BaseException | None = None
        self._parts = iter(call)
        self._left = max_bytes
        self._max_bytes = max_bytes
        self._watch = watch
        self._chunks: deque[bytes] = deque()
        self._held = 0
        self._pieces: deque[bytes] = deque()
        self._over = False
        self._end: pb.QueryEnd | None = None

    def open(self) -> Any:
        import pyarrow as pa

        # Of a file, Arrow needs read and closed alone.
        file: Any = self
        return pa.ipc.open_stream(pa.PythonFile(file, mode="r"))

    def end(self) -> pb.QueryEnd:
        """Returns the message behind the rows."""
        if self._end is None and self._chunk():
            raise _no_stream("there is more after its end")
        if self._end is None:
            raise _broken_off()
        return self._end

    def read(self, size: int = -1) -> bytes:
        try:
            return self._read(size)
        except BaseException as e:
            self.error = e
            raise

    def _read(self, size: int) -> bytes:
        if size <= 0:
            return b""
        if not self._pieces and not self._over:
            self._frame()
        if not self._pieces:
            return b""
        piece = self._pieces.popleft()
        if len(piece) > size:
            self._pieces.appendleft(piece[size:])
            return piece[:size]
        while len(piece) < size and self._pieces:
            following = self._pieces.popleft()
            missing = size - len(piece)
            if len(following) > missing:
                self._pieces.appendleft(following[missing:])
            piece += following[:missing]
        return piece

    def _frame(self) -> None:
        """Appends the next message of the Arrow stream to ``_pieces``."""
        prefix = self._take(8)
        if not prefix and self._end is None:
            raise _broken_off()
        self._over = not prefix or prefix == _CONTINUATION + bytes(4)
        if self._over:
            self._pieces.extend([prefix] if prefix else [])
            return
        (size,) = struct.unpack_from("<i", prefix, 4)
        if prefix[:4] != _CONTINUATION or not 0 < size <= _MAX_METADATA:
            raise _no_stream("a message has no sound prefix")
        metadata = self._whole(size)
        try:
            length = _body_length(metadata)
        except struct.error:
            raise _no_stream("a message makes no sense") from None
        body = self._whole(length)
        self._pieces.extend(piece for piece in (prefix, metadata, body) if piece)

    def _whole(self, size: int) -> bytes:
        data = self._take(size)
        if len(data) < size:
            raise _broken_off() if self._end is None else _no_stream("its last message is cut")
        return data

    def _take(self, size: int) -> bytes:
        """Returns ``size`` bytes, or fewer at the end of the answer."""
        while self._held < size and self._chunk():
            pass
        taken: list[bytes] = []
        missing = size
        while missing and self._chunks:
            chunk = self._chunks.popleft()
            if len(chunk) > missing:
                self._chunks.appendleft(chunk[missing:])
                chunk = chunk[:missing]
            taken.append(chunk)
            missing -= len(chunk)
        self._held -= size - missing
        return taken[0] if len(taken) == 1 else b"".join(taken)

    def _chunk(self) -> bool:
        """Waits for the next piece of the answer; returns False at its end."""
        while (part := sheltered(lambda: next(self._parts, None))) is not None:
            kind = part.WhichOneof("part")
            if kind == "progress" and self._watch is not None:
                self._watch(part.progress)
            elif kind == "end":
                self._end = part.end
                return False
            elif kind == "arrow" and part.arrow:
                self._left -= len(part.arrow)
                if self._left < 0:
                    raise QueryMemory(f"the answer is larger than {self._max_bytes} bytes", hint=_HELD)
                self._chunks.append(part.arrow)
                self._held += len(part.arrow)
                return True
        return False


def _body_length(metadata: bytes) -> int:
    """Returns the number of bytes behind the metadata of a message, after checks of their content.

    A flatbuffer: https://github.com/apache/arrow/blob/main/format/Message.fbs
    """
    message = _offset(metadata, 0)
    (kind,) = _field(metadata, message, 1, "<B") or (0,)
    (size,) = _field(metadata, message, 3, "<q") or (0,)
    if not 0 <= size <= _MAX_BODY:
        raise PeerError(f"the answer has a batch of {size} bytes", hint="ask for fewer columns, or shorter values")
    if kind in (_DICTIONARY, _BATCH):
        batch = _table(metadata, message, 2)
        if kind == _DICTIONARY:
            batch = _table(metadata, batch, 1)
        (rows,) = _field(metadata, batch, 0, "<q") or (0,)
        if not 0 <= rows <= _MAX_ROWS:
            raise _no_stream(f"a batch of {rows} rows")
        if _field(metadata, batch, 3, "<I") is not None:
            raise _no_stream("it is compressed")
    return int(size)


def _offset(data: bytes, position: int) -> int:
    return position + int(struct.unpack_from("<I", data, position)[0])


def _field(data: bytes, table: int, number: int, kind: str) -> tuple[int] | None:
    position = _position(data, table, number)
    return None if position is None else (int(struct.unpack_from(kind, data, position)[0]),)


def _table(data: bytes, table: int, number: int) -> int:
    position = _position(data, table, number)
    if position is None:
        raise _no_stream("a message without its header")
    return _offset(data, position)


def _position(data: bytes, table: int, number: int) -> int | None:
    """Returns the position of field ``number`` of ``table``; None where it has its default."""
    vtable = table - int(struct.unpack_from("<i", data, table)[0])
    if vtable < 0:
        raise _no_stream("a message without its header")
    (size,) = struct.unpack_from("<H", data, vtable)
    slot = 4 + 2 * number
    if slot + 2 > size:
        return None
    (offset,) = struct.unpack_from("<H", data, vtable + slot)
    return table + int(offset) if offset else None


def _broken_off() -> PeerError:
    return PeerError("the answer broke off", hint="ask again; `probingctl status` shows the state of the node")


def _no_stream(why: str) -> PeerError:
    return PeerError(f"the answer is no Arrow stream: {(why.splitlines() or [''])[0][:120]}")
