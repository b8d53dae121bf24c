"""Limits statements such as "nothing is wrong" to the nodes that answered, if some nodes did not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar

from probing.api.errors import NotFound, PartialAnswer

__all__ = ("claim", "partial", "require_all", "silent_of_command", "unless_partial")

SilentNodes = Callable[[], dict[str, str]]
_MOST_NAMED = 4
_AMONG = "on the nodes that answered"
_silent: ContextVar[SilentNodes] = ContextVar("silent nodes", default=dict)


def silent_of_command(silent: SilentNodes) -> None:
    """Sets the function that returns, for this command, the nodes that did not answer and the reason of each."""
    _silent.set(silent)


def claim(text: str) -> str:
    """Returns ``text``, such as "nothing is wrong"; adds "on the nodes that answered" if a node did not answer."""
    return f"{text} {_AMONG}" if _silent.get()() else text


def require_all() -> None:
    """Raises PartialAnswer if a node did not answer, because then an empty answer may be wrong."""
    if _silent.get()():
        raise partial("nothing was found")


def partial(message: str, silent: Mapping[str, str] | None = None) -> PartialAnswer:
    """Returns the error for ``message``, which says that something was not found.

    ``silent`` maps each node that did not answer to the reason; None stands for the silent nodes of the command.
    """
    nodes = _silent.get()() if silent is None else silent
    named = [f"{node} ({why})" for node, why in list(nodes.items())[:_MOST_NAMED]]
    return PartialAnswer(f"{message} {_AMONG}", hint=f"missing: {'; '.join(named)}")


def unless_partial(error: NotFound) -> NotFound | PartialAnswer:
    """Returns ``error``; if a node did not answer, returns PartialAnswer instead, because that node may have what the
    other nodes lack.
    """
    return partial(error.message) if _silent.get()() else error
