"""Reads consistent stacks of a process that keeps running.

One call reads all ranges that the last capture of the process used. It reads each thread's chain twice: from the
outermost frame to the pointer to the innermost frame, and back. A stack whose links are equal both ways was whole at
the moment between both reads. All other ranges are read before and after the chains: code objects that are equal both
times did not change in between. Threads without this proof are read again; stacks that stay unproven are marked.

``prepared`` keeps the CPython of each process in a reader; ``parse_request`` parses requests for such a process.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from probing.api.errors import CorruptTarget, UsageError
from probing.daemon.ipc import Header
from probing.daemon.processes.memory import PAGE, Memory, Range
from probing.daemon.python_stack.walk.codes import Code, read_codes, same_code
from probing.daemon.python_stack.walk.layouts import DEBUG_OFFSETS_SIZE, TABLE, Layout, layout_of
from probing.daemon.python_stack.walk.locate import RuntimeInfo
from probing.daemon.python_stack.walk.snapshot import BothWays, Snapshot, both_ways
from probing.daemon.python_stack.walk.walker import Limits, RawThread, Walker, held

__all__ = ("LIMITS", "Capture", "Known", "Prepared", "capture", "checked_layout", "forget", "parse_request", "prepared")

ATTEMPTS = 6
# How many times the chain of frames of a running thread is read in one call. Each time it is read from both ends.
PASSES = 4
_MAX_KNOWN = 16_384
# A message has no room for more stacks of one process; further threads are only counted.
LIMITS = Limits(threads=16_384, stacks=512)
# The maximum bytes of all attempts. It leaves a part of the bytes that ``Memory`` allows to the rest of the dump.
_MOST_BYTES = 48 << 20
# The number of innermost frames of a running thread that are read with the memory around them.
_RESTLESS_FRAMES = 64

_Key = tuple[int, int]
_Found = tuple[RawThread, dict[int, Code]]


@dataclass(slots=True)
class Known:
    """The ranges that the last capture of a process used. They make the next capture cheap, and do not affect its
    result.
    """

    chains: dict[_Key, list[Range]] = field(default_factory=dict)
    others: list[Range] = field(default_factory=list)
    sizes: dict[int, int] = field(default_factory=dict)
    restless: set[_Key] = field(default_factory=set)
    again: _Again | None = None


@dataclass(slots=True)
class Capture:
    """The threads of a process, and the code objects of their frames by address. ``complete`` is False when threads may
    be missing.

    ``unread``: threads that were listed, but not read because of the limit.
    """

    threads: list[_Found]
    complete: bool
    unread: list[RawThread] = field(default_factory=list)


class _Again(NamedTuple):
    """A proven capture, and the bytes of the call that proved it. If the next call reads the same bytes, the capture is
    still right.
    """

    plan: BothWays
    read: list[bytes | None]
    found: Capture


def capture(
    memory: Memory,
    runtime: int,
    layout: Layout,
    deadline: float,
    known: Known,
    limits: Limits = LIMITS,
    attempts: int = ATTEMPTS,
) -> Capture:
    """Returns the stacks of the CPython whose ``_PyRuntime`` is at address ``runtime``, and updates ``known``. Stacks
    that are not proven within ``attempts`` attempts are not ``complete``.

    At ``deadline``, a time of time.monotonic(), the stacks that were read are returned, even unproven. Raises
    TargetTimeout if not even the threads are listed at the deadline, CorruptTarget if there is no interpreter or the
    walk costs more than ``memory`` allows, ProcessGone and PrivilegeError.
    """
    proven: dict[_Key, _Found] = {}
    again, known.again = known.again, None
    for _ in range(attempts):
        began, cost = time.monotonic(), memory.bytes_read
        plan = _plan(known) if again is None else again.plan
        read = memory.read_many(plan.wanted) if plan.wanted else []
        if again is not None and read == again.read:
            # Nothing has changed, as is usual in a rank that hangs.
            known.again = again
            return again.found
        again = None
        calls = memory.calls
        before, snapshot = plan.snapshots(memory, read)
        walker = Walker(snapshot, layout, limits, deadline)
        threads = walker.walk(runtime)
        codes = read_codes(snapshot, layout, (f.code for t in threads for f in t.frames), known.sizes)
        same = {a: same_code(before[0], snapshot, layout, a, known.sizes) for a in codes}
        may_run = walker.may_run(before[0])
        for thread in threads:
            still = _held_still(thread, before, known, may_run(thread))
            if still and all(same.get(f.code, False) for f in thread.frames):
                proven[_key(thread)] = (thread, codes)
        _remember(known, threads, snapshot, layout)
        complete = walker.complete and held(walker.links, before[0])
        if complete and all(_key(t) in proven for t in threads):
            break
        now = time.monotonic()
        if 2 * now - began > deadline or 2 * memory.bytes_read - cost > _MOST_BYTES:
            # A further attempt would cost as much as this attempt, and exceed the limit.
            break
    captured = Capture([_best(t, codes, proven) for t in threads], complete, walker.unread)
    if complete and memory.calls == calls and all(proven.get(_key(t), (None,))[0] is t for t in threads):
        known.again = _Again(plan, read, captured)
    return captured


def _plan(known: Known) -> BothWays:
    chains = [(chain, PASSES if key in known.restless else 1) for key, chain in known.chains.items()]
    return both_ways(chains, known.others)


def _key(thread: RawThread) -> _Key:
    return thread.address, thread.thread_id


def _held_still(thread: RawThread, before: list[Snapshot], known: Known, may_run: bool) -> bool:
    """Returns whether the stack was equal in all reads. Marks a thread that runs, or may run, as restless in ``known``,
    so that later calls read its chain more often.
    """
    key = _key(thread)
    rests = not may_run and all(one.get(*wanted) == data for wanted, _, data in thread.links for one in before)
    # Two equal reads are enough for a thread that has not run. A running thread may be at the same place again, so its
    # reads count only if its chain was read more often.
    often = rests or key in known.restless
    if rests:
        known.restless.discard(key)
    elif key in known.chains:
        known.restless.add(key)
    return often and not thread.torn and all(held(thread.links, one) for one in before)


def _best(thread: RawThread, codes: dict[int, Code], proven: dict[_Key, _Found]) -> _Found:
    if best := proven.get(_key(thread)):
        # Only one thread holds the GIL, so all values of ``gil`` must come from the same reading.
        best[0].gil = thread.gil
        return best
    thread.complete = False
    return thread, codes


def _remember(known: Known, threads: list[RawThread], snapshot: Snapshot, layout: Layout) -> None:
    known.chains, room = {}, _MAX_KNOWN
    for thread in threads:
        chain = _chain(thread, layout, _key(thread) in known.restless)[: max(0, room)]
        known.chains[_key(thread)] = chain
        room -= len(chain)
    chained = {link[0] for thread in threads for link in thread.links}
    known.others = [r for r in snapshot.used if r not in chained][:_MAX_KNOWN]
    known.restless &= known.chains.keys()


def _chain(thread: RawThread, layout: Layout, restless: bool) -> list[Range]:
    """Returns the ranges that link the thread's stack, from the pointer to the innermost frame outwards."""
    ranges = [link[0] for link in thread.links]
    if not restless or layout.frame_owner is None:
        return ranges
    # The thread pushes and pops frames next to the frames seen, so the pages of its data stack are read (3.11+).
    frames = len(ranges) - min(len(thread.frames), len(ranges))
    pages = {a & -PAGE for a, _ in ranges[frames : frames + _RESTLESS_FRAMES]}
    pages |= {p + PAGE for p in pages}
    within: Iterable[Range] = (r for r in ranges[frames:] if r[0] & -PAGE not in pages)
    return [*ranges[:frames], *((p, PAGE) for p in sorted(pages, reverse=True)), *within]


_MAX_PROCESSES = 64
# The maximum total of ``Prepared.bytes_read`` of all kept processes. The objects that are kept take up to six times as
# much memory.
_MAX_PROCESS_BYTES = 16 << 20
_DEFAULT_TIMEOUT_MS = 1000


@dataclass(eq=False)
class Prepared:
    """The CPython of one process. ``head``: the first bytes of its ``_PyRuntime`` from 3.13 on; the bytes of its
    Py_Version, or no bytes, for older versions. ``memory``: the last request read the process through this object.
    """

    runtime: RuntimeInfo
    layout: Layout
    head: bytes
    memory: Memory
    known: Known = field(default_factory=Known)
    _before: int = 0

    @property
    def bytes_read(self) -> int:
        """The number of bytes that the last request or the request before read, whichever read more."""
        return max(self._before, self.memory.bytes_read)

    def read_by(self, memory: Memory) -> None:
        self._before, self.memory = self.memory.bytes_read, memory


class _Asked(NamedTuple):
    """The fields that all requests about a CPython have. ``deadline`` is a time of time.monotonic()."""

    pid: int
    start_ns: int
    deadline: float


_processes: OrderedDict[tuple[int, int], Prepared] = OrderedDict()


def parse_request(request: Header) -> _Asked:
    """Returns ``pid`` and ``start_ns`` of a request, and the deadline from its ``timeout_ms``. Raises UsageError."""
    pid, start_ns = request.get("pid"), request.get("start_ns")
    timeout_ms = request.get("timeout_ms", _DEFAULT_TIMEOUT_MS)
    if not (isinstance(pid, int) and isinstance(start_ns, int) and isinstance(timeout_ms, int | float)):
        raise UsageError("a request about a CPython needs pid, start_ns and timeout_ms")
    return _Asked(pid, start_ns, time.monotonic() + timeout_ms / 1000)


def prepared(pid: int, start_ns: int, runtime: RuntimeInfo, memory: Memory) -> Prepared:
    """Returns the cached ``Prepared`` of a process, or a new object if the CPython of the process has changed.

    Raises the errors of ``checked_layout``.
    """
    process = _processes.get((pid, start_ns))
    layout, head = checked_layout(pid, runtime, memory)
    if process is None or process.runtime != runtime or process.head != head:
        process = _processes[pid, start_ns] = Prepared(runtime, layout, head, memory)
    process.read_by(memory)
    _processes.move_to_end((pid, start_ns))
    while len(_processes) > _MAX_PROCESSES or (len(_processes) > 1 and _bytes_read() > _MAX_PROCESS_BYTES):
        _processes.popitem(last=False)
    return process


def _bytes_read() -> int:
    return sum(process.bytes_read for process in _processes.values())


def checked_layout(pid: int, runtime: RuntimeInfo, memory: Memory) -> tuple[Layout, bytes]:
    """Returns the layout of the process's CPython, and ``Prepared.head``.

    Raises CorruptTarget when the process no longer runs the CPython that ``runtime`` describes, UnsupportedTarget,
    ProcessGone and PrivilegeError.
    """
    if runtime.version not in TABLE:
        head = memory.read_many([(runtime.runtime, DEBUG_OFFSETS_SIZE)])[0]
        changed = head is None
    else:
        head = memory.read_many([(runtime.version_at, 4)])[0] if runtime.version_at else b""
        changed = bool(runtime.version_at) and (head is None or int.from_bytes(head, "little") != runtime.hexversion)
    if changed or head is None:
        raise CorruptTarget(f"process {pid} no longer runs the CPython that was found in it")
    return layout_of(runtime.version, head), head


def forget(pid: int, start_ns: int) -> None:
    """Drops the hints that make the next read of a process cheap."""
    _processes.pop((pid, start_ns), None)
