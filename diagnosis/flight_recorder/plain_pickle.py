"""Loads plain data from a pickle and refuses all else: the file cannot name, import or call any code.

Opcodes are those of CPython's Lib/pickletools.py, protocols 2 to 5. PyTorch writes its flight recorder's dumps with
``torch::jit::Pickler`` (torch/csrc/distributed/c10d/FlightRecorderDetail.hpp), which uses a few of them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from probing.api.errors import CorruptTarget, UnsupportedTarget

__all__ = ("load_plain",)

# A dump of 20,000 records has 3 million opcodes.
MAX_OPCODES = 6_000_000
MAX_MARKS = 64
# The maximum size of an integer, bytes; the counts in a dump take 8.
MAX_INTEGER = 16
# The largest integer key. Many larger keys could share one hash, which would make a dict slow.
MAX_KEY = 1 << 53
_FORMATS = {size: struct.Struct(text) for size, text in {"B": "<B", "H": "<H", "i": "<i", "I": "<I", "Q": "<Q"}.items()}
_FLOAT = struct.Struct(">d")
_MISSING = object()


def load_plain(data: bytes) -> Any:
    """Returns the value in the pickle ``data``, made of dict, list, tuple, str, bytes, int, float, bool and None.

    Keys are texts or integers. Containers may contain themselves and each other many times, so the caller must limit
    any walk. Raises UnsupportedTarget for other types and for a pickle beyond the limits of this module, CorruptTarget
    for a pickle that ends early or is malformed.
    """
    return _Machine(data).run()


class _Machine:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:
        data, opcodes = self._data, _OPCODES
        for _ in range(MAX_OPCODES):
            if self._at >= len(data):
                raise CorruptTarget("the pickle ends without its STOP opcode")
            code = data[self._at]
            self._at += 1
            if code == _STOP:
                if len(self._stack) != 1 or self._marks:
                    raise CorruptTarget("the pickle does not end with exactly one value")
                return self._stack[0]
            handler = opcodes.get(code)
            if handler is None:
                raise UnsupportedTarget(f"the pickle contains more than plain data (opcode {code:#04x})")
            handler(self)
        raise UnsupportedTarget(f"the pickle has more than {MAX_OPCODES} opcodes")

    def take(self, size: int) -> bytes:
        part = self._data[self._at : self._at + size]
        if len(part) != size:
            raise CorruptTarget("the pickle ends within a value")
        self._at += size
        return part

    def number(self, kind: str) -> int:
        form = _FORMATS[kind]
        value: int = form.unpack(self.take(form.size))[0]
        return value

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def pop(self) -> Any:
        if len(self._stack) <= (self._marks[-1] if self._marks else 0):
            raise CorruptTarget("the pickle uses a value from an empty stack")
        return self._stack.pop()

    def top(self, kind: type) -> Any:
        if len(self._stack) <= (self._marks[-1] if self._marks else 0) or type(self._stack[-1]) is not kind:
            raise CorruptTarget(f"the pickle adds to a value that is not a {kind.__name__}")
        return self._stack[-1]

    def mark(self) -> None:
        if len(self._marks) >= MAX_MARKS:
            raise UnsupportedTarget(f"the pickle is nested deeper than {MAX_MARKS}")
        self._marks.append(len(self._stack))

    def since_mark(self) -> list[Any]:
        if not self._marks:
            raise CorruptTarget("the pickle uses a mark that it never set")
        start = self._marks.pop()
        values = self._stack[start:]
        del self._stack[start:]
        return values

    def text(self, size: int) -> None:
        self.push(self.take(size).decode("utf-8", "backslashreplace"))

    def integer(self, size: int) -> None:
        if not 0 <= size <= MAX_INTEGER:
            raise UnsupportedTarget("the pickle contains a larger integer than any dump has")
        self.push(int.from_bytes(self.take(size), "little", signed=True))

    def tuple_of(self, size: int) -> None:
        values = [self.pop() for _ in range(size)]
        self.push(tuple(reversed(values)))

    def set_items(self, pairs: list[Any]) -> None:
        target = self.top(dict)
        if len(pairs) % 2:
            raise CorruptTarget("the pickle has a key without a value")
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            if not (type(key) is str or (type(key) is int and abs(key) < MAX_KEY)):
                raise UnsupportedTarget("the pickle has a key that is not text")
            target[key] = value

    def set_item(self) -> None:
        value = self.pop()
        self.set_items([self.pop(), value])

    def append(self) -> None:
        value = self.pop()
        self.top(list).append(value)

    def extend(self) -> None:
        values = self.since_mark()
        self.top(list).extend(values)

    def new_dict(self) -> None:
        pairs = self.since_mark()
        self.push({})
        self.set_items(pairs)

    def put(self, index: int) -> None:
        if not self._stack:
            raise CorruptTarget("the pickle stores a value from an empty stack")
        self._memo[index] = self._stack[-1]

    def get(self, index: int) -> None:
        value = self._memo.get(index, _MISSING)
        if value is _MISSING:
            raise CorruptTarget("the pickle loads a value that it never stored")
        self.push(value)

    def memoize(self) -> None:
        self.put(len(self._memo))

    def protocol(self) -> None:
        if not 2 <= self.number("B") <= 5:
            raise UnsupportedTarget("the pickle is of an unknown protocol")


_STOP = ord(".")
_OPCODES: dict[int, Callable[[_Machine], Any]] = {
    0x80: _Machine.protocol,
    0x95: lambda m: m.number("Q"),  # the argument is the length of a frame
    ord("("): _Machine.mark,
    ord("N"): lambda m: m.push(None),
    0x88: lambda m: m.push(True),
    0x89: lambda m: m.push(False),
    ord("J"): lambda m: m.push(m.number("i")),
    ord("K"): lambda m: m.push(m.number("B")),
    ord("M"): lambda m: m.push(m.number("H")),
    0x8A: lambda m: m.integer(m.number("B")),
    0x8B: lambda m: m.integer(m.number("i")),
    ord("G"): lambda m: m.push(_FLOAT.unpack(m.take(8))[0]),
    0x8C: lambda m: m.text(m.number("B")),
    ord("X"): lambda m: m.text(m.number("I")),
    0x8D: lambda m: m.text(m.number("Q")),
    ord("C"): lambda m: m.push(m.take(m.number("B"))),
    ord("B"): lambda m: m.push(m.take(m.number("I"))),
    0x8E: lambda m: m.push(m.take(m.number("Q"))),
    ord(")"): lambda m: m.push(()),
    0x85: lambda m: m.tuple_of(1),
    0x86: lambda m: m.tuple_of(2),
    0x87: lambda m: m.tuple_of(3),
    ord("t"): lambda m: m.push(tuple(m.since_mark())),
    ord("]"): lambda m: m.push([]),
    ord("l"): lambda m: m.push(m.since_mark()),
    ord("a"): _Machine.append,
    ord("e"): _Machine.extend,
    ord("}"): lambda m: m.push({}),
    ord("d"): _Machine.new_dict,
    ord("s"): _Machine.set_item,
    ord("u"): lambda m: m.set_items(m.since_mark()),
    ord("q"): lambda m: m.put(m.number("B")),
    ord("r"): lambda m: m.put(m.number("I")),
    0x94: _Machine.memoize,
    ord("h"): lambda m: m.get(m.number("B")),
    ord("j"): lambda m: m.get(m.number("I")),
}
