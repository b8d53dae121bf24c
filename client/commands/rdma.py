"""``rdma``: shows ports of RDMA devices, their traffic and their errors, from the rows that the daemon stores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from probing.api.errors import NotFound
from probing.api.rdma_counters import COUNTERS, HW_COUNTERS, PACKETS
from probing.api.text import bits, sql_text
from probing.client.options import Since, Until
from probing.client.render.output import write_objects, write_table
from probing.client.render.rows import Row, rows_of
from probing.client.render.table import Field
from probing.client.session import opened
from probing.client.settings import Settings
from probing.client.times import interval
from probing.client.zone import clock

if TYPE_CHECKING:
    from probing.client.cluster import Cluster

__all__ = ("EXAMPLES", "Options", "run")

EXAMPLES = ("probingctl rdma --all-nodes --since 10m", "probingctl rdma mlx5_0 --history")
_NEWEST = (
    "link_layer",
    "state",
    "phys_state",
    "rate_gbps",
    "rate",
    "netdev",
    "bus_id",
    "numa_node",
    "port_xmit_data_bytes",
    "port_rcv_data_bytes",
    *PACKETS,
    *COUNTERS,
    *HW_COUNTERS,
)
_RATES = ("sent_gbps", "received_gbps", "snd_pkts_rate", "rcv_pkts_rate")
_RISES = tuple(f"{name}_new" for name in (*COUNTERS, *HW_COUNTERS))
# Congestion and retries are not errors of the port itself, so their counters are left out.
_ERRORS = (
    "port_rcv_errors",
    "port_rcv_remote_physical_errors",
    "port_xmit_discards",
    "symbol_error",
    "link_error_recovery",
    "link_downed",
    "local_link_integrity_errors",
    "excessive_buffer_overrun_errors",
    "packet_seq_err",
    "local_ack_timeout_err",
    "rnr_nak_retry_err",
    "out_of_buffer",
    "out_of_sequence",
    "rx_icrc_encapsulated",
)
_WHERE = "{during} AND {hca}"
_PORTS = f"""
SELECT node, hca, port, max(ts) AS ts, {", ".join(f"arg_max({name}, ts) AS {name}" for name in _NEWEST)},
  sum(interval_ns) AS interval_ns,
  {", ".join(f"sum({name} * interval_ns) / sum(interval_ns) AS {name}" for name in _RATES)},
  max(sent_gbps) AS sent_most_gbps, max(received_gbps) AS received_most_gbps,
  {", ".join(f"sum({name}) AS {name}" for name in _RISES)}
FROM rdma.ports WHERE {_WHERE} GROUP BY node, hca, port ORDER BY node, hca, port
"""
_HISTORY = f"SELECT * FROM rdma.ports WHERE {_WHERE} ORDER BY node, hca, port, ts"
_NAMES = (Field("NODE", "node"), Field("HCA", "hca"), Field("PORT", "port", right=True))


_TRAFFIC = (Field("SENT", "sent_gbps", bits, right=True), Field("RECEIVED", "received_gbps", bits, right=True))
_FIELDS = (
    *_NAMES,
    Field("LINK", "link_layer"),
    Field("STATE", "state"),
    Field("PHYSICAL", "phys_state"),
    Field("SPEED", "rate_gbps", bits, right=True),
    *_TRAFFIC,
    Field("MOST", "most_gbps", bits, right=True),
    Field("CNP", "cnp", right=True),
    Field("ECN", "np_ecn_marked_roce_packets_new", right=True),
    Field("NEW ERRORS", "errors", flex=True),
    Field("BEFORE", "before", flex=True),
)
_HISTORY_FIELDS = (
    Field("TIME", "ts", clock),
    *_NAMES,
    Field("STATE", "state"),
    *_TRAFFIC,
    Field("CNP", "cnp", right=True),
    Field("ECN", "np_ecn_marked_roce_packets_new", right=True),
    Field("NEW ERRORS", "errors", flex=True),
)


@dataclass(frozen=True, slots=True)
class Options:
    hca: Annotated[str | None, typer.Argument(metavar="[HCA]", help="Only this device.")] = None
    since: Since = "1m"
    until: Until = None
    history: Annotated[bool, typer.Option("--history", help="A line for each reading, not for each port.")] = False


def run(settings: Settings, options: Options) -> None:
    sql = _HISTORY if options.history else _PORTS
    where = "true" if options.hca is None else f"hca = {sql_text(options.hca)}"
    during = interval(options.since, options.until)
    with opened(settings) as cluster:
        rows = _read(cluster, sql.format(during=during.sql(), hca=where))
        if options.hca and not rows:
            raise NotFound(
                f"there are no rows of RDMA device {options.hca} {during.text()}",
                hint="`probingctl rdma` lists the devices",
            )
    if settings.format != "table":
        write_table(settings, (), rows)
    elif rows:
        fields = _HISTORY_FIELDS if options.history else _FIELDS
        write_table(settings, fields, [{**row, **_shown(row)} for row in rows])
    else:
        # Rows of an earlier interval may have been deleted by now.
        what = "no RDMA devices" if during.open else f"no rows of RDMA devices {during.text()}"
        write_objects(settings, (), f"{what} on {'any node' if settings.all_nodes else 'this node'}\n", ())


def _read(cluster: Cluster, sql: str) -> list[Row]:
    return rows_of(cluster.query(sql))


def _shown(row: Row) -> Row:
    """Returns the shown columns of a row. ``before``: the errors between the load of the driver and the
    start of the interval. ``cnp``: congestion notifications.
    """
    new = {name: row[f"{name}_new"] or 0 for name in _ERRORS}
    before = {name: (row[name] or 0) - new[name] for name in _ERRORS}
    sent, received = row["np_cnp_sent_new"], row["rp_cnp_handled_new"]
    most = [row[name] for name in ("sent_most_gbps", "received_most_gbps") if row.get(name) is not None]
    return {
        "cnp": None if sent is None and received is None else (sent or 0) + (received or 0),
        "most_gbps": max(most, default=None),
        "errors": _counted(new) or "none",
        "before": _counted(before) or "-",
    }


def _counted(counts: dict[str, int]) -> str:
    return " ".join(f"{name}={count}" for name, count in counts.items() if count > 0)
