"""Reads the locals of all frames of a dump while the process runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from probing.api.errors import CorruptTarget, TargetTimeout
from probing.daemon.processes.memory import Memory
from probing.daemon.python_stack.values.frames import Frames
from probing.daemon.python_stack.values.heap import CHANGED, Heap, Torn
from probing.daemon.python_stack.values.layout import ObjectLayout
from probing.daemon.python_stack.values.objects import Objects
from probing.daemon.python_stack.values.render import Renderer, Value
from probing.daemon.python_stack.values.secrets import HIDDEN, names_secret
from probing.daemon.python_stack.walk.walker import RawFrame
from probing.daemon.stack_wire import CUT, Variable

__all__ = ("MAX_LOCALS", "NAME_IS_SECRET", "LocalsReader", "variable")

MAX_LOCALS = 64
MAX_ALL = 4096
ATTEMPTS = 3
NAME_IS_SECRET = "its name looks like a secret"  # noqa: S105


class LocalsReader:
    """Never raises for a value: its reason says why it is missing, and the stacks stay usable."""

    def __init__(self, memory: Memory, layout: ObjectLayout, deadline: float) -> None:
        self._objects = Objects(Heap(memory, deadline), layout)
        self._frames = Frames(self._objects)
        self._renderer = Renderer(self._objects)
        self._left = MAX_ALL
        self._why = ""
        self._torn = False

    def load(self, frames: Iterable[RawFrame]) -> None:
        """Prefetch the memory of the locals of ``frames``."""
        try:
            self._frames.load(frames)
        except (CorruptTarget, TargetTimeout) as e:
            self._why = e.message

    def read(self, frame: RawFrame) -> list[Variable]:
        """The locals of ``frame`` that are set, at most 64."""
        found: list[Variable] = []
        for attempt in range(ATTEMPTS):
            if self._why or self._left <= 0:
                return [variable("...", Value("", None, None, self._why or CUT))]
            if attempt:
                self._objects.refresh()
            try:
                self._objects.heap.begin()
                self._torn = False
                found = list(self._variables(frame))
                if self._objects.heap.held() and not self._torn:
                    break
            except TargetTimeout as e:
                self._why = e.message
            except CorruptTarget as e:
                found = [variable("...", Value("", None, None, e.message))]
        else:
            found = self._one_by_one(frame)
        self._left -= len(found)
        return found

    def _variables(self, frame: RawFrame) -> Iterator[Variable]:
        for i, (name, address) in enumerate(self._frames.locals(frame, MAX_LOCALS + 1)):
            if i == MAX_LOCALS:
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
        # Only the values that changed are left out.
        found = []
        try:
            self._objects.refresh()
            for row in list(self._variables(frame)):
                self._objects.heap.begin()
                address = self._frames.local(frame, row["name"])
                value = self._value(row["name"], address) if address else Value("", None, None, CHANGED)
                held = address is not None and self._objects.heap.held()
                found.append(variable(row["name"], value if held else Value(value.type, None, None, CHANGED)))
        except TargetTimeout as e:
            self._why = e.message
        except CorruptTarget as e:
            found.append(variable("...", Value("", None, None, e.message)))
        return found


def variable(name: str, value: Value) -> Variable:
    return {"name": name, "type": value.type, "value": value.text, "number": value.number, "reason": value.reason}
