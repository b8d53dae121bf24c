"""Reads the BTF of an object as numpy dtypes, so that a record is defined once, in C.

Format: Documentation/bpf/btf.rst of the Linux sources. Only objects that we built are read here.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import numpy as np

from probing.api.errors import FormatError

__all__ = ("Btf", "BtfType", "dtype_from_json", "dtype_to_json")

_MAGIC = 0xEB9F
INT, PTR, ARRAY, STRUCT, UNION, ENUM, FWD, TYPEDEF, VOLATILE, CONST, RESTRICT = range(1, 12)
FUNC, FUNC_PROTO, VAR, DATASEC, FLOAT, DECL_TAG, TYPE_TAG, ENUM64 = range(12, 20)
_TRANSPARENT = (TYPEDEF, VOLATILE, CONST, RESTRICT, TYPE_TAG)
_MAX_DEPTH = 32


class BtfType(NamedTuple):
    """A type in BTF. ``ref`` is a size or a type id, depending on ``kind``. ``rows``: the members of a struct (name,
    type, bit offset), or the entries of another kind.
    """

    name: str
    kind: int
    flag: bool
    ref: int
    rows: tuple[tuple[Any, ...], ...]


class Btf:
    """The types in ``data``, the bytes of a .BTF section. Raises FormatError."""

    def __init__(self, data: bytes) -> None:
        try:
            self._types = _parse(data)
        except (struct.error, IndexError, ValueError) as e:
            raise FormatError("the object's type information is damaged", hint="build the package again") from e

    def type(self, index: int) -> BtfType:
        return self._types[index]

    def find(self, name: str, kind: int) -> BtfType | None:
        return next((t for t in self._types if t.kind == kind and t.name == name), None)

    def variables(self, section: str) -> dict[str, tuple[int, np.dtype[Any]]]:
        """Returns name -> (offset, dtype) of the variables in a data section."""
        found: dict[str, tuple[int, np.dtype[Any]]] = {}
        if datasec := self.find(section, DATASEC):
            for index, offset, _ in datasec.rows:
                variable = self._types[index]
                found[variable.name] = (offset, self.dtype(variable.ref))
        return found

    def record(self, ring: str) -> np.dtype[Any]:
        """Returns the record type of a ring that RING() of loss.bpf.h defines."""
        variable = self.find(f"{ring}_record", VAR)
        pointer = variable and self._resolve(variable.ref)
        if not pointer or pointer.kind != PTR:
            raise FormatError(f"ring {ring} has no record type", hint="define it with RING() of loss.bpf.h")
        return self.dtype(pointer.ref)

    def map_types(self, name: str) -> tuple[np.dtype[Any] | None, np.dtype[Any] | None]:
        """Returns the dtypes of the key and the value of a map in .maps; None for a dtype that the map does not
        declare.
        """
        variable = self.find(name, VAR)
        definition = variable and self._resolve(variable.ref)
        if not definition or definition.kind != STRUCT:
            return None, None
        members = {member: index for member, index, _ in definition.rows}
        key, value = (self._pointed(members.get(part)) for part in ("key", "value"))
        return key, value

    def dtype(self, index: int, depth: int = 0) -> np.dtype[Any]:
        """Returns the numpy dtype of a type. A union becomes raw bytes; a ``char`` array becomes bytes, read up to the
        trailing NULs.
        """
        if depth > _MAX_DEPTH:
            raise FormatError("types are nested too deep")
        t = self._resolve(index)
        if t.kind == INT:
            signed = bool((t.rows[0][0] >> 24) & 1)
            return np.dtype(f"<{'i' if signed else 'u'}{t.ref}")
        if t.kind in (ENUM, ENUM64):
            return np.dtype(f"<{'i' if t.flag else 'u'}{t.ref}")
        if t.kind == PTR:
            return np.dtype("<u8")
        if t.kind == FLOAT:
            return np.dtype(f"<f{t.ref}")
        if t.kind == UNION:
            return np.dtype((np.void, t.ref))
        if t.kind == ARRAY:
            element, count = t.rows[0]
            if self._resolve(element).name == "char":
                return np.dtype(f"S{count}")
            return np.dtype((self.dtype(element, depth + 1), (count,)))
        if t.kind == STRUCT:
            return self._structure(t, depth)
        raise FormatError(f"type {t.name or t.kind} cannot be read from memory")

    def _structure(self, t: BtfType, depth: int) -> np.dtype[Any]:
        names, formats, offsets = [], [], []
        for name, index, bits in t.rows:
            if t.flag and bits >> 24:
                raise FormatError(f"{t.name}.{name} is a bit field")
            names.append(name)
            formats.append(self.dtype(index, depth + 1))
            offsets.append((bits & 0xFFFFFF if t.flag else bits) // 8)
        return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": t.ref})

    def _resolve(self, index: int) -> BtfType:
        for _ in range(_MAX_DEPTH):
            t = self._types[index]
            if t.kind not in _TRANSPARENT:
                return t
            index = t.ref
        raise FormatError("types refer to each other in a circle")

    def _pointed(self, index: int | None) -> np.dtype[Any] | None:
        if index is None:
            return None
        pointer = self._resolve(index)
        return self.dtype(pointer.ref) if pointer.kind == PTR else None


def dtype_to_json(dtype: np.dtype[Any]) -> Any:
    """Returns a JSON value with offsets and sizes; ``dtype_from_json`` reads it back."""
    if dtype.names is not None and dtype.fields is not None:
        fields = [[name, dtype_to_json(dtype.fields[name][0]), dtype.fields[name][1]] for name in dtype.names]
        return {"fields": fields, "itemsize": dtype.itemsize}
    if dtype.subdtype is not None:
        return {"array": dtype_to_json(dtype.subdtype[0]), "shape": list(dtype.subdtype[1])}
    return dtype.str


def dtype_from_json(value: Any) -> np.dtype[Any]:
    """Returns the dtype that ``dtype_to_json`` described. Raises FormatError for a damaged description."""
    try:
        if isinstance(value, str):
            return np.dtype(value)
        if "array" in value:
            return np.dtype((dtype_from_json(value["array"]), tuple(int(n) for n in value["shape"])))
        names, formats, offsets = zip(*value["fields"], strict=True)
        parts = {"names": names, "formats": [dtype_from_json(f) for f in formats], "offsets": offsets}
        return np.dtype({**parts, "itemsize": int(value["itemsize"])})  # type: ignore[call-overload,no-any-return]
    except (TypeError, ValueError, KeyError, RecursionError) as e:
        raise FormatError("a stored record type is damaged") from e


def _parse(data: bytes) -> list[BtfType]:
    magic, _, _, header, types, types_length, strings, strings_length = struct.unpack_from("<HBBIIIII", data)
    if magic != _MAGIC:
        raise FormatError("the object's type information is not BTF", hint="build the package again")
    text = data[header + strings : header + strings + strings_length]

    def name(offset: int) -> str:
        return text[offset : text.index(b"\0", offset)].decode()

    parsed = [BtfType("void", 0, False, 0, ())]
    at, end = header + types, header + types + types_length
    while at < end:
        label, info, ref = struct.unpack_from("<III", data, at)
        at += 12
        kind, count, flag = info >> 24 & 0x1F, info & 0xFFFF, bool(info >> 31)
        rows: list[tuple[Any, ...]] = []
        if kind == INT or kind in (VAR, DECL_TAG):
            rows, at = [struct.unpack_from("<I", data, at)], at + 4
        elif kind == ARRAY:
            element, _, length = struct.unpack_from("<III", data, at)
            rows, at = [(element, length)], at + 12
        elif kind in (STRUCT, UNION):
            for _ in range(count):
                member, index, bits = struct.unpack_from("<III", data, at)
                rows.append((name(member), index, bits))
                at += 12
        elif kind == DATASEC:
            for _ in range(count):
                rows.append(struct.unpack_from("<III", data, at))
                at += 12
        elif kind in (ENUM, FUNC_PROTO):
            for _ in range(count):
                member, value = struct.unpack_from("<Ii", data, at)
                rows.append((name(member), value))
                at += 8
        elif kind == ENUM64:
            for _ in range(count):
                member, low, high = struct.unpack_from("<III", data, at)
                rows.append((name(member), low | high << 32))
                at += 12
        parsed.append(BtfType(name(label), kind, flag, ref, tuple(rows)))
    return parsed
