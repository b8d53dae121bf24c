"""``config``: shows and changes settings of the running daemon."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import typer

from probing.api.errors import UsageError
from probing.client.deletions import amount
from probing.client.messages import Change, Setting
from probing.client.options import For
from probing.client.render.output import write_table
from probing.client.render.table import Field
from probing.client.session import job_named, opened
from probing.client.settings import Settings, process_id
from probing.client.times import seconds
from probing.client.zone import when

__all__ = ("EXAMPLES", "Options", "run", "write_settings")

EXAMPLES = ("probingctl config", "probingctl config sampling.hz=99 --job 4711 --for 10m")

_FIELDS = (
    Field("NODE", "node"),
    Field("KEY", "key"),
    Field("VALUE", "value", flex=True),
    Field("DEFAULT", "default", flex=True),
    Field("WHERE", "where"),
    Field("UNTIL", "ends"),
    Field("DELETES", "deleting"),
    Field("MEANING", "doc", flex=True, wrap=True),
)
# Settings by which the tool Probing changes the address of its running server; probingd sets its address at the start.
_LISTEN = "set it by `probingd run --listen HOST:PORT` or `listen` in the configuration; then `probingctl -t HOST:PORT`"
_ADDRESSES = ("probing.server.port", "probing.server.address", "server.port", "server.address")


@dataclass(frozen=True, slots=True)
class Options:
    """The arguments and options. ``what`` is KEY or KEY=VALUE."""

    what: Annotated[str | None, typer.Argument(metavar="[KEY[=VALUE]]", help="The setting; default: all settings.")] = (
        None
    )
    job: Annotated[
        str, typer.Option(metavar="JOB", help="Only for this job: a name, the end of a name, a run or a pid.")
    ] = ""
    pid: Annotated[str | None, typer.Option(metavar="PID", help="Only for this process.")] = None
    for_: For = None
    persist: Annotated[bool, typer.Option("--persist", help="Keep the change when the daemon restarts.")] = False
    reset: Annotated[bool, typer.Option("--reset", help="Undo a change.")] = False
    yes: Annotated[bool, typer.Option("--yes", help="Confirm a limit that deletes rows.")] = False

    def change(self) -> Change:
        """Returns the change that the options ask for. Raises UsageError if they contradict each other."""
        key, equals, _ = (self.what or "").partition("=")
        if key in _ADDRESSES:
            raise UsageError(f"{key}: the daemon's address is set when it starts", hint=_LISTEN)
        if self.what is not None and not key:
            raise UsageError(f"{self.what}: the key is missing", hint="`probingctl config` lists the keys")
        pid = 0 if self.pid is None else process_id(self.pid)
        length = 0.0 if self.for_ is None else seconds(self.for_)
        if self.job and pid:
            hint = "leave one out: a change is for one job, one process, or all"
            raise UsageError("--job and --pid contradict each other", hint=hint)
        if self.reset and equals:
            raise UsageError("--reset takes no value", hint=f"probingctl config {key} --reset")
        if self.reset and not key:
            raise UsageError("--reset needs a key", hint="`probingctl config` lists the keys")
        if not equals and (length or self.persist):
            raise UsageError("--for and --persist need a change", hint="give the change as KEY=VALUE")
        changed: Change = {"job": self.job, "pid": pid, "seconds": length, "persist": self.persist}
        return {**changed, "reset": self.reset, "yes": self.yes}


def run(settings: Settings, options: Options) -> None:
    change = options.change()
    key, equals, value = (options.what or "").partition("=")
    with opened(settings) as cluster:
        change["job"] = job_named(cluster, options.job)
        write_settings(settings, cluster.config(key, value if equals else None, **change))


def write_settings(settings: Settings, found: Sequence[Setting]) -> None:
    """Writes a row for each setting. A table also says for which processes, and until when, the setting holds."""
    if settings.format != "table":
        write_table(settings, _FIELDS, found)
        return
    rows = [
        {**setting, "where": _where(setting), "ends": _ends(setting), "deleting": _deleting(setting)}
        for setting in found
    ]
    hidden = {"node"} if len({setting["node"] for setting in found}) < 2 else set()
    if all(row["deleting"] is None for row in rows):
        hidden.add("deleting")
    write_table(settings, [field for field in _FIELDS if field.key not in hidden], rows)


def _where(setting: Setting) -> str:
    if setting["job"] is not None:
        return f"job {setting['job']}"
    return "everywhere" if setting["pid"] is None else f"pid {setting['pid']}"


def _deleting(setting: Setting) -> str | None:
    begins, rows = setting["deletes_from"], setting["deletes_rows"]
    if begins is None or rows is None:
        return None
    return f"{amount(rows, setting['deletes_bytes'] or 0, setting['deletes_segments'] or 0)} from {when(begins)}"


def _ends(setting: Setting) -> str | None:
    if setting["until"] is not None:
        return when(str(setting["until"]))
    if setting["persisted"]:
        return "kept"
    particular = setting["job"] is not None or setting["pid"] is not None
    return "restart" if particular or setting["value"] != setting["default"] else None
