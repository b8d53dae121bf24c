"""Reads objects of a target by address: types, texts, numbers, items and entries.

An object is accepted if its reference count and its type are plausible: the type's metaclass is a type, and the type's
name can be read. Otherwise ``Torn`` is raised, because the process frees and reuses objects while they are read.
Structures: CPython ``Include/cpython/object.h``, ``Objects/dict-common.h`` (3.8 to 3.10),
``Include/internal/pycore_dict.h`` (3.11+), ``Include/cpython/longintrepr.h``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from probing.api.errors import CorruptTarget
from probing.daemon.processes.memory import PAGE
from probing.daemon.processes.procfs import clean_text
from probing.daemon.python_stack.values.heap import CHANGED, Heap, Torn
from probing.daemon.python_stack.values.layout import ObjectLayout
from probing.daemon.python_stack.walk.snapshot import is_count, word

__all__ = ("ENUM_TYPES", "Entry", "Objects", "Type")

# An entry of a dict: address of the value's pointer, key, value.
Entry = tuple[int, int, int]

# The name of the metaclass of enumerations, from 3.11 on and before 3.11.
ENUM_TYPES = ("EnumType", "EnumMeta")
MAX_ENTRIES = 1 << 17
MAX_BITS = 4096
_CHUNK = 512
_TYPE_SIZE = 360
_NAME, _BASICSIZE, _ITEMSIZE, _FLAGS, _BASE, _DICT, _DICTOFFSET, _MRO = 24, 32, 40, 168, 256, 264, 288, 344
_READY, _HEAP_TYPE, _TYPE_SUBCLASS = 1 << 12, 1 << 9, 1 << 31
_INLINE_VALUES, _MANAGED_DICT = 1 << 2, 1 << 4
_MAX_NAME = 256
_MAX_BASES = 64
# The kinds of types, by the name of a static type. A type that derives from the static type has the same kind.
_KINDS = {
    **{name: name for name in ("bool", "int", "float", "complex", "str", "bytes", "list", "tuple", "dict", "set")},
    **{name: name for name in ("frozenset", "NoneType", "type", "module", "cell", "function", "method", "property")},
    "builtin_function_or_method": "builtin",
    "member_descriptor": "member",
    "getset_descriptor": "getset",
    "torch._C.TensorBase": "tensor",
    "torch._C._TensorBase": "tensor",
}
# Kinds of types that pybind11 makes, by name. Any class may have such a name, so all values of its objects are checked.
_HEAP_KINDS = {"torch._C._distributed_c10d.ProcessGroup": "process group"}
# Bits of tp_flags by kind (Py_TPFLAGS_LONG_SUBCLASS and its kin).
_FLAG_OF = {"int": 24, "bool": 24, "list": 25, "tuple": 26, "bytes": 27, "str": 28, "dict": 29, "type": 31}


class Type(NamedTuple):
    """A type. ``name``: tp_name. ``kind``: the known kind that the type has or inherits, "object" for other types."""

    address: int
    name: str
    kind: str
    flags: int
    basicsize: int
    itemsize: int
    dictoffset: int
    base: int
    attributes: int
    order: int
    metatype: int

    @property
    def is_heap(self) -> bool:
        return bool(self.flags & _HEAP_TYPE)

    @property
    def short(self) -> str:
        """The name of the type, ``__name__``."""
        return self.name.rpartition(".")[2]


class Objects:
    """Reads objects through ``heap``. Methods raise Torn if there is no such object at the address."""

    def __init__(self, heap: Heap, layout: ObjectLayout) -> None:
        self.heap = heap
        self.layout = layout
        self._types: dict[int, Type] = {}

    def refresh(self) -> None:
        """Drops all bytes that were read, so that they are read anew."""
        self.heap.refresh()
        self._types.clear()

    def type_of(self, address: int) -> Type:
        """Returns the type of the object at ``address``."""
        if address % 8:
            raise Torn("it is not an object")
        head = self.heap.read(address, 16, counted=True)
        if not is_count(word(head, 0)):
            raise Torn(CHANGED)  # the object was freed since its address was read
        return self.type_at(word(head, 8))

    def type_at(self, address: int) -> Type:
        """Returns the type whose type object is at ``address``."""
        if known := self._types.get(address):
            return known
        of = self._read_type(address)
        base, name, kind = of, of.name, "object"
        for _ in range(_MAX_BASES):
            if built_in := (_HEAP_KINDS if base.is_heap else _KINDS).get(name):
                kind = built_in
                break
            if not base.base:
                break
            base = self._read_type(base.base)
            name = base.name
        if kind in _FLAG_OF and not of.flags >> _FLAG_OF[kind] & 1:
            raise Torn("its type contradicts itself")
        if len(self._types) >= 4096:
            self._types.clear()
        self._types[address] = of = of._replace(kind=kind)
        return of

    def _read_type(self, address: int) -> Type:
        if address % 8:
            raise Torn("it has no type")
        data = self.heap.peek(address, _TYPE_SIZE)
        flags, basic, item = word(data, _FLAGS), word(data, _BASICSIZE), word(data, _ITEMSIZE)
        meta = word(data, 8)
        if not flags & _READY or not 16 <= basic < 1 << 20 or item >= 1 << 20:
            raise Torn("its type is not a type object")
        if not word(self.heap.peek(meta + _FLAGS, 8), 0) & _TYPE_SUBCLASS:
            raise Torn("its type is not a type object")
        offset = int.from_bytes(data[_DICTOFFSET : _DICTOFFSET + 8], "little", signed=True)
        name = self.c_text(word(data, _NAME))
        pointers = (word(data, _BASE), word(data, _DICT), word(data, _MRO))
        return Type(address, name, "object", flags, basic, item, offset, *pointers, meta)

    def c_text(self, address: int) -> str:
        """Returns the C string at ``address``, a name of at most 255 bytes."""
        raw = self.heap.peek(address, min(_MAX_NAME, PAGE - address % PAGE))
        if b"\0" not in raw and len(raw) < _MAX_NAME:
            raw = self.heap.peek(address, _MAX_NAME)
        text, end, _ = raw.partition(b"\0")
        try:
            decoded = text.decode()
        except UnicodeDecodeError as e:
            raise Torn("its type has no name") from e
        if not end or not decoded.isprintable() or not decoded:
            raise Torn("its type has no name")
        return clean_text(decoded, _MAX_NAME)

    def text(self, address: int, limit: int) -> tuple[str, int]:
        """Returns the first ``limit`` characters of the str at ``address``, and its length."""
        base = self.layout.base
        head = self.heap.read(address, base.str_ascii, counted=True)
        length = word(head, base.str_length)
        state = int.from_bytes(head[base.str_state : base.str_state + 4], "little")
        kind, compact, ascii_only = state >> 2 & 7, state >> 5 & 1, state >> 6 & 1
        coding = {1: "latin-1", 2: "utf-16-le", 4: "utf-32-le"}.get(kind)
        if coding is None or length >= 1 << 40:
            raise Torn("it is not a text")
        start = address + (base.str_ascii if compact and ascii_only else base.str_compact)
        if not compact:
            start = self.heap.word(start)
        size = min(length, limit) * kind
        raw = self.heap.read(start, size) if size else b""
        if compact and ascii_only and not raw.isascii():
            raise Torn("it is not a text")
        try:
            return raw.decode(coding, "surrogatepass"), length
        except UnicodeDecodeError as e:
            raise Torn("it is not a text") from e

    def bytes_of(self, address: int, limit: int) -> tuple[bytes, int]:
        """Returns the first ``limit`` bytes of the bytes object at ``address``, and its length."""
        base = self.layout.base
        length = word(self.heap.read(address, base.bytes_length + 8, counted=True), base.bytes_length)
        if length >= 1 << 40:
            raise Torn("it is not a bytes object")
        size = min(length, limit)
        return (self.heap.read(address + base.bytes_data, size) if size else b""), length

    def integer(self, address: int) -> int:
        """Returns the int (or bool) at ``address``. Raises CorruptTarget if it has more than 4096 bits."""
        size = word(self.heap.read(address, 24, counted=True), 16)
        if self.layout.long_tag:
            # lv_tag: two bits of sign (0 positive, 1 zero, 2 negative), a reserved bit, then the number of digits.
            digits, sign = size >> 3, (1, 0, -1, 1)[size & 3]
        else:
            sign = -1 if size >> 63 else 1
            digits = (1 << 64) - size if sign < 0 else size
        if digits * 30 > MAX_BITS + 30:
            raise CorruptTarget(f"it has more than {MAX_BITS} bits")
        if not digits or not sign:
            return 0
        raw = self.heap.read(address + 24, 4 * digits)
        parts = struct.unpack(f"<{digits}I", raw)
        if any(part >> 30 for part in parts):
            raise Torn("it is not an int")
        number: int = sum(part << 30 * i for i, part in enumerate(parts))
        if number.bit_length() > MAX_BITS:
            raise CorruptTarget(f"it has more than {MAX_BITS} bits")
        return sign * number

    def floats(self, address: int, count: int) -> tuple[float, ...]:
        """Returns the double of the float at ``address``, or the two doubles of a complex."""
        return struct.unpack(f"<{count}d", self.heap.read(address, 16 + 8 * count, counted=True)[16:])

    def items(self, address: int, kind: str, limit: int, start: int = 0) -> tuple[list[int], int]:
        """Returns up to ``limit`` items of the list or tuple at ``address``, the first at ``start``, and its length."""
        head = self.heap.read(address, 32 if kind == "list" else 24, counted=True)
        length = word(head, 16)
        if length >= 1 << 40:
            raise Torn(f"it is not a {kind}")
        count = max(0, min(length - start, limit))
        at = word(head, 24) if kind == "list" else address + self.layout.tuple_items
        raw = self.heap.read(at + 8 * start, 8 * count) if count else b""
        return list(struct.unpack(f"<{count}Q", raw)), length

    def members(self, address: int, limit: int) -> tuple[list[int], int]:
        """Returns up to ``limit`` members of the set at ``address`` in the set's order, and its length."""
        used, mask, table = struct.unpack("<QQQ", self.heap.read(address + 24, 24))
        members: list[int] = []
        if used > mask + 1 or mask >= 1 << 40:
            raise Torn("it is not a set")
        for at in range(0, min(mask + 1, MAX_ENTRIES), _CHUNK):
            count = min(_CHUNK, mask + 1 - at)
            for key, kept_hash in struct.iter_unpack("<QQ", self.heap.read(table + 16 * at, 16 * count)):
                # A removed member leaves a dummy with hash -1, which no object has.
                if key and kept_hash != (1 << 64) - 1:
                    members.append(key)
            if len(members) >= min(limit, used):
                break
        return members[:limit], used

    def dict_length(self, address: int) -> int:
        """Returns the length of the dict at ``address``."""
        return word(self.heap.read(address + 16, 8), 0)

    def entries(self, address: int) -> Iterator[Entry]:
        """Yields the entries of the dict at ``address`` in the dict's order."""
        layout, heap = self.layout, self.heap
        keys, values = heap.word(address + layout.dict_keys), heap.word(address + layout.dict_values)
        yield from self.table(keys, values + layout.values_start if values else 0)

    def table(self, keys: int, values: int) -> Iterator[Entry]:
        """Yields the entries of a keys table. ``values``: address of the first value of a split table, otherwise 0."""
        start, count, width = self._keys_shape(keys)
        for at in range(0, min(count, MAX_ENTRIES), _CHUNK):
            n = min(_CHUNK, count - at)
            raw = self.heap.peek(start + width * at, width * n)
            split = self.heap.peek(values + 8 * at, 8 * n) if values else b""
            for i in range(n):
                key = word(raw, width * i + width - 16)
                slot = values + 8 * (at + i) if values else start + width * (at + i) + width - 8
                value = word(split, 8 * i) if values else word(raw, width * i + width - 8)
                if key and value:
                    yield slot, key, value

    def _keys_shape(self, keys: int) -> tuple[int, int, int]:
        """Returns the address of the entries, the number of entries in use, and the size of an entry."""
        head = self.heap.read(keys, 40, counted=True)
        if self.layout.dict_kinds:
            log2_size, log2_index, kind = head[8:11]
            count, start = word(head, 24), keys + 32 + (1 << min(log2_index, 40))
            width, slots = 24 if kind == 0 else 16, 1 << min(log2_size, 40)
            valid = kind <= 2 and log2_index <= 40 and log2_size <= 40
        else:
            slots, count, width = word(head, 8), word(head, 32), 24
            index = 1 if slots <= 0xFF else 2 if slots <= 0xFFFF else 4 if slots <= 0xFFFF_FFFF else 8
            start, valid = keys + 40 + slots * index, 0 < slots <= 1 << 40
        if not valid or count > slots:
            raise Torn("its keys are malformed")
        return start, count, width

    def find(self, entries: Iterator[Entry], name: str | int) -> int | None:
        """Returns the value of the str or int key ``name`` among ``entries``, or None. The entry is noted."""
        length_at = self.layout.base.str_length
        size, length = (24, 0) if isinstance(name, int) else (self._text_size(name), len(name))
        while chunk := list(islice(entries, _CHUNK)):
            heads = self.heap.sample([(key, size) for _, key, _ in chunk])
            for (slot, key, value), head in zip(chunk, heads, strict=True):
                if head is None or (length and word(head, length_at) != length) or not self._is_key(key, head, name):
                    continue
                if self.heap.word(slot) != value:
                    raise Torn(CHANGED)
                return value
        return None

    def _text_size(self, name: str) -> int:
        return (self.layout.base.str_ascii if name.isascii() else self.layout.base.str_compact) + len(name)

    def _is_key(self, key: int, head: bytes, name: str | int) -> bool:
        try:
            if isinstance(name, int):
                return self.type_of(key).kind == "int" and self.integer(key) == name
            if name.isascii() and not head.endswith(name.encode()):
                return False
            return self.type_of(key).kind == "str" and self.text(key, len(name) + 1)[0] == name
        except CorruptTarget:
            return False

    def instance_entries(self, address: int, of: Type) -> Iterator[Entry]:
        """Yields the attributes in the dict of the object at ``address``. The dict's place depends on the version."""
        layout, heap = self.layout, self.heap
        if of.flags & _MANAGED_DICT and layout.managed != "none":
            values, held = 0, heap.word(address - 24)
            if layout.managed == "pointers":
                values = heap.word(address - 32) if not held else 0
            elif layout.managed == "tagged" and held & 1:
                values, held = held + 1, 0
            elif layout.managed == "inline" and not held and of.flags & _INLINE_VALUES:
                # PyDictValues has capacity, size, embedded and valid, a byte each.
                inline = address + of.basicsize
                values = inline if heap.read(inline, 8)[3] else 0
            if values and not held:
                yield from self.table(heap.word(of.address + layout.type_keys), values + layout.values_start)
                return
        else:
            held = heap.word(address + self._dict_at(address, of)) if of.dictoffset else 0
        if held:
            if self.type_of(held).kind != "dict":
                raise Torn("its attributes are not in a dict")
            yield from self.entries(held)

    def _dict_at(self, address: int, of: Type) -> int:
        if of.dictoffset > 0:
            return of.dictoffset
        # The pointer is after a variable number of items, as in _PyObject_GetDictPtr.
        size = int.from_bytes(self.heap.read(address + 16, 8), "little", signed=True)
        if abs(size) > 1 << 30:
            raise Torn("its attributes are too far away")
        return (of.basicsize + abs(size) * of.itemsize + 7 & -8) + of.dictoffset
