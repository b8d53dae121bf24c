"""Reads torch modules and their children from the memory of a running process.

A module keeps its children in ``_modules``, a dict of its instance (torch/nn/modules/module.py of 1.x and 2.x). The
name of a child is its key in this dict.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from probing.daemon.processes.procfs import clean_text
from probing.daemon.python_stack.values.heap import Proof, Torn
from probing.daemon.python_stack.values.objects import Entry, Objects, Type
from probing.daemon.python_stack.walk.snapshot import word

__all__ = ("Hints", "Module", "ModuleTree", "Step", "Way")

# Limits of one search: the attributes and the children of a module, the modules whose children are read, and the total
# number of children.
MAX_ATTRIBUTES = 1024
MAX_CHILDREN = 4096
MAX_SEARCHED = 4096
MAX_ENTRIES = 1 << 16
MAX_STEPS = 64
MAX_NAME = 128
MAX_KEYS = 16
_CHILDREN = "_modules"


class Module(NamedTuple):
    """A module: its address, and the address and name of its class."""

    address: int
    class_address: int
    kind: str


class Step(NamedTuple):
    """A step from a module to its child."""

    name: str
    child: int


class Way(NamedTuple):
    """The steps from a module to a module below it. ``proofs`` prove the steps, and the classes of the modules."""

    steps: tuple[Step, ...]
    proofs: tuple[Proof, ...]


@dataclass(slots=True)
class Hints:
    """Cached addresses that save reads: the type object of cells, and the str objects "_modules" that are keys in the
    modules' ``__dict__``.
    """

    cell_class: int = 0
    keys: set[int] = field(default_factory=set)


class ModuleTree:
    """Reads modules through ``objects``. ``hints`` are kept between requests."""

    def __init__(self, objects: Objects, hints: Hints) -> None:
        self._objects = objects
        self._hints = hints

    def contents(self, values: Sequence[int], known: Container[int]) -> list[int]:
        """Returns ``values``, in which each cell is replaced by its contents. ``known``: values that are not cells."""
        hints = self._hints
        for value in values:
            if not hints.cell_class and value not in known and (of := self._type_of(value)) and of.kind == "cell":
                hints.cell_class = of.address
        heads = (
            self._objects.heap.sample([(value, 24) for value in values]) if hints.cell_class else [None] * len(values)
        )
        return [
            value if head is None or word(head, 8) != hints.cell_class else word(head, 16)
            for value, head in zip(values, heads, strict=True)
        ]

    def module(self, address: int) -> Module | None:
        """Returns the module at ``address``; None if there is no module."""
        try:
            of = self._type_of(address)
            if of is not None and self._dict_of(address, of):
                return Module(address, of.address, clean_text(of.short, MAX_NAME))
        except Torn:
            pass  # the object changed meanwhile
        return None

    def search(self, parent: int, child: int) -> Way | None:
        """Returns the way from ``parent`` to ``child`` through the fewest modules; None if no way is found within the
        limits.

        Raises TargetTimeout, and CorruptTarget if the memory read exceeds its bounds.
        """
        # For each module, its entry and the index of its parent in this list. The list grows in the loop.
        queue: list[tuple[Entry, int]] = [((0, 0, parent), -1)]
        seen = {parent}
        for at, ((_, _, address), _) in enumerate(queue):
            if at >= MAX_SEARCHED:
                break
            for entry in self._children(address):
                value = entry[2]
                if value == child:
                    return self._way(parent, _entries(queue, at, entry))
                if value not in seen and len(seen) < MAX_ENTRIES:
                    seen.add(value)
                    queue.append((entry, at))
        return None

    def only_child(self, parent: int) -> Way | None:
        """Returns the way to the child of ``parent``; None unless ``parent`` has a single child, which is a module."""
        entries = list(islice(self._children(parent), 2))
        way = self._way(parent, entries) if len(entries) == 1 else None
        return way if way is not None and self.module(way.steps[0].child) else None

    def _type_of(self, address: int) -> Type | None:
        """Returns the type of the object at ``address``, None if there is no object. Begins new notes in the heap."""
        self._objects.heap.begin()
        try:
            return self._objects.type_of(address)
        except Torn:
            return None

    def _children(self, address: int) -> Iterator[Entry]:
        of = self._type_of(address)
        try:
            children = self._dict_of(address, of) if of is not None else 0
            if children:
                yield from islice(self._objects.entries(children), MAX_CHILDREN)
        except Torn:
            return  # the module changed meanwhile

    def _dict_of(self, address: int, of: Type) -> int:
        """Returns the address of the dict ``_modules`` of the object at ``address``, 0 if it has no such dict."""
        objects, keys = self._objects, self._hints.keys
        if of.kind != "object" or not of.is_heap:
            return 0
        attributes = list(islice(objects.instance_entries(address, of), MAX_ATTRIBUTES))
        # The key is the same string object in all modules, unless they were unpickled.
        slot, found = next(((slot, value) for slot, key, value in attributes if key in keys), (0, None))
        if found is None:
            found = objects.find(iter(attributes), _CHILDREN)
            if found is None:
                return 0
            slot, key = next((slot, key) for slot, key, value in attributes if value == found)
            if len(keys) < MAX_KEYS:
                keys.add(key)
        if objects.heap.word(slot) != found:
            raise Torn("its attributes changed")
        return found if objects.type_of(found).kind == "dict" else 0

    def _way(self, parent: int, entries: Sequence[Entry]) -> Way | None:
        """Returns the way from ``parent`` through ``entries``, and a proof of it."""
        objects, steps = self._objects, list[Step]()
        if len(entries) > MAX_STEPS:
            return None
        objects.heap.begin()
        try:
            for entry in entries:
                slot, key, child = entry
                children = self._dict_of(parent, objects.type_of(parent))
                if not children or entry not in islice(objects.entries(children), MAX_CHILDREN):
                    return None
                if objects.heap.word(slot) != child or objects.type_of(key).kind != "str":
                    return None
                steps.append(Step(clean_text(objects.text(key, MAX_NAME + 1)[0], MAX_NAME), child))
                parent = child
            objects.type_of(parent)
        except Torn:
            return None
        return Way(tuple(steps), (objects.heap.proof(),))


def _entries(queue: Sequence[tuple[Entry, int]], at: int, last: Entry) -> list[Entry]:
    """Returns the entries from the first module of ``queue`` to ``last``, a child of the module at ``at``."""
    entries = [last]
    while at > 0:
        entry, at = queue[at]
        entries.append(entry)
    return entries[::-1]
