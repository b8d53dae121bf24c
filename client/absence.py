"""Says for which nodes a statement such as "nothing is wrong" holds: only for the nodes that have answered."""

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
    """Sets the function that returns the nodes of this command that did not answer, each with the reason."""
    _silent.set(silent)


def claim(text: str) -> str:
    """Returns ``text``, which states that something is absent or well; if a node did not answer, limited to the nodes
    that did.
    """
    return f"{text} {_AMONG}" if _silent.get()() else text


def require_all() -> None:
    """Raises PartialAnswer if a node did not answer, because then an empty answer may be wrong."""
    if _silent.get()():
        raise partial("nothing was found")


def partial(message: str, silent: Mapping[str, str] | None = None) -> PartialAnswer:
    """Returns the error for ``message``, which says that something was not found.

    ``silent``: the nodes that did not answer, with the reasons; None: the silent nodes of the command.
    """
    nodes = _silent.get()() if silent is None else silent
    named = [f"{node} ({why})" for node, why in list(nodes.items())[:_MOST_NAMED]]
    return PartialAnswer(f"{message} {_AMONG}", hint=f"missing: {'; '.join(named)}")


def unless_partial(error: NotFound) -> NotFound | PartialAnswer:
    """Returns ``error``; if a node did not answer, which may have the thing, PartialAnswer with the same message."""
    return partial(error.message) if _silent.get()() else error
