"""Checks a message of an Arrow stream before it is decoded: its size, its number of rows, no compression.

The metadata of a message is a flatbuffer: https://github.com/apache/arrow/blob/main/format/Message.fbs
"""

from __future__ import annotations

import struct

from probing.api.errors import PeerError

__all__ = ("body_length", "no_stream")

_MAX_BODY = 256 << 20
_MAX_ROWS = 1 << 24
_DICTIONARY, _BATCH = 2, 3


def no_stream(why: str) -> PeerError:
    """Returns the error for an answer that is no valid Arrow stream."""
    return PeerError(f"the answer is no Arrow stream: {(why.splitlines() or [''])[0][:120]}")


def body_length(metadata: bytes) -> int:
    """Returns the number of bytes behind ``metadata``. Raises PeerError, and struct.error where it is cut."""
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
            raise no_stream(f"a batch of {rows} rows")
        if _field(metadata, batch, 3, "<I") is not None:
            raise no_stream("it is compressed")
    return int(size)


def _offset(data: bytes, position: int) -> int:
    return position + int(struct.unpack_from("<I", data, position)[0])


def _field(data: bytes, table: int, number: int, kind: str) -> tuple[int] | None:
    position = _position(data, table, number)
    return None if position is None else (int(struct.unpack_from(kind, data, position)[0]),)


def _table(data: bytes, table: int, number: int) -> int:
    position = _position(data, table, number)
    if position is None:
        raise no_stream("a message without its header")
    return _offset(data, position)


def _position(data: bytes, table: int, number: int) -> int | None:
    """Returns the position of field ``number`` of ``table``; None where it has its default."""
    vtable = table - int(struct.unpack_from("<i", data, table)[0])
    if vtable < 0:
        raise no_stream("a message without its header")
    (size,) = struct.unpack_from("<H", data, vtable)
    slot = 4 + 2 * number
    if slot + 2 > size:
        return None
    (offset,) = struct.unpack_from("<H", data, vtable + slot)
    return table + int(offset) if offset else None
