"""``probingd verify``: reads a whole state directory, and changes nothing."""

from __future__ import annotations

import sys

import typer

from probing.api.text import escape
from probing.daemon.cli.options import Format, FormatOption, config_of, decoder, write_json

__all__ = ("command",)


def command(context: typer.Context, output: FormatOption = Format.TABLE) -> int:
    """Read all of --state-dir and write nothing; a line for each thing that is wrong; 3 when there is any."""
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
