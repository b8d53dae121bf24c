"""Groups of workers on the page: what they do, logs of ranks, and the changes and commands of their owner.

The server of the caller's own page signs with the key of the caller. The page of a team, or a page under sudo, has no
key of its visitors, so it shows groups and refuses to change them.
"""

from __future__ import annotations

import codecs
import os
import shlex
from dataclasses import replace
from typing import TYPE_CHECKING

from probing.api.errors import PrivilegeError
from probing.api.text import escape
from probing.client.groups.changes import (
    Fields,
    first_spec,
    next_spec,
    put,
    split,
    variables,
    with_fields,
    workers_in,
)
from probing.client.groups.orders import begin, clashes, end, outcome
from probing.client.groups.records import GroupsSeen, living_groups, named, node_named, seen
from probing.client.groups.rows import group_row, order_of_worker, rank_rows, table_rows
from probing.client.times import seconds
from probing.client.web.panels import Panel, Panels, Question
from probing.groups.group import Action
from probing.groups.spec import MAX_SPEC, Spec, node_of

if TYPE_CHECKING:
    from probing.client.cluster import Cluster
    from probing.client.render.rows import Row

__all__ = ("ACTIONS", "PANELS", "refusing")

_LOG_BYTES = 64 << 10
# The maximum number of digits of a position in a log.
_DIGITS = 15
_COMMANDS = {
    "preview": "create {} --dry-run ...",
    "create": "create {} ...",
    "change": "set {} ...",
    **{action: f"{action} {{}}" for action in ("start", "stop", "restart", "delete")},
}


def _groups(question: Question) -> list[Row]:
    """Returns the list of ``group status -f json``."""
    groups = seen(_all(question))
    return [group_row(groups, group) for group in living_groups(groups)]


def _group(question: Question) -> Row:
    """Returns the object of ``group status NAME -f json``; a group of the user who serves the page has a ``spec``."""
    groups = seen(_all(question))
    group = named(groups, question.parameters.text("name"))
    spec = _shown(group.spec) if group.spec.uid == os.getuid() else None
    return {**group_row(groups, group), "workers": rank_rows(groups, group), "spec": spec}


def _workers(question: Question) -> list[Row]:
    """Returns the rows of cluster.workers in the order of their names, and whether each worker is ``mine``."""
    rows = [{**row, "mine": row["uid"] == os.getuid()} for row in seen(_all(question)).workers]
    return sorted(rows, key=lambda row: order_of_worker(row["worker"]))


def _log(question: Question) -> Row:
    """Returns ``text``, the part of a rank's log on ``node`` from the position ``from`` on, and ``end``, the position
    where the text ends. Without ``from`` the text is the last 64 KiB of the log."""
    parameters = question.parameters
    rank, start = parameters.number("rank") or 0, parameters.number("from", _DIGITS)
    # A page asks every second, so only the rank's node is asked.
    node = node_named(_all(question), parameters.text("node"))
    data, position = node.group_log(parameters.text("name"), rank, -_LOG_BYTES if start is None else start)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(data)
    # The next part begins with the character that is cut at the end.
    return {"text": text, "end": position - len(decoder.getstate()[0])}


def _preview(question: Question) -> Row:
    """Returns the table of ``ranks`` that the specification would have, and its ``clashes`` with groups that run."""
    cluster = _all(question)
    groups = seen(cluster)
    group = put(cluster, groups, _spec(question, cluster, groups), dry_run=True)
    return {"ranks": table_rows(group), "clashes": clashes(groups, group)}


def _put(question: Question) -> Row:
    cluster = _all(question)
    groups = seen(cluster)
    group = put(cluster, groups, _spec(question, cluster, groups), dry_run=False)
    return {"group": group.spec.name}


def _spec(question: Question, cluster: Cluster, groups: GroupsSeen) -> Spec:
    """Returns the specification of a new group, or with ``version`` the specification that follows that version."""
    name, version = question.parameters.text("name"), question.parameters.number("version")
    fields = _fields(question)
    if version is None:
        return first_spec(cluster, groups, name, fields)
    # The form sends all variables, and an empty field stands for the default, so old values are not kept.
    old = replace(next_spec(cluster, groups, name), version=version + 1, world_size=None, env={}, cwd="")
    return with_fields(replace(old, min_nodes=0, save=()), fields, groups)


def _fields(question: Question) -> Fields:
    parameters = question.parameters

    def text(name: str) -> str | None:
        return parameters.text(name, "", most=MAX_SPEC) or None

    def length(name: str) -> float | None:
        return None if (given := text(name)) is None else seconds(given)

    words = None if (command := text("command")) is None else split(command, "the command")
    workers, least = workers_in(text("workers") or ""), parameters.number("min_nodes")
    return Fields(
        workers=workers,
        master=text("master"),
        world_size=parameters.number("world_size"),
        master_port=parameters.number("master_port"),
        backend=text("backend"),
        env=variables(split(text("env") or "", "the environment")),
        cwd=text("cwd"),
        command=words,
        restart=text("restart"),
        on_hang=text("on_hang"),
        max_restarts=parameters.number("max_restarts"),
        nnodes=f"{least}:{len(set(map(node_of, workers)))}" if least else None,
        grace_s=length("grace"),
        fence_s=length("fence"),
        save=None if (save := text("save")) is None else split(save, "the command of the save step"),
        save_s=length("save_time"),
    )


def _shown(spec: Spec) -> Row:
    """Returns the fields of a specification as the form has them: commands and variables quoted as in a shell, times
    with their unit."""
    env = "\n".join(f"{name}={shlex.quote(value)}" for name, value in spec.env.items())
    names = ("version", "master", "world_size", "master_port", "backend", "restart", "on_hang", "cwd")
    fields = {name: getattr(spec, name) for name in (*names, "max_restarts", "min_nodes")}
    times = {"grace": spec.grace_s, "fence": spec.fence_s, "save_time": spec.save_s}
    return {
        **fields,
        **{name: f"{length:g}s" for name, length in times.items()},
        "workers": list(spec.workers),
        "command": shlex.join(spec.command),
        "save": shlex.join(spec.save),
        "env": env,
    }


def _begun(action: Action) -> Panel:
    def answer(question: Question) -> Row:
        """Returns ``said``, a text about what began, and ``failures``, the failed checks. If these prevent the start,
        ``said`` is None.
        """
        cluster, parameters = _all(question), question.parameters
        groups = seen(cluster)
        group = named(groups, parameters.text("name"))
        begun = begin(cluster, groups, group, action, force=parameters.flag("force"))
        failures = [f"{failure.check}: {failure.text}" for failure in begun.failures]
        return {"said": None if begun.group is None else outcome(begun.group, action), "failures": failures}

    return answer


def _ended(action: Action) -> Panel:
    def answer(question: Question) -> Row:
        cluster = _all(question)
        groups = seen(cluster)
        ended = end(cluster, groups, named(groups, question.parameters.text("name")), action)
        return {"said": outcome(ended, action), "failures": []}

    return answer


def _all(question: Question) -> Cluster:
    return question.of_all_nodes(True)


def _refusal(command: str) -> Panel:
    def answer(question: Question) -> Row:
        name = escape(question.parameters.text("name", "NAME"), 64)
        raise PrivilegeError(
            "this page cannot sign as you: changes of a group, and commands to it, need the key of its owner",
            hint=f"run `probingctl group {command.format(shlex.quote(name))}` as the owner",
        )

    return answer


PANELS: Panels = {"groups": _groups, "group": _group, "group/log": _log, "workers": _workers}
"""Panels by address."""
ACTIONS: Panels = {
    "group/preview": _preview,
    "group/create": _put,
    "group/change": _put,
    "group/start": _begun("start"),
    "group/restart": _begun("restart"),
    "group/stop": _ended("stop"),
    "group/delete": _ended("delete"),
}
"""Panels of POST by address, on the page of the user who owns the groups."""


def refusing() -> Panels:
    """Returns the panels of ACTIONS for a page that cannot sign: each panel refuses, and names the command to run
    instead.
    """
    return {f"group/{action}": _refusal(command) for action, command in _COMMANDS.items()}
