"""Rules that say which records and commands a launcher obeys."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from probing.api.text import escape
from probing.groups.spec import Spec

__all__ = ("SIGUSR1", "Rules", "command_problem")

SIGUSR1 = ("SIGUSR1",)
_MAX_SHOWN = 200


@dataclass(frozen=True, slots=True)
class Rules:
    """The records and commands that a launcher obeys: records of the user ``uid`` that one of ``keys`` has signed.

    ``allow``: patterns of commands for ``fnmatch.fnmatchcase``, with ``*``, ``?`` and ``[...]``. A pattern must match
    the whole command as ``shlex.join`` writes it: a word with a blank or another special character is in single quotes.
    Without patterns, a command runs only if it was typed on this node.
    """

    keys: frozenset[str]
    uid: int
    user: str
    allow: tuple[str, ...] = ()


def command_problem(spec: Spec, node: str, allow: Sequence[str]) -> str:
    """Returns why a launcher on ``node`` refuses to run the commands of ``spec``; empty if it runs them."""
    if not allow:
        if spec.signed_on == node:
            return ""
        return (
            f"the command was typed on {spec.signed_on}, and without --allow this launcher runs only commands "
            f"that were typed on {node}"
        )
    commands = [spec.command] if not spec.save or spec.save == SIGUSR1 else [spec.command, spec.save]
    for command in commands:
        text = shlex.join(command)
        if not any(fnmatchcase(text, pattern) for pattern in allow):
            return f"no --allow of this launcher matches the command {escape(text, _MAX_SHOWN)}"
    return ""
