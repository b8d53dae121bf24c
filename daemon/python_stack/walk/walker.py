"""Walks the threads and frames of all interpreters of a CPython, in memory that may change and may be hostile.

Every list is limited, because it may be a ring. A walk records the links that it followed, so that ``held`` can prove
later that nothing changed: if the links of a stack are equal before and after, the stack was whole in between.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from probing.api.errors import CorruptTarget, TargetTimeout
from probing.daemon.processes.memory import Range
from probing.daemon.python_stack.walk.layouts import Layout
from probing.daemon.python_stack.walk.snapshot import Snapshot, word

__all__ = ("Limits", "Link", "RawFrame", "RawThread", "Walker", "held")

# The offset of struct pthread.tid from pthread_self(), in glibc (nptl/descr.h) and musl (pthread_impl.h).
TID_OFFSETS = (720, 48, 208)
# FRAME_OWNED_BY_GENERATOR (3.11+, Include/internal/pycore_frame.h).
_GENERATOR = 1

# A memory range, the offsets in it of the 8-byte words that ``held`` compares, and its bytes as the walk read them.
Link = tuple[Range, tuple[int, ...], bytes]


class Limits(NamedTuple):
    """The limits of a walk. A stack that is cut at a limit is not ``complete``.

    At most ``threads`` threads are listed. The frames of the oldest ``stacks`` threads are read. The main
    thread is one of these.
    """

    interpreters: int = 64
    threads: int = 4096
    stacks: int = 1 << 16
    frames: int = 1024
    all_frames: int = 16_384


@dataclass(slots=True)
class RawFrame:
    """A frame. ``code`` and ``instr`` are the words in the frame. ``entry``: the frame is the outermost in a call of
    the C interpreter loop.
    """

    address: int
    code: int
    instr: int
    entry: bool = False


@dataclass(slots=True)
class RawThread:
    """A Python thread. ``thread_id``: pthread_self(); ``native_id`` and ``pthread_tids``: candidates for its tid in its
    own namespace.

    ``gil``: whether the thread holds the GIL, None if unknown. ``frames``: innermost first. ``torn``: the frames are of
    different moments, or callers are missing. Frames are of different moments if a frame that has called another frame
    still runs. Callers are missing if the outermost frame is a generator's, or begins no call of the interpreter loop.
    This can happen because CPython 3.11 and 3.12, as gcc compiles ``CALL``, make a frame current before they link it to
    its caller. Until then the frame has the link of an earlier frame that lay at its address.
    """

    address: int
    thread_id: int
    native_id: int | None
    gil: bool | None
    pthread_tids: tuple[int, ...] = ()
    frames: list[RawFrame] = field(default_factory=list)
    complete: bool = True
    torn: bool = False
    links: list[Link] = field(default_factory=list)


def held(links: Iterable[Link], later: Snapshot) -> bool:
    """Returns whether all ``links`` in ``later`` are the same as in the walk."""
    for wanted, offsets, data in links:
        now = later.get(*wanted)
        if now != data and (now is None or any(now[o : o + 8] != data[o : o + 8] for o in offsets)):
            return False
    return True


class Walker:
    """One walk, which fills ``snapshot``. ``complete`` is False if threads may be missing.

    ``links``: the links of the lists of interpreters and threads. ``unread``: threads beyond ``Limits.stacks``. Frames
    that are not read at ``deadline``, a time of time.monotonic(), are missing from their stacks.
    """

    def __init__(self, snapshot: Snapshot, layout: Layout, limits: Limits, deadline: float) -> None:
        self.complete = True
        self.links: list[Link] = []
        self.unread: list[RawThread] = []
        self._snapshot = snapshot
        self._layout = layout
        self._limits = limits
        self._deadline = deadline
        self._gils: list[Range] = []

    def walk(self, runtime: int) -> list[RawThread]:
        """Returns the threads of the CPython whose ``_PyRuntime`` is at address ``runtime``.

        Raises TargetTimeout if the threads are not listed at the deadline, CorruptTarget if there is no runtime or the
        list of interpreters is damaged.
        """
        layout = self._layout
        wanted = [(runtime + layout.interpreters_head, 8)]
        if layout.runtime_current is not None:
            self._gils.append((runtime + layout.runtime_current, 8))
        self._load(self._snapshot.load, wanted + self._gils)
        head = self._snapshot.get(*wanted[0])
        if head is None:
            raise CorruptTarget("there is no longer a CPython runtime at its address")
        self.links.append((wanted[0], (0,), head))
        threads: list[RawThread] = []
        tops: list[int] = []
        for interpreter in self._interpreters(word(head, 0)):
            self._threads(interpreter, threads, tops)
        # An interpreter has at least one thread as long as it exists.
        self.complete = self.complete and bool(threads or not word(head, 0))
        # The newest thread is listed first.
        first = max(0, len(threads) - self._limits.stacks)
        self.unread, threads = threads[:first], threads[first:]
        self._tids(threads if self._layout.native_thread_id is not None else [*self.unread, *threads])
        self._frames(threads, self._through_cframes(threads, tops[first:]))
        return threads

    def may_run(self, before: Snapshot) -> Callable[[RawThread], bool]:
        """Returns a function that tells whether a thread may have held a GIL in ``before`` or in the walk. Such a
        thread may have changed its frames.
        """
        holders = {_holder(s, gil, self._layout) for s in (before, self._snapshot) for gil in self._gils}
        return lambda thread: thread.gil is not False or thread.address in holders or None in holders

    def _interpreters(self, address: int) -> list[int]:
        layout, found = self._layout, dict[int, None]()
        while address:
            if address in found or len(found) >= self._limits.interpreters:
                self.complete = False
                break
            offsets = [layout.interp_next, layout.interp_threads]
            if layout.interp_gil is not None:
                offsets.append(layout.interp_gil)
            self._load(self._snapshot.load, [(address + o, 8) for o in offsets])
            following = self._snapshot.get(address + layout.interp_next, 8)
            if following is None:
                raise CorruptTarget("the list of interpreters has an invalid address")
            self.links.append(((address + layout.interp_next, 8), (0,), following))
            found[address] = None
            address = word(following, 0)
        return list(found)

    def _threads(self, interpreter: int, threads: list[RawThread], tops: list[int]) -> None:
        layout, snapshot, seen = self._layout, self._snapshot, set[int]()
        head = snapshot.get(interpreter + layout.interp_threads, 8)
        if head is None:
            self.complete = False
            return
        self.links.append(((interpreter + layout.interp_threads, 8), (0,), head))
        holder = self._gil_holder(interpreter)
        address = word(head, 0)
        while address:
            wanted = (address, layout.thread_size)
            self._load(snapshot.load, [wanted])
            data = snapshot.get(*wanted)
            looped = address in seen or len(threads) >= self._limits.threads
            if looped or data is None or word(data, layout.thread_interp) != interpreter:
                self.complete = False
                return
            seen.add(address)
            self.links.append((wanted, (layout.thread_next, layout.thread_interp), data))
            native = None
            if layout.native_thread_id is not None:
                native = word(data, layout.native_thread_id) & 0xFFFF_FFFF
            thread = RawThread(
                address, word(data, layout.thread_id), native, None if holder is None else holder == address
            )
            thread.links.append((wanted, (layout.thread_id, layout.thread_frame), data))
            threads.append(thread)
            tops.append(word(data, layout.thread_frame))
            address = word(data, layout.thread_next)

    def _gil_holder(self, interpreter: int) -> int | None:
        """Returns the address of the thread that holds the GIL, 0 if no thread holds it, None if unknown."""
        layout, snapshot = self._layout, self._snapshot
        if layout.interp_gil is None:
            return _holder(snapshot, self._gils[0], layout) if self._gils else None
        gil = snapshot.word(interpreter + layout.interp_gil)
        if not gil:
            return None
        wanted = (gil, max(layout.gil_holder + 8, layout.gil_locked + 4))
        self._load(snapshot.load, [wanted])
        self._gils.append(wanted)
        return _holder(snapshot, wanted, layout)

    def _tids(self, threads: list[RawThread]) -> None:
        snapshot = self._snapshot
        self._load(snapshot.load, [(t.thread_id + o, 4) for t in threads for o in TID_OFFSETS])
        for thread in threads:
            words = (snapshot.get(thread.thread_id + o, 4) for o in TID_OFFSETS)
            thread.pthread_tids = tuple(int.from_bytes(w or b"", "little") for w in words)

    def _through_cframes(self, threads: list[RawThread], tops: list[int]) -> list[int]:
        at = self._layout.cframe_frame
        if at is None:
            return tops
        self._load(self._snapshot.load, [(t + at, 8) for t in tops if t])
        frames = []
        for thread, top in zip(threads, tops, strict=True):
            data = self._snapshot.get(top + at, 8) if top else bytes(8)
            if data is None:
                thread.complete = False
            elif top:
                thread.links.append(((top + at, 8), (0,), data))
            frames.append(word(data or bytes(8), 0))
        return frames

    def _frames(self, threads: list[RawThread], tops: list[int]) -> None:
        size = self._layout.frame_size
        active = [(t, top, set[int]()) for t, top in zip(threads, tops, strict=True) if top]
        total = 0
        while active:
            if time.monotonic() > self._deadline:
                for thread, _, _ in active:
                    thread.complete = False
                return
            self._snapshot.load_pages([(address, size) for _, address, _ in active])
            following = []
            for thread, address, seen in active:
                total += 1
                if address in seen or len(seen) >= self._limits.frames or total > self._limits.all_frames:
                    thread.complete = False
                    continue
                innermost = not seen
                seen.add(address)
                if previous := self._frame(thread, address, innermost):
                    following.append((thread, previous, seen))
            active = following

    def _frame(self, thread: RawThread, address: int, innermost: bool) -> int:
        """Adds the frame at ``address``. Returns the address of the caller's frame, or 0."""
        layout, wanted = self._layout, (address, self._layout.frame_size)
        data = self._snapshot.get(*wanted)
        if data is None:
            thread.complete = False
            return 0
        # A caller stays at its call while this frame exists; only the innermost frame advances.
        own = () if innermost else (layout.frame_instr,)
        thread.links.append((wanted, (layout.frame_previous, layout.frame_code, *own), data))
        owner = 0 if layout.frame_owner is None else data[layout.frame_owner]
        if layout.is_shim_from is not None and owner >= layout.is_shim_from:
            if thread.frames:
                thread.frames[-1].entry = True
        else:
            # A call within the same run of the interpreter loop suspends its caller.
            if thread.frames and not thread.frames[-1].entry and self._runs(data):
                thread.torn = True
            code = word(data, layout.frame_code) & ~layout.tag_mask
            thread.frames.append(RawFrame(address, code, self._instr(data), self._is_entry(data)))
        previous = word(data, layout.frame_previous)
        if not previous and thread.frames and (not thread.frames[-1].entry or owner == _GENERATOR):
            thread.torn = True
        return previous

    def _instr(self, data: bytes) -> int:
        at = self._layout.frame_instr
        if self._layout.instr in ("previous", "current"):
            return word(data, at)
        return int.from_bytes(data[at : at + 4], "little", signed=True)

    def _runs(self, data: bytes) -> bool:
        at, size = self._layout.frame_stack, self._layout.frame_stack_size
        if at is None:
            return False
        top = int.from_bytes(data[at : at + size], "little", signed=True)
        return top == 0 if size == 8 else top < 0

    def _is_entry(self, data: bytes) -> bool:
        # Up to 3.10 each Python frame is run by a C interpreter loop of its own.
        if self._layout.frame_owner is None:
            return True
        return self._layout.frame_entry is not None and data[self._layout.frame_entry] != 0

    def _load(self, load: Callable[[Iterable[Range]], None], ranges: list[Range]) -> None:
        if time.monotonic() > self._deadline:
            raise TargetTimeout("the stacks could not be read in time")
        load(ranges)


def _holder(snapshot: Snapshot, gil: Range, layout: Layout) -> int | None:
    """Returns the thread that holds the GIL whose bytes are at ``gil``, 0 if no thread holds it, None if unknown."""
    data = snapshot.get(*gil)
    if data is None:
        return None
    if layout.interp_gil is None:
        return word(data, 0)
    locked = int.from_bytes(data[layout.gil_locked : layout.gil_locked + 4], "little", signed=True)
    return word(data, layout.gil_holder) if locked > 0 else 0
