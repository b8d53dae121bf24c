"""Makes docs/commands.md: every command of probingctl and probingd with its options, as ``--help`` has them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

from probing.client.app import program as probingctl
from probing.client.lazy import LazyGroup
from probing.daemon.cli.app import program as probingd

HEAD = """# Every command and option

Made from `--help` by `make docs`. [cli.md](cli.md) explains what the commands of `probingctl` show and how to read it,
[config.md](config.md) the keys of the configuration, which every command of `probingd` takes as options too, such as
`--state-dir DIR`, beside `--config FILE`.
"""


def page() -> str:
    """Returns docs/commands.md."""
    client, daemon = probingctl(), probingd()
    context = _context(client, "probingctl", None)
    lines = [HEAD, "## Options of every command of probingctl", *_parameters(client, context)]
    lines += ["", "## probingctl", *_commands(client, context)]
    lines += ["", "## probingd", *_commands(daemon, _context(daemon, "probingd", None))]
    return "\n".join([*lines, ""])


def _context(command: Any, name: str, parent: Any) -> Any:
    # Wide enough that no text is cut.
    return typer.Context(command, info_name=name, parent=parent, terminal_width=200)


def _commands(group: Any, context: Any) -> Iterator[str]:
    for name in group.list_commands(context):
        _, command, _ = group.resolve_command(context, [name])
        if isinstance(command, LazyGroup):
            yield from _commands(command, _context(command, name, context))
        elif not command.hidden:
            yield from _command(command, _context(command, name, context), _aliases(group, name))


def _aliases(group: Any, name: str) -> list[str]:
    found = group.commands.items()
    return [other for other, command in found if command.hidden and command.help == f"The same as {name}."]


def _command(command: Any, context: Any, aliases: list[str]) -> Iterator[str]:
    yield from ("", f"### {context.command_path}", f"{command.help}".replace("\n", " "))
    if aliases:
        yield f"Also: {', '.join(f'`{alias}`' for alias in aliases)}."
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    yield from ("", "```", usage, "```", *_parameters(command, context))
    examples = [line.strip() for line in (command.epilog or "").split("\n") if line.startswith("  ")]
    if examples:
        yield from ("", "Examples:", "", "```", *examples, "```")


def _parameters(command: Any, context: Any) -> Iterator[str]:
    records = [found for parameter in command.params if (found := parameter.get_help_record(context))]
    if records:
        yield from ("", "| option | meaning |", "|---|---|")
        for names, text in records:
            cells = (f"`{names.strip()}`", text.replace("  [", " ["))
            yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
