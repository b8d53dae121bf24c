"""``worker``: the launcher of this node, which starts ranks of groups as the user who runs it."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from probing.api.errors import UsageError
from probing.api.text import escape, listed, plural
from probing.client.launching import Lease, Link, LogWanted
from probing.client.session import opened
from probing.client.settings import Settings
from probing.client.user import user_name
from probing.groups.keys import trusted_keys
from probing.groups.report import rows_json
from probing.groups.spec import node_of
from probing.launcher.logs import read_log

if TYPE_CHECKING:
    from probing.launcher.launcher import Launcher

__all__ = ("EXAMPLES", "Options", "run")

EXAMPLES = (
    "probingctl worker --slots 8",
    "probingctl worker --join gn6:7070 --allow 'python /home/me/*'",
)
_REPORT_S = 0.5
_MAX_SLOTS = 256
_MAX_LOG = 256 << 10


@dataclass(frozen=True, slots=True)
class Options:
    join: Annotated[
        str | None, typer.Option(metavar="NODE:PORT", help="The daemon of this node; default: the socket of -t.")
    ] = None
    name: Annotated[str | None, typer.Option(metavar="NODE-N", help="Serve only this worker.")] = None
    slots: Annotated[
        int | None,
        typer.Option(min=1, max=_MAX_SLOTS, metavar="N", help="Workers to serve; default: one for each GPU."),
    ] = None
    allow: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Commands that groups may run; default: commands typed on this node."),
    ] = None


def run(settings: Settings, options: Options) -> None:
    if options.name is not None and options.slots is not None:
        raise UsageError("--name and --slots exclude each other", hint="--slots N serves NODE-0 to NODE-(N-1)")
    from probing.launcher.allowed import Rules
    from probing.launcher.launcher import NODE_VARIABLE, Launcher
    from probing.launcher.spawn import start_keeper

    target = settings.target if options.join is None else options.join
    alone = replace(settings, target=target, nodes=(), all_nodes=False, where=())
    rules = Rules(trusted_keys(), os.getuid(), user_name(), tuple(options.allow or ()))
    with opened(alone) as cluster:
        node = os.environ.pop(NODE_VARIABLE, "") or cluster.status()[0][1].node
        workers = _workers(node, options)
        directory = _state_directory(node)
        launcher = Launcher(node, workers, directory, rules)
        start_keeper(directory, node)
        # A signal handler only adds its signal to this list. The loop reads the list at least every _REPORT_S.
        signals: list[int] = []
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda got, _: signals.append(got))
        link = Link(cluster, target, workers, launcher.wake)
        sys.stderr.write(f"serving {listed(workers[:8])} of node {escape(node)} as {rules.user}\n")
        try:
            _serve(launcher, link, signals)
        finally:
            link.close()


def _serve(launcher: Launcher, link: Link, signals: list[int]) -> None:
    said: str | None = None
    fences: dict[str, float] = {}
    while not signals:
        launcher.wait(_REPORT_S)
        while link.orders:
            order = link.orders.popleft()
            if isinstance(order, LogWanted):
                link.answer(order, *_log_part(launcher, order))
            elif isinstance(order, Lease):
                launcher.renew(order.group, order.generation, order.sent + fences.get(order.group, 0.0))
            elif not launcher.apply(order):
                fences[order.spec.name] = order.spec.fence_s
        launcher.step()
        link.report(rows_json(launcher.report()))
        if link.refused is not None:
            raise link.refused
        if link.problem is not None and link.problem != said:
            said = link.problem
            sys.stderr.write(f"the daemon does not answer: {escape(said)}\n" if said else "connected to the daemon\n")
        if set(signals) == {signal.SIGHUP}:
            signals.clear()
            try:
                launcher.reexec()
            except OSError as e:
                sys.stderr.write(f"the launcher cannot restart its program, and goes on: {e.strerror}\n")
    living = sum(row.state in ("starting", "running", "ending") for row in launcher.report())
    launcher.close()
    if living:
        sys.stderr.write(
            f"{plural(living, 'rank')} run on; the next `probingctl worker` of this node finds them again\n"
        )


def _log_part(launcher: Launcher, wanted: LogWanted) -> tuple[bytes, int, str]:
    """Returns a part of the log of a rank, the position after that part, and the reason if there is no log, or ""."""
    path = launcher.log(wanted.group, wanted.rank)
    if path is None:
        return b"", 0, "it has no log here"
    try:
        return *read_log(path, wanted.start, _MAX_LOG), ""
    except OSError as e:
        return b"", 0, f"its log cannot be read: {e.strerror}"


def _workers(node: str, options: Options) -> tuple[str, ...]:
    if options.name is not None:
        if node_of(options.name) != node:
            raise UsageError(f"{escape(options.name, 80)} is no worker of node {node}", hint=f"--name {node}-0")
        return (options.name,)
    return tuple(f"{node}-{number}" for number in range(options.slots or _gpus() or 1))


def _state_directory(node: str) -> Path:
    """Returns the launcher's directory. Its path has the node's name, since nodes may share the home directory."""
    base = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    return base / "probing" / "launcher" / node


def _gpus() -> int:
    return min(sum(path.name[6:].isdecimal() for path in Path("/dev").glob("nvidia*")), _MAX_SLOTS)
