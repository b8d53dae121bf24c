"""Adds C frames to stacks on demand: a reader copies the stacks, a parser unwinds them, and ``merge`` joins C and
Python frames.

In the joined stack a run of Python frames replaces the C frames of one call of the interpreter loop. A Python frame
with ``entry`` is the outermost of its run, so the runs correspond to the calls, counted from the innermost.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Sequence

from probing.api.errors import CorruptTarget, InternalError, NotPython, ProbingError, TargetTimeout, UnsupportedTarget
from probing.daemon.processes.parsers import ParserPool, answer_of
from probing.daemon.processes.reader_pool import GRACE_S, ReaderPool, seconds_left
from probing.daemon.python_stack.native.payload import Captured, CodeMapping, Unwound
from probing.daemon.python_stack.walk.locate import RuntimeInfo
from probing.daemon.stack_wire import Frame, Thread, unpack

__all__ = (
    "NativeStacks",
    "merge",
)

# Compilers split functions and name the parts .cold, .constprop.0, .lto_priv.0 and so on.
_LOOP = re.compile(r"_PyEval_EvalFrameDefault(?:\.[\w.]+)?(?: \(\.[\w.]+\))*")
# CPython 3.14 can be built with a function for each instruction; the functions jump to each other, not to the loop.
_INSTRUCTION = re.compile(r"_TAIL_CALL_\w+(?:\.[\w.]+)*")


def merge(python: Sequence[Frame], native: Sequence[Frame], reason: str) -> tuple[list[Frame], str]:
    """Returns the joined frames, innermost first, and the reason why native frames are missing, or "".

    ``reason``: why outer frames of ``native`` are missing; empty for a whole stack. If the two stacks do not match, the
    result has the native frames inside the innermost call of the loop, and after them the whole Python stack.
    """
    if not python:
        return list(native), reason
    if not native:
        return list(python), reason or "the thread has no native frames"
    runs = _runs(python)
    loops = _loops(native)
    if len(loops) > len(runs) or (len(loops) < len(runs) and not reason) or not loops:
        first = loops[0][0] if loops else len(native)
        return [*native[:first], *python], reason or "its Python and native frames do not fit together"
    merged: list[Frame] = []
    at = 0
    for (start, end), run in zip(loops, runs, strict=False):
        merged += native[at:start]
        merged += run
        at = end
    merged += native[at:]
    for run in runs[len(loops) :]:
        merged += run
    return merged, reason


def _runs(python: Sequence[Frame]) -> list[list[Frame]]:
    runs: list[list[Frame]] = [[]]
    for frame in python:
        runs[-1].append(frame)
        if frame.get("entry"):
            runs.append([])
    return [run for run in runs if run]


def _loops(native: Sequence[Frame]) -> list[tuple[int, int]]:
    """Returns [start, end) of the frames of each call of the loop."""
    loops: list[tuple[int, int]] = []
    at = 0
    while at < len(native):
        start = at
        if _INSTRUCTION.fullmatch(native[at]["func"]):
            at += 1
        if at < len(native) and _LOOP.fullmatch(native[at]["func"]):
            at += 1
        if at > start:
            loops.append((start, at))
        else:
            at += 1
    return loops


# The maximum number of descriptors in one message (daemon/ipc.py).
_MAX_FDS = 16
# The maximum number of rounds for a request. Each round finds the next missing file of every stack, and a stack passes
# through few files.
_MAX_ROUNDS = 64
# The maximum number of times that another parser may take over during a request. The new parser lacks the files that
# were given to its predecessor.
_MAX_REPLACED = 1
_REASONS = {
    "runs": "it runs, and only a thread that is blocked can be read without stopping it",
    "gone": "it ended",
    "refused": "its registers or its stack cannot be read",
    "limit": "the process has too many threads with large stacks",
}


class NativeStacks:
    """Adds native frames to stacks. Thread-safe. ``prepare`` is ``PythonStacks.prepare``, which finds the CPython of a
    process.
    """

    def __init__(
        self, readers: ReaderPool, parsers: ParserPool, prepare: Callable[[int, int, float], RuntimeInfo]
    ) -> None:
        self._readers = readers
        self._parsers = parsers
        self._prepare = prepare

    def add(self, pid: int, start_ns: int, threads: list[Thread], timeout: float) -> None:
        """Adds native frames to ``threads``, the threads of one process from ``PythonStacks.stacks``.

        Each thread gets ``native_missing``: why native frames are missing, or "". No ProbingError is raised. The Python
        frames of a blocked thread are read again, at the same moment as its C stack. The call takes at most ``timeout``
        seconds, and one second more if the process cannot be read.
        """
        deadline = time.monotonic() + timeout
        try:
            unwound, python = self._read(pid, start_ns, threads, deadline)
        except ProbingError as e:
            for thread in threads:
                thread["native_missing"] = e.message
            return
        for thread in threads:
            frames, reason = unwound.get(thread["tid"], ([], "gone"))
            if again := python.get(thread["tid"]):
                thread["gil"], thread["state"] = again["gil"], again["state"]
                thread["complete"], thread["frames"] = again["complete"], again["frames"]
            thread["frames"], reason = merge(thread["frames"], frames, _explained(reason))
            thread["native_missing"] = reason

    def _read(
        self, pid: int, start_ns: int, threads: list[Thread], deadline: float
    ) -> tuple[dict[int, tuple[list[Frame], str]], dict[int, Thread]]:
        """Returns two dicts by tid: one of (native frames, why outer frames are missing), and one of the Python stacks
        from the same moment.
        """
        runtime = None
        if any(thread["frames"] for thread in threads):
            # The process may have called exec meanwhile.
            with contextlib.suppress(NotPython, UnsupportedTarget):
                runtime = self._prepare(pid, start_ns, seconds_left(deadline, "native frames")).to_dict()
        seconds = seconds_left(deadline, "native frames")
        answer = self._readers.call(
            "native",
            pid=pid,
            start_ns=start_ns,
            timeout=seconds + GRACE_S,
            tids=[thread["tid"] for thread in threads],
            runtime=runtime,
            timeout_ms=max(1, int(seconds * 1000)),
        )
        packed = answer.header.get("python")
        python = {t["tid"]: t for t in unpack(packed)["threads"]} if packed else {}
        return self._unwind(pid, start_ns, answer.payload, deadline), python

    def _unwind(self, pid: int, start_ns: int, payload: bytes, deadline: float) -> dict[int, tuple[list[Frame], str]]:
        mappings = {m.start: m for m in Captured.decode(payload).mappings}
        absent: set[int] = set()
        need: list[int] = []
        given: set[int] = set()
        replaced = 0
        for _ in range(_MAX_ROUNDS):
            with contextlib.ExitStack() as opened:
                files = self._open(pid, start_ns, need[:_MAX_FDS], mappings, absent, opened, deadline)
                seconds = seconds_left(deadline, "native frames")
                answer = self._parsers.call(
                    "unwind",
                    payload,
                    fds=list(files.values()),
                    timeout=seconds + GRACE_S,
                    starts=list(files),
                    absent=sorted(absent),
                    timeout_ms=max(1, int(seconds * 1000)),
                )
            try:
                unwound = answer_of(Unwound, answer)
            except InternalError as e:
                raise CorruptTarget("a parser's answer contains no stacks") from e
            need = unwound["need"]
            if any(start not in mappings for start in need):
                raise CorruptTarget("a parser asks for files that the process does not map")
            if not need:
                return _threads(unwound)
            if not given.isdisjoint(need):
                replaced += 1
                given.clear()
            if replaced > _MAX_REPLACED:
                raise TargetTimeout(
                    "the parser process ended while it unwound the stacks",
                    hint="a file of the process may take more time or memory than allowed",
                )
            given.update(files)
        raise TargetTimeout("the stacks pass through too many files", hint="ask again: the parser has the files now")

    def _open(
        self,
        pid: int,
        start_ns: int,
        need: Sequence[int],
        mappings: dict[int, CodeMapping],
        absent: set[int],
        opened: contextlib.ExitStack,
        deadline: float,
    ) -> dict[int, int]:
        """Opens the files of the mappings that start at ``need``. Returns the descriptors by start of the mapping. Adds
        to ``absent`` the start of each mapping whose file cannot be opened.
        """
        files = {}
        for start in need:
            try:
                answer = self._readers.call(
                    "open",
                    pid=pid,
                    start_ns=start_ns,
                    start=start,
                    timeout=seconds_left(deadline, "native frames") + GRACE_S,
                )
            except UnsupportedTarget:
                file = mappings[start][3:6]
                absent |= {m.start for m in mappings.values() if m[3:6] == file}
                continue
            opened.callback(answer.close_fds)
            files[start] = answer.fds[0]
        return files


def _explained(reason: str) -> str:
    """Returns the message to show for a reason."""
    return _REASONS.get(reason, reason)


def _threads(answer: Unwound) -> dict[int, tuple[list[Frame], str]]:
    codes = answer["codes"]
    try:
        return {
            tid: ([_frame(codes[code], ip) for code, ip in frames], reason) for tid, frames, reason in answer["threads"]
        }
    except IndexError as e:
        raise CorruptTarget("a parser's answer contains no stacks") from e


def _frame(code: Sequence[str], ip: int) -> Frame:
    func, file = code
    return {"func": func, "file": file, "lineno": None, "frame_type": "Native", "ip": ip, "entry": False}
