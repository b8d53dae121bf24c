"""Runs in a watched process: evaluates code in its main thread and writes the answer to memory that the daemon reads.

The daemon sends this text itself; no process imports it. It works on CPython 3.8 to 3.15, imports nothing but built-in
modules that the interpreter has loaded, starts no thread, opens no socket, keeps no file open, and leaves no name.
``probing_request`` is set by the daemon: (address, size, code, seconds, latest start on time.monotonic() or 0, pid,
whether system calls are filtered, session or "", and whether the session ends). The names of a session, which code has
assigned, stay in a dict of the module ``sys`` until the session ends.
"""

from __future__ import annotations

import _thread
import posix
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import FrameType
    from typing import Any

    probing_request: tuple[int, int, str, float, float, int, bool, str, bool]

BEGUN, DONE = b"\1\0\0\0", b"\2\0\0\0"
# Where the answer begins; before it are the state and the length, 4 bytes each.
HEAD = 64
MAX_OUTPUT, MAX_TEXT, MAX_FRAMES, MAX_ITEMS = 256 << 10, 64 << 10, 64, 1000
FILE = "<eval>"
# CO_GENERATOR, CO_COROUTINE and CO_ASYNC_GENERATOR of Include/cpython/code.h.
SUSPENDED = 0x20 | 0x80 | 0x200
SESSIONS, MAX_SESSIONS = "__probing_sessions__", 4


def output_to(stream: Any, parts: list[str], left: list[int]) -> Any:
    """Returns a file that keeps what the main thread prints; other threads go on printing to ``stream``.

    It is no class: a class is a cycle of references, which stays in memory if the garbage collector is off.
    """
    thread = _thread.get_ident()

    def write(text: str) -> int:
        if _thread.get_ident() != thread:
            return int(stream.write(text))
        kept = str(text)[: left[0]]
        left[0] -= len(kept)
        left[1] += len(text) - len(kept)
        if kept:
            parts.append(kept)
        return len(text)

    def writelines(lines: Iterable[str]) -> None:
        for line in lines:
            write(line)

    def flush() -> None:
        if _thread.get_ident() != thread and stream is not None:
            stream.flush()

    fixed = {"encoding": "utf-8", "errors": "replace", "closed": False, "isatty": bool, "writable": lambda: True}
    namespace: Any = type(sys.implementation)
    return namespace(write=write, writelines=writelines, flush=flush, **fixed)


def by_ctypes(address: int, data: bytes) -> None:
    sys.modules["ctypes"].memmove(address, data, len(data))


def by_file(address: int, data: bytes) -> None:
    fd = posix.open("/proc/self/mem", posix.O_RDWR | posix.O_CLOEXEC)
    try:
        posix.lseek(fd, address, 0)
        posix.write(fd, data)
    finally:
        posix.close(fd)


def text_of(value: Any, limit: int = MAX_TEXT) -> str:
    """Returns repr(value), or its begin if the text or collection is long."""
    kind = type(value)
    try:
        if kind in (str, bytes, bytearray) and len(value) > limit:
            return repr(value[:limit])[:limit] + "..."
        if kind in (list, tuple) and len(value) > MAX_ITEMS:
            return f"{repr(value[:MAX_ITEMS])[: limit - 1]}... ({len(value)} items)"
        if kind in (dict, set, frozenset) and len(value) > MAX_ITEMS:
            return f"{kind.__name__} of {len(value)} items, first of them: {repr(first_of(value))[:limit]}"
        text = repr(value)
    except Exception as e:
        return f"<{name_of(kind)} whose repr raised {name_of(type(e))}>"
    return text if len(text) <= limit else text[:limit] + "..."


def first_of(items: Iterable[Any]) -> list[Any]:
    found: list[Any] = []
    for item in items:
        if len(found) == MAX_ITEMS:
            break
        found.append(item)
    return found


def name_of(kind: type) -> str:
    name = str(getattr(kind, "__qualname__", kind))
    module = getattr(kind, "__module__", "builtins")
    return name if module == "builtins" else f"{module}.{name}"


def message_of(error: BaseException) -> str:
    try:
        return str(error)[:MAX_TEXT]
    except Exception:
        return ""


def fields_of(error: BaseException) -> Iterator[tuple[str, str]]:
    """Yields the fields of an exception: its class, its text, and a line for each frame outside this file."""
    yield "error", name_of(type(error))
    yield "message", message_of(error)
    step, left = error.__traceback__, MAX_FRAMES
    while step is not None and left:
        code = step.tb_frame.f_code
        if code.co_filename != "<probing>":
            yield "frame", f"{code.co_filename}\0{step.tb_lineno}\0{code.co_name}"
            left -= 1
        step = step.tb_next


def limit(frame: FrameType, event: str, argument: Any) -> Any:
    """The trace function: ends code that runs past ``end_of_code``. Called for each instruction, and for each line and
    each function of other files.
    """
    del event, argument
    if time.monotonic() > globals()["end_of_code"]:
        globals()["is_overdue"] = True
        raise GeneratorExit
    if frame.f_code.co_filename != FILE:
        # A generator of the program would keep the trace function.
        return None if frame.f_code.co_flags & SUSPENDED else limit
    # Up to 3.11 lines do not show that ``while True: pass`` runs on, and an exception of the call for a line is lost
    # when one for an instruction follows (maybe_call_line_trace in Python/ceval.c). From 3.12 on lines show all.
    frame.f_trace_opcodes = sys.version_info < (3, 12)
    frame.f_trace_lines = not frame.f_trace_opcodes
    return limit


def compiled(code: str) -> Any:
    try:
        return compile(code, FILE, "eval", dont_inherit=True)
    except SyntaxError:
        return compile(code, FILE, "exec", dont_inherit=True)


def fields_of_value(code: Any, names: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns the fields of the value of the code, or of its exception: their texts may take code of the program."""
    try:
        value = eval(code, names)  # noqa: S307
        return [] if value is None else [("value", text_of(value)), ("type", name_of(type(value)))]
    except Exception as error:
        return list(fields_of(error))


def limited(code: Any, names: dict[str, Any], seconds: float) -> list[tuple[str, str]]:
    """Returns ``fields_of_value``. If a debugger has set a trace function, it stays, and no time limit applies."""
    if sys.gettrace() is not None:
        return fields_of_value(code, names)
    globals()["end_of_code"] = time.monotonic() + seconds
    sys.settrace(limit)
    try:
        return fields_of_value(code, names)
    finally:
        sys.settrace(None)


def evaluate(code: str, names: dict[str, Any], seconds: float) -> Iterator[tuple[str, str]]:
    """Yields the fields of the answer: the value of an expression, the printed text, an exception."""
    parts: list[str] = []
    left = [MAX_OUTPUT, 0]
    before, mine = (sys.stdout, sys.stderr), (output_to(sys.stdout, parts, left), output_to(sys.stderr, parts, left))
    begun = time.monotonic()
    try:
        sys.stdout, sys.stderr = mine
        try:
            yield from limited(compiled(code), names, seconds)
        finally:
            if sys.stdout is mine[0]:
                sys.stdout = before[0]
            if sys.stderr is mine[1]:
                sys.stderr = before[1]
    except KeyboardInterrupt as error:
        # The interrupt was meant for the program.
        yield from fields_of(error)
        _thread.interrupt_main()
    except BaseException as error:
        if globals().get("is_overdue"):
            yield "error", "TimeoutError"
            yield "message", f"it ran for longer than {seconds:g} s and was ended"
        else:
            yield from fields_of(error)
    yield "seconds", f"{time.monotonic() - begun:.6f}"
    yield "output", "".join(parts)
    yield "dropped", str(left[1])


def packed(fields: Iterable[tuple[str, str]], limit: int) -> bytes:
    """Returns all texts, each after its length; a field that does not fit into ``limit`` bytes is left out."""
    data = b""
    for pair in fields:
        row = b"".join(len(raw).to_bytes(4, "little") + raw for raw in (t.encode("utf-8", "replace") for t in pair))
        if len(data) + len(row) <= limit:
            data += row
    return data


def names_of(session: str) -> dict[str, Any]:
    """Returns the names that the code sees: those of ``__main__``, and those that the session has assigned."""
    main = sys.modules["__main__"].__dict__
    if not session:
        return dict(main)
    sessions: dict[str, tuple[dict[str, Any], set[str]]] = sys.__dict__.setdefault(SESSIONS, {})
    names, assigned = sessions.pop(session, ({}, set()))
    sessions[session] = names, assigned
    for old in list(sessions)[:-MAX_SESSIONS]:
        end(old)
    names.update((name, value) for name, value in main.items() if name not in assigned)
    return names


def keep(session: str, names: dict[str, Any]) -> None:
    """Notes which names the code of a session has assigned."""
    main, missing = sys.modules["__main__"].__dict__, object()
    changed = (name for name, value in names.items() if main.get(name, missing) is not value)
    sys.__dict__[SESSIONS][session][1].update(changed)


def end(session: str) -> None:
    """Drops the names of a session; the last session leaves nothing."""
    del sys.__dict__[SESSIONS][session]
    if not sys.__dict__[SESSIONS]:
        del sys.__dict__[SESSIONS]


def answer() -> None:
    address, size, code, seconds, latest, pid, filtered, session, ends = probing_request  # noqa: F821 - the daemon's
    write: Callable[[int, bytes], None] = by_file
    if "ctypes" in sys.modules:
        write = by_ctypes
    elif filtered:
        return
    # A child that was forked in the meantime must not answer.
    if (not filtered and posix.getpid() != pid) or (latest and time.monotonic() > latest):
        return
    write(address, BEGUN)
    names = names_of(session)
    # If the program has changed its command line, only ``sys.flags`` tells that it runs in isolated mode.
    refusal = (("error", "PermissionError"), ("message", "it was started in isolated mode (python -I)"))
    data = packed(refusal if sys.flags.isolated else evaluate(code, names, seconds), size - HEAD)
    write(address + HEAD, data)
    write(address + 4, len(data).to_bytes(4, "little"))
    if session:
        end(session) if ends else keep(session, names)
    write(address, DONE)
    if session:
        return
    # Functions of the code hold its names, and the names hold the functions: without the garbage collector both would
    # stay. A function that something else holds was left behind on purpose, and needs its names.
    control: list[Any] = [lambda: None]
    alone = {"control": control[0]}
    own = [value for value in names.values() if type(value) is type(answer) and value.__globals__ is names]
    kept = any(holders_of(own, at) != holders_of(control, 0) for at in range(len(own)))
    if own and not kept and sys.getrefcount(names) - sys.getrefcount(alone) == len(own):
        names.clear()


def holders_of(values: list[Any], at: int) -> int:
    return sys.getrefcount(values[at])


if "probing_request" in globals():
    answer()
