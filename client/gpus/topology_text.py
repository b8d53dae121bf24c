"""Draws the topology of a node: GPUs under their NUMA nodes, and a matrix of the connections between GPUs and NICs."""

from __future__ import annotations

from collections.abc import Sequence

from probing.api.text import bandwidth, escape, numbers_text
from probing.client.render.rows import Row
from probing.client.render.table import Field, render, wrapped

__all__ = ("drawn",)

_LEGEND = (
    "NVn: n NVLinks; PIX: one PCIe switch; PXB: several switches; PHB: one host bridge; NODE: one NUMA node;"
    " SYS: across NUMA nodes"
)


def drawn(node: Row, width: int | None) -> str:
    """Returns the text about one node of ``topo``; each line is at most ``width`` cells wide."""
    links: Sequence[Row] = node["links"]
    parts = [escape(f"node {node['node']}") + "\n", *(_numa(number, node) for number in _numa_nodes(node))]
    parts.append("\n" + _matrix(node, width))
    wrong = [text for link in links for text in _wrong(link)]
    parts += [part + "\n" for text in wrong for part in wrapped(escape(f"! {text}"), width)]
    parts += [part + "\n" for part in wrapped(_LEGEND, width)]
    return "".join(parts)


def _numa_nodes(node: Row) -> list[int | None]:
    found = {gpu["numa_node"] for gpu in node["gpus"]} | {nic["numa_node"] for nic in _nics(node)}
    return sorted(found, key=lambda number: (number is None, number or 0))


def _numa(number: int | None, node: Row) -> str:
    """Returns the tree of the GPUs and NICs of one NUMA node."""
    gpus = [gpu for gpu in node["gpus"] if gpu["numa_node"] == number]
    nics = [nic for nic in _nics(node) if nic["numa_node"] == number]
    cpus = next((gpu["cpu_list"] for gpu in gpus if gpu["cpu_list"]), None)
    title = "NUMA node unknown" if number is None else f"NUMA node {number}"
    lines = [f"  {title}" + (f", CPUs {cpus}" if cpus else "")]
    for gpu in gpus:
        words = [f"GPU{gpu['device_id']}", gpu["bus_id"] or "-", _trained(_pcie(node, gpu) or {})]
        words.append(f"rank {numbers_text(gpu['ranks'])}" if gpu["ranks"] else "no rank")
        lines.append("    " + "  ".join(words + [gpu["state"]] * (gpu["state"] != "ok")))
    lines += [f"    {nic['peer']}  {nic['peer_kind']}  {_trained(nic)}" for nic in nics]
    return "".join(escape(line) + "\n" for line in lines)


def _pcie(node: Row, gpu: Row) -> Row | None:
    return next((r for r in node["links"] if r["kind"] == "pcie" and r["device_id"] == gpu["device_id"]), None)


def _trained(link: Row) -> str:
    """Returns a PCIe link as text: ``PCIe 5.0 x16``, or ``PCIe 4.0 x8 of 5.0 x16`` if it is below its maximum."""
    if not link.get("width"):
        return "PCIe ?"
    now, best = _speed(link["generation"], link["width"]), _speed(link["generation_max"], link["width_max"])
    return f"PCIe {now}" + (f" of {best}" if best != now and link["width_max"] else "")


def _speed(generation: int | None, width: int | None) -> str:
    return f"{generation or '?'}.0 x{width or '?'}"


def _nics(node: Row) -> list[Row]:
    """Returns one link for each NIC, because all links to a NIC have the same values."""
    found: dict[str, Row] = {}
    for link in node["links"]:
        if link["kind"] == "nic":
            found.setdefault(link["peer"], link)
    return [found[name] for name in sorted(found)]


def _matrix(node: Row, width: int | None) -> str:
    """Returns a table with a line for each GPU: its ranks, and its connection to each GPU and NIC."""
    gpus, nics = node["gpus"], [nic["peer"] for nic in _nics(node)]
    ways = {(link["device_id"], link["peer_id"]): link for link in node["links"] if link["kind"] == "gpu"}
    to_nic = {(link["device_id"], link["peer"]): link["path"] for link in node["links"] if link["kind"] == "nic"}
    rows = []
    for gpu in gpus:
        own = gpu["device_id"]
        row: Row = {"gpu": f"GPU{own}", "ranks": numbers_text(gpu["ranks"]) if gpu["ranks"] else None}
        row |= {
            f"g{other['device_id']}": _way(ways.get((own, other["device_id"])), own == other["device_id"])
            for other in gpus
        }
        rows.append(row | {f"n{name}": to_nic.get((own, name)) for name in nics})
    fields = [Field("", "gpu"), Field("RANK", "ranks", right=True)]
    fields += [Field(f"GPU{gpu['device_id']}", f"g{gpu['device_id']}") for gpu in gpus]
    fields += [Field(name, f"n{name}") for name in nics]
    return render(fields, rows, width)


def _way(link: Row | None, same: bool) -> str | None:
    if same:
        return "X"
    return link["path"] if link else None


def _wrong(link: Row) -> list[str]:
    """Returns texts that say what is wrong with a link."""
    gpu = f"GPU{link['device_id']}"
    if link["kind"] == "nvlink" and link["state"] == "down":
        return [f"{gpu}: NVLink {link['link']} is down"]
    if link["kind"] == "nvlink" and (link["crc_errors"] or link["replays"] or link["recoveries"]):
        counts = (
            f"{name} {link[key]}"
            for name, key in (("CRC errors", "crc_errors"), ("replays", "replays"), ("recoveries", "recoveries"))
            if link[key]
        )
        return [f"{gpu}: NVLink {link['link']} has had {', '.join(counts)}"]
    if link["kind"] == "pcie" and link["state"] == "degraded":
        speeds = [link["speed_bytes_per_s"], link["speed_max_bytes_per_s"]]
        carried = f": {bandwidth(speeds[0] / 1e9)} instead of {bandwidth(speeds[1] / 1e9)}" if all(speeds) else ""
        return [f"{gpu}: {_trained(link)}{carried}"]
    if link["kind"] == "gpu" and link["p2p"] not in (None, "ok"):
        return [f"{gpu} cannot read the memory of GPU{link['peer_id']}: {link['p2p']}"]
    return []
