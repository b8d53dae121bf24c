"""Evaluates code in a process: maps memory in it, writes the code there, adds a pending call, and reads the answer.

The process is stopped three times: to call mmap, ``Py_AddPendingCall`` (twice), and munmap. If the injector ends in
between, the target goes on unchanged; at worst the memory stays mapped but unused.

The first pending call runs the code. The second one, a function of the C library, clears a mark: then the first is
over, with the destructors and signal handlers that Python ran after the answer.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple, TypedDict

from probing.api.errors import (
    CorruptTarget,
    PrivilegeError,
    ProbingError,
    ProcessGone,
    TargetError,
    TargetTimeout,
    UsageError,
)
from probing.daemon.inject.consent import facts_of
from probing.daemon.inject.moments import Moments
from probing.daemon.inject.places import Functions, Instructions, free_address, instructions_of
from probing.daemon.inject.tracing import Stop, write_memory
from probing.daemon.ipc import Header
from probing.daemon.processes.memory import ProcessMemory
from probing.daemon.processes.procfs import Mapping as Mapped
from probing.daemon.processes.procfs import parse_maps
from probing.daemon.processes.target import MAX_MAPS, Target

__all__ = ("MAX_CODE", "MAX_SECONDS", "SESSION", "Answer", "Evaluation", "Raised", "evaluate")

MAX_CODE, MAX_SECONDS = 64 << 10, 60.0
SESSION = re.compile(r"[0-9a-f]{0,32}")
# The mapped memory starts with the answer, which sdk/evaluate.py writes: a state, a length, and the fields, which begin
# at byte _HEAD. The mark follows at byte _MARK_AT, and the text to run at byte _TEXT_AT.
_HEAD, _MARK_AT, _TEXT_AT = 64, (1 << 20) - 128, 1 << 20
_MARK = b"running\0"
_BEGUN, _DONE = 1, 2
_MMAP, _MUNMAP = 9, 11
# PROT_READ | PROT_WRITE; MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE.
_PROTECTION, _FLAGS = 3, 0x2 | 0x20 | 0x100000
_NOWHERE = (1 << 64) - 1
_MAPPED_S, _CLEAN_S, _GRACE_S = 1.0, 1.0, 1.0
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.0002, 0.005
# The stack is read at each stop. These limits are never reached, so only the deadline bounds the reads.
_MAX_READS, _MAX_READ_BYTES, _MAX_FIELDS = 1 << 30, 1 << 50, 256
# To withdraw the code, the first 1 of the text is overwritten with 0. The text catches all exceptions, because a
# pending call must never raise.
_TEXT = """if 1:
 try:
  (lambda names: (
   __import__('builtins').exec(__import__('builtins').compile({source}, '<probing>', 'exec'), names), names.clear()
  ))({{'__name__': 'probing.evaluate', 'probing_request': {request}}})
 except:
  if __import__('sys').exc_info()[0] is __import__('builtins').KeyboardInterrupt:
   __import__('_thread').interrupt_main()
"""
_SWITCH_AT = _TEXT.index("1")
_WANTED = b"if 1:\n try:"
# The maximum bytes of the text. It contains the source of sdk/evaluate.py and the code. ``ascii`` turns a character of
# the code into at most ten bytes.
_MAX_TEXT = 1 << 20


class Evaluation(NamedTuple):
    """A request to run code in a process. ``uid`` is the real user that the process must have, and ``functions`` has
    the fields of ``Functions``. The code must begin and end within ``seconds``. Code of a ``session`` sees the names
    that earlier code of the same session has assigned; ``ends`` marks the last code of the session.
    """

    pid: int
    start_ns: int
    uid: int
    functions: dict[str, int]
    code: str
    seconds: float
    session: str = ""
    ends: bool = False

    @classmethod
    def from_dict(cls, data: Header) -> Evaluation:
        """Returns the request that the message ``data`` contains. Raises UsageError."""
        try:
            pid, start_ns, uid = int(data["pid"]), int(data["start_ns"]), int(data["uid"])
            functions, code, seconds = dict(data["functions"]), str(data["code"]), float(data["seconds"])
            asked = cls(pid, start_ns, uid, functions, code, seconds, str(data["session"]), bool(data["ends"]))
        except (KeyError, TypeError, ValueError) as e:
            raise UsageError("the request to run code has a missing or malformed field") from e
        if len(asked.code) > MAX_CODE:
            raise UsageError(f"the code has {len(asked.code):,} characters", hint=f"at most {MAX_CODE:,} can be run")
        if not 0 < asked.seconds <= MAX_SECONDS or asked.pid <= 0 or asked.start_ns <= 0:
            raise UsageError("the request to run code has a number out of range")
        if not SESSION.fullmatch(asked.session):
            raise UsageError("the name of a session has at most 32 characters: digits and the letters a to f")
        return asked


class Raised(TypedDict):
    """The exception that the code raised. ``frames`` holds the file, line and function of each frame."""

    type: str
    message: str
    frames: list[tuple[str, int, str]]


class Answer(TypedDict, total=False):
    """What the code in a process answered. ``value`` and ``type`` are set if the code is an expression. ``dropped``
    is the number of characters of output beyond the limit. ``stops`` is how often a thread was stopped for the code.
    """

    value: str
    type: str
    output: str
    dropped: int
    seconds: float
    error: Raised
    stops: int
    longest_stop_us: int


def evaluate(asked: Evaluation) -> Answer:
    """Runs the code in the process's main thread and returns its answer.

    Raises PrivilegeError or UnsupportedTarget if no code may be put into the process. Raises TargetTimeout if the code
    does not end, or was withdrawn because it did not begin in time. Raises ProcessGone and other TargetErrors.
    """
    deadline = time.monotonic() + asked.seconds
    with Target(asked.pid, asked.start_ns) as target:
        memory = ProcessMemory(asked.pid, max_calls=_MAX_READS, max_bytes=_MAX_READ_BYTES)
        maps = parse_maps(target.read("maps", MAX_MAPS))
        functions = Functions.from_dict(asked.functions, maps)
        facts = facts_of(target, memory, maps)
        if facts.uid != asked.uid:
            raise PrivilegeError(f"process {asked.pid} has changed its user", hint="ask again")
        instructions = instructions_of(memory, maps)
        _require_no_code(memory, maps, asked.pid)
        moments = Moments(target, memory, maps, functions, instructions)

        def text(address: int) -> bytes:
            latest = deadline if _same_clock(asked.pid) else 0
            left = round(max(deadline - time.monotonic(), 0.0), 3)
            own = (asked.code, left, latest, facts.pid, facts.filtered, asked.session, asked.ends)
            request = (address, _MARK_AT, *own)
            return _TEXT.format(source=ascii(_source()), request=ascii(request)).encode() + b"\0"

        size = (_TEXT_AT + len(text(_NOWHERE)) + 4095) & -4096
        region = _Region(target, memory, moments, instructions, free_address(maps, size), size)
        region.map(deadline)
        try:
            region.put(_MARK_AT, _MARK)
            region.put(_TEXT_AT, text(region.address))
            region.run(functions, deadline)
            region.wait(deadline)
            data = region.answer()
            region.wait_for_end(deadline)
            answer = _decoded(data)
        finally:
            # Memory that the code may still use stays mapped.
            if region.unused:
                region.unmap()
    return {**answer, "stops": len(moments.stops_us), "longest_stop_us": round(max(moments.stops_us))}


def _require_no_code(memory: ProcessMemory, maps: Sequence[Mapped], pid: int) -> None:
    """Raises TargetTimeout if the pending call of an earlier request still runs in the process after its time limit.

    Our code runs under a trace function, which enforces the time limit. In CPython 3.11 traced code never gets past its
    first instruction while another pending call waits (CHECK_EVAL_BREAKER in DO_TRACING, Python/ceval.c). A call that
    was added while an earlier one ran counts as waiting even when it runs itself: the flag is cleared only before the
    first of the calls (make_pending_calls). So a call is added only when the earlier call is over. ``Evaluations``
    makes concurrent requests wait for each other.
    """
    for mapped in maps:
        if _TEXT_AT < mapped.end - mapped.start <= _TEXT_AT + _MAX_TEXT and not mapped.path:
            parts = (0, 4), (_MARK_AT, len(_MARK)), (_TEXT_AT, len(_WANTED))
            state, mark, text = memory.read_many([(mapped.start + at, size) for at, size in parts])
            begun = state is not None and int.from_bytes(state, "little") in (_BEGUN, _DONE)
            if text == _WANTED and begun and mark == _MARK:
                raise TargetTimeout(
                    f"code of an earlier request still runs in process {pid}",
                    hint="ask again later; `probingctl stacks` shows what the process does",
                )


class _Region:
    """Memory mapped in the process. ``unused``: the process neither uses this memory now nor will use it later."""

    def __init__(
        self,
        target: Target,
        memory: ProcessMemory,
        moments: Moments,
        instructions: Instructions,
        address: int,
        size: int,
    ) -> None:
        self._target = target
        self._memory = memory
        self._moments = moments
        self._instructions = instructions
        self.address = address
        self.size = size
        self.unused = True

    def map(self, deadline: float) -> None:
        arguments = (self.address, self.size, _PROTECTION, _FLAGS, _NOWHERE, 0)
        self._moments.for_system_call(lambda stop: self._system_call(stop, _MMAP, arguments), deadline)
        if not self._waited(mapped=True):
            raise TargetError(
                f"process {self._target.pid} did not map memory for the code in time",
                hint="is its address space limited (ulimit -v)?",
            )

    def put(self, at: int, data: bytes) -> None:
        write_memory(self._target.pid, self.address + at, data)

    def run(self, functions: Functions, deadline: float) -> None:
        code = (functions.run_string, self.address + _TEXT_AT)
        end = (functions.empty_set, self.address + _MARK_AT)

        def act(stop: Stop) -> None:
            # The thread makes the last of these calls first.
            stop.call(functions.add_pending_call, end, self._instructions.restorer)
            self.unused = False
            stop.call(functions.add_pending_call, code, self._instructions.restorer)

        self._moments.for_pending_call(act, deadline)

    def wait(self, deadline: float) -> None:
        """Waits for the answer. Raises TargetTimeout when the code has not begun at ``deadline``, or does not end."""
        pid, pause = self._target.pid, _FIRST_PAUSE_S
        while (state := self._state()) != _DONE:
            now = time.monotonic()
            if now > deadline and state != _BEGUN:
                self.put(_TEXT_AT + _SWITCH_AT, b"0")
                time.sleep(_LAST_PAUSE_S)
                if self._state() == state:
                    raise TargetTimeout(
                        f"the code was withdrawn: the main thread of process {pid} did not begin it in time",
                        hint="`probingctl stacks` and `vars` show what it does, and put nothing into the process",
                    )
            elif now > deadline + _GRACE_S:
                raise TargetTimeout(
                    f"the code still runs in process {pid}: it is in C code, where it cannot be interrupted, or it"
                    " has caught the exception that ends it",
                    hint="`probingctl stacks` shows where the code is; the result of the code will not be read",
                )
            time.sleep(pause)
            pause = min(pause * 1.2, _LAST_PAUSE_S)

    def wait_for_end(self, deadline: float) -> None:
        """Waits until the pending call that ran the code is over; at most until ``deadline``, and _GRACE_S more."""
        pause = _FIRST_PAUSE_S
        with suppress(ProcessGone):
            while self._memory.read_many([(self.address + _MARK_AT, len(_MARK))])[0] == _MARK:
                if time.monotonic() > deadline + _GRACE_S:
                    return
                time.sleep(pause)
                pause = min(pause * 1.2, _LAST_PAUSE_S)
        self.unused = True

    def answer(self) -> bytes:
        head = self._memory.read_many([(self.address, 8)])[0] or bytes(8)
        length = min(int.from_bytes(head[4:], "little"), _MARK_AT - _HEAD)
        return (self._memory.read_many([(self.address + _HEAD, length)])[0] or b"") if length else b""

    def unmap(self) -> None:
        # The code has ended, and its answer counts even if the memory stays mapped.
        with suppress(ProbingError):
            arguments = (self.address, self.size)
            limit = time.monotonic() + _CLEAN_S
            self._moments.for_system_call(lambda stop: self._system_call(stop, _MUNMAP, arguments), limit)
            self._waited(mapped=False)

    def _system_call(self, stop: Stop, number: int, arguments: tuple[int, ...]) -> None:
        stop.call(self._instructions.system_call, arguments, self._instructions.restorer, result=number)

    def _waited(self, *, mapped: bool) -> bool:
        """Waits until the stopped thread has made its call; returns False if that takes longer than _MAPPED_S."""
        limit = time.monotonic() + _MAPPED_S
        while self._is_mapped() != mapped:
            if time.monotonic() > limit:
                return False
            time.sleep(_FIRST_PAUSE_S)
        return True

    def _is_mapped(self) -> bool:
        maps = parse_maps(self._target.read("maps", MAX_MAPS))
        return any((m.start, m.end) == (self.address, self.address + self.size) for m in maps)

    def _state(self) -> int:
        data = None
        with suppress(ProcessGone):
            data = self._memory.read_many([(self.address, 4)])[0]
        if data is None:
            pid = self._target.pid
            raise ProcessGone(f"process {pid} ended, or began another program, before it had answered")
        return int.from_bytes(data, "little")


@cache
def _source() -> str:
    """Returns the text that runs in the process, without its docstring, comments and blank lines."""
    lines = files("probing").joinpath("evaluate.py").read_text("utf-8").partition('"""\n\n')[2].splitlines()
    return "\n".join(line for line in lines if line.strip() and not line.lstrip().startswith("#"))


def _same_clock(pid: int) -> bool:
    # CLOCK_MONOTONIC may differ in another time namespace (time_namespaces(7)).
    try:
        return Path(f"/proc/{pid}/ns/time").stat().st_ino == Path("/proc/self/ns/time").stat().st_ino
    except OSError:
        return True  # a kernel before 5.6 has no such namespace


def _decoded(data: bytes) -> Answer:
    """Returns the fields of the answer. The process may have written anything. Raises CorruptTarget."""
    answer: Answer = {}
    error: Raised = {"type": "", "message": "", "frames": []}
    for key, text in _pairs(data):
        if key == "value":
            answer["value"] = text
        elif key == "type":
            answer["type"] = text
        elif key == "output":
            answer["output"] = text
        elif key == "error":
            error["type"] = text
            answer["error"] = error
        elif key == "message":
            error["message"] = text
        elif key == "frame":
            file, line, function = [*text.split("\0"), "", ""][:3]
            error["frames"].append((file, int(line) if line.isdecimal() and len(line) < 10 else 0, function))
        elif key == "dropped" and text.isdecimal():
            answer["dropped"] = int(text[:18])
        elif key == "seconds":
            with suppress(ValueError):
                answer["seconds"] = seconds if math.isfinite(seconds := float(text)) else 0.0
    return answer


def _pairs(data: bytes) -> Iterator[tuple[str, str]]:
    texts: list[str] = []
    at = 0
    while at < len(data) and len(texts) < 2 * _MAX_FIELDS:
        end = at + 4 + int.from_bytes(data[at : at + 4], "little")
        if at + 4 > len(data) or end > len(data):
            raise CorruptTarget("the answer of the code is malformed")
        texts.append(data[at + 4 : end].decode("utf-8", "replace"))
        at = end
    return zip(texts[::2], texts[1::2], strict=False)
