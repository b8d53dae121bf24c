"""Reads the names of Python threads from ``threading._active``.

The names of the last dump are checked with a single call, which reads each pointer to a name and the text of the name.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from probing.api.errors import ProbingError, ProcessGone
from probing.daemon.processes.memory import Memory
from probing.daemon.processes.procfs import clean_text
from probing.daemon.python_stack.values.attributes import step
from probing.daemon.python_stack.values.heap import Heap
from probing.daemon.python_stack.values.layout import ObjectLayout
from probing.daemon.python_stack.values.objects import Objects
from probing.daemon.python_stack.walk.snapshot import word

__all__ = ("KnownNames", "thread_names")

MAX_NAME = 64
MAX_THREADS = 4096
MAX_INTERPRETERS = 8
# The maximum time for reading names, s. Names are optional, so the stacks, which are read already, should not wait.
MAX_S = 0.1
# The largest offset at which the text of a str begins (Include/cpython/unicodeobject.h).
_STR_HEAD = 56
_NAME = "_name"


class _Named(NamedTuple):
    """A name that was read. ``thread``: address of the Thread; ``slot``: address of the pointer to its name;
    ``text_at``: address of the name's str; ``raw``: the bytes of this str, without reference count and type.
    """

    thread: int
    slot: int
    text_at: int
    raw: bytes
    name: str


@dataclass(slots=True)
class KnownNames:
    """Hints from the last dump: ``active`` dicts by interpreter, names by thread identity."""

    active: dict[int, int] = field(default_factory=dict)
    named: dict[int, _Named] = field(default_factory=dict)


def thread_names(
    memory: Memory, layout: ObjectLayout, runtime: int, deadline: float, known: KnownNames
) -> dict[int, str]:
    """Returns the names of the threads whose names can be read, by ``thread_id``; empty without ``threading``.

    ``runtime`` is the address of ``_PyRuntime``, ``deadline`` a time of time.monotonic(). Raises ProcessGone.
    """
    heap = Heap(memory, min(deadline, time.monotonic() + MAX_S))
    objects = Objects(heap, layout)
    found: dict[int, _Named] = {}
    try:
        for interpreter in _interpreters(heap, layout, runtime):
            for identity, thread in _active(objects, interpreter, known):
                if identity in found or len(found) >= MAX_THREADS:
                    continue
                before = known.named.get(identity)
                if before is None or before.thread != thread:
                    before = _named(objects, thread)
                if before is not None:
                    found[identity] = before
    except ProcessGone:
        raise
    except ProbingError:
        # The dict changed, or the deadline has passed: the names read so far are used.
        pass
    known.named = dict(_proven(memory, found))
    return {identity: named.name for identity, named in known.named.items()}


def _interpreters(heap: Heap, layout: ObjectLayout, runtime: int) -> list[int]:
    """Returns the interpreters, the oldest first; the oldest is the main interpreter."""
    interpreters: list[int] = []
    at = heap.word(runtime + layout.base.interpreters_head)
    while at and at not in interpreters and len(interpreters) < MAX_INTERPRETERS:
        interpreters.append(at)
        at = heap.word(at + layout.base.interp_next)
    return interpreters[::-1]


def _active(objects: Objects, interpreter: int, known: KnownNames) -> Iterator[tuple[int, int]]:
    """Yields identity and Thread object of each thread that ``threading`` lists."""
    active = known.active.get(interpreter)
    if active is None:
        modules = objects.heap.word(interpreter + objects.layout.interp_modules)
        module = objects.find(objects.entries(modules), "threading") if modules else None
        if module is None:
            return
        active = step(objects, module, "_active")
    known.active.pop(interpreter, None)
    if objects.type_of(active).kind != "dict":
        return
    entries = list(objects.entries(active))
    objects.heap.load_near((key, 32) for _, key, _ in entries)
    for _, key, thread in entries:
        yield objects.integer(key), thread
    known.active[interpreter] = active


def _named(objects: Objects, thread: int) -> _Named | None:
    of = objects.type_of(thread)
    for slot, key, value in objects.instance_entries(thread, of):
        if objects.type_of(key).kind == "str" and objects.text(key, len(_NAME) + 1)[0] == _NAME:
            if objects.type_of(value).kind != "str":
                return None
            text, _ = objects.text(value, MAX_NAME)
            raw = objects.heap.peek(value, _STR_HEAD + len(text))
            return _Named(thread, slot, value, raw[16:], clean_text(text, MAX_NAME)) if text else None
    return None


def _proven(memory: Memory, found: dict[int, _Named]) -> Iterator[tuple[int, _Named]]:
    """Yields the threads whose names are unchanged. The head of a str (reference count, type) is not compared."""
    wanted = [r for n in found.values() for r in ((n.slot, 8), (n.text_at + 16, len(n.raw)))]
    read = memory.read_many(wanted) if wanted else []
    for i, (identity, named) in enumerate(found.items()):
        slot, raw = read[2 * i], read[2 * i + 1]
        if slot is not None and word(slot, 0) == named.text_at and raw == named.raw:
            yield identity, named
