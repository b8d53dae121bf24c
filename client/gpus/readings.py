"""Reads the last readings of GPUs and of the memory of processes from each node, and chooses the columns that fit the
terminal. Ages of readings are measured by the node's clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from probing.client.render.rows import Row, rows_of
from probing.client.render.table import Field, Grid

if TYPE_CHECKING:
    from probing.client.cluster import Cluster

__all__ = (
    "DEVICES",
    "LINKS",
    "MEMORY",
    "PROCESSES",
    "READINGS",
    "ask",
    "by_device",
    "device_key",
    "fitting",
)

# The maximum age of readings and processes of devices, s.
RECENT_S = 30
# The maximum age of links, s; all links are written once a minute.
LINKS_S = 150
_LAST = "QUALIFY row_number() OVER (PARTITION BY {key} ORDER BY ts DESC) = 1"
READINGS = f"SELECT * FROM gpu.utilization WHERE ts > now() - INTERVAL {RECENT_S} SECOND " + _LAST.format(
    key="node, device_id, mig"
)
PROCESSES = f"SELECT * FROM gpu.processes WHERE ts > now() - INTERVAL {RECENT_S} SECOND " + _LAST.format(
    key="node, pid, device_id, mig"
)
LINKS = f"SELECT * FROM gpu.links WHERE ts > now() - INTERVAL {LINKS_S} SECOND " + _LAST.format(
    key="node, kind, device_id, link, peer"
)
DEVICES = "SELECT * FROM gpu.devices"
# A process gets a row every ``host.memory_interval_s``, by default 10 s, so 60 s usually contain several rows.
MEMORY = "SELECT * FROM process.memory WHERE ts > now() - INTERVAL 60 SECOND " + _LAST.format(key="node, pid, start_ns")


def ask(cluster: Cluster, statements: Mapping[str, str]) -> dict[str, list[Row]]:
    """Returns the rows of each statement. Each node answers a statement from its own rows."""
    tables = cluster.query_all(statements, each=statements)
    return {name: rows_of(tables[name]) for name in statements}


def device_key(row: Row) -> tuple[str, int, int]:
    """Returns (node, number of the GPU, number of the MIG device or -1), the key by which devices are ordered."""
    mig = row.get("mig")
    return str(row["node"]), int(row["device_id"]), -1 if mig is None else int(mig)


def by_device(processes: Sequence[Row]) -> dict[tuple[str, int, int], list[Row]]:
    """Returns the processes of each device, ordered by rank."""
    found: dict[tuple[str, int, int], list[Row]] = {}
    for row in sorted(processes, key=lambda row: (row["rank"] is None, row["rank"] or 0, row["pid"] or 0)):
        found.setdefault(device_key(row), []).append(row)
    return found


def fitting(fields: Sequence[Field], rows: Sequence[Row], width: int | None, *, spare: Sequence[str]) -> list[Field]:
    """Returns ``fields`` without columns of ``spare``, which are dropped in their order until the table fits."""
    kept = list(fields)
    for key in spare:
        if width is None or not rows or Grid(kept, rows, width).width <= width:
            break
        # The column of nodes is kept if there are several nodes.
        if len({str(row.get(key)) for row in rows}) == 1 or key != "node":
            kept = [field for field in kept if field.key != key]
    return kept
