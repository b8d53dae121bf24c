"""Finds the variables of a frame: its fast locals, cells and free variables, and the dicts of modules and class bodies.

Up to 3.10 the slots are ``PyFrameObject.f_localsplus``, named by ``co_varnames``, ``co_cellvars`` and ``co_freevars``
(``Include/cpython/frameobject.h``). From 3.11 on they are ``_PyInterpreterFrame.localsplus``, named by
``co_localsplusnames`` with their kinds (``Include/internal/pycore_frame.h``, ``pycore_code.h``).

``LocalsReader`` reads the locals of all frames of a dump while the process runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from probing.api.errors import CorruptTarget, TargetTimeout
from probing.daemon.processes.memory import Memory
from probing.daemon.processes.procfs import clean_text
from probing.daemon.processes.redaction import names_secret
from probing.daemon.python_stack.values.heap import CHANGED, Heap, Torn
from probing.daemon.python_stack.values.layout import ObjectLayout
from probing.daemon.python_stack.values.objects import Objects
from probing.daemon.python_stack.values.render import HIDDEN, Renderer, Value
from probing.daemon.python_stack.walk.snapshot import word
from probing.daemon.python_stack.walk.walker import RawFrame
from probing.daemon.stack_wire import CUT, Variable

__all__ = ("NAME_IS_SECRET", "Frames", "LocalsReader", "variable")

MAX_SLOTS = 1024
MAX_NAME = 256
# CO_FAST_CELL and CO_FAST_FREE of Include/internal/pycore_code.h.
_CELLS = 0x40 | 0x80
_OPTIMIZED = 1


class _Slots(NamedTuple):
    names: list[str]
    in_cells: list[bool]
    optimized: bool


class Frames:
    """Finds the variables of frames. Methods raise Torn for a frame that has ended."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._slots: dict[int, _Slots] = {}

    def load(self, frames: Iterable[RawFrame]) -> None:
        """Reads the names of all variables of ``frames`` in a few batches."""
        heap, layout = self._objects.heap, self._objects.layout
        frames = list(frames)
        codes = {f.code for f in frames} - self._slots.keys()
        heap.load_near([(f.address, layout.frame_slots + 64) for f in frames] + [(c, 128) for c in codes])
        tuples = [self._pointers(code, layout.code_names) for code in codes]
        heap.load_near((at, 128) for found in tuples for at in found)
        for code in codes:
            try:
                self._slots[code] = self._read_slots(code)
            except CorruptTarget:
                continue

    def local(self, frame: RawFrame, name: str) -> int | None:
        """Returns the address of the local ``name`` of ``frame``; None if the local does not exist or is not set."""
        for local, value in self._fast(frame, name):
            if local == name:
                return value
        if names := self._locals_dict(frame):
            return self._objects.find(self._objects.entries(names), name)
        return None

    def first(self, frame: RawFrame) -> int:
        """Returns the address of the first local of ``frame``, which is the first argument if the function has any; 0
        if there is no first local or it is not set.
        """
        self.load([frame])
        slots = self._slots.get(frame.code)
        return (self.local(frame, slots.names[0]) if slots is not None and slots.names else None) or 0

    def locals(self, frame: RawFrame, limit: int) -> Iterator[tuple[str, int]]:
        """Yields name and address of the first ``limit`` locals of ``frame`` that are set."""
        left = limit
        for local in self._fast(frame, None):
            if left <= 0:
                return
            left -= 1
            yield local
        names = self._locals_dict(frame, globals_too=True)
        if not names:
            return
        objects = self._objects
        for slot, key, value in objects.entries(names):
            if left <= 0:
                return
            if objects.type_of(key).kind != "str" or objects.heap.word(slot) != value:
                continue
            name = objects.text(key, MAX_NAME)[0]
            # Names such as __name__ are left out: every module has them.
            if not (name.startswith("__") and name.endswith("__")):
                left -= 1
                yield clean_text(name, MAX_NAME), value

    def globals_of(self, frame: RawFrame) -> int:
        """Returns the address of the dict of globals of ``frame``, 0 if the globals are not a dict."""
        address = self._checked(frame, self._objects.layout.frame_globals)
        return address if address and self._objects.type_of(address).kind == "dict" else 0

    def _fast(self, frame: RawFrame, name: str | None) -> Iterator[tuple[str, int]]:
        objects, layout = self._objects, self._objects.layout
        slots = self._slots.get(frame.code)
        if slots is None:
            raise Torn(CHANGED)
        start = frame.address + layout.frame_slots
        for i, local in enumerate(slots.names):
            if name is not None and local != name:
                continue
            self._checked(frame, layout.base.frame_code)
            value = objects.heap.word(start + 8 * i)
            if layout.base.tag_mask and value & 3 == 3:
                continue  # a tagged int is not an object (_PyStackRef, 3.14+)
            value &= ~layout.base.tag_mask
            if value and slots.in_cells[i] and objects.type_of(value).kind == "cell":
                value = objects.heap.word(value + 16)
            if value:
                yield local, value

    def _locals_dict(self, frame: RawFrame, globals_too: bool = False) -> int:
        slots = self._slots.get(frame.code)
        if slots is None or slots.optimized:
            return 0
        address = self._checked(frame, self._objects.layout.frame_locals) & ~self._objects.layout.base.tag_mask
        if not address or self._objects.type_of(address).kind != "dict":
            return 0
        return address if globals_too or address != self.globals_of(frame) else 0

    def _checked(self, frame: RawFrame, offset: int) -> int:
        """Returns the pointer at ``offset`` of ``frame``. Raises Torn when the frame now runs other code."""
        base = self._objects.layout.base
        if self._objects.heap.word(frame.address + base.frame_code) & ~base.tag_mask != frame.code:
            raise Torn(CHANGED)
        return self._objects.heap.word(frame.address + offset)

    def _read_slots(self, code: int) -> _Slots:
        objects, layout = self._objects, self._objects.layout
        pointers = self._pointers(code, layout.code_names)
        if len(pointers) != len(layout.code_names) or objects.type_of(code).name != "code":
            raise Torn(CHANGED)
        groups = [objects.items(at, "tuple", MAX_SLOTS)[0] for at in pointers if self._is("tuple", at)]
        objects.heap.load_near((name, 64) for group in groups for name in group)
        names = [self._name(name) for group in groups for name in group]
        flags = int.from_bytes(objects.heap.peek(code + layout.code_flags, 4), "little")
        if layout.code_kinds is None:
            in_cells = [i > 0 for i, group in enumerate(groups) for _ in group]
        else:
            kinds = objects.bytes_of(word(objects.heap.peek(code + layout.code_kinds, 8), 0), MAX_SLOTS)[0]
            in_cells = [bool(kind & _CELLS) for kind in kinds]
        if len(in_cells) != len(names):
            raise Torn(CHANGED)
        return _Slots(names[:MAX_SLOTS], in_cells, bool(flags & _OPTIMIZED))

    def _pointers(self, code: int, offsets: tuple[int, ...]) -> list[int]:
        try:
            return [word(self._objects.heap.peek(code + at, 8), 0) for at in offsets]
        except CorruptTarget:
            return []

    def _is(self, kind: str, address: int) -> bool:
        if self._objects.type_of(address).kind != kind:
            raise Torn(CHANGED)
        return True

    def _name(self, address: int) -> str:
        if self._objects.type_of(address).kind != "str":
            raise Torn(CHANGED)
        return self._objects.text(address, MAX_NAME)[0]


_MAX_LOCALS = 64
MAX_ALL = 4096
ATTEMPTS = 3
NAME_IS_SECRET = "its name looks like a secret"  # noqa: S105


class LocalsReader:
    """Reads the locals of frames. A value that cannot be read raises no error, so that the stacks stay usable. Its
    ``reason`` says why the value cannot be read.
    """

    def __init__(self, memory: Memory, layout: ObjectLayout, deadline: float) -> None:
        self._objects = Objects(Heap(memory, deadline), layout)
        self._frames = Frames(self._objects)
        self._renderer = Renderer(self._objects)
        self._left = MAX_ALL
        self._why = ""
        self._torn = False

    def load(self, frames: Iterable[RawFrame]) -> None:
        """Reads the names of the locals of ``frames`` in advance, in a few batches."""
        try:
            self._frames.load(frames)
        except (CorruptTarget, TargetTimeout) as e:
            self._why = e.message

    def read(self, frame: RawFrame) -> list[Variable]:
        """Returns the locals of ``frame`` that are set, at most 64."""
        rows: list[Variable] = []
        for attempt in range(ATTEMPTS):
            if self._why or self._left <= 0:
                return [variable("...", Value("", None, None, self._why or CUT))]
            if attempt:
                self._objects.refresh()
            try:
                self._objects.heap.begin()
                self._torn = False
                rows = list(self._variables(frame))
                if self._objects.heap.held() and not self._torn:
                    break
            except TargetTimeout as e:
                self._why = e.message
            except CorruptTarget as e:
                rows = [variable("...", Value("", None, None, e.message))]
        else:
            rows = self._one_by_one(frame)
        self._left -= len(rows)
        return rows

    def _variables(self, frame: RawFrame) -> Iterator[Variable]:
        for i, (name, address) in enumerate(self._frames.locals(frame, _MAX_LOCALS + 1)):
            if i == _MAX_LOCALS:
                yield variable("...", Value("", None, None, CUT))
                return
            yield variable(name, self._value(name, address))

    def _value(self, name: str, address: int) -> Value:
        if names_secret(name):
            return Value("", HIDDEN, None, NAME_IS_SECRET)
        try:
            return self._renderer.value(address)
        except Torn:
            self._torn = True
            return Value("", None, None, CHANGED)
        except CorruptTarget as e:
            return Value("", None, None, e.message)

    def _one_by_one(self, frame: RawFrame) -> list[Variable]:
        # Only the values that changed meanwhile are left out.
        rows = []
        try:
            self._objects.refresh()
            for row in list(self._variables(frame)):
                self._objects.heap.begin()
                address = self._frames.local(frame, row["name"])
                value = self._value(row["name"], address) if address else Value("", None, None, CHANGED)
                held = address is not None and self._objects.heap.held()
                rows.append(variable(row["name"], value if held else Value(value.type, None, None, CHANGED)))
        except TargetTimeout as e:
            self._why = e.message
        except CorruptTarget as e:
            rows.append(variable("...", Value("", None, None, e.message)))
        return rows


def variable(name: str, value: Value) -> Variable:
    return {"name": name, "type": value.type, "value": value.text, "number": value.number, "reason": value.reason}
