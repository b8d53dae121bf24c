"""Merged stacks as trees of text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from probing.client.render.text import ascii_only, escape, ranks_named, ranks_text
from probing.client.stacks.merge import Group, Member, Node, pids_of, ranks_of

__all__ = ("frame_text", "members_text", "people")


def people(groups: Sequence[Group]) -> str:
    """Returns a tree for each group, outermost frame first: a line for each shared frame, branches indented."""
    return "\n".join("\n".join(_group(group)) + "\n" for group in groups)


def members_text(ranks: Sequence[int], pids: Sequence[int]) -> str:
    """``0-6``, ``1,3``, and ``pid 812`` for processes that have no rank."""
    parts = [ranks_text(ranks)] if ranks else []
    if pids:
        parts.append(("pid " if len(pids) == 1 else "pids ") + ",".join(map(str, pids)))
    return " ".join(parts)


def frame_text(func: str, file: str, lineno: int | None, frame_type: str) -> str:
    """Returns ``func (file:line)``, without the file or line where it is not known; native frames are marked."""
    where = file if lineno is None else f"{file}:{lineno}"
    return f"{func}{f' ({where})' if where else ''}{' [native]' if frame_type == 'Native' else ''}"


def _group(group: Group) -> Iterator[str]:
    threads = [ranks_named(group.ranks) if group.ranks else "", members_text([], group.pids)]
    # Otherwise the branch of an incomplete stack says so.
    alone = "  incomplete" if [child.complete for child in group.children] == [False] and not group.ends else ""
    yield escape(f"job {group.job or '(none)'}  {group.thread}  {' '.join(text for text in threads if text)}{alone}")
    yield from _below(group.ends, group.children, "(no Python frame)", "  ")


def _below(ends: Sequence[Member], children: Sequence[Node], end: str, indent: str) -> Iterator[str]:
    """Yields the lines under a frame: a line for each shared frame, then a branch for each set of threads."""
    while len(children) == 1 and not ends:
        node = children[0]
        yield escape(indent + _text(node))
        ends, children, end = node.ends, node.children, "(innermost)"
    if not children:
        if end != "(innermost)":
            yield indent + end
        return
    branches = _branches(ends, children)
    onward, last = ("|- ", "`- ") if ascii_only() else ("├─ ", "└─ ")
    for number, (members, branch) in enumerate(branches, 1):
        corner, beside = (onward, "|  " if ascii_only() else "│  ") if number < len(branches) else (last, "   ")
        mark = f"[{members_text(ranks_of(members), pids_of(members))}]"
        if branch is not None and not branch.complete:
            mark += " incomplete:"
        yield escape(f"{indent}{corner}{mark} {end if branch is None else _text(branch)}")
        if branch is not None:
            yield from _below(branch.ends, branch.children, "(innermost)", f"{indent}{beside}  ")


def _branches(ends: Sequence[Member], children: Iterable[Node]) -> list[tuple[Sequence[Member], Node | None]]:
    branches: list[tuple[Sequence[Member], Node | None]] = [(child.members, child) for child in children]
    if ends:
        branches.append((ends, None))
    branches.sort(key=lambda b: (b[1] is not None and not b[1].complete, len(b[0])))
    return branches


def _text(node: Node) -> str:
    return frame_text(node.func, node.file, node.lineno, node.frame_type)
