"""Lays out stacks as a tree: the position of each frame of a flame graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from probing.client.profile.model import Frame, Profile, Sample, merged

__all__ = ("MAX_DEPTH", "Box", "boxes")

# Recursion makes stacks of thousands of frames, too many to look at.
MAX_DEPTH = 400
# Share of the whole width: a narrower box is below a third of a pixel.
_LEAST = 0.0003


@dataclass(frozen=True, slots=True)
class Box:
    """One frame. ``left`` and ``width`` are shares of the whole width; the root has ``depth`` 0 and ``frame`` None.

    ``shares`` and ``ns`` have a value for each profile; ``own``: the part of ``ns`` without further frames.
    """

    frame: Frame | None
    left: float
    width: float
    depth: int
    shares: tuple[float, ...]
    ns: tuple[int, ...]
    own: tuple[int, ...]


def boxes(profiles: Sequence[Profile]) -> Iterator[Box]:
    """Yields the frames that are wide enough to be seen, parents first.

    A width is the mean of the shares in the profiles, so that a frame of one profile alone has a box as well.
    """
    # In sorted stacks a frame is a range: stacks with a common beginning are neighbours.
    marked = [s._replace(labels=(("", f"{i}"),)) for i, profile in enumerate(profiles) for s in profile.samples]
    samples = merged(marked, labels=True)
    stacks = [sample.frames for sample in samples]
    sums = [_sums(samples, f"{i}") for i in range(len(profiles))]
    wholes = [found[-1] or 1 for found in sums]
    waiting: list[tuple[Frame | None, int, int, float, int]] = [(None, 0, len(stacks), 0.0, 0)]
    while waiting:
        frame, first, end, left, depth = waiting.pop()
        ns = tuple(found[end] - found[first] for found in sums)
        ranges = list(_ranges(stacks, first, end, depth))
        inner = ranges[0][1] if ranges else end
        shares = tuple(n / whole for n, whole in zip(ns, wholes, strict=True))
        own = tuple(found[inner] - found[first] for found in sums)
        yield Box(frame, left, sum(shares) / len(shares), depth, shares, ns, own)
        below = []
        for child, begin, stop in ranges if depth < MAX_DEPTH else ():
            parts = ((found[stop] - found[begin]) / whole for found, whole in zip(sums, wholes, strict=True))
            width = sum(parts) / len(wholes)
            if width >= _LEAST:
                below.append((child, begin, stop, left, depth + 1))
            left += width
        waiting += reversed(below)


def _sums(samples: Sequence[Sample], mark: str) -> list[int]:
    """Returns sums of the time of one profile over the first 0, 1, 2… samples."""
    return [0, *accumulate(s.ns if s.labels[0][1] == mark else 0 for s in samples)]


def _ranges(stacks: Sequence[tuple[Frame, ...]], first: int, end: int, depth: int) -> Iterator[tuple[Frame, int, int]]:
    """Yields the frames at ``depth``, each with its range of stacks; stacks that end before are the first."""
    while first < end and len(stacks[first]) == depth:
        first += 1
    while first < end:
        frame, begin = stacks[first][depth], first
        while first < end and stacks[first][depth] == frame:
            first += 1
        yield frame, begin, first
