"""The command line of ``probingd``: its commands in typer, each of which also accepts the configuration's options."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from probing.api.errors import UsageError
from probing.daemon.cli import check, commands, import_rows
from probing.daemon.cli.options import FORMAT_NAMES
from probing.daemon.cli.run import run
from probing.daemon.config import DEFAULT_FILE, options

__all__ = ("invoke", "program")


def _run(context: typer.Context) -> int:
    """Run the daemon in the foreground; print `ready` on stdout once it collects and answers."""
    return run(context.args)


_COMMANDS: dict[str, Callable[..., int]] = {
    "run": _run,
    "stop": commands.stop,
    "restart": commands.restart,
    "check": check.command,
    "cleanup": commands.cleanup,
    "import": import_rows.command,
    "verify": commands.verify,
    "version": commands.show_version,
}
# The keys of the configuration that each command reads. `check` reads all keys, so only the help of `run` lists them.
_READS: dict[str, tuple[str, ...]] = {
    "stop": ("socket",),
    "restart": ("socket",),
    "cleanup": ("instance", "socket", "probes.bpffs"),
    "import": ("state_dir", "node_name", "store.max_bytes", "store.keep_free_bytes"),
    "verify": ("state_dir",),
}
# The exit code after Ctrl-C, as in a shell.
_INTERRUPTED = 130
# The length of the longest option, plus two spaces.
_OPTION_WIDTH = 34


def invoke(args: Sequence[str]) -> int:
    """Runs a command line and returns its exit code. Raises UsageError, and the errors of the command."""
    if not args or args[0] == "help":
        args = ["--help"]
    # The click that typer uses depends on typer's version, so click's error class is found through a class of typer.
    click_error: type[Exception] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")
    try:
        code = program().main(list(args), prog_name="probingd", standalone_mode=False)
    except typer.Abort:
        return _INTERRUPTED
    except typer.Exit as e:
        return e.exit_code
    except click_error as e:
        raise _usage(e, args) from None
    return code if isinstance(code, int) else 0


class _Command(TyperCommand):
    def format_options(self, ctx: Any, formatter: Any) -> None:
        super().format_options(ctx, formatter)
        if ctx.info_name == "run":
            _write_configuration(formatter)
        elif ctx.info_name != "version":
            _write_keys_of(ctx.info_name, formatter)


class _Group(TyperGroup):
    def format_commands(self, ctx: Any, formatter: Any) -> None:
        del ctx
        _write_commands(formatter)
        _write_configuration(formatter)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in _COMMANDS:
            near = difflib.get_close_matches(args[0], _COMMANDS, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"one of {', '.join(_COMMANDS)}"
            raise UsageError(f"unknown command {args[0][:80]!r}", hint=hint)
        return super().resolve_command(ctx, args)


def program() -> Any:
    """Returns the command ``probingd``; its ``main`` runs it."""
    # An unknown option before the command is reported as an unknown command. After the command, options that the
    # command does not define are left to the configuration.
    context = {"help_option_names": ["-h", "--help"], "ignore_unknown_options": True, "max_content_width": 120}
    app = typer.Typer(cls=_Group, add_completion=False, rich_markup_mode=None, context_settings=context)
    app.callback()(_root)
    for name, command in _COMMANDS.items():
        usage = "SOURCE... [OPTIONS]" if name == "import" else "[OPTIONS]"
        settings = {**context, "allow_extra_args": True}
        app.command(name, cls=_Command, options_metavar=usage, context_settings=settings)(command)
    return get_command(app)


def _show_version(wanted: bool) -> None:
    if wanted:
        commands.show()
        raise typer.Exit


def _root(
    _: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """The daemon that watches every training process of this node."""


def _write_commands(formatter: Any) -> None:
    with formatter.section("Commands"):
        formatter.write_dl([(name, command.__doc__ or "") for name, command in _COMMANDS.items()])


def _write_configuration(formatter: Any) -> None:
    with formatter.section(f"Configuration (also keys of {DEFAULT_FILE})"):
        formatter.write_dl(_rows_of([key for key, _ in options()]), col_max=_OPTION_WIDTH)


def _write_keys_of(command: str, formatter: Any) -> None:
    """Writes the options of the configuration that a command reads, and the command that lists all options."""
    with formatter.section(f"Configuration (also keys of {DEFAULT_FILE})"):
        formatter.write_dl(_rows_of(_READS.get(command, ())), col_max=_OPTION_WIDTH)
    formatter.write_paragraph()
    formatter.write_text("All other keys are options, too: `probingd run --help` lists them.")


def _rows_of(keys: Sequence[str]) -> list[tuple[str, str]]:
    known = dict(options())
    rows = [("--config FILE", f"the file to read instead of {DEFAULT_FILE}")]
    for key in keys:
        option = known[key]
        value = "[=false]" if option.default is True else "" if option.default is False else "VALUE"
        rows.append((f"--{key.replace('_', '-')} {value}", option.doc))
    return rows


def _usage(error: Any, args: Sequence[str]) -> UsageError:
    parameter = getattr(error, "param", None)
    names = {*(parameter.opts if parameter is not None else ()), getattr(error, "option_name", None)}
    if names & set(FORMAT_NAMES):
        given = next((word for word in args if word.partition("=")[0] in FORMAT_NAMES), FORMAT_NAMES[0])
        return UsageError(f"{given.partition('=')[0]} must be table or json")
    message = str(error.format_message())
    return UsageError(message[:1].lower() + message[1:].rstrip("."))
