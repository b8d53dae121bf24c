"""Finds which torch modules a thread runs at this moment: the reader's request ``modules``.

A module runs while a frame of its ``forward``, or of a function of torch that calls ``forward``, is on the stack. The
first argument of these functions is the module. It is read together with the code of the frame.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import WeakKeyDictionary

from probing.api.errors import CorruptTarget, UsageError
from probing.daemon.ipc import Header
from probing.daemon.processes.memory import Memory, ProcessMemory
from probing.daemon.python_stack.torch_modules.naming import KnownModules, ModuleNames
from probing.daemon.python_stack.values.frames import Frames
from probing.daemon.python_stack.values.heap import CHANGED, Heap, Torn
from probing.daemon.python_stack.values.layout import ObjectLayout, object_layout
from probing.daemon.python_stack.values.objects import Objects
from probing.daemon.python_stack.walk.capture import Known, Prepared, capture, forget, parse_request, prepared
from probing.daemon.python_stack.walk.codes import Code
from probing.daemon.python_stack.walk.locate import RuntimeInfo
from probing.daemon.python_stack.walk.snapshot import word
from probing.daemon.python_stack.walk.threads import KernelThread, check_process, match_threads, read_thread
from probing.daemon.python_stack.walk.walker import RawFrame, RawThread

__all__ = ("handlers", "look")

# Functions of modules (torch/nn/modules/module.py), and of autograd (torch/_tensor.py, torch/autograd).
_OF_MODULES = frozenset(("forward", "_call_impl", "_wrapped_call_impl"))
_OF_BACKWARD = frozenset(("backward", "_engine_run_backward"))
# A stack that does not change is proven at once. With more attempts, a stack that changes would be proven at the next
# moment at which it rests, and modules that call many short functions would get too few samples (measured).
_ATTEMPTS = 2
_CAPTURES = 3
_MAX_OTHERS = 16


class _Frame(NamedTuple):
    """A frame. ``function``: the name of its function; ``first``: the value of its first variable, 0 if unset."""

    raw: RawFrame
    function: str
    first: int


_Stack = list[_Frame]


@dataclass(slots=True)
class _KnownProcess:
    """What earlier requests read of a process: hints for the next walk, and its modules."""

    stacks: Known = field(default_factory=Known)
    modules: KnownModules = field(default_factory=KnownModules)


_known_of: WeakKeyDictionary[Prepared, _KnownProcess] = WeakKeyDictionary()


def look(
    pid: int, start_ns: int, runtime: RuntimeInfo, tid: int, deadline: float, memory: Memory | None = None
) -> Header:
    """Returns the modules that the thread ``tid`` of a process runs, outermost first.

    ``{"stage", "modules": [[model, path, class], ...], "reads", "bytes", "duration_ns"}``, see
    ``naming.TorchModule``. ``stage``: backward while the thread runs or awaits autograd, else forward while a module
    runs, else other. In the backward pass, the modules can be those that another thread recomputes.

    ``deadline`` is a time of time.monotonic(). Raises CorruptTarget if the stack changed during every read, and the
    errors of ``dump_stacks``.
    """
    began = time.monotonic_ns()
    memory = memory or ProcessMemory(pid)
    check_process(pid, start_ns)
    process = prepared(pid, start_ns, runtime, memory)
    known = _known_of.setdefault(process, _KnownProcess())
    layout = object_layout(process.layout, process.head)
    try:
        stack, others = _stacks(memory, process, layout, known.stacks, read_thread(pid, tid), deadline)
    except Torn:
        raise
    except CorruptTarget:
        forget(pid, start_ns)
        raise
    objects = Objects(Heap(memory, deadline), layout)
    names = ModuleNames(objects, known.modules)
    backward = any(frame.function in _OF_BACKWARD for frame in stack)
    modules = names.of(_first_arguments(stack, objects))
    for other in others if backward else ():
        modules = modules or names.of(_first_arguments(other, objects))
    check_process(pid, start_ns)
    return {
        "stage": "backward" if backward else "forward" if modules else "other",
        "modules": modules,
        "reads": memory.calls,
        "bytes": memory.bytes_read,
        "duration_ns": time.monotonic_ns() - began,
    }


def handlers() -> dict[str, Callable[[Header], Header]]:
    """Returns the handler of the reader's request ``modules`` {pid, start_ns, runtime, tid, timeout_ms}: ``look``."""
    return {"modules": _modules}


def _modules(request: Header) -> Header:
    asked = parse_request(request)
    tid = request.get("tid")
    if not isinstance(tid, int):
        raise UsageError("a request for modules needs the tid of a thread")
    return look(asked.pid, asked.start_ns, RuntimeInfo.from_dict(request.get("runtime") or {}), tid, asked.deadline)


def _stacks(
    memory: Memory, process: Prepared, layout: ObjectLayout, known: Known, kernel: KernelThread, deadline: float
) -> tuple[_Stack, list[_Stack]]:
    """Returns the stack of the thread ``kernel``, empty if it runs no Python, and stacks of other threads."""
    walked = process.layout._replace(frame_size=max(process.layout.frame_size, layout.frame_slots + 8))
    for _ in range(_CAPTURES):
        captured = capture(memory, process.runtime.runtime, walked, deadline, known, attempts=_ATTEMPTS)
        ours: list[_Stack] = []
        others: list[_Stack] = []
        spoilt = False
        tids = match_threads([thread for thread, _ in captured.threads], [kernel])
        for tid, (thread, codes) in zip(tids, captured.threads, strict=True):
            if thread.frames:
                (others if tid is None else ours).append(_frames(thread, codes, layout))
            spoilt = spoilt or (tid is not None and not _is_usable(thread, codes))
        if not spoilt:
            # A thread has a stack in each interpreter that it entered.
            return (ours or [[]])[0], others[:_MAX_OTHERS]
    raise Torn(CHANGED)


def _is_usable(thread: RawThread, codes: dict[int, Code]) -> bool:
    """Returns whether a stack is proven, or at least plausible: a stack that changes all the time is never proven."""
    if thread.complete:
        return True
    read = [codes.get(frame.code) for frame in thread.frames]
    return bool(read) and not thread.torn and all(code is not None and not code.cut for code in read)


def _frames(thread: RawThread, codes: dict[int, Code], layout: ObjectLayout) -> _Stack:
    read = {address: data for (address, _), _, data in thread.links}
    stack = []
    for frame in thread.frames:
        function = codes[frame.code].func.rpartition(".")[2] if frame.code in codes else ""
        stack.append(_Frame(frame, function, word(read[frame.address], layout.frame_slots)))
    return stack


def _first_arguments(stack: _Stack, objects: Objects) -> list[int]:
    """Returns the first arguments of the frames of modules, outermost first."""
    base, arguments = objects.layout.base, list[int]()
    for frame in reversed(stack):
        if frame.function not in _OF_MODULES:
            continue
        if not frame.first and base.version < (3, 11):
            # Up to 3.10, an argument that an inner function uses is moved into a cell behind the variables.
            with suppress(Torn):
                arguments.append(Frames(objects).first(frame.raw))
        elif not base.tag_mask or frame.first & 3 != 3:
            # Two set low bits would mean a tagged int, which is not an object (_PyStackRef, 3.14+).
            arguments.append(frame.first & ~base.tag_mask)
    return arguments
