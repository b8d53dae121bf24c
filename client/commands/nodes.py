"""``nodes``: shows the nodes that the target knows, itself included, and their states."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from probing.api.errors import QueryRejected
from probing.api.text import age
from probing.client.render.output import write_rows
from probing.client.render.table import Field
from probing.client.session import opened, warn
from probing.client.settings import Settings
from probing.client.zone import clock

if TYPE_CHECKING:
    import pyarrow as pa

    from probing.client.cluster import Cluster

__all__ = ("EXAMPLES", "members", "run")

EXAMPLES = ("probingctl nodes", "probingctl nodes -f json", "probingctl ps --where rack=r7")
_OLD = "node, member, address, state, version, ts"
_UNKEYED = f"{_OLD}, since, incarnation, labels, engine, heard_ns, rtt_ns, clock_offset_ns, problem"
_COLUMNS = f"{_UNKEYED}, proof"
_SQL = "SELECT {} FROM cluster.members ORDER BY node, member, address"


def _about(value: Any) -> str:
    return "-" if value is None else age(value)


_FIELDS = (
    Field("NODE", "member"),
    Field("ADDRESS", "address"),
    Field("STATE", "state"),
    Field("SINCE", "since", clock),
    Field("LABELS", "labels", flex=True),
    Field("VERSION", "version"),
    Field("RTT", "rtt_ns", _about, right=True),
    Field("CLOCK", "clock_offset_ns", _about, right=True),
    Field("PROVEN BY", "proof", lambda proof: "nothing" if proof is None else str(proof)),
    Field("PROBLEM", "problem", flex=True),
    Field("SAYS", "node"),
)
_EARLIER = (
    (_UNKEYED, "the daemon is older than probingctl: it does not report how the names of nodes are proven"),
    (_OLD, "the daemon is older than probingctl: it reports only name, address, state and version of nodes"),
)


def run(settings: Settings) -> None:
    with opened(settings) as cluster:
        table = members(cluster)
        write_rows(settings, table, tuple(field for field in _FIELDS if field.key in table.column_names))


def members(cluster: Cluster) -> pa.Table:
    """Returns the rows of cluster.members, with the columns that the target has."""
    try:
        return cluster.query(_SQL.format(_COLUMNS))
    except QueryRejected as e:
        error = e
    for columns, why in _EARLIER:
        try:
            table = cluster.query(_SQL.format(columns))
        except QueryRejected as e:
            error = e
        else:
            warn(why)
            return table
    raise error
