"""Writes values as Python does, limited in length, without running code of the target. Secrets are hidden according to
the rules for command lines (``processes.redaction``).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from probing.api.errors import CorruptTarget
from probing.daemon.processes.procfs import clean_text
from probing.daemon.processes.redaction import command_text, names_secret, takes_secret
from probing.daemon.python_stack.values.heap import CHANGED, Torn
from probing.daemon.python_stack.values.objects import ENUM_TYPES, Objects, Type
from probing.daemon.python_stack.values.torch_objects import process_group_text, read_tensor, torch_text

__all__ = (
    "HIDDEN",
    "Renderer",
    "Value",
    "looks_secret",
)

HIDDEN = "<redacted>"
_MAX_TEXT = 1024


def looks_secret(text: str) -> bool:
    """Returns whether ``text`` looks like a token or contains a password, so that it would be hidden in a
    command line.
    """
    shown = text[:_MAX_TEXT]
    return command_text((shown,)) != clean_text(shown, _MAX_TEXT)


MAX_DEPTH = 3
MAX_ITEMS = 16
MAX_CHARACTERS = 256
MAX_TOTAL = 1024
_SECRET = "it looks like a secret"  # noqa: S105
_NUMPY = {
    "numpy.float16": "e",
    "numpy.float32": "f",
    "numpy.float64": "d",
    "numpy.int8": "b",
    "numpy.int16": "h",
    "numpy.int32": "i",
    "numpy.int64": "q",
    "numpy.uint8": "B",
    "numpy.uint16": "H",
    "numpy.uint32": "I",
    "numpy.uint64": "Q",
    "numpy.longlong": "q",
    "numpy.ulonglong": "Q",
    "numpy.bool": "?",
    "numpy.bool_": "?",
}
_BRACKETS = {"list": ("[", "]"), "tuple": ("(", ")"), "set": ("{", "}"), "frozenset": ("{", "}"), "dict": ("{", "}")}


class Value(NamedTuple):
    """A value as text. If the value cannot be shown, ``text`` is None and ``reason`` says why. ``number``: the value of
    a number or a scalar.
    """

    type: str
    text: str | None
    number: float | None = None
    reason: str = ""


class Renderer:
    """Writes objects as text. Collections are cut at 16 items, three levels and 1024 characters, strings at 256
    characters.
    """

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._left = 0
        self._kinds: dict[str, Callable[[int], str]] = {
            "NoneType": lambda _: "None",
            "bool": lambda a: str(objects.integer(a) != 0),
            "int": lambda a: str(objects.integer(a)),
            "float": lambda a: repr(objects.floats(a, 1)[0]),
            "complex": lambda a: repr(complex(*objects.floats(a, 2))),
            "str": self._string,
            "bytes": self._bytes,
            "type": lambda a: f"<class '{self.class_name(objects.type_at(a))}'>",
            "module": lambda a: f"<module '{self.module_name(a)}'>",
            "function": lambda a: f"<function {self._function(a)}>",
            "method": self._method,
            "builtin": self._builtin,
            "tensor": lambda a: str(read_tensor(objects, a)),
            "process group": lambda a: process_group_text(objects, a),
        }

    def value(self, address: int) -> Value:
        """Returns the object at ``address`` as text. Raises CorruptTarget when it cannot be read."""
        of = self._objects.type_of(address)
        self._left = MAX_TOTAL
        if of.kind == "tensor":
            tensor = read_tensor(self._objects, address)
            text = None if tensor.reason else str(tensor)
            return Value(of.short, text, _as_float(tensor.number), tensor.reason)
        text = self._text(address, 0, ())
        if text == HIDDEN:
            return Value(of.short, HIDDEN, None, _SECRET)
        if len(text) > MAX_TOTAL:
            text = text[: MAX_TOTAL - 3] + "..."
        return Value(of.short, clean_text(text, MAX_TOTAL), self._number(address, of))

    def class_name(self, of: Type) -> str:
        """Returns module and qualified name of a class."""
        if not of.is_heap or "." in of.name:
            return of.name
        objects = self._objects
        try:
            name = self.string_at(of.address + objects.layout.type_qualname)
            module = objects.find(objects.entries(of.attributes), "__module__") if of.attributes else None
            where = self.string_of(module) if module else "builtins"
        except CorruptTarget:
            return of.name
        return name if where == "builtins" else f"{where}.{name}"

    def module_name(self, address: int) -> str:
        """Returns ``__name__`` of the module object at ``address``; "?" if the module has no name."""
        objects = self._objects
        found = objects.find(objects.instance_entries(address, objects.type_of(address)), "__name__")
        return self.string_of(found) if found else "?"

    def string_of(self, address: int) -> str:
        """Returns the first characters of the str at ``address``; "?" for anything else."""
        if self._objects.type_of(address).kind != "str":
            return "?"
        return clean_text(self._objects.text(address, MAX_CHARACTERS)[0], MAX_CHARACTERS)

    def string_at(self, slot: int) -> str:
        """Returns ``string_of`` for the object to which the pointer at ``slot`` points."""
        return self.string_of(self._objects.heap.word(slot))

    def _text(self, address: int, depth: int, above: tuple[int, ...]) -> str:
        of = self._objects.type_of(address)
        if self._objects.type_at(of.metatype).short in ENUM_TYPES and of.is_heap:
            text = self._enum(address, of, above)
        elif of.kind in _BRACKETS:
            opening, closing = _BRACKETS[of.kind]
            if address in above or depth >= MAX_DEPTH or self._left <= 0:
                return f"{opening}...{closing}"
            return self._collection(address, of, depth, (*above, address))
        elif of.kind in self._kinds:
            text = self._kinds[of.kind](address)
        elif code := _NUMPY.get(of.name):
            text = str(self._numpy(address, code))
        else:
            text = torch_text(self._objects, address, of.name) or f"<{self.class_name(of)} object>"
        self._left -= len(text)
        return text

    def _collection(self, address: int, of: Type, depth: int, above: tuple[int, ...]) -> str:
        opening, closing = _BRACKETS[of.kind]
        if of.kind == "dict":
            total = self._objects.dict_length(address)
            parts = self._pairs(address, total, depth, above)
        else:
            items, total = self._items(address, of.kind)
            _check_whole(items, total)
            self._objects.heap.load_near((a, 64) for a in items)
            parts = self._listed(items, depth, above)
        shown = []
        for part in parts:
            shown.append(part)
            self._left -= 2
            if self._left <= 0:
                break
        if len(shown) < total:
            shown.append("...")
        if of.kind == "set" and not shown:
            return "set()"
        comma = "," if of.kind == "tuple" and len(shown) == 1 else ""
        text = f"{opening}{', '.join(shown)}{comma}{closing}"
        return text if of.kind != "frozenset" else f"frozenset({text if shown else ''})"

    def _listed(self, items: Sequence[int], depth: int, above: tuple[int, ...]) -> Iterator[str]:
        """Yields the items of a list. In a list of arguments, the value after an option that names a secret is
        hidden.
        """
        option = ""
        for item in items:
            text = self._text(item, depth + 1, above)
            plain = text.strip("b'\"")
            hide = takes_secret(option, plain)
            option = "" if hide else plain
            yield HIDDEN if hide else text

    def _items(self, address: int, kind: str) -> tuple[list[int], int]:
        if kind in ("set", "frozenset"):
            return self._objects.members(address, MAX_ITEMS)
        return self._objects.items(address, kind, MAX_ITEMS)

    def _pairs(self, address: int, total: int, depth: int, above: tuple[int, ...]) -> Iterator[str]:
        objects = self._objects
        entries = list(islice(objects.entries(address), MAX_ITEMS))
        _check_whole(entries, total)
        objects.heap.load_near((a, 64) for _, key, value in entries for a in (key, value))
        for slot, key, value in entries:
            if objects.heap.word(slot) != value:
                raise Torn(CHANGED)
            name = self._text(key, depth + 1, above)
            is_name = objects.type_of(key).kind in ("str", "bytes")
            secret = is_name and names_secret(name.strip("b'\""))
            yield f"{name}: {HIDDEN if secret else self._text(value, depth + 1, above)}"

    def _string(self, address: int) -> str:
        text, length = self._objects.text(address, 2 * MAX_CHARACTERS)
        # A token at the end of the shown text is recognised only with more text after it.
        if looks_secret(text):
            return HIDDEN
        return repr(text[:MAX_CHARACTERS]) + ("..." if length > MAX_CHARACTERS else "")

    def _bytes(self, address: int) -> str:
        data, length = self._objects.bytes_of(address, 2 * MAX_CHARACTERS)
        if looks_secret(data.decode("latin-1")):
            return HIDDEN
        return repr(data[:MAX_CHARACTERS]) + ("..." if length > MAX_CHARACTERS else "")

    def _enum(self, address: int, of: Type, above: tuple[int, ...]) -> str:
        objects = self._objects
        name = objects.find(objects.instance_entries(address, of), "_name_")
        value = objects.find(objects.instance_entries(address, of), "_value_")
        if not name or not value or address in above or len(above) > MAX_DEPTH:
            return f"<{self.class_name(of)} object>"
        shown = self._text(value, MAX_DEPTH, (*above, address)) if objects.type_of(value).kind in self._kinds else "..."
        return f"<{self.class_name(of).rpartition('.')[2]}.{self.string_of(name)}: {shown}>"

    def _function(self, address: int) -> str:
        return self.string_at(address + self._objects.layout.function_qualname)

    def _method(self, address: int) -> str:
        objects = self._objects
        function, of_self = objects.heap.word(address + 16), objects.type_of(objects.heap.word(address + 24))
        name = self._function(function) if objects.type_of(function).kind == "function" else "?"
        return f"<bound method {name} of <{self.class_name(of_self)} object>>"

    def _builtin(self, address: int) -> str:
        # PyCFunctionObject.m_ml, whose first member is ml_name (Include/methodobject.h).
        heap = self._objects.heap
        return f"<built-in function {self._objects.c_text(heap.word(heap.word(address + 16)))}>"

    def _numpy(self, address: int, code: str) -> float | int | bool:
        size = struct.calcsize(code)
        number: float | int = struct.unpack(f"<{code}", self._objects.heap.read(address + 16, size))[0]
        return number

    def _number(self, address: int, of: Type) -> float | None:
        if of.kind in ("bool", "int"):
            return _as_float(self._objects.integer(address))
        if of.kind == "float":
            return self._objects.floats(address, 1)[0]
        return _as_float(self._numpy(address, code)) if (code := _NUMPY.get(of.name)) else None


def _check_whole(items: Sequence[object], total: int) -> None:
    # Empty slots are not noted, so ``held`` does not compare them. Too few items show that the table is being changed.
    if len(items) < min(total, MAX_ITEMS):
        raise Torn(CHANGED)


def _as_float(number: float | int | None) -> float | None:
    try:
        return None if number is None else float(number)
    except OverflowError:
        return None
