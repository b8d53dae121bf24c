"""``rdma``: ports of RDMA devices, their traffic and their errors."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from probing.api.errors import NotFound
from probing.client.render.output import write_table
from probing.client.render.rows import Row, rows_of
from probing.client.render.table import Field
from probing.client.render.text import escape
from probing.client.session import opened, sql_text
from probing.client.settings import Settings, seconds

if TYPE_CHECKING:
    from probing.client.cluster import Cluster

__all__ = ("EXAMPLES", "Options", "run")

EXAMPLES = ("probingctl rdma mlx5_0 --seconds 5",)
_SQL = "SELECT *, epoch_ns(ts) AS read_ns FROM rdma.ports {where} ORDER BY node, hca, port"
_BYTES = {"sent_gbps": "port_xmit_data_bytes", "received_gbps": "port_rcv_data_bytes"}
_ERRORS = (
    "port_rcv_errors", "port_xmit_discards", "symbol_error", "link_error_recovery", "link_downed",
    "local_link_integrity_errors", "excessive_buffer_overrun_errors", "packet_seq_err", "local_ack_timeout_err",
    "rnr_nak_retry_err", "out_of_buffer",
)  # fmt: skip
_FIELDS = (
    Field("NODE", "node"),
    Field("HCA", "hca"),
    Field("PORT", "port", right=True),
    Field("LINK", "link_layer"),
    Field("STATE", "state"),
    Field("PHYSICAL", "phys_state"),
    Field("GB/S", "rate_gbps", right=True),
    Field("SENT", "sent", right=True),
    Field("RECEIVED", "received", right=True),
    Field("CNP", "np_cnp_sent", right=True),
    Field("DOWNED", "link_downed", right=True),
    Field("ERRORS", "errors", flex=True),
)


@dataclass(frozen=True, slots=True)
class Options:
    hca: Annotated[str | None, typer.Argument(metavar="[HCA]", help="Only this device.")] = None
    length: Annotated[
        str | None, typer.Option("--seconds", metavar="TIME", help="Also the traffic of the ports in this time.")
    ] = None


def run(settings: Settings, options: Options) -> None:
    hca, length = options.hca, 0.0 if options.length is None else seconds(options.length)
    where = f"WHERE hca = {sql_text(hca)}" if hca else ""
    with opened(settings) as cluster:
        rows = _read(cluster, where)
        if hca and not rows:
            raise NotFound(f"there is no RDMA device {hca}", hint="`probingctl rdma` lists them")
        if length and rows:
            time.sleep(length)
            _add_rates(rows, _read(cluster, where))
    if settings.format != "table":
        write_table(settings, (), rows)
    elif rows:
        write_table(settings, _FIELDS, [{**row, **_shown(row)} for row in rows])
    else:
        sys.stdout.write(escape(f"no RDMA devices on {_place(settings)}") + "\n")


def _read(cluster: Cluster, where: str) -> list[Row]:
    return rows_of(cluster.query(_SQL.format(where=where)))


def _place(settings: Settings) -> str:
    return "any node that answered" if settings.all_nodes else "this node"


def _add_rates(rows: list[Row], later: list[Row]) -> None:
    """Adds ``sent_gbps`` and ``received_gbps`` in 1e9 bits/s, as ``rate_gbps`` is; None for a new or lost port."""
    after = {(row["node"], row["hca"], row["port"]): row for row in later}
    for row in rows:
        now = after.get((row["node"], row["hca"], row["port"]), row)
        length = now["read_ns"] - row["read_ns"]
        for name, counter in _BYTES.items():
            first, last = row[counter], now[counter]
            known = length > 0 and first is not None and last is not None and last >= first
            row[name] = (last - first) * 8 / length if known else None


def _shown(row: Row) -> dict[str, str]:
    errors = [f"{name}={row[name]}" for name in _ERRORS if row[name]]
    return {
        "sent": _traffic(row, "sent_gbps"),
        "received": _traffic(row, "received_gbps"),
        "errors": " ".join(errors) or "none",
    }


def _traffic(row: Row, name: str) -> str:
    if name in row:
        return "-" if row[name] is None else f"{row[name]:.3g} Gb/s"
    total = row[_BYTES[name]]
    return "-" if total is None else f"{total / 1e9:.3g} GB"
