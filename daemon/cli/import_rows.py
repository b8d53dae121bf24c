"""``probingd import`` copies rows of other state directories and of Parquet files into this state directory."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from probing.api.errors import UsageError
from probing.api.text import escape, size
from probing.daemon.cli.options import account, decoder
from probing.daemon.config import Config, options

__all__ = ("command",)


def command(
    context: typer.Context,
    table: Annotated[
        str, typer.Option("--table", metavar="NAME", help="The table for Parquet files that name no table.")
    ] = "",
) -> int:
    """Import rows of other state directories and of Parquet files (SOURCE...) into --state-dir, each file once."""
    from probing.daemon.collector.live_settings import Changes
    from probing.daemon.collector.settings import limits_of
    from probing.daemon.store.importing.importer import import_sources
    from probing.daemon.store.importing.target import Target
    from probing.daemon.supervisor.runtime import make_state_dir
    from probing.daemon.user_tables import UserTables

    sources, rest = _split(context.args)
    if not sources:
        raise UsageError("there is nothing to import", hint="probingd import SOURCE... [--state-dir DIR]")
    config = Config.from_args(rest, default_file=True)
    root = Path(config.state_dir)
    if not root.exists():
        make_state_dir(root, account(config, "collector"))
    limits = limits_of(config, Changes(config, root / "changes.json", time.time_ns).value)
    target = Target(root, config.node_name, limits, UserTables(root / "user_tables.json"))
    with decoder(config) as confined:
        done = import_sources(
            target,
            [Path(source) for source in sources],
            confined,
            table=table,
            now_ns=time.time_ns(),
            progress=_progress,
        )
    sys.stderr.writelines(f"not imported: {escape(str(problem))}\n" for problem in done.problems)
    for name, rows in sorted(done.rows.items()):
        sys.stdout.write(f"{name}: {rows} rows\n")
    sys.stdout.write(f"{done.files} files imported, {done.already} were here before\n")
    return 3 if done.problems else 0


def _progress(done: int, total: int) -> None:
    if sys.stderr.isatty() and total:
        end = "\n" if done == total else ""
        sys.stderr.write(f"\r{done / total:4.0%} of {size(total)}{end}")
        sys.stderr.flush()


def _split(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns (sources, options with their values)."""
    switches = {f"--{key}" for key, option in options() if isinstance(option.default, bool)}
    sources: list[str] = []
    rest: list[str] = []
    words = iter(args)
    for word in words:
        if not word.startswith("-"):
            sources.append(word)
            continue
        rest.append(word)
        if "=" not in word and word.replace("-", "_").replace("__", "--", 1) not in switches:
            rest.extend(value for value in [next(words, None)] if value is not None)
    return sources, rest
