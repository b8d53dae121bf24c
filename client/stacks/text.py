"""Formats merged stacks as trees of text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from probing.api.text import escape, numbers_text, plural, ranks_of
from probing.client.messages import Frame
from probing.client.render.table import ascii_only, cut_mark
from probing.client.stacks.merge import MAIN_THREAD, Group, Member, Node, member_ranks, pids_of

__all__ = ("frame_text", "members_text", "short_name", "telling", "trees_text", "without_frames")

# Names of C++ templates may have hundreds of characters, so names are cut to this length; -f json has complete names.
_LONG_NAME = 60
_MOST_NAMED = 8


def trees_text(groups: Sequence[Group]) -> str:
    """Returns a tree for each group, outermost frame first: a line for each shared frame, branches indented.

    Threads without a frame, except main threads, are summarized in one line at the end of a job.
    """
    texts: list[str] = []
    jobs: dict[str, list[Group]] = {}
    for group in groups:
        jobs.setdefault(group.job, []).append(group)
    for own in jobs.values():
        empty = [group for group in own if not group.children and group.thread != MAIN_THREAD]
        texts += ["\n".join(_group(group)) + "\n" for group in own if group not in empty]
        threads = [(group.thread, len(group.members)) for group in empty]
        line = without_frames(threads)
        texts += [escape(f"job {own[0].job or '(none)'}  {line}") + "\n"] if line else []
    return "\n".join(texts)


def without_frames(threads: Iterable[tuple[str, int]]) -> str:
    """Returns a line such as ``3 threads without a frame: pin_memory, pt_autograd (2)``. ``threads`` has pairs of a
    name and a number of threads.
    """
    numbers: dict[str, int] = {}
    for name, number in threads:
        numbers[name] = numbers.get(name, 0) + number
    named = [f"{name} ({number})" if number > 1 else name for name, number in numbers.items()]
    more = [f"{len(named) - _MOST_NAMED} other names"] if len(named) > _MOST_NAMED else []
    total = sum(numbers.values())
    return f"{plural(total, 'thread')} without a frame: {', '.join([*named[:_MOST_NAMED], *more])}" if total else ""


def telling(frames: Sequence[Frame]) -> list[Frame]:
    """Returns ``frames``, innermost first, up to the outermost Python frame; frames of the interpreter's start are left
    out.
    """
    last = max((i for i, frame in enumerate(frames) if frame["frame_type"] == "Python"), default=len(frames) - 1)
    return list(frames[: last + 1])


def short_name(func: str) -> str:
    """Returns the name of a C or C++ function, cut so that it fits on a line."""
    return func if len(func) <= _LONG_NAME else func[: _LONG_NAME - 1] + cut_mark()


def members_text(ranks: Sequence[int], pids: Sequence[int]) -> str:
    """Returns ``0-6`` or ``1,3`` for ranks, and ``pid 812`` for processes without a rank."""
    parts = [numbers_text(ranks)] if ranks else []
    if pids:
        parts.append(("pid " if len(pids) == 1 else "pids ") + ",".join(map(str, pids)))
    return " ".join(parts)


def frame_text(func: str, file: str, lineno: int | None, frame_type: str) -> str:
    """Returns ``func (file:line)``, without the file or line if it is unknown; native frames are marked."""
    where = file if lineno is None else f"{file}:{lineno}"
    native = frame_type == "Native"
    return f"{short_name(func) if native else func}{f' ({where})' if where else ''}{' [native]' if native else ''}"


def _group(group: Group) -> Iterator[str]:
    threads = [ranks_of(group.ranks) if group.ranks else "", members_text([], group.pids)]
    # Branches of incomplete stacks are marked below. A single incomplete stack has no branch, so the title is marked.
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
        mark = f"[{members_text(member_ranks(members), pids_of(members))}]"
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
