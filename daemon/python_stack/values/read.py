"""Reads variables of a running process by name: the reader's request ``vars``."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import NamedTuple, TypeVar

from probing.api.errors import CorruptTarget, UsageError
from probing.daemon.ipc import Header
from probing.daemon.processes.memory import Memory, ProcessMemory
from probing.daemon.processes.redaction import names_secret
from probing.daemon.python_stack.values.attributes import walk
from probing.daemon.python_stack.values.frames import NAME_IS_SECRET, Frames
from probing.daemon.python_stack.values.heap import CHANGED, Heap, Torn
from probing.daemon.python_stack.values.layout import object_layout
from probing.daemon.python_stack.values.names import Name, parse_names
from probing.daemon.python_stack.values.objects import Objects
from probing.daemon.python_stack.values.render import HIDDEN, Renderer, Value
from probing.daemon.python_stack.walk.capture import capture, parse_request, prepared
from probing.daemon.python_stack.walk.locate import RuntimeInfo
from probing.daemon.python_stack.walk.threads import check_process, match_threads, read_threads
from probing.daemon.python_stack.walk.walker import RawFrame
from probing.daemon.stack_wire import CUT, MAX_BYTES, VARIABLE_BYTES, NamedVariable, json_bytes

__all__ = ("MAX_ROWS", "handlers", "read_values")

MAX_ROWS = 256
ATTEMPTS = 4
# The maximum number of reads of a value before the stacks are read again.
RETAKES = 4
_MAX_CALLS = 20_000
_MAX_BYTES = 96 << 20
MAX_INTERPRETERS = 64
_Found = TypeVar("_Found")


class _Thread(NamedTuple):
    tid: int
    frames: list[tuple[RawFrame, str]]


class _Place(NamedTuple):
    """The place of a name: ``parts`` are resolved from the object at ``address``. ``look`` finds ``address`` again,
    because the variable may refer to another object by now."""

    tid: int
    func: str
    look: Callable[[], int | None]
    address: int
    parts: tuple[str | int, ...]


def read_values(
    pid: int,
    start_ns: int,
    runtime: RuntimeInfo,
    names: list[str],
    deadline: float,
    memory: Memory | None = None,
    *,
    threads: Collection[int] | None = None,
) -> Header:
    """Returns the variables ``names`` of a process, each from the innermost frame of each thread that has it.

    ``{"values": [{"tid", "func", "name", "type", "value", "number", "reason"}], "reads", "bytes", "duration_ns"}``. The
    values, at most 256, are in the order of ``names``; for each name the main thread comes first. A global is used only
    if the thread has no such local, and gives one value for all threads. ``func`` is the function or module that holds
    the variable. ``value`` is text as Python writes it, or None with a ``reason``; ``number`` is a float for numbers
    and tensors of one element. A name that no thread has gets one value, with the reason. All values are of one moment
    if a few attempts can achieve this. If ``threads`` is given, only the threads with these tids are searched.

    ``deadline`` is a time of time.monotonic(). Raises UsageError for text that is no name, and the errors of
    ``dump_stacks``.
    """
    began = time.monotonic_ns()
    parsed = parse_names(names)
    memory = memory or ProcessMemory(pid, max_calls=_MAX_CALLS, max_bytes=_MAX_BYTES)
    check_process(pid, start_ns)
    reading = _Reading(pid, start_ns, runtime, deadline, memory)
    by_name: dict[Name, list[NamedVariable]] = {}
    for _ in range(ATTEMPTS):
        looked = time.monotonic()
        reading.look(threads)
        for name in parsed:
            rows = reading.rows(name)
            if name not in by_name or _unproven(by_name[name]) or not _unproven(rows):
                by_name[name] = rows
        if not any(map(_unproven, by_name.values())) and (len(parsed) == 1 or reading.held_together()):
            break
        if 2 * time.monotonic() - looked > deadline:
            # A further attempt would take as long as this attempt, and end after the deadline.
            break
    check_process(pid, start_ns)
    return {
        "values": _fitting([row for name in parsed for row in by_name[name]][:MAX_ROWS]),
        "reads": memory.calls,
        "bytes": memory.bytes_read,
        "duration_ns": time.monotonic_ns() - began,
    }


def handlers() -> dict[str, Callable[[Header], Header]]:
    """Returns the handler of the reader's request ``vars`` {pid, start_ns, runtime, names, timeout_ms, threads}; see
    ``read_values``.
    """
    return {"vars": _vars}


def _vars(request: Header) -> Header:
    asked = parse_request(request)
    runtime = RuntimeInfo.from_dict(request.get("runtime") or {})
    threads = request.get("threads")
    if threads is not None and not (isinstance(threads, list) and all(isinstance(tid, int) for tid in threads)):
        raise UsageError("the threads of a request for variables must be a list of tids")
    names = request.get("names") or []
    return read_values(asked.pid, asked.start_ns, runtime, names, asked.deadline, threads=threads)


class _Reading:
    """The threads at the last ``look``, and the variables read from them."""

    def __init__(self, pid: int, start_ns: int, runtime: RuntimeInfo, deadline: float, memory: Memory) -> None:
        self._pid = pid
        self._deadline = deadline
        self._memory = memory
        self._runtime = runtime
        self._process = prepared(pid, start_ns, runtime, memory)
        self._objects = Objects(Heap(memory, deadline), object_layout(self._process.layout, self._process.head))
        self._renderer = Renderer(self._objects)
        self._frames = Frames(self._objects)
        self._threads: list[_Thread] = []
        self._whole = False
        self._changed = False

    def look(self, only: Collection[int] | None) -> None:
        """Reads the current stacks of the threads with the tids ``only``, or of all threads if ``only`` is None."""
        process = self._process
        captured = capture(self._memory, self._runtime.runtime, process.layout, self._deadline, process.known)
        tids = match_threads([t for t, _ in captured.threads], read_threads(self._pid))
        threads = []
        self._whole = captured.complete
        for tid, (thread, codes) in zip(tids, captured.threads, strict=True):
            frames = [(f, codes[f.code].func) for f in thread.frames if f.code in codes]
            if tid is not None and (only is None or tid in only):
                self._whole &= thread.complete and len(frames) == len(thread.frames)
                if frames:
                    threads.append(_Thread(tid, frames))
        self._threads = sorted(threads, key=lambda t: t.tid != self._pid)
        self._objects.refresh()
        self._frames = Frames(self._objects)
        self._frames.load(frame for t in threads for frame, _ in t.frames)

    def held_together(self) -> bool:
        """Returns whether all values since the last ``look`` are of one moment, as a step and its loss must be."""
        return self._objects.heap.held_together()

    def rows(self, name: Name) -> list[NamedVariable]:
        """Returns a row for each thread that has ``name``, or one row with the reason why no thread has it."""
        # The frame with the variable may be missing in a stack that changed while it was read.
        self._changed = not self._whole and not name.module
        rows = []
        for place in self._in_modules(name) if name.module else self._in_threads(name):
            rows.append(_answer(place.tid, place.func, name, self._value(name, place)))
            if len(rows) >= MAX_ROWS:
                break
        if rows:
            return rows
        reason = f"there is no variable {name.first!r} in any frame"
        if name.module:
            reason = f"no module {name.first!r} was imported"
        return [_answer(self._pid, "", name, Value("", None, None, CHANGED if self._changed else reason))]

    def _value(self, name: Name, place: _Place) -> Value:
        if any(names_secret(part) for part in (name.first, *name.parts) if isinstance(part, str)):
            return Value("", HIDDEN, None, NAME_IS_SECRET)
        address: int | None = place.address
        reason = ""
        for _ in range(RETAKES):
            value = self._once(address, place.parts)
            if self._objects.heap.held() and value.reason != CHANGED:
                if value.reason == reason:
                    self._objects.heap.keep()
                    return value
                # An object under construction has no attributes yet, so a reason is accepted only when it repeats.
                reason = value.reason
                self._objects.heap.reread()
            address = self._begin(place.look)
        return Value("", None, None, CHANGED)

    def _once(self, address: int | None, parts: tuple[str | int, ...]) -> Value:
        if address is None:
            return Value("", None, None, CHANGED)
        try:
            return self._renderer.value(walk(self._objects, address, parts))
        except Torn:
            return Value("", None, None, CHANGED)
        except CorruptTarget as e:
            return Value("", None, None, e.message)

    def _in_threads(self, name: Name) -> Iterator[_Place]:
        seen = set[int]()
        for thread in self._threads:
            place = self._local(thread, name) or self._global(thread, name, seen)
            if place is not None:
                yield place

    def _local(self, thread: _Thread, name: Name) -> _Place | None:
        for frame, func in thread.frames:
            look = partial(self._frames.local, frame, name.first)
            if (found := self._begin(look)) is not None:
                return _Place(thread.tid, func, look, found, name.parts)
        return None

    def _global(self, thread: _Thread, name: Name, seen: set[int]) -> _Place | None:
        for frame, _ in thread.frames:
            where = self._begin(partial(self._frames.globals_of, frame))
            if not where or where in seen:
                continue
            seen.add(where)
            func = self._begin(partial(self._name_of_globals, where))
            look = partial(self._in_globals, frame, name.first)
            if (found := self._begin(look)) is not None:
                return _Place(thread.tid, func or "?", look, found, name.parts)
        return None

    def _name_of_globals(self, where: int) -> str:
        name = self._objects.find(self._objects.entries(where), "__name__")
        return self._renderer.string_of(name) if name else "?"

    def _in_globals(self, frame: RawFrame, name: str) -> int | None:
        return self._objects.find(self._objects.entries(self._frames.globals_of(frame)), name)

    def _in_modules(self, name: Name) -> Iterator[_Place]:
        """Yields the imported module whose name is the longest prefix of ``name``, from the first interpreter with such
        a module.
        """
        names = [str(part) for part in (name.first, *name.parts)]
        for interpreter in self._interpreters():
            for n in range(len(names), 0, -1):
                look = partial(self._module, interpreter, ".".join(names[:n]))
                if (found := self._begin(look)) is not None:
                    yield _Place(self._pid, ".".join(names[:n]), look, found, name.parts[n - 1 :])
                    return

    def _module(self, interpreter: int, name: str) -> int | None:
        objects = self._objects
        modules = objects.heap.word(interpreter + objects.layout.interp_modules)
        return objects.find(objects.entries(modules), name) if objects.type_of(modules).kind == "dict" else None

    def _interpreters(self) -> list[int]:
        """Returns the interpreters, the oldest first, which is the main interpreter."""
        layout, heap = self._process.layout, self._objects.heap
        interpreters: list[int] = []
        at = heap.word(self._runtime.runtime + layout.interpreters_head)
        while at and at not in interpreters and len(interpreters) < MAX_INTERPRETERS:
            interpreters.append(at)
            at = heap.word(at + layout.interp_next)
        return interpreters[::-1]

    def _begin(self, look: Callable[[], _Found]) -> _Found | None:
        # New notes begin here, so that they contain the path to the value.
        self._objects.heap.begin()
        try:
            return look()
        except CorruptTarget as e:
            self._changed = self._changed or isinstance(e, Torn)
            return None


def _unproven(rows: list[NamedVariable]) -> bool:
    return any(row["reason"] == CHANGED for row in rows)


def _fitting(rows: list[NamedVariable]) -> list[NamedVariable]:
    """Returns the rows. Values that no longer fit into one message are removed from their rows."""
    left = MAX_BYTES
    for row in rows:
        # A row without its value takes a few hundred bytes. The limit leaves room for such rows.
        left -= VARIABLE_BYTES + json_bytes(row["func"], row["name"], row["type"], row["value"] or "", row["reason"])
        if left < 0:
            row["value"], row["number"], row["reason"], row["func"] = None, None, CUT, ""
    return rows


def _answer(tid: int, func: str, name: Name, value: Value) -> NamedVariable:
    type_, text, number, reason = value.type, value.text, value.number, value.reason
    return {
        "tid": tid,
        "func": func,
        "name": name.text,
        "type": type_,
        "value": text,
        "number": number,
        "reason": reason,
    }
