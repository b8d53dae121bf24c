"""The result of a check, and helpers that say which nodes differ."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

__all__ = ("FAIL", "PASS", "SKIPPED", "STATES", "WARN", "Result", "by_value", "compared", "names", "skipped")

PASS, WARN, FAIL, SKIPPED = "pass", "warn", "fail", "skipped"
# The states of a check, the worst first.
STATES = (FAIL, WARN, SKIPPED, PASS)
_MOST_NAMED = 6
_K = TypeVar("_K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a check. ``text``: a sentence that says what is wrong or right, or for ``skipped`` why the check
    could not be made. ``hint``: what to do. ``nodes``: the nodes concerned; empty: all.
    """

    check: str
    state: str
    text: str
    nodes: tuple[str, ...] = ()
    hint: str = ""


def names(nodes: Iterable[str]) -> str:
    """Returns a text with the names of the nodes. If there are more than six, it has the first six and the number of
    the rest.
    """
    found = sorted(nodes)
    more = f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
    return ", ".join(found[:_MOST_NAMED]) + more


def by_value(pairs: Iterable[tuple[str, _K]]) -> dict[_K, list[str]]:
    """Returns the nodes by value; the value that most nodes have comes first."""
    found: dict[_K, list[str]] = {}
    for node, value in pairs:
        found.setdefault(value, []).append(node)
    return dict(sorted(found.items(), key=lambda item: (-len(item[1]), str(item[0]))))


def compared(
    check: str,
    what: str,
    values: Mapping[str, str],
    *,
    state: str = FAIL,
    hint: str = "",
    show: Callable[[str], str] = str,
) -> Iterator[Result]:
    """Yields the result that all nodes have the same value, or that some nodes have another value than most.

    ``values``: the values by node. ``state``: the state of the result if there is a difference.
    """
    found = by_value(values.items())
    if len(found) == 1:
        [(value, nodes)] = found.items()
        where = f"on all {len(nodes)} nodes" if len(nodes) > 1 else f"on {nodes[0]}"
        yield Result(check, PASS, f"{what} {show(value)} {where}")
    elif found:
        text = "; ".join(f"{show(value)} on {names(nodes)}" for value, nodes in found.items())
        most, *others = found.values()
        odd = others if len(most) > len(others[0]) else [most, *others]
        yield Result(check, state, f"{what} differs: {text}", tuple(sorted(n for own in odd for n in own)), hint)


def skipped(check: str, why: str, nodes: Sequence[str] = ()) -> Result:
    """Returns the result that the check could not be made, and why."""
    return Result(check, SKIPPED, why, tuple(nodes))
