"""Templates of Protobuf messages: bytes with holes. numpy makes many copies and fills the holes of all copies at once.

Numbers in holes are varints of a fixed length, padded with continuation bits; decoders accept these, and Perfetto's own
writer makes them (protozero's WriteRedundantVarInt). https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ("Bytes", "Filling", "Hole", "Part", "Template", "fixed", "message", "number", "packet", "text", "varint")

Bytes = npt.NDArray[np.uint8]
Filling = dict[str, npt.NDArray[Any]]
"""Columns of int64 or float64, by the name of the hole that they fill."""
_VARINT, _FIXED64, _LENGTH = 0, 1, 2


class Hole(NamedTuple):
    """``width`` bytes for a value of the column ``name``, written as a varint, or as its 8 bytes if ``fixed``."""

    name: str
    width: int
    fixed: bool = False


Part = bytes | Hole


def varint(value: int) -> bytes:
    """Returns ``value`` (64 bits, with or without sign) as a varint."""
    rest, digits = value & (1 << 64) - 1, bytearray()
    while rest > 0x7F:
        digits.append(rest & 0x7F | 0x80)
        rest >>= 7
    return bytes((*digits, rest))


def number(field: int, value: int | Hole) -> list[Part]:
    """Returns a field of type int32, int64, uint64, bool or enum."""
    return [_key(field, _VARINT), value if isinstance(value, Hole) else varint(value)]


def fixed(field: int, name: str) -> list[Part]:
    """Returns a field of type fixed64 or double, as a hole."""
    return [_key(field, _FIXED64), Hole(name, 8, fixed=True)]


def text(field: int, value: str) -> list[Part]:
    """Returns a field of type string or bytes."""
    data = value.encode("utf-8", "backslashreplace")
    return [_key(field, _LENGTH), varint(len(data)), data]


def message(field: int, *parts: list[Part]) -> list[Part]:
    """Returns a field that holds a message with the fields ``parts``."""
    inner = [piece for part in parts for piece in part]
    return [_key(field, _LENGTH), varint(_size(inner)), *inner]


def packet(*parts: list[Part]) -> bytes:
    """Returns the bytes of fields that have no holes."""
    return b"".join(piece for part in parts for piece in part if isinstance(piece, bytes))


def _key(field: int, kind: int) -> bytes:
    return varint(field << 3 | kind)


def _size(parts: list[Part]) -> int:
    return sum(part.width if isinstance(part, Hole) else len(part) for part in parts)


class Template:
    """The bytes of ``parts``; ``filled`` returns copies of these bytes with the values of columns in the holes."""

    def __init__(self, *parts: list[Part]) -> None:
        self._holes: list[tuple[Hole, int]] = []
        template = bytearray()
        for piece in (piece for part in parts for piece in part):
            if isinstance(piece, Hole):
                self._holes.append((piece, len(template)))
                template += bytes(piece.width)
            else:
                template += piece
        self._bytes = np.frombuffer(bytes(template), np.uint8)

    def filled(self, rows: int, columns: Filling) -> Bytes:
        """Returns ``rows`` copies as (rows, length) bytes."""
        copies = np.empty((rows, len(self._bytes)), np.uint8)
        copies[:] = self._bytes
        for hole, place in self._holes:
            space = copies[:, place : place + hole.width]
            values = np.ascontiguousarray(columns[hole.name])
            space[:] = _fixed64(values) if hole.fixed else _varints(values.view(np.uint64), hole.width)
        return copies


def _fixed64(values: npt.NDArray[Any]) -> Bytes:
    return values.view(np.uint8).reshape(len(values), 8)


def _varints(values: npt.NDArray[np.uint64], width: int) -> Bytes:
    digits = np.empty((len(values), width), np.uint8)
    for place in range(width):
        digits[:, place] = (values >> np.uint64(7 * place)).astype(np.uint8)
    digits[:, : width - 1] |= 0x80
    digits[:, width - 1] &= 0x7F
    return digits
