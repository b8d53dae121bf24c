"""Stacks as a tree with the place of each frame: what a flame graph draws."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from probing.client.profile_model import Frame, Profile

__all__ = ("MAX_DEPTH", "Box", "boxes")

# Recursion makes stacks of thousands of frames, and nobody can look at those.
MAX_DEPTH = 400
# Of the whole width: less is under a third of a pixel.
_LEAST = 0.0003


@dataclass(slots=True)
class _Node:
    """``ns`` and ``own`` (not in children) in each profile."""

    ns: list[int]
    own: list[int]
    children: dict[Frame, _Node] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Box:
    """One frame: ``left`` and ``width`` of the whole width, ``depth`` 0 for all together, whose ``frame`` is None.

    ``shares`` and ``ns`` in each profile, ``own`` is the part of ns that is in no frame above.
    """

    frame: Frame | None
    left: float
    width: float
    depth: int
    shares: tuple[float, ...]
    ns: tuple[int, ...]
    own: tuple[int, ...]


def boxes(profiles: Sequence[Profile]) -> Iterator[Box]:
    """All frames wide enough to be seen, parents first. A width is the mean of the shares in the profiles, so that
    what is in one of them alone is there as well."""
    root = _tree(profiles)
    wholes = [ns or 1 for ns in root.ns]
    waiting: list[tuple[Frame | None, _Node, float, int]] = [(None, root, 0.0, 0)]
    while waiting:
        frame, node, left, depth = waiting.pop()
        shares = tuple(ns / whole for ns, whole in zip(node.ns, wholes, strict=True))
        yield Box(frame, left, _width(node, wholes), depth, shares, tuple(node.ns), tuple(node.own))
        below = []
        for name, child in sorted(node.children.items(), key=lambda item: (item[0].func, item[0].file, str(item[0]))):
            width = _width(child, wholes)
            if width >= _LEAST and depth < MAX_DEPTH:
                below.append((name, child, left, depth + 1))
            left += width
        waiting += reversed(below)


def _width(node: _Node, wholes: Sequence[int]) -> float:
    return sum(ns / whole for ns, whole in zip(node.ns, wholes, strict=True)) / len(wholes)


def _tree(profiles: Sequence[Profile]) -> _Node:
    root = _Node([0] * len(profiles), [0] * len(profiles))
    for number, profile in enumerate(profiles):
        for sample in profile.samples:
            node = root
            node.ns[number] += sample.ns
            for frame in sample.frames:
                child = node.children.get(frame)
                if child is None:
                    child = node.children[frame] = _Node([0] * len(profiles), [0] * len(profiles))
                node = child
                node.ns[number] += sample.ns
            node.own[number] += sample.ns
    return root
