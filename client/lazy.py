"""A group of typer commands that imports only the command that runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from importlib import import_module
from inspect import Parameter, Signature
from types import ModuleType
from typing import Any, NamedTuple, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

__all__ = ("Entry", "LazyGroup", "taking")

_COMMANDS = "probing.client.commands"
_GLOBAL = "Every command also takes -t, -f, -o, --all-nodes and all options that `probingctl --help` lists."


class Entry(NamedTuple):
    """A command: its module, its line in ``--help``, the function that runs it, and the class of its options."""

    module: str
    help: str
    hidden: bool = False
    function: str = "run"
    options: str = "Options"


class LazyGroup(TyperGroup):
    """A group that lists and completes its commands without importing them."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self._entries: Mapping[str, Entry] = {}

    def add(self, entries: Mapping[str, Entry]) -> None:
        self._entries = {**self._entries, **entries}
        for name, entry in entries.items():
            self.add_command(TyperCommand(name, help=entry.help, hidden=entry.hidden, rich_markup_mode=None))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        if name is not None and name in self._entries:
            command = _loaded(name, self._entries[name])
        return name, command, rest


def taking(options: type[Any], function: Callable[[typer.Context, Any], None]) -> Callable[..., None]:
    """Returns a callback for typer whose parameters are the fields of ``options`` and that calls ``function`` with
    them.
    """

    def callback(context: typer.Context, **values: Any) -> None:
        function(context, options(**values))

    hints = get_type_hints(options, include_extras=True)
    parameters = [
        Parameter("context", Parameter.KEYWORD_ONLY, annotation=typer.Context),
        *(
            # A field without a default is a parameter that has to be given.
            Parameter(
                f.name,
                Parameter.KEYWORD_ONLY,
                default=Parameter.empty if f.default is MISSING else f.default,
                annotation=hints[f.name],
            )
            for f in fields(options)
        ),
    ]
    callback.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return callback


def _loaded(name: str, entry: Entry) -> Any:
    module = import_module(f"{_COMMANDS}.{entry.module}")
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(
        name,
        help=entry.help,
        epilog=_epilog(module),
        hidden=entry.hidden,
        context_settings=getattr(module, "CONTEXT", None),
    )(_callback(getattr(module, entry.options or "-", None), getattr(module, entry.function)))
    return get_command(app)


def _callback(options: type[Any] | None, run: Callable[..., None]) -> Callable[..., None]:
    if options is not None:
        return taking(options, lambda context, chosen: run(context.obj, chosen))

    def callback(context: typer.Context) -> None:
        run(context.obj)

    return callback


def _epilog(module: ModuleType) -> str | None:
    examples = getattr(module, "EXAMPLES", ())
    # For click, \b keeps the line breaks of a paragraph.
    return "\n".join(["\b", "Examples:", *(f"  {line}" for line in examples), "", _GLOBAL]) if examples else None
