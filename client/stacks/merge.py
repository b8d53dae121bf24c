"""Merges the stacks of many ranks into trees: shared frames appear once, with branches where ranks differ, small
branches first.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

from probing.client.messages import Frame, Thread

__all__ = (
    "MAIN_THREAD",
    "MAX_DEPTH",
    "Group",
    "Member",
    "Node",
    "PlainGroup",
    "PlainNode",
    "member_ranks",
    "merge",
    "pids_of",
    "plain_groups",
)

MAIN_THREAD = "MainThread"
"""The name of the groups of main threads."""
# The maximum depth of a tree, so that recursion over it is safe. The middle frames of a deeper stack become one node.
MAX_DEPTH = 200

Member = tuple[int | None, int, int, str]
"""A thread: rank, pid, tid, node."""


class _Merged:
    """A set of threads (``members``), and the child nodes among which these threads are divided."""

    __slots__ = ()
    members: list[Member]
    children: list[Node]

    @property
    def ranks(self) -> list[int]:
        return member_ranks(self.members)

    @property
    def pids(self) -> list[int]:
        """The pids of the processes that have no rank."""
        return pids_of(self.members)

    @property
    def ends(self) -> list[Member]:
        """The members that are in no child: this frame is their innermost frame, or the threads have no frame."""
        return _without(self.members, self.children)


@dataclass(slots=True)
class Node(_Merged):
    """A frame and the threads whose stacks contain it at this place.

    ``lineno`` is None if unknown. ``complete`` False: the frame belongs to a stack that lacks frames. Such a stack is
    not merged with other stacks.
    """

    func: str
    file: str
    lineno: int | None
    frame_type: str
    complete: bool = True
    members: list[Member] = field(default_factory=list)
    children: list[Node] = field(default_factory=list)


@dataclass(slots=True)
class Group(_Merged):
    """The threads of one job that have the same name; ``thread`` is that name with ``*`` in place of numbers that
    differ.

    Main threads that train form the group MainThread, which is Python's name for a main thread. In the kernel a main
    thread has the name of its process.
    """

    job: str
    thread: str
    members: list[Member] = field(default_factory=list)
    children: list[Node] = field(default_factory=list)


def merge(threads: Iterable[Thread], *, every_thread: bool = False) -> list[Group]:
    """Returns the groups of ``threads`` by job. Only threads that train are used, unless ``every_thread``.

    Groups of threads that train come first, then other groups by name. Siblings are ordered from the fewest members;
    incomplete stacks come last.
    """
    chosen: dict[tuple[str, bool, str], list[Thread]] = {}
    for thread in threads:
        if thread["trains"] or every_thread:
            main = thread["tid"] == thread["pid"]
            name = MAIN_THREAD if main else re.sub(r"\d+", "*", thread["thread"] or "(unnamed)")
            chosen.setdefault((thread["job"], not thread["trains"], name), []).append(thread)
    return [_group(job, name, chosen[job, other, name], other) for job, other, name in sorted(chosen)]


def _group(job: str, name: str, threads: Sequence[Thread], named: bool) -> Group:
    names = {thread["thread"] for thread in threads if thread["thread"]}
    group = Group(job, names.pop() if named and len(names) == 1 else name)
    shared: dict[Any, Any] = {}
    for thread in sorted(threads, key=lambda t: _order(_member(t))):
        _add(group, shared if thread["complete"] else {}, thread)
    _sort(group.children)
    return group


def _add(group: Group, known: dict[Any, Any], thread: Thread) -> None:
    """Adds a thread to its group. ``known`` maps a frame to its node and to a map of the same form for the node's
    children.
    """
    member = _member(thread)
    group.members.append(member)
    siblings = group.children
    for key, frame in _path(thread["frames"]):
        if key not in known:
            node = Node(frame["func"], frame["file"], frame["lineno"], frame["frame_type"], complete=thread["complete"])
            siblings.append(node)
            known[key] = (node, {})
        node, known = known[key]
        node.members.append(member)
        siblings = node.children


def _path(frames: Sequence[Frame]) -> list[tuple[Any, Frame]]:
    """Returns pairs of key and frame, outermost first. Frames with equal keys are merged."""
    path: list[tuple[Any, Frame]] = [
        ((f["func"], f["file"], f["lineno"], f["frame_type"]), f) for f in reversed(frames)
    ]
    if len(path) <= MAX_DEPTH:
        return path
    half = (MAX_DEPTH - 1) // 2
    middle = path[half:-half]
    left_out: Frame = {"func": f"({len(middle)} frames left out)", "file": "", "lineno": None, "frame_type": "Python"}
    return [*path[:half], (tuple(key for key, _ in middle), left_out), *path[-half:]]


def _sort(nodes: list[Node]) -> None:
    nodes.sort(key=lambda n: (not n.complete, len(n.members), _order(n.members[0])))
    for node in nodes:
        _sort(node.children)


def _member(thread: Thread) -> Member:
    return thread["rank"], thread["pid"], thread["tid"], thread["node"]


def _order(member: Member) -> tuple[Any, ...]:
    rank, pid, tid, node = member
    return rank is None, rank or 0, node, pid, tid


def member_ranks(members: Iterable[Member]) -> list[int]:
    """Returns the ranks of ``members``, in order."""
    return sorted({rank for rank, *_ in members if rank is not None})


def pids_of(members: Iterable[Member]) -> list[int]:
    """Returns the pids of ``members`` that have no rank, in order."""
    return sorted({pid for rank, pid, *_ in members if rank is None})


def _without(members: Sequence[Member], children: Iterable[Node]) -> list[Member]:
    further = {member for child in children for member in child.members}
    return [member for member in members if member not in further]


class PlainNode(TypedDict):
    func: str
    file: str
    lineno: int | None
    frame_type: str
    ranks: list[int]
    pids: list[int]
    threads: int
    complete: bool
    children: list[PlainNode]


class PlainGroup(TypedDict):
    job: str
    thread: str
    ranks: list[int]
    pids: list[int]
    threads: int
    children: list[PlainNode]


def plain_groups(groups: Iterable[Group]) -> list[PlainGroup]:
    """Returns the groups as docs/json.md describes them."""
    return [
        {
            "job": g.job,
            "thread": g.thread,
            "ranks": g.ranks,
            "pids": g.pids,
            "threads": len(g.members),
            "children": [_plain(child) for child in g.children],
        }
        for g in groups
    ]


def _plain(node: Node) -> PlainNode:
    return {
        "func": node.func,
        "file": node.file,
        "lineno": node.lineno,
        "frame_type": node.frame_type,
        "ranks": node.ranks,
        "pids": node.pids,
        "threads": len(node.members),
        "complete": node.complete,
        "children": [_plain(child) for child in node.children],
    }
