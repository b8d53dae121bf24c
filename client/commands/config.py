"""``config``: what is collected, and changing it while the daemon runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from probing.api.errors import UsageError
from probing.client.render.output import write_table
from probing.client.render.table import Field
from probing.client.session import job_named, opened
from probing.client.settings import Settings

__all__ = ("run", "write_settings")

_FIELDS = (
    Field("NODE", "node"),
    Field("KEY", "key"),
    Field("VALUE", "value", flex=True),
    Field("DEFAULT", "default", flex=True),
    Field("WHERE", "where"),
    Field("UNTIL", "ends"),
    Field("MEANING", "doc", flex=True),
)
# Of Probing, whose server can move while it runs.
_ADDRESSES = ("probing.server.port", "probing.server.address", "server.port", "server.address")


def run(
    settings: Settings, what: str | None, *, job: str, pid: int, length: float, persist: bool, reset: bool
) -> None:
    """``what``: None for all settings, KEY or KEY=VALUE. ``length`` in seconds; 0: the change stays."""
    key, equals, value = (what or "").partition("=")
    _check(what, key, bool(equals), job, pid, length, persist=persist, reset=reset)
    with opened(settings) as cluster:
        job = job_named(cluster, job)
        found = cluster.config(
            key, value if equals else None, job=job, pid=pid, seconds=length, persist=persist, reset=reset
        )
        write_settings(settings, found)


def _check(
    what: str | None, key: str, setting: bool, job: str, pid: int, length: float, *, persist: bool, reset: bool
) -> None:
    if key in _ADDRESSES:
        hint = "probingd run --listen HOST:PORT, or listen in its configuration; `probingctl -t HOST:PORT` asks there"
        raise UsageError(f"{key}: where the daemon listens is set when it starts", hint=hint)
    if what is not None and not key:
        raise UsageError(f"{what}: there is no key", hint="`probingctl config` lists the keys")
    if job and pid:
        raise UsageError("--job and --pid contradict each other", hint="a change is for one job, one process, or all")
    if reset and setting:
        raise UsageError("--reset takes no value", hint=f"probingctl config {key} --reset")
    if reset and not key:
        raise UsageError("--reset needs a key", hint="`probingctl config` lists the keys")
    if not setting and (length or persist):
        raise UsageError("--for and --persist belong to a change", hint="give it as KEY=VALUE")


def write_settings(settings: Settings, found: Sequence[dict[str, Any]]) -> None:
    """The settings, one a line. ``where`` and ``ends`` are for people alone."""
    if settings.format != "table":
        write_table(settings, _FIELDS, list(found))
        return
    rows = [{**setting, "where": _where(setting), "ends": _ends(setting)} for setting in found]
    alone = len({setting["node"] for setting in found}) < 2
    write_table(settings, _FIELDS[1:] if alone else _FIELDS, rows)


def _where(setting: dict[str, Any]) -> str:
    if setting["job"] is not None:
        return f"job {setting['job']}"
    return "everywhere" if setting["pid"] is None else f"pid {setting['pid']}"


def _ends(setting: dict[str, Any]) -> str | None:
    if setting["until"] is not None:
        return str(setting["until"])[:19] + "Z"
    if setting["persisted"]:
        return "kept"
    particular = setting["job"] is not None or setting["pid"] is not None
    return "restart" if particular or setting["value"] != setting["default"] else None
