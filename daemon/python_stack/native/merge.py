"""Merges the C and Python frames of a thread: Python frames replace each run of the C interpreter loop.

A Python frame that is an ``entry`` is the outermost of its run of the loop, so runs and calls of the loop correspond
one to one, the innermost to the innermost.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from probing.daemon.stack_wire import Frame

__all__ = ("merge",)

# Compilers split functions and name the parts .cold, .constprop.0, .lto_priv.0 and so on.
_LOOP = re.compile(r"_PyEval_EvalFrameDefault(?:\.[\w.]+)?(?: \(\.[\w.]+\))*")
# 3.14 can be built with a function for each instruction, which jump to each other and never return to the loop.
_INSTRUCTION = re.compile(r"_TAIL_CALL_\w+(?:\.[\w.]+)*")


def merge(python: Sequence[Frame], native: Sequence[Frame], reason: str) -> tuple[list[Frame], str]:
    """Returns (frames innermost first, why native frames are missing, empty when none are).

    ``reason``: why outer frames of ``native`` are missing; empty for a whole stack. When the two do not match, the
    Python stack stays whole, below the native frames inside all of it.
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
    found: list[tuple[int, int]] = []
    at = 0
    while at < len(native):
        start = at
        if _INSTRUCTION.fullmatch(native[at]["func"]):
            at += 1
        if at < len(native) and _LOOP.fullmatch(native[at]["func"]):
            at += 1
        if at > start:
            found.append((start, at))
        else:
            at += 1
    return found
