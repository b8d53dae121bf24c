"""``status``: shows the state of the daemon and of each of its sources."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypedDict

from probing.api.text import age, count, escape, size
from probing.client.render.output import write_objects
from probing.client.render.rows import Row
from probing.client.render.table import Field, render, terminal_width
from probing.client.session import opened
from probing.client.settings import Settings
from probing.client.times import bound

if TYPE_CHECKING:
    from probing.api.proto.probing.v1 import node_pb2 as pb

__all__ = ("EXAMPLES", "as_object", "run")

EXAMPLES = ("probingctl status --all-nodes",)
_FIELDS = (
    Field("SOURCE", "name"),
    Field("STATE", "state"),
    Field("ROWS", "rows", count, right=True),
    Field("LOST", "lost", count, right=True),
    Field("WHY / WHAT", "note", flex=True),
)
# Matches the time at which a state began, in the text of the state's reason.
_SINCE = re.compile(r"\bsince (\d{4}-\d\d-\d\d \d\d:\d\d:\d\dZ)")


class _Source(TypedDict):
    name: str
    state: str
    reason: str | None
    rows: int
    lost: int
    detail: str | None


class _Node(TypedDict):
    node: str
    address: str
    version: str
    instance: str
    state: str
    reason: str | None
    uptime_ns: int | None
    processes: int
    store_bytes: int
    boot_id: str
    state_ns: int | None
    sources: list[_Source]


def run(settings: Settings) -> None:
    with opened(settings) as cluster:
        nodes = [as_object(address, reply) for address, reply in cluster.status()]
        width = terminal_width() if settings.output is None else None
        text = "\n".join(_node_text(node, width) for node in nodes)
        write_objects(settings, nodes if cluster.many else nodes[0], text, list(_flat(nodes)))


def as_object(address: str, reply: pb.StatusReply) -> _Node:
    """Returns the status of a node, as docs/json.md describes it."""
    return {
        "node": reply.node,
        "address": address,
        "version": reply.version,
        "instance": reply.instance,
        "state": reply.state,
        "reason": reply.reason or None,
        "uptime_ns": max(0, reply.node_time_ns - reply.started_ns) if reply.started_ns else None,
        "processes": reply.processes,
        "store_bytes": reply.store_bytes,
        "boot_id": reply.boot_id,
        "state_ns": _lasts(reply),
        "sources": [
            {
                "name": s.name,
                "state": s.state,
                "reason": s.reason or None,
                "rows": s.rows,
                "lost": s.lost,
                "detail": s.detail or None,
            }
            for s in reply.sources
        ],
    }


def _lasts(reply: pb.StatusReply) -> int | None:
    """Returns how long the node has been in its state, ns; None if the start is unknown or the clock was set back."""
    if reply.state == "running":
        begun: int | None = reply.started_ns or None
    else:
        since = _SINCE.search(reply.reason)
        begun = None if since is None else bound(since[1]).at_ns
    passed = -1 if begun is None else reply.node_time_ns - begun
    return passed if passed >= 0 else None


def _node_text(node: _Node, width: int | None) -> str:
    lines = [
        f"{node['node']}  probingd {node['version']} at {node['address']}",
        f"  {_state(node)}",
        f"  watches {node['processes']} processes, keeps {size(node['store_bytes'])}",
    ]
    rows = [{**s, "note": s["reason"] or s["detail"]} for s in node["sources"]]
    table = render(_FIELDS, rows, None if width is None else width - 2) if rows else ""
    return "\n".join([*map(escape, lines), *(f"  {line}" for line in table.splitlines())]) + "\n"


def _state(node: _Node) -> str:
    """Returns the state and, if known, its duration; the daemon may have run longer than that."""
    up = "" if node["uptime_ns"] is None else f" for {age(node['uptime_ns'])}"
    reason = node["reason"] or ""
    if node["state"] == "running":
        return f"running{up}{f': {reason}' if reason else ''}"
    lasts = "" if node["state_ns"] is None else f" for {age(node['state_ns'])}"
    return f"{node['state']}{lasts}{f': {reason}' if reason else ''}{f'; the daemon runs{up}' if up else ''}"


def _flat(nodes: Sequence[_Node]) -> list[Row]:
    return [
        {"node": node["node"], "node_state": node["state"], "version": node["version"], **source}
        for node in nodes
        for source in node["sources"]
    ]
