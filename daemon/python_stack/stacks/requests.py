"""Reads stacks on demand: finds each process's CPython once, and requests the stacks from the readers."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from probing.api.errors import CorruptTarget, InternalError, NotPython, ProbingError, TargetError, UnsupportedTarget
from probing.daemon.ipc import Header, Message
from probing.daemon.processes.memory import Range
from probing.daemon.processes.parsers import ParserPool
from probing.daemon.processes.procfs import Mapping as Mapped
from probing.daemon.processes.procfs import parse_maps
from probing.daemon.processes.reader_pool import GRACE_S, PATIENCE_S, Failure, ReaderPool, ask_each, seconds_left
from probing.daemon.python_stack.walk.layouts import DEBUG_OFFSETS_SIZE, TABLE, Layout, layout_of
from probing.daemon.python_stack.walk.locate import (
    SYMBOLS,
    RuntimeInfo,
    RuntimeSymbols,
    candidates,
    locate,
    release_of,
    sys_hexversion,
)
from probing.daemon.python_stack.walk.search import find_runtime
from probing.daemon.stack_wire import Thread, threads_of

__all__ = ("PythonStacks",)

_MAX_PREPARED = 4096
_Target = tuple[int, int]
_Packed = tuple[_Target, bytes]
_Answer = tuple[_Target, Message]


class PythonStacks:
    """Reads stacks on demand. Thread-safe. At most ``parallel`` processes with an unknown CPython are read at once."""

    def __init__(self, readers: ReaderPool, parsers: ParserPool, *, parallel: int = 4) -> None:
        self._readers = readers
        self._parsers = parsers
        self._pool = ThreadPoolExecutor(parallel, thread_name_prefix="stacks")
        self._lock = threading.Lock()
        self._prepared: OrderedDict[tuple[int, int], RuntimeInfo] = OrderedDict()

    def close(self) -> None:
        """Refuses new requests; requests in progress end at their own deadlines."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def prepare(self, pid: int, start_ns: int, timeout: float = 5.0) -> RuntimeInfo:
        """Returns the CPython of a process, which is searched for once.

        The search takes at most ``timeout`` seconds, and one second more if the process cannot be read.

        Raises NotPython, UnsupportedTarget, ProcessGone, TargetTimeout, CorruptTarget or PrivilegeError.
        """
        with self._lock:
            if runtime := self._prepared.get((pid, start_ns)):
                return runtime
        deadline = time.monotonic() + timeout
        runtime = self._find(pid, start_ns, deadline)
        with self._lock:
            self._prepared[pid, start_ns] = runtime
            while len(self._prepared) > _MAX_PREPARED:
                self._prepared.popitem(last=False)
        return runtime

    def layout(self, pid: int, start_ns: int, timeout: float = 5.0) -> Layout:
        """Returns the layout of the CPython of a process. Raises the errors of ``prepare``."""
        deadline = time.monotonic() + timeout
        runtime = self.prepare(pid, start_ns, timeout)
        if layout := TABLE.get(runtime.version):
            return layout
        head = self._memory(pid, start_ns, deadline, [(runtime.runtime, DEBUG_OFFSETS_SIZE)])[0]
        return layout_of(runtime.version, head or b"")

    def python_version(self, pid: int, start_ns: int, timeout: float = 5.0) -> str:
        """Returns a version such as "3.11.7", or "3.10" if no more is known. Raises the errors of ``prepare``."""
        return self.prepare(pid, start_ns, timeout).python

    def forget(self, pid: int, start_ns: int) -> None:
        """Drops the CPython of a process that ended or called exec."""
        with self._lock:
            self._prepared.pop((pid, start_ns), None)

    def stacks(
        self, targets: Iterable[_Target], timeout: float = 1.0, *, with_locals: bool = False
    ) -> tuple[list[Thread], list[Failure]]:
        """Returns the threads of all ``targets`` (pid, start_ns), each with its ``pid`` and ``start_ns``, and the
        failures.

        ``timeout``: seconds for all targets together.
        """
        threads: list[Thread] = []
        place = {target: n for n, target in enumerate(dict.fromkeys(targets))}
        answers, failures = self.packed(place, timeout, with_locals=with_locals)
        for (pid, start_ns), text in sorted(answers, key=lambda answer: place[answer[0]]):
            try:
                threads += [{"pid": pid, "start_ns": start_ns, **thread} for thread in threads_of(text)]
            except InternalError as e:
                failures.append(Failure(pid, start_ns, e))
        return threads, failures

    def packed(
        self, targets: Iterable[_Target], timeout: float = 1.0, *, with_locals: bool = False
    ) -> tuple[list[_Packed], list[Failure]]:
        """Returns the threads of ``stacks`` for each process as bytes for ``stack_wire.threads_of``, in no particular
        order, and the failures.

        A process with threads that were left out also has a failure.
        """
        deadline = time.monotonic() + timeout
        keys = list(dict.fromkeys(targets))
        with self._lock:
            known = {key: self._prepared[key] for key in keys if key in self._prepared}
        answers, failures = self._of_known(known, deadline, timeout, with_locals)
        # The CPython of these targets has to be searched for first, or again after an exec.
        changed = {(f.pid, f.start_ns) for f in failures if isinstance(f.error, CorruptTarget)}
        rest = [key for key in keys if key not in known or key in changed]
        if rest:
            ask = partial(self._of_new, deadline, with_locals)
            more, failed = ask_each(self._pool, rest, ask, deadline, "stacks")
            answers += more
            failures = [f for f in failures if (f.pid, f.start_ns) not in changed] + failed
        packed = [(key, answer.payload) for key, answer in answers]
        return packed, failures + [_partial(key, answer) for key, answer in answers if answer.header.get("left_out")]

    def _of_known(
        self, known: dict[_Target, RuntimeInfo], deadline: float, timeout: float, with_locals: bool
    ) -> tuple[list[_Answer], list[Failure]]:
        answers: list[_Answer] = []
        failures: list[Failure] = []
        asks = {key: partial(_arguments, runtime, deadline, with_locals) for key, runtime in known.items()}
        for key, answer in self._readers.call_each("stacks", asks, timeout=timeout + GRACE_S, patience=PATIENCE_S):
            if isinstance(answer, CorruptTarget):
                self.forget(*key)
            if isinstance(answer, ProbingError):
                failures.append(Failure(*key, answer))
            else:
                answers.append((key, answer))
        return answers, failures

    def _of_new(self, deadline: float, with_locals: bool, pid: int, start_ns: int) -> list[_Answer]:
        try:
            return self._ask(deadline, with_locals, pid, start_ns)
        except CorruptTarget:
            self.forget(pid, start_ns)
            return self._ask(deadline, with_locals, pid, start_ns)

    def _ask(self, deadline: float, with_locals: bool, pid: int, start_ns: int) -> list[_Answer]:
        arguments = _arguments(self.prepare(pid, start_ns, seconds_left(deadline)), deadline, with_locals)
        answer = self._call("stacks", pid, start_ns, deadline, patience=PATIENCE_S, **arguments)
        return [((pid, start_ns), answer)]

    def _find(self, pid: int, start_ns: int, deadline: float) -> RuntimeInfo:
        mappings = parse_maps(self._call("maps", pid, start_ns, deadline, files=True).payload)
        reason: ProbingError | None = None
        for mapping in candidates(mappings):
            result = self._try_file(pid, start_ns, mapping, deadline)
            if isinstance(result, RuntimeInfo):
                return result
            if not isinstance(result, NotPython):
                reason = reason or result
        try:
            return find_runtime(partial(self._memory, pid, start_ns, deadline), mappings)
        except NotPython as e:
            raise reason or NotPython(f"process {pid} runs no CPython") from e

    def _try_file(
        self, pid: int, start_ns: int, mapping: Mapped, deadline: float
    ) -> RuntimeInfo | NotPython | UnsupportedTarget:
        try:
            return self._in_file(pid, start_ns, mapping, deadline)
        except (NotPython, UnsupportedTarget) as e:
            return e

    def _in_file(self, pid: int, start_ns: int, mapping: Mapped, deadline: float) -> RuntimeInfo:
        opened = self._call("open", pid, start_ns, deadline, start=mapping.start)
        try:
            parsed = self._parsers.symbols(opened.fds[0], SYMBOLS, timeout=seconds_left(deadline))
        finally:
            opened.close_fds()
        addresses = {symbol.name: symbol.address for symbol in parsed.symbols}
        symbols = RuntimeSymbols(addresses, parsed.first_vaddr, parsed.relocated)
        read = partial(self._memory, pid, start_ns, deadline)
        if not (at := symbols.address("Py_Version", mapping)) or "_PyRuntime" not in symbols.addresses:
            runtime = locate(mapping, symbols)
            hexversion = sys_hexversion(read, runtime.runtime, runtime.version)
            return runtime._replace(python=release_of(hexversion)) if hexversion else runtime
        head = read([(at, 4)])[0]
        if head is None:
            raise CorruptTarget(f"process {pid} has no CPython at the addresses that its libraries show")
        runtime = locate(mapping, symbols, int.from_bytes(head, "little"))
        if runtime.version >= (3, 13):
            # If the declared offsets are unusable, this fails now, not at each request.
            layout_of(runtime.version, read([(runtime.runtime, DEBUG_OFFSETS_SIZE)])[0] or b"")
        return runtime

    def _memory(self, pid: int, start_ns: int, deadline: float, ranges: Sequence[Range]) -> list[bytes | None]:
        if not ranges:
            return []
        answer = self._call("memory", pid, start_ns, deadline, ranges=ranges)
        parts: list[bytes | None] = []
        at = 0
        for length in answer.header["lengths"]:
            parts.append(None if length < 0 else answer.payload[at : at + length])
            at += max(0, length)
        if len(parts) != len(ranges):
            raise InternalError("a reader's answer contains other memory than was requested")
        return parts

    def _call(self, op: str, pid: int, start_ns: int, deadline: float, **args: Any) -> Message:
        return self._readers.call(op, pid=pid, start_ns=start_ns, timeout=seconds_left(deadline) + GRACE_S, **args)


def _partial(target: _Target, answer: Message) -> Failure:
    left_out = answer.header["left_out"]
    message = f"{left_out:,} of its threads are left out, the newest: the process has too many for one answer"
    return Failure(*target, TargetError(message))


def _arguments(runtime: RuntimeInfo, deadline: float, with_locals: bool) -> Header:
    timeout_ms = max(1, int(seconds_left(deadline) * 1000))
    more = {"locals": True} if with_locals else {}
    return {"runtime": runtime.to_dict(), "timeout_ms": timeout_ms, **more}
