"""Unwinds copied stacks to frames with readable names, in a parser.

A request may lack files. The answer then lists the mappings whose files are needed, and the request is repeated with
their descriptors. The parser keeps the descriptors, so that each file is opened and indexed once.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence

from probing.api.errors import CorruptTarget, UsageError
from probing.daemon.ipc import Message
from probing.daemon.python_stack.native.modules import CodeSpace, FileNeeded, Modules
from probing.daemon.python_stack.native.payload import Captured, StackCopy, Unwound
from probing.daemon.python_stack.native.walk import CFrame, CStack, walk

__all__ = ("Unwinder", "handlers")

_MAX_TEXT = 8 << 20
_MAX_ABSENT = 4096


class Unwinder:
    """Unwinds stacks of all processes of a node. Not thread-safe."""

    def __init__(self) -> None:
        self._modules = Modules()

    def close(self) -> None:
        self._modules.close()

    def unwind(
        self, data: bytes, starts: Sequence[int], fds: Sequence[int], absent: frozenset[int], deadline: float
    ) -> Unwound:
        """Unwinds ``data``, the bytes of ``Captured.encode()``.

        ``fds`` are the files of the mappings at ``starts``, and the caller keeps them. Files of mappings at ``absent``
        cannot be opened. ``deadline`` is a time of time.monotonic(). Raises CorruptTarget for damaged ``data``.
        """
        captured = Captured.decode(data)
        process = (captured.pid, captured.start_ns)
        by_start = {mapping.start: mapping for mapping in captured.mappings}
        for start, fd in zip(starts, fds, strict=True):
            if start not in by_start:
                raise CorruptTarget("a file was passed for a mapping that the process does not have")
            self._modules.add(by_start[start], process, fd)
        space = CodeSpace(captured.mappings, self._modules, process, absent)
        stacks, need = [], set()
        for copy in captured.threads:
            try:
                stacks.append((copy, self._one(copy, space, deadline)))
            except FileNeeded as e:
                need.add(e.mapping.start)
        if need:
            return {"need": sorted(need), "threads": [], "codes": []}
        codes = _Codes(deadline)
        threads = [(copy.tid, [(codes.index(f), f.ip) for f in stack.frames], stack.reason) for copy, stack in stacks]
        return {"need": [], "threads": threads, "codes": codes.listed}

    def _one(self, copy: StackCopy, space: CodeSpace, deadline: float) -> CStack:
        if copy.reason:
            return CStack(reason=copy.reason)
        if time.monotonic() > deadline:
            return CStack(reason="there was no time left")
        return walk(copy, space, deadline)


class _Codes:
    """Function names without duplicates, because the threads of a training job share most frames."""

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self.listed: list[tuple[str, str]] = []
        self._known: dict[tuple[str, str], int] = {}
        self._left = _MAX_TEXT

    def index(self, frame: CFrame) -> int:
        key = _named(frame, in_time=time.monotonic() < self._deadline)
        if key not in self._known:
            self._left -= len(key[0]) + len(key[1])
            if self._left < 0:
                key = ("?", "?")
            if key not in self._known:
                self._known[key] = len(self.listed)
                self.listed.append(key)
        return self._known[key]


def _named(frame: CFrame, *, in_time: bool) -> tuple[str, str]:
    """Returns (name, file) of a frame. If ``in_time`` is False, the deadline has passed, and the name is only the file
    and the address.
    """
    place = frame.place
    if place is None:
        return "?", "?"
    path = place.mapping.path or "[anonymous]"
    if place.module and place.address is not None and in_time:
        if function := place.module.function(place.address):
            return function[0], path
        row = place.module.row(place.address)
        if row is not None and row.signal:
            return "<signal handler called>", path
    at = place.address if place.address is not None else place.offset
    return f"{path.rpartition('/')[2]}+{at:#x}", path


def handlers() -> dict[str, Callable[[Message], bytes]]:
    """Returns the handler of the parser's request ``unwind`` {starts, absent, timeout_ms}. The request has
    ``Captured.encode()`` as payload, and the descriptors of the files of the mappings at ``starts``. The answer is the
    result of ``Unwinder.unwind`` as JSON."""
    unwinder = Unwinder()

    def answer(request: Message) -> bytes:
        starts, absent = request.header.get("starts") or [], request.header.get("absent") or []
        timeout_ms = request.header.get("timeout_ms", 1000)
        numbers = isinstance(starts, list) and isinstance(absent, list) and isinstance(timeout_ms, int | float)
        if not numbers or len(starts) != len(request.fds) or len(absent) > _MAX_ABSENT:
            raise UsageError('the request "unwind" needs a descriptor for each mapping')
        deadline = time.monotonic() + timeout_ms / 1000
        return json.dumps(unwinder.unwind(request.payload, starts, request.fds, frozenset(absent), deadline)).encode()

    return {"unwind": answer}
