"""``probingd``: the command of the daemon's side. Each command imports what it needs and no more."""

from __future__ import annotations

import difflib
import json
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from probing.api.errors import ConfigError, UsageError
from probing.daemon.config import Config, options
from probing.daemon.supervisor.fatal import guard

if TYPE_CHECKING:
    from probing.daemon.store.decoder import Decoder
    from probing.daemon.supervisor.rights import Account, Rights

__all__ = ("main",)


def main() -> None:
    """The entry point. Exit code: 0 fine, 1 error, 2 wrong usage, 3 something needed is missing."""
    sys.exit(guard(lambda: _dispatch(sys.argv[1:])))


def _dispatch(args: Sequence[str]) -> int:
    if not args or args[0] in ("-h", "--help", "help"):
        return _help()
    name, rest = args[0], list(args[1:])
    if name == "--version":
        name = "version"
    command = _COMMANDS.get(name)
    if command is None:
        near = difflib.get_close_matches(name, _COMMANDS, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"one of {', '.join(_COMMANDS)}"
        raise UsageError(f"unknown command {name[:80]!r}", hint=hint)
    if any(word in ("-h", "--help") for word in rest):
        return _help()
    return command(rest)


def _run(args: list[str]) -> int:
    """Start the daemon and stay; prints `ready` on stdout once it collects and answers."""
    from probing.daemon.supervisor.loop import Supervisor
    from probing.daemon.supervisor.requirements import needs_sys_admin
    from probing.daemon.supervisor.rights import rights_table

    config = Config.from_args(args, default_file=True)
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s"
    )
    return Supervisor(config, rights_table(config, sys_admin=needs_sys_admin())).run()


def _stop(args: list[str]) -> int:
    """End the daemon and remove its probes; --keep-pins leaves them for the next start."""
    from probing.daemon.supervisor.control import stop

    keep = _flag(args, "--keep-pins")
    stop(Config.from_args(args, default_file=True), keep_pins=keep)
    return 0


def _restart(args: list[str]) -> int:
    """Start the collector and the service anew; probes stay in place meanwhile."""
    from probing.daemon.supervisor.control import restart

    restart(Config.from_args(args, default_file=True))
    return 0


def _check(args: list[str]) -> int:
    """List what works here and what each lack costs; -f json for machines; 3 when something needed is missing."""
    from probing.daemon.cli.check import check, needed_is_missing, print_table

    as_json = _format_is_json(args)
    findings = check(Config.from_args(args, default_file=True))
    if as_json:
        json.dump([finding.to_dict() for finding in findings], sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        print_table(findings, sys.stdout)
    return 3 if needed_is_missing(findings) else 0


def _cleanup(args: list[str]) -> int:
    """Remove the probes that a daemon left behind: those of --instance NAME, or with --all everyone's."""
    from probing.daemon.supervisor.control import cleanup

    everything = _flag(args, "--all")
    cleanup(Config.from_args(args, default_file=True), everything=everything)
    return 0


def _verify(args: list[str]) -> int:
    """Read all of --state-dir and write nothing; a line for each thing that is wrong; 3 when there is any."""
    from probing.daemon.store.verify.examine import examine

    as_json = _format_is_json(args)
    config = Config.from_args(args, default_file=True)
    with _decoder(config) as decoder:
        found = examine(config.state_dir, decoder)
    if as_json:
        json.dump(found.to_dict(), sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        sys.stdout.writelines(f"{_printable(str(problem))}\n" for problem in found.problems)
        sys.stdout.write(_printable(found.summary) + "\n")
    return 3 if found.wrong else 0


def _import(args: list[str]) -> int:
    """Bring rows of other state directories and of Parquet files (SOURCE...) into --state-dir, each once."""
    import time

    from probing.daemon.collector.live_settings import Changes
    from probing.daemon.collector.settings import limits_of
    from probing.daemon.store.importing.importer import Target, import_sources
    from probing.daemon.supervisor.runtime import make_state_dir
    from probing.daemon.user_probes.tables import UserTables

    table = _option(args, "--table")
    sources, rest = _words(args)
    if not sources:
        raise UsageError("there is nothing to import", hint="probingd import SOURCE... [--state-dir DIR]")
    config = Config.from_args(rest, default_file=True)
    root = Path(config.state_dir)
    if not root.exists():
        make_state_dir(root, _account(config, "collector"))
    limits = limits_of(config, Changes(config, root / "changes.json", time.time_ns).value)
    target = Target(root, config.node_name, limits, UserTables(root / "user_tables.json"))
    with _decoder(config) as decoder:
        done = import_sources(
            target, [Path(source) for source in sources], decoder,
            table=table, now_ns=time.time_ns(), progress=_progress,
        )  # fmt: skip
    sys.stderr.writelines(f"not imported: {_printable(str(problem))}\n" for problem in done.problems)
    for name, rows in sorted(done.rows.items()):
        sys.stdout.write(f"{name}: {rows} rows\n")
    sys.stdout.write(f"{done.files} files imported, {done.already} were here before\n")
    return 3 if done.problems else 0


def _progress(done: int, total: int) -> None:
    if sys.stderr.isatty() and total:
        end = "\n" if done == total else ""
        sys.stderr.write(f"\r{done / total:4.0%} of {total / 1e6:.1f} MB{end}")
        sys.stderr.flush()


def _version(args: list[str]) -> int:
    """Print the version."""
    from importlib.metadata import version

    if args:
        raise UsageError("version takes no arguments")
    sys.stdout.write(f"probingd {version('probingd')}\n")
    return 0


_COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "run": _run,
    "stop": _stop,
    "restart": _restart,
    "check": _check,
    "cleanup": _cleanup,
    "import": _import,
    "verify": _verify,
    "version": _version,
}


def _decoder(config: Config) -> Decoder:
    """Files are decoded by the user of the SQL workers, where we can become it."""
    from probing.daemon.store.decoder import Decoder

    account = _account(config, "parser")
    return Decoder(account.uid, account.gid) if account else Decoder()


def _account(config: Config, part: str) -> Account | None:
    """The user of a part of the daemon; None where no daemon was ever installed, or we cannot become it."""
    from probing.daemon.supervisor.rights import rights_table

    try:
        rights: Rights = getattr(rights_table(config), part)
    except ConfigError:
        return None
    return rights.account


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)


def _flag(args: list[str], name: str) -> bool:
    found = name in args
    while name in args:
        args.remove(name)
    return found


def _option(args: list[str], name: str) -> str:
    if name not in args:
        return ""
    at = args.index(name)
    given = args[at + 1 : at + 2]
    if not given:
        raise UsageError(f"{name} needs a value")
    del args[at : at + 2]
    return given[0]


def _words(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words of a command line that belong to no option, and the rest."""
    switches = {f"--{key}" for key, option in options() if isinstance(option.default, bool)}
    words: list[str] = []
    rest: list[str] = []
    waiting = iter(args)
    for word in waiting:
        if not word.startswith("-"):
            words.append(word)
            continue
        rest.append(word)
        if "=" not in word and word.replace("-", "_").replace("__", "--", 1) not in switches:
            rest.extend(value for value in [next(waiting, None)] if value is not None)
    return words, rest


def _format_is_json(args: list[str]) -> bool:
    for name in ("-f", "--format"):
        if name in args:
            at = args.index(name)
            chosen = args[at + 1 : at + 2]
            del args[at : at + 2]
            if chosen not in (["json"], ["table"]):
                raise UsageError(f"{name} takes table or json")
            return chosen == ["json"]
    return False


def _help() -> int:
    lines = ["usage: probingd COMMAND [--config FILE] [--KEY VALUE ...]", "", "commands:"]
    lines += [f"  {name:9} {command.__doc__}" for name, command in _COMMANDS.items()]
    lines += ["", "options (also keys of /etc/probingd/probingd.toml):"]
    lines += [f"  --{key.replace('_', '-'):24} {option.metadata['doc']}" for key, option in options()]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    main()
