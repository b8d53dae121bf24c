"""Profiles of the page: a tree of frames with their times, for one selection of samples or for two."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypedDict

from probing.api.errors import UsageError
from probing.api.text import numbers_text
from probing.client.profile.model import Frame, Profile, folded_imports, label, short_files
from probing.client.profile.request import Selection, at_times, base_of
from probing.client.profile.samples import read_profiles
from probing.client.web.panels import Question

__all__ = ("Tree", "difference", "profile")

# Small frames are counted only in their callers. A frame is small if its share of the time is below _LEAST_SHARE, or if
# _MOST_NODES frames are larger.
_LEAST_SHARE = 1 / 5_000
_MOST_NODES = 20_000
_MOST_DEPTH = 200


@dataclass(slots=True)
class _Node:
    """``ns``: the time of the frame in each profile. ``ranks``: the ranks that have the frame."""

    ns: list[int]
    ranks: set[int] = field(default_factory=set)
    children: dict[Frame, _Node] = field(default_factory=dict)


class Tree(TypedDict, total=False):
    """A frame with its callees. ``value``: its time, ns; ``base``: its time in the second profile, if there are two.
    ``ranks``: the ranks that have the frame, if they are asked for. ``seen``: the number of samples of each profile;
    only the root has it.
    """

    name: str
    value: int
    base: int
    ranks: str
    seen: list[int]
    children: list[Tree]


def profile(question: Question) -> Tree:
    """Returns the tree of stored samples, with ``ranks`` if the parameter ``by`` is ``rank``.

    With ``wall`` the tree has the time on and off the CPU of the threads that train, else the time on the CPU.
    """
    (found,) = read_profiles(question.cluster, [_selection(question)])
    return _tree([found], by_rank=question.parameters.text("by", "") == "rank")


def difference(question: Question) -> Tree:
    """Returns one tree of two selections. The parameters ``a`` and ``b`` are texts such as ``rank:R``, ``pid:P``,
    ``job:J`` or ``before:10m``. ``value`` is the time in ``a``, ``base`` the time in ``b``, both ns. Without ``a``, the
    whole selection is compared with ``b``."""
    whole = _selection(question)
    one = question.parameters.text("a", "")
    selected = base_of(whole, one) if one else whole
    base = base_of(selected, question.parameters.text("b"))
    return _tree(read_profiles(question.cluster, [selected, base]))


def _selection(question: Question) -> Selection:
    parameters = question.parameters
    job = question.job_or_all() or ""
    wall = parameters.flag("wall")
    if not job and not parameters.text("pid", ""):
        raise UsageError("neither a job nor a process is named", hint="add job=... or pid=...")
    whole = Selection(
        (parameters.pid(),) if parameters.text("pid", "") else (),
        job,
        parameters.number("rank"),
        "wall" if wall else "cpu",
        trains=wall,
    )
    return at_times(whole, *parameters.bounds("5m"))


def _tree(profiles: list[Profile], *, by_rank: bool = False) -> Tree:
    profiles = [folded_imports(one) for one in profiles]
    root = _Node([0] * len(profiles))
    for at, one in enumerate(profiles):
        for sample in one.samples:
            rank = dict(sample.labels).get("rank") if by_rank else None
            for node in _path(root, sample.frames[:_MOST_DEPTH], len(profiles)):
                node.ns[at] += sample.ns
                if rank is not None:
                    node.ranks.add(int(rank))
    short = short_files(profiles)
    shares = sorted((max(_shares(node, root)) for node in _nodes(root)), reverse=True)
    least = max([_LEAST_SHARE, *shares[_MOST_NODES : _MOST_NODES + 1]])
    return {**_plain(profiles[0].title, root, short, root, least), "seen": [one.seen for one in profiles]}


def _nodes(root: _Node) -> Iterator[_Node]:
    waiting = [root]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += node.children.values()


def _shares(node: _Node, root: _Node) -> list[float]:
    return [ns / (whole or 1) for ns, whole in zip(node.ns, root.ns, strict=True)]


def _path(root: _Node, frames: Iterable[Frame], profiles: int) -> Iterator[_Node]:
    """Yields the nodes from ``root`` to the innermost of ``frames``."""
    node = root
    yield node
    for frame in frames:
        node = node.children.setdefault(frame, _Node([0] * profiles))
        yield node


def _plain(name: str, node: _Node, short: dict[str, str], root: _Node, least: float) -> Tree:
    large = [
        _plain(label(frame, short), child, short, root, least)
        for frame, child in node.children.items()
        if max(_shares(child, root)) >= least
    ]
    plain: Tree = {"name": name, "value": node.ns[0]}
    if len(node.ns) > 1:
        plain["base"] = node.ns[1]
    if node.ranks:
        plain["ranks"] = numbers_text(sorted(node.ranks))
    return {**plain, "children": sorted(large, key=lambda child: -child["value"])}
