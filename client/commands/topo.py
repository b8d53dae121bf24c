"""``topo``: shows how GPUs are linked to each other, to NICs and to the host, with the ranks that run on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from probing.client.gpus.readings import DEVICES, LINKS, PROCESSES, ask
from probing.client.gpus.topology_text import drawn
from probing.client.options import Job
from probing.client.render.output import write_objects
from probing.client.render.rows import Row
from probing.client.render.table import terminal_width
from probing.client.session import job_named, opened, require_live
from probing.client.settings import Settings

if TYPE_CHECKING:
    from probing.client.cluster import Cluster

__all__ = ("EXAMPLES", "Options", "collect", "run")

EXAMPLES = ("probingctl topo", "probingctl topo --all-nodes --job 4711 -f json")
_GPU = (
    "device_id",
    "uuid",
    "name",
    "bus_id",
    "numa_node",
    "cpu_list",
    "pcie_width",
    "pcie_width_max",
    "pcie_gen",
    "pcie_gen_max",
    "state",
)
_LINK = (
    "device_id",
    "kind",
    "link",
    "peer",
    "peer_kind",
    "peer_id",
    "path",
    "p2p",
    "numa_node",
    "state",
    "width",
    "width_max",
    "generation",
    "generation_max",
    "speed_bytes_per_s",
    "speed_max_bytes_per_s",
    "replays",
    "recoveries",
    "crc_errors",
    "fatal_errors",
)


@dataclass(frozen=True, slots=True)
class Options:
    job: Job = None


def run(settings: Settings, options: Options) -> None:
    with opened(settings) as cluster:
        job = job_named(cluster, options.job)
        if job is not None:
            require_live(cluster, job)
        nodes = collect(cluster, job)
    width = terminal_width() if settings.output is None else None
    text = "\n".join(drawn(node, width) for node in nodes)
    flat = [{"node": node["node"], **link} for node in nodes for link in node["links"]]
    write_objects(settings, nodes, text or "(no GPU; `probingctl status` says whether the source nvml runs)\n", flat)


def collect(cluster: Cluster, job: str | None) -> list[Row]:
    """Returns the nodes with their GPUs and links, as docs/json.md describes; with ``job`` only that job's nodes."""
    found = ask(cluster, {"devices": DEVICES, "links": LINKS, "processes": PROCESSES})
    return _nodes(found["devices"], found["links"], found["processes"], job)


def _nodes(devices: Sequence[Row], links: Sequence[Row], processes: Sequence[Row], job: str | None) -> list[Row]:
    """Returns each node with its ``gpus`` (each with its ``ranks``) and its ``links``, as docs/json.md describes."""
    nodes: dict[str, Row] = {}
    for row in sorted(devices, key=lambda row: (row["node"], row["device_id"])):
        if row["mig"] is None:
            node = nodes.setdefault(row["node"], {"node": row["node"], "gpus": [], "links": []})
            node["gpus"].append({**{name: row[name] for name in _GPU}, "ranks": [], "jobs": []})
    for row in links:
        if row["node"] in nodes:
            nodes[row["node"]]["links"].append({name: row[name] for name in _LINK})
    for row in sorted(processes, key=lambda row: (row["rank"] is None, row["rank"] or 0)):
        for gpu in nodes.get(row["node"], {"gpus": ()})["gpus"]:
            # A GPU that is gone may have the same number as a present GPU.
            is_this = gpu["device_id"] == row["device_id"] and gpu["state"] != "gone"
            if is_this and row["rank"] is not None and job in (None, row["job"]):
                gpu["ranks"].append(row["rank"])
                gpu["jobs"] += [row["job"]] * (row["job"] not in gpu["jobs"])
    for node in nodes.values():
        node["links"].sort(key=lambda row: (row["device_id"], row["kind"], row["link"] or 0, str(row["peer"])))
    found = list(nodes.values())
    return found if job is None else [node for node in found if any(gpu["ranks"] for gpu in node["gpus"])]
