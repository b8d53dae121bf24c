"""Decodes the Arrow stream of an answer, piece by piece. The node is not trusted.

Each message is checked before it is decoded: its size, its number of rows, and that it is not compressed, because a
compressed message could expand to any size. Each batch is validated before it is returned.
https://arrow.apache.org/docs/format/Columnar.html#serialization-and-interprocess-communication-ipc
The metadata of a message is a flatbuffer: https://github.com/apache/arrow/blob/main/format/Message.fbs
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

from probing.api.errors import PeerError
from probing.api.proto.probing.v1 import node_pb2 as pb

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ("ArrowReader", "Next", "broken_off", "ended")

T = TypeVar("T")
# A function that returns the next message of an answer; None at its end.
Next = Callable[[], Awaitable[pb.QueryReply | None]]
_MAX_METADATA = 16 << 20
_MAX_BODY = 256 << 20
_MAX_ROWS = 1 << 24
_CONTINUATION = b"\xff\xff\xff\xff"
_DICTIONARY, _BATCH = 2, 3


def broken_off() -> PeerError:
    """Returns the error for an answer that stops before its end."""
    return PeerError("the answer broke off", hint="ask again; `probingctl status` shows the state of the node")


async def ended(messages: Next) -> None:
    """Waits for the status of a call whose last message has come. Cancelling the call before its status comes would
    take longer, in this process and at the node."""
    await messages()


class _File:
    """Provides checked messages as a file for Arrow, which needs only ``read`` and ``closed``.

    It is not part of ArrowReader, because Arrow keeps a reference to the file: ArrowReader would then be in a reference
    cycle that Python cannot collect.
    """

    closed = False

    def __init__(self) -> None:
        self.pieces: deque[bytes] = deque()

    def read(self, size: int = -1) -> bytes:
        return _cut(self.pieces, size)


class ArrowReader:
    """Reads record batches from messages. All coroutines raise PeerError if the answer is not valid."""

    def __init__(self, messages: Next) -> None:
        self._messages = messages
        self._received: deque[bytes] = deque()
        self._size = 0
        self._file = _File()
        self._reader: Any = None
        self._end: pb.QueryEnd | None = None

    async def schema(self) -> pa.Schema:
        if self._reader is None:
            await self._check_next()
            import pyarrow as pa

            file: Any = self._file
            self._reader = _decoded(lambda: pa.ipc.open_stream(pa.PythonFile(file, mode="r")))
        schema: pa.Schema = self._reader.schema
        return schema

    async def next(self) -> pa.RecordBatch | None:
        """Returns the next batch, None at the end of the stream."""
        await self.schema()
        while (kind := await self._check_next()) == _DICTIONARY:
            pass
        return None if kind is None else _decoded(self._batch)

    def _batch(self) -> pa.RecordBatch:
        batch: pa.RecordBatch = self._reader.read_next_batch()
        # Offsets in the batch may be out of bounds.
        batch.validate(full=True)
        return batch

    async def end(self) -> pb.QueryEnd:
        """Returns the message after the rows."""
        if self._end is None and await self._receive():
            raise _no_stream("there is more after its end")
        if self._end is None:
            raise broken_off()
        await ended(self._messages)
        return self._end

    async def _check_next(self) -> int | None:
        """Receives and checks the next message of the Arrow stream; returns its kind, None at the end of the stream."""
        prefix = await self._take(8)
        if not prefix and self._end is None:
            raise broken_off()
        if not prefix or prefix == _CONTINUATION + bytes(4):
            return None
        if len(prefix) < 8 or prefix[:4] != _CONTINUATION or not 0 < (size := _int(prefix, 4)) <= _MAX_METADATA:
            raise _no_stream("a message has no sound prefix")
        metadata = await self._whole(size)
        try:
            kind, length = _kind_and_length(metadata)
        except struct.error:
            raise _no_stream("a message is malformed") from None
        self._file.pieces += (prefix, metadata, await self._whole(length))
        return kind

    async def _whole(self, size: int) -> bytes:
        data = await self._take(size)
        if len(data) < size:
            raise broken_off() if self._end is None else _no_stream("its last message is cut")
        return data

    async def _take(self, size: int) -> bytes:
        """Returns ``size`` bytes, or fewer at the end of the answer."""
        while self._size < size and await self._receive():
            pass
        data = _cut(self._received, size)
        self._size -= len(data)
        return data

    async def _receive(self) -> bool:
        """Waits for the next bytes of the answer; returns False at its end."""
        while (part := await self._messages()) is not None:
            if part.WhichOneof("part") == "end":
                self._end = part.end
                return False
            if part.arrow:
                self._received.append(part.arrow)
                self._size += len(part.arrow)
                return True
        return False


def _decoded(step: Callable[[], T]) -> T:
    import pyarrow as pa

    try:
        return step()
    except (pa.ArrowException, OSError, EOFError, StopIteration) as e:
        raise _no_stream(str(e)) from None


def _no_stream(why: str) -> PeerError:
    return PeerError(f"the answer is not an Arrow stream: {(why.splitlines() or [''])[0][:120]}")


def _cut(chunks: deque[bytes], size: int) -> bytes:
    """Removes at most ``size`` bytes from the front of ``chunks`` and returns them."""
    cut: list[bytes] = []
    while size > 0 and chunks:
        chunk = chunks.popleft()
        if len(chunk) > size:
            chunks.appendleft(chunk[size:])
            chunk = chunk[:size]
        cut.append(chunk)
        size -= len(chunk)
    return cut[0] if len(cut) == 1 else b"".join(cut)


def _kind_and_length(metadata: bytes) -> tuple[int, int]:
    """Returns the kind of a message, and the number of bytes after ``metadata``. Raises PeerError, and struct.error if
    the metadata is cut."""
    message = _offset(metadata, 0)
    kind = _field(metadata, message, 1, "<B") or 0
    size = _field(metadata, message, 3, "<q") or 0
    if not 0 <= size <= _MAX_BODY:
        raise PeerError(f"the answer has a batch of {size} bytes", hint="ask for fewer columns, or shorter values")
    if kind in (_DICTIONARY, _BATCH):
        batch = _table(metadata, message, 2)
        if kind == _DICTIONARY:
            batch = _table(metadata, batch, 1)
        rows = _field(metadata, batch, 0, "<q") or 0
        if not 0 <= rows <= _MAX_ROWS:
            raise _no_stream(f"a batch of {rows} rows")
        if _field(metadata, batch, 3, "<I") is not None:
            raise _no_stream("it is compressed")
    return kind, size


def _int(data: bytes, position: int, kind: str = "<i") -> int:
    return int(struct.unpack_from(kind, data, position)[0])


def _offset(data: bytes, position: int) -> int:
    return position + _int(data, position, "<I")


def _field(data: bytes, table: int, number: int, kind: str) -> int | None:
    position = _position(data, table, number)
    return None if position is None else _int(data, position, kind)


def _table(data: bytes, table: int, number: int) -> int:
    position = _position(data, table, number)
    if position is None:
        raise _no_stream("a message without its header")
    return _offset(data, position)


def _position(data: bytes, table: int, number: int) -> int | None:
    """Returns the position of field ``number`` of ``table``; None if the field has its default."""
    vtable = table - _int(data, table)
    if vtable < 0:
        raise _no_stream("a message without its header")
    slot = 4 + 2 * number
    if slot + 2 > _int(data, vtable, "<H"):
        return None
    offset = _int(data, vtable + slot, "<H")
    return table + offset if offset else None
