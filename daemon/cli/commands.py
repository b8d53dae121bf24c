"""The short commands of ``probingd``: ``cleanup``, ``restart``, ``stop``, ``verify`` and ``version``."""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Annotated

import typer

from probing.api.errors import UsageError
from probing.api.text import escape
from probing.daemon.cli.options import Format, FormatOption, config_of, decoder, write_json
from probing.daemon.supervisor import control

__all__ = ("cleanup", "restart", "show", "show_version", "stop", "verify")


def cleanup(
    context: typer.Context,
    everything: Annotated[bool, typer.Option("--all", help="Remove the probes of all instances.")] = False,
) -> int:
    """Remove the probes that the daemon of --instance NAME left behind; with --all, the probes of all instances."""
    config = config_of(context)
    removed = control.cleanup(config, everything=everything)
    whose = "" if everything else f" of instance {config.instance}"
    sys.stdout.write(f"the probes{whose} are removed\n" if removed else f"there were no probes{whose}\n")
    return 0


def restart(context: typer.Context) -> int:
    """Read the configuration again and restart the collector and the service; the probes stay in place."""
    control.restart(config_of(context))
    return 0


def stop(
    context: typer.Context,
    keep_pins: Annotated[bool, typer.Option("--keep-pins", help="Leave the probes for the next start.")] = False,
) -> int:
    """End the daemon and remove its probes."""
    control.stop(config_of(context), keep_pins=keep_pins)
    return 0


def verify(context: typer.Context, output: FormatOption = Format.TABLE) -> int:
    """Check all files of --state-dir without writing; print a line for each problem; exit with 3 if there is a
    problem.
    """
    from probing.daemon.store.verify.examine import examine

    config = config_of(context)
    with decoder(config) as confined:
        found = examine(config.state_dir, confined)
    if output is Format.JSON:
        write_json(found.to_dict())
    else:
        sys.stdout.writelines(f"{escape(str(problem))}\n" for problem in found.problems)
        sys.stdout.write(escape(found.summary) + "\n")
    return 3 if found.wrong else 0


def show_version(context: typer.Context) -> int:
    """Print the version."""
    if context.args:
        raise UsageError("version takes no arguments")
    show()
    return 0


def show() -> None:
    sys.stdout.write(f"probingd {version('probingd')}\n")
