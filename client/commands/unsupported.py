"""``launch`` and ``inject`` of Probing, which load a library into the job: each only names its replacement."""

from __future__ import annotations

import ast
import builtins
from dataclasses import dataclass
from typing import Annotated

import typer

from probing.api.errors import UsageError
from probing.client.settings import Settings

__all__ = ("CONTEXT", "Options", "launch", "nearest")

CONTEXT = {"ignore_unknown_options": True, "allow_extra_args": True}
_MAX_NAMES = 5
_MAX_CODE = 1 << 16


@dataclass(frozen=True, slots=True)
class Options:
    words: Annotated[list[str] | None, typer.Argument(hidden=True)] = None


def launch(_settings: Settings, _options: Options) -> None:
    hint = "start the job as always: the daemon finds it by itself, `probingctl ps` shows it"
    raise UsageError("a job needs no launcher and no injected library", hint=hint)


def nearest(code: str) -> str:
    """Returns a hint with a command that reads the variables of ``code`` from outside. If ``code`` has no variables,
    the hint names other commands.
    """
    try:
        tree = ast.parse(code[:_MAX_CODE])
        found = list(dict.fromkeys(_names(tree)))[:_MAX_NAMES]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        found = []
    if found:
        return f"to read it from outside: probingctl vars {' '.join(found)}"
    return "`probingctl ps` has rank, world size and backends, `probingctl vars NAME` values of variables"


def _names(tree: ast.AST) -> list[str]:
    """Returns the dotted names in the code, outermost first, without names of called functions, imports and
    builtins."""
    skipped = {
        alias.asname or alias.name.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }
    found = []
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop(0)
        if isinstance(node, ast.Call):
            pending += [*node.args, *node.keywords]
        elif (name := _dotted(node)) is None:
            pending += ast.iter_child_nodes(node)
        elif (first := name.partition(".")[0]) not in skipped and not hasattr(builtins, first):
            found.append(name)
    return found


def _dotted(node: ast.AST) -> str | None:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else None
