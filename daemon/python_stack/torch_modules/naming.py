"""Names running torch modules by their place in the tree of modules.

A search begins at the module whose code called the module, and goes through containers, whose own code does not run.
The way that the search finds is kept with the bytes that prove it, so that later requests only compare these bytes.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from probing.daemon.processes.procfs import clean_text
from probing.daemon.python_stack.torch_modules.tree import Hints, ModuleTree, Step, Way
from probing.daemon.python_stack.values.heap import Proof
from probing.daemon.python_stack.values.objects import Objects
from probing.daemon.python_stack.walk.snapshot import is_count, word

__all__ = ("KnownModules", "ModuleNames", "TorchModule")

# The maximum number of modules that are named in one request.
MAX_CHAIN = 64
MAX_PATH = 512
# The maximum numbers of entries that are kept for a process.
MAX_KEPT = 2048
MAX_ROOTS = 8
# How long a search without a result is not repeated, s.
ABSENT_S = 300.0
_TRIES = 3
# The keys under which wrappers hold the module that they wrap: torch.compile, FSDP 1, activation checkpointing.
_TRANSPARENT = frozenset(("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"))
# DDP, DeepSpeed and Megatron hold the model as their only child, under the key "module".
_AROUND_MODELS = _TRANSPARENT | {"module"}
_MAX_WRAPPERS = 8
_Pair = tuple[int, int]


class TorchModule(NamedTuple):
    """A module. ``model``: the class of the outermost module. ``path``: the module's name below the outermost module,
    as in ``named_modules``; the outermost module itself has the path ``model``. ``kind``: the module's class.

    A wrapper, such as DDP, has the path of the module that it wraps.
    """

    model: str
    path: str
    kind: str


class _Place(NamedTuple):
    root: int
    steps: tuple[Step, ...] = ()


@dataclass(slots=True)
class KnownModules:
    """The modules of a process that earlier requests found. They make the next request cheap.

    ``classes``: (address, name) of the class of each module. ``ways``: the way from a module to a module below it. The
    key has both addresses; with 0 as second address, the way leads to the model that the first module wraps.
    ``absent``: the time.monotonic() at which a way was searched in vain. ``roots``: modules that were outermost on a
    stack, the most recent last.
    """

    classes: OrderedDict[int, tuple[int, str]] = field(default_factory=OrderedDict)
    ways: OrderedDict[_Pair, Way] = field(default_factory=OrderedDict)
    absent: OrderedDict[_Pair, float] = field(default_factory=OrderedDict)
    roots: OrderedDict[int, None] = field(default_factory=OrderedDict)
    hints: Hints = field(default_factory=Hints)

    def drop(self, address: int) -> None:
        """Drops a module whose address now belongs to another object."""
        del self.classes[address]
        self.roots.pop(address, None)
        for pairs in (self.ways, self.absent):
            for pair in [pair for pair in pairs if address in pair]:
                del pairs[pair]


class ModuleNames:
    """Names the modules of a process, for one request. ``known`` is kept between requests."""

    def __init__(self, objects: Objects, known: KnownModules) -> None:
        self._objects = objects
        self._known = known
        self._tree = ModuleTree(objects, known.hints)
        self._used: dict[_Pair, Way] = {}

    def of(self, values: Iterable[int]) -> list[TorchModule]:
        """Returns the modules among ``values``, the first arguments of frames, outermost first. A module whose own
        functions call each other is listed once.

        Raises TargetTimeout at the deadline of ``objects``, and CorruptTarget when the memory read exceeds its bounds.
        """
        chain = self._chain([value for value, before in _pairs(values) if value != before])
        for _ in range(_TRIES):
            self._used.clear()
            modules = self._named(chain)
            if not self._drop_changed():
                break
            self._objects.refresh()
        return modules

    def _chain(self, values: list[int]) -> list[int]:
        """Returns the addresses of the modules among ``values``. A cell among ``values`` counts as its contents."""
        classes = self._known.classes
        values = self._tree.contents(values, classes)
        known = [value for value in dict.fromkeys(values) if value in classes]
        heads = self._objects.heap.sample([(address, 16) for address in known])
        for address, head in zip(known, heads, strict=True):
            if head is None or not is_count(word(head, 0)) or word(head, 8) != classes[address][0]:
                self._known.drop(address)
        chain = [value for value in values if self._is_module(value)]
        return [address for address, before in _pairs(chain) if address != before][:MAX_CHAIN]

    def _is_module(self, address: int) -> bool:
        if address in self._known.classes:
            return True
        module = self._tree.module(address)
        if module is not None:
            _keep(self._known.classes, address, (module.class_address, module.kind), MAX_KEPT)
        return module is not None

    def _named(self, chain: list[int]) -> list[TorchModule]:
        if not chain:
            return []
        first, roots = chain[0], self._known.roots
        place, before = self._below_a_root(first), first
        places = {first: place}
        for address in chain[1:]:
            if address not in places:
                places[address] = self._below_caller(before, places[before], address)
            before = address
        for address in chain:
            roots.pop(address, None)
        _keep(roots, place.root, None, MAX_ROOTS)
        return [self._module(address, places[address]) for address in chain]

    def _below_a_root(self, address: int) -> _Place:
        """Returns the place of a module below a root that was seen before. A block that is recomputed in the backward
        pass has no caller on the stack, but is below such a root. A module that is below no root becomes a root.
        """
        for root in reversed(self._known.roots):
            if root != address and (way := self._way(root, address)):
                return _Place(root, way.steps)
        return _Place(address)

    def _below_caller(self, caller: int, place: _Place, address: int) -> _Place:
        if way := self._way(caller, address):
            return _Place(place.root, (*place.steps, *way.steps))
        # A stack that changed while it was read may show a module below the wrong module of the same model.
        if place.root not in (caller, address) and (way := self._way(place.root, address)):
            return _Place(place.root, way.steps)
        return _Place(address)

    def _way(self, parent: int, child: int) -> Way | None:
        known, pair, now = self._known, (parent, child), time.monotonic()
        way = known.ways.get(pair)
        if way is None:
            if now - known.absent.get(pair, -ABSENT_S) < ABSENT_S:
                return None
            # A search that ends at the deadline is not repeated either.
            _keep(known.absent, pair, now, MAX_KEPT)
            way = self._tree.search(parent, child)
            if way is None:
                return None
            del known.absent[pair]
            _keep(known.ways, pair, way, MAX_KEPT)
        self._used[pair] = way
        return way

    def _wrapped(self, root: int) -> Way:
        """Returns the way from ``root`` to the model that it wraps. The way has no steps if ``root`` wraps no model."""
        ways, pair = self._known.ways, (root, 0)
        if pair not in ways:
            steps, proofs = list[Step](), list[Proof]()
            while len(steps) < _MAX_WRAPPERS:
                way = self._tree.only_child(steps[-1].child if steps else root)
                if way is None or way.steps[0].name not in _AROUND_MODELS:
                    break
                steps += way.steps
                proofs += way.proofs
            _keep(ways, pair, Way(tuple(steps), tuple(proofs)), MAX_KEPT)
        self._used[pair] = ways[pair]
        return ways[pair]

    def _drop_changed(self) -> bool:
        """Drops the used ways that no longer hold. Returns whether a way was dropped."""
        proofs = [(pair, proof) for pair, way in self._used.items() for proof in way.proofs]
        holds = self._objects.heap.holds([proof for _, proof in proofs])
        for (pair, _), right in zip(proofs, holds, strict=True):
            if not right:
                self._known.ways.pop(pair, None)
        return not all(holds)

    def _module(self, address: int, place: _Place) -> TorchModule:
        wrapped = self._wrapped(place.root).steps
        model = self._kind(wrapped[-1].child if wrapped else place.root)
        around = {step.child for step in wrapped}
        names = [s.name for s in place.steps if s.child not in around and s.name not in _TRANSPARENT]
        return TorchModule(model, clean_text(".".join(names), MAX_PATH) or model, self._kind(address))

    def _kind(self, address: int) -> str:
        return self._known.classes[address][1] if self._is_module(address) else "?"


def _keep(kept: OrderedDict[Any, Any], key: object, value: object, limit: int) -> None:
    kept[key] = value
    kept.move_to_end(key)
    while len(kept) > limit:
        kept.popitem(last=False)


def _pairs(values: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yields each value and the value before it, 0 for the first."""
    before = 0
    for value in values:
        yield value, before
        before = value
