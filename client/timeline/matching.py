"""Matches rows of a timeline: operations with the same operations on other ranks, and with the steps around them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np

from probing.client.timeline.coding import UNKNOWN, Ints, mixed, runs
from probing.client.timeline.model import Operations, Steps

__all__ = ("awaited", "steps_at")


def awaited(parts: Iterable[Operations], sizes: Callable[[], Ints]) -> Iterator[Operations]:
    """Yields ``parts``, which are ordered by time, with ``last_call`` and ``last`` filled in.

    ``sizes`` returns the number of ranks of each communicator; 0: not known. The rows of one operation may lie in
    adjacent parts.
    """
    before: Operations | None = None
    part: Operations | None = None
    for after in _and_none(parts):
        if part is not None:
            yield _compared(before, part, after, sizes())
        before, part = part, after


def _and_none(parts: Iterable[Operations]) -> Iterator[Operations | None]:
    yield from parts
    yield None


def _compared(before: Operations | None, part: Operations, after: Operations | None, sizes: Ints) -> Operations:
    near = [rows for rows in (before, part, after) if rows is not None]
    comm, seq, call, process = (
        np.concatenate([getattr(rows, name) for rows in near]) for name in ("comm", "seq", "call", "process")
    )
    first = 0 if before is None else len(before)
    last_call, last = np.full(len(comm), UNKNOWN), np.full(len(comm), UNKNOWN)
    numbered = np.flatnonzero((seq != UNKNOWN) & (sizes[comm] > 1))
    if len(numbered):
        keys = mixed(comm[numbered], seq[numbered])
        # If all rows are sorted by call, which is the usual case, a stable sort by key is enough.
        in_order = bool((np.diff(call[numbered]) >= 0).all())
        order = np.argsort(keys, kind="stable") if in_order else np.lexsort((call[numbered], keys))
        starts, counts = runs(keys[order])
        latest = numbered[order[starts + counts - 1]]
        complete = counts == sizes[comm[latest]]
        members = numbered[order[np.repeat(complete, counts)]]
        who = np.repeat(latest[complete], counts[complete])
        last_call[members], last[members] = call[who], process[who]
    part.last_call, part.last = last_call[first : first + len(part)], last[first : first + len(part)]
    return part


def steps_at(steps: Steps, process: Ints, time: Ints) -> Ints:
    """Returns the number of the step in which each ``process`` is at ``time``; UNKNOWN outside of all steps."""
    if not len(steps) or not len(process):
        return np.full(len(process), UNKNOWN)
    base = int(steps.begin.min())
    span = int(steps.end.max()) - base + 1
    most = max(int(steps.process.max()), int(process.max())) + 1
    # Process and time form one number, the sort key. If they do not fit into 62 bits, a larger unit of time is used.
    unit = 1
    while (span // unit + 1) * most >= 2**62:
        unit *= 10
    width = span // unit + 1

    def keys(who: Ints, when: Ints) -> Ints:
        return who * width + np.clip((when - base) // unit, 0, width - 1)

    place = np.searchsorted(keys(steps.process, steps.begin), keys(process, time), side="right") - 1
    same = (place >= 0) & (steps.process[place] == process)
    inside = same & (time >= steps.begin[place]) & (time < steps.end[place])
    return np.where(inside, steps.step[place], UNKNOWN)
