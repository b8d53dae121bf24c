"""Stacks of a process that runs on while they are read.

What the last capture of the process used is read in one call, and its moving parts (threads, frames) once more right
behind it. A stack whose links are the same in both readings was whole, and so were its code objects, read in between.
Threads for which that fails are read again; what stays unproven is marked.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from probing.daemon.python_stack.codes import Code, read_codes
from probing.daemon.python_stack.layouts import Layout
from probing.daemon.python_stack.memory import PAGE, Memory, Range
from probing.daemon.python_stack.snapshot import Snapshot
from probing.daemon.python_stack.walker import Limits, RawThread, Walker, held

__all__ = ("Capture", "Known", "capture")

ATTEMPTS = 4
_MAX_KNOWN = 16_384


@dataclass(slots=True)
class Known:
    """What the last capture of a process used. Only hints: they make the next one cheap, and never wrong."""

    moving: list[Range] = field(default_factory=list)
    fixed: list[Range] = field(default_factory=list)
    sizes: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class Capture:
    """Each thread with the code objects of its frames by address. ``complete`` is False when threads may be missing."""

    threads: list[tuple[RawThread, dict[int, Code]]]
    complete: bool


def capture(
    memory: Memory, runtime: int, layout: Layout, deadline: float, known: Known, limits: Limits | None = None
) -> Capture:
    """Read the stacks of the CPython whose ``_PyRuntime`` is at address ``runtime``; ``known`` is brought up to date.

    ``deadline`` is on time.monotonic(). Raises TargetTimeout behind it, CorruptTarget when no interpreter is there or
    the walk costs more than ``memory`` allows, ProcessGone and PrivilegeError.
    """
    proven: dict[tuple[int, int], tuple[RawThread, dict[int, Code]]] = {}
    around: list[Range] = []
    for attempt in range(ATTEMPTS):
        snapshot, later = Snapshot(memory), Snapshot(memory)
        moving = [*around, *known.moving]
        snapshot.load([*moving, *known.fixed])
        later.load(moving)
        calls = memory.calls
        walker = Walker(snapshot, layout, limits or Limits(), deadline)
        threads = walker.walk(runtime)
        known.moving = list(snapshot.used)[:_MAX_KNOWN]
        codes = read_codes(snapshot, layout, (f.code for t in threads for f in t.frames), known.sizes)
        walked = set(known.moving)
        known.fixed = [r for r in snapshot.used if r not in walked][:_MAX_KNOWN]
        if memory.calls != calls:
            later = Snapshot(memory)
            later.load(link[0] for links in (walker.links, *(t.links for t in threads)) for link in links)
        proven.update({_key(t): (t, codes) for t in threads if held(t.links, later)})
        complete = walker.complete and held(walker.links, later)
        unproven = [t for t in threads if _key(t) not in proven]
        if complete and not unproven:
            break
        around = _surroundings(unproven, layout) if attempt else []
    return Capture([_best(t, codes, proven) for t in threads], complete)


def _key(thread: RawThread) -> tuple[int, int]:
    return thread.address, thread.thread_id


def _best(
    thread: RawThread, codes: dict[int, Code], proven: dict[tuple[int, int], tuple[RawThread, dict[int, Code]]]
) -> tuple[RawThread, dict[int, Code]]:
    if found := proven.get(_key(thread)):
        # Only one thread holds the GIL, so that must come from one and the same reading.
        found[0].gil = thread.gil
        return found
    thread.complete = False
    return thread, codes


def _surroundings(threads: Iterable[RawThread], layout: Layout) -> list[Range]:
    # A thread that runs Python pushes and pops frames around those seen: take all of its data stack there (3.11+).
    if layout.frame_owner is None:
        return []
    pages = {f.address & -PAGE for t in threads for f in t.frames[:64]}
    pages |= {p + PAGE for p in pages}
    return [(p, PAGE) for p in sorted(pages)[:64]]
