"""``net``: shows network interfaces and the TCP connections of ranks: round trips, retransmits, and which end waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from probing.api.text import age, bits, escape, plural, size, sql_text
from probing.client.absence import claim
from probing.client.collectives.standing import state_lines, states
from probing.client.options import Job, Since, Until
from probing.client.render.output import write_objects
from probing.client.render.rows import Row, rows_of
from probing.client.render.table import Field, render, terminal_width, wrapped
from probing.client.session import job_named, opened, require_live
from probing.client.settings import Settings
from probing.client.times import Interval, interval

if TYPE_CHECKING:
    from probing.client.cluster import Cluster

__all__ = ("EXAMPLES", "Options", "run")

EXAMPLES = ("probingctl net --all-nodes --job 4711", "probingctl net --since 10m -f json")
_WINDOW = "{during}"
_EVENTS = (
    "rx_errors_new",
    "rx_dropped_new",
    "rx_fifo_errors_new",
    "rx_frame_errors_new",
    "tx_errors_new",
    "tx_dropped_new",
    "tx_carrier_errors_new",
    "carrier_changes_new",
)
_INTERFACES = f"""
SELECT node, netns, interface, arg_max(job, ts) AS job, arg_max(kind, ts) AS kind,
  arg_max(operstate, ts) AS operstate, arg_max(speed_gbps, ts) AS speed_gbps, arg_max(addresses, ts) AS addresses,
  sum(rx_gbps * interval_ns) / sum(interval_ns) AS rx_gbps, sum(tx_gbps * interval_ns) / sum(interval_ns) AS tx_gbps,
  max(rx_gbps) AS rx_most_gbps, max(tx_gbps) AS tx_most_gbps,
  {", ".join(f"sum({name}) AS {name}" for name in _EVENTS)}
FROM net.interfaces WHERE {_WINDOW} AND {{interfaces}} GROUP BY node, netns, interface ORDER BY node, netns, interface
"""
_SUMS = ("bytes_sent", "bytes_received", "segs_out", "segs_in", "retrans", "bytes_retrans", "ecn_marked")
_SUMMED = ", ".join(f"sum({name}) AS {name}" for name in _SUMS)
_RTT = "avg(rtt_ns) AS rtt_ns, max(rtt_max_ns) AS rtt_max_ns, min(rtt_min_ns) AS rtt_min_ns"
_PAIR = "node, job, run, rank, role, pid, start_ns, netns, local_address, peer_address"
# A reading has a row for each pair of addresses and each rank at the other end.
_READINGS = f"""
SELECT {_PAIR}, ts, bool_or(peer_local) AS peer_local, sum(sockets) AS sockets, sum(connecting) AS connecting,
  {_SUMMED}, {_RTT}, sum(timeouts) AS timeouts, max(longest_timeouts) AS longest_timeouts, sum(lost) AS lost,
  sum(unread_bytes) AS unread_bytes, sum(unsent_bytes) AS unsent_bytes, sum(busy_ns) AS busy_ns,
  sum(rwnd_limited_ns) AS rwnd_limited_ns, sum(sndbuf_limited_ns) AS sndbuf_limited_ns
FROM net.tcp WHERE {_WINDOW} AND {{of_job}} GROUP BY {_PAIR}, ts
"""
_TCP = f"""
SELECT {_PAIR}, bool_or(peer_local) AS peer_local,
  arg_max(sockets, ts) AS sockets, arg_max(connecting, ts) AS connecting, {_SUMMED}, {_RTT},
  arg_max(timeouts, ts) AS timeouts, max(longest_timeouts) AS longest_timeouts, arg_max(lost, ts) AS lost,
  arg_max(unread_bytes, ts) AS unread_bytes, arg_max(unsent_bytes, ts) AS unsent_bytes,
  sum(busy_ns) AS busy_ns, sum(rwnd_limited_ns) AS rwnd_limited_ns, sum(sndbuf_limited_ns) AS sndbuf_limited_ns
FROM ({_READINGS}) AS r GROUP BY {_PAIR}
ORDER BY retrans DESC, rtt_max_ns DESC NULLS LAST, node, rank, pid, local_address, peer_address LIMIT {{most}}
"""
_PATHS = f"""
SELECT node, job, run, local_address, peer_address, arg_max(processes, ts) AS processes,
  arg_max(sockets, ts) AS sockets, arg_max(connecting, ts) AS connecting, {_SUMMED}, {_RTT}
FROM net.paths WHERE {_WINDOW} AND {{of_job}} GROUP BY node, job, run, local_address, peer_address
ORDER BY retrans DESC, rtt_max_ns DESC NULLS LAST, node, local_address, peer_address LIMIT {{most}}
"""
MOST = 10_000


_INTERFACE_FIELDS = (
    Field("NODE", "node"),
    Field("INTERFACE", "interface"),
    Field("JOB", "job"),
    Field("STATE", "operstate"),
    Field("SPEED", "speed_gbps", bits, right=True),
    Field("RECEIVED", "rx_gbps", bits, right=True),
    Field("SENT", "tx_gbps", bits, right=True),
    Field("NEW ERRORS", "errors", flex=True),
    Field("ADDRESSES", "addresses", flex=True),
)
_TCP_FIELDS = (
    Field("NODE", "node"),
    Field("JOB", "job", flex=True),
    Field("RANK", "rank", right=True),
    Field("PID", "pid", right=True),
    Field("PEER", "peer"),
    Field("CONN", "sockets", right=True),
    Field("SENT", "bytes_sent", size, right=True),
    Field("RECEIVED", "bytes_received", size, right=True),
    Field("ROUND TRIP", "rtt_ns", age, right=True),
    Field("MOST", "rtt_max_ns", age, right=True),
    Field("RETRANS", "retrans", right=True),
    Field("OF SENT", "share", right=True),
    Field("NOW", "now", flex=True),
)


@dataclass(frozen=True, slots=True)
class Options:
    job: Job = None
    since: Since = "1m"
    until: Until = None
    every: Annotated[bool, typer.Option("--local", help="Also connections within a node.")] = False


def run(settings: Settings, options: Options) -> None:
    with opened(settings) as cluster:
        job = job_named(cluster, options.job)
        during = interval(options.since, options.until)
        found = _read(cluster, job, during)
        if not found["tcp"] and job is not None and during.open:
            require_live(cluster, job)
        of_job = "true" if job is None else f"job = {sql_text(job)}"
        runs = states(cluster, of_job, during)
    width = terminal_width() if settings.output is None else None
    shown = dict.fromkeys((row["job"], row["run"]) for row in found["tcp"])
    lines = [f"job {run[0]}: {line}" for run in shown for line in state_lines(runs, *run)]
    above = "".join(part + "\n" for line in lines for part in wrapped(escape(line), width))
    write_objects(settings, found, above + _text(found, width, every=options.every), found["tcp"])


def _read(cluster: Cluster, job: str | None, during: Interval) -> dict[str, list[Row]]:
    """Returns ``interfaces``, ``tcp`` and ``paths`` from one snapshot of each node, as docs/json.md describes."""
    of_job = "true" if job is None else f"job = {sql_text(job)}"
    interfaces = "true" if job is None else f"(job = {sql_text(job)} OR job IS NULL)"
    asked = {"during": during.sql(), "of_job": of_job, "interfaces": interfaces, "most": MOST}
    statements = {"interfaces": _INTERFACES, "tcp": _TCP, "paths": _PATHS}
    tables = cluster.query_all({name: sql.format(**asked) for name, sql in statements.items()})
    return {name: rows_of(tables[name]) for name in statements}


def _text(found: dict[str, list[Row]], width: int | None, *, every: bool) -> str:
    bold = width is not None
    interfaces = [{**row, "errors": _errors(row)} for row in found["interfaces"]]
    text = (
        render(_INTERFACE_FIELDS, interfaces, width, bold=bold)
        if interfaces
        else claim("no rows of interfaces yet") + "\n"
    )
    nodes = _nodes_by_address(found["interfaces"])
    tcp = [{**row, **_shown(row, nodes)} for row in found["tcp"] if every or not row["peer_local"]]
    inside = len(found["tcp"]) - len(tcp)
    nobody = claim("no TCP connections of ranks to other hosts") + "\n"
    hidden = f"\nwithin a node, with --local: {plural(inside, 'peer')}\n" if inside else ""
    return text + "\n" + (render(_TCP_FIELDS, tcp, width, bold=bold) if tcp else nobody) + hidden


def _nodes_by_address(interfaces: Sequence[Row]) -> dict[str, str]:
    """Returns the node of each address that only one node has."""
    nodes: dict[str, set[str]] = {}
    for row in interfaces:
        for address in (row["addresses"] or "").split(", "):
            nodes.setdefault(address, set()).add(row["node"])
    return {address: next(iter(names)) for address, names in nodes.items() if len(names) == 1}


def _errors(row: Row) -> str:
    counted = [f"{name.removesuffix('_new')}={row[name]}" for name in _EVENTS if row[name]]
    return " ".join(counted) or "none"


def _shown(row: Row, nodes: dict[str, str]) -> Row:
    """Returns the shown columns of a row. ``now``: the causes of delay at the last reading."""
    peer = nodes.get(row["peer_address"])
    waits = {
        "connecting": row["connecting"],
        "waiting for an answer": row["timeouts"],
        "segments lost": row["lost"],
    }
    now = [f"{count} {what}" for what, count in waits.items() if count]
    for name, what in (("unread_bytes", "not read"), ("unsent_bytes", "not sent")):
        now += [f"{size(row[name])} {what}"] if row[name] else []
    return {
        "peer": f"{peer} ({row['peer_address']})" if peer else row["peer_address"] or "(all of its container)",
        "share": f"{row['retrans'] / row['segs_out']:.2%}" if row["segs_out"] else "-",
        "now": ", ".join(now) or "-",
    }
