"""Reads the links of each GPU: NVLinks, PCIe to the host, and its paths to other GPUs, NICs and HCAs.

Rows have the columns of gpu.links, but hold counters (since the driver was loaded) instead of rates.
"""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from typing import Any

from probing.daemon.gpu.nvml import pci
from probing.daemon.gpu.nvml.calls import Calls, DeviceLost, Values
from probing.daemon.gpu.nvml.devices import Device, bus_address
from probing.daemon.gpu.nvml.fields import read_fields

__all__ = ("Topology",)

MAX_LINKS = 36
_CPU_WORDS = 32
_NODE_SCOPE = 0
_P2P_READ = 0
_P2P = (
    "ok",
    "chipset not supported",
    "GPU not supported",
    "topology not supported",
    "disabled by a registry key",
    "not supported",
)
# nvmlGpuTopologyLevel_t
_LEVELS = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
_REMOTE = {0: "gpu", 2: "switch"}


class Topology:
    """Reads the links of the GPUs in ``devices``. ``sysfs``: /sys, or a directory with the same structure."""

    def __init__(self, calls: Calls, devices: list[Device], sysfs: Path) -> None:
        self._calls = calls
        self._gpus = [device for device in devices if device.parent is None]
        self._sysfs = sysfs
        self._refused: set[tuple[str, str]] = set()
        self._links: dict[str, list[int]] = {}

    def counted(self) -> list[Values]:
        """Returns the links that have counters: each NVLink, and PCIe. Raises DriverFailed."""
        rows: list[Values] = []
        for gpu in self._gpus:
            try:
                rows += [*self._nvlinks(gpu), self._pcie(gpu)]
            except DeviceLost:
                # The next reading of the values of this GPU reports that it is lost.
                continue
        return rows

    def pairs(self, nvlinks: list[Values]) -> list[Values]:
        """Returns the connections of each GPU to other GPUs and to NICs; ``nvlinks``: rows of ``counted``.

        Raises DriverFailed.
        """
        rows: list[Values] = []
        for gpu, other in permutations(self._gpus, 2):
            try:
                rows.append(self._pair(gpu, other, nvlinks))
            except DeviceLost:
                # One of the two GPUs may be lost; the pairs of the other GPUs are still read.
                continue
        return rows + self._nics()

    def _nvlinks(self, gpu: Device) -> list[Values]:
        if gpu.key not in self._links:
            states = {link: self._state(gpu, link) for link in range(MAX_LINKS)}
            self._links[gpu.key] = [link for link, state in states.items() if state is not None]
        return [self._nvlink(gpu, link) for link in self._links[gpu.key]]

    def _state(self, gpu: Device, link: int) -> int | None:
        # A GPU may support only some links. ``ask`` keeps refusals by ``device``, so the text names the link, too.
        found = self._calls.ask("nvmlDeviceGetNvLinkState", gpu.handle, link, device=f"{gpu.key} {link}")
        return None if found is None else int(found)

    def _nvlink(self, gpu: Device, link: int) -> Values:
        def ask(name: str) -> Any:
            return self._calls.ask(name, gpu.handle, link, device=f"{gpu.key} {link}")

        numbers = (
            ("tx_kib", 138),
            ("rx_kib", 139),
            ("replays", 161),
            ("recoveries", 162),
            ("crc_errors", 163),
            ("speed_mbps", 164),
        )
        found = read_fields(
            self._calls, gpu, {f"{name} {link}": (number, link) for name, number in numbers}, self._refused
        )
        values = {name: found.get(f"{name} {link}") for name, _ in numbers}
        speed = values.pop("speed_mbps")
        # None: the call failed, so the state of the link is unknown.
        state = self._state(gpu, link)
        return {
            "device": gpu.key,
            "kind": "nvlink",
            "link": link,
            "path": "NV",
            "state": None if state is None else "up" if state else "down",
            "peer": bus_address(ask("nvmlDeviceGetNvLinkRemotePciInfo")),
            "peer_kind": _REMOTE.get(ask("nvmlDeviceGetNvLinkRemoteDeviceType"), "unknown"),
            "generation": ask("nvmlDeviceGetNvLinkVersion"),
            "speed_bytes_per_s": None if speed is None else speed * 1e6,
            **values,
        }

    def _pcie(self, gpu: Device) -> Values:
        def ask(name: str) -> Any:
            return self._calls.ask(name, gpu.handle, device=gpu.key)

        kernel = None
        row: Values = {"device": gpu.key, "kind": "pcie", "peer_kind": "host", "path": "PCIE"}
        if gpu.bus_id:
            with self._calls.reading("read of /sys/bus/pci"):
                kernel = pci.link_of(self._sysfs, gpu.bus_id)
                row |= {
                    "numa_node": pci.numa_node(self._sysfs, gpu.bus_id),
                    "peer": pci.slot_above(self._sysfs, gpu.bus_id),
                    "cpu_list": pci.near_cpus(self._sysfs, gpu.bus_id),
                }
        if row.get("cpu_list") is None:
            row |= self._near(gpu)
        row["width"] = ask("nvmlDeviceGetCurrPcieLinkWidth") or (kernel and kernel.width)
        row["generation"] = ask("nvmlDeviceGetCurrPcieLinkGeneration") or (kernel and kernel.generation)
        row["width_max"] = (kernel and kernel.width_max) or ask("nvmlDeviceGetMaxPcieLinkWidth")
        row["generation_max"] = (kernel and kernel.generation_max) or ask("nvmlDeviceGetMaxPcieLinkGeneration")
        row["speed_bytes_per_s"] = pci.bytes_per_s(row["width"], row["generation"])
        row["speed_max_bytes_per_s"] = pci.bytes_per_s(row["width_max"], row["generation_max"])
        fields = read_fields(
            self._calls, gpu, {"replays": 94, "bad_tlp": 176, "bad_dllp": 178, "fatal_errors": 180}, self._refused
        )
        bad = [fields[name] for name in ("bad_tlp", "bad_dllp") if name in fields]
        row |= {name: fields.get(name) for name in ("replays", "fatal_errors")}
        return row | {"crc_errors": sum(bad) if bad else None}

    def _near(self, gpu: Device) -> Values:
        """Returns the NUMA node and CPUs near a GPU from the driver, for containers whose sysfs lacks the GPU."""
        nodes = self._calls.ask("nvmlDeviceGetMemoryAffinity", gpu.handle, 1, _NODE_SCOPE, device=gpu.key)
        cpus = self._calls.ask("nvmlDeviceGetCpuAffinity", gpu.handle, _CPU_WORDS, device=gpu.key)
        near = _bits(nodes)
        return {"numa_node": near[0] if len(near) == 1 else None, "cpu_list": _ranges(_bits(cpus))}

    def _pair(self, gpu: Device, other: Device, nvlinks: list[Values]) -> Values:
        level = self._calls.ask("nvmlDeviceGetTopologyCommonAncestor", gpu.handle, other.handle, device=gpu.key)
        status = self._calls.ask("nvmlDeviceGetP2PStatus", gpu.handle, other.handle, _P2P_READ, device=gpu.key)
        links = _links_between(gpu, other, nvlinks)
        return {
            "device": gpu.key,
            "kind": "gpu",
            "peer": other.uuid,
            "peer_kind": "gpu",
            "peer_id": other.device_id,
            "path": f"NV{links}" if links else _LEVELS.get(level) or self._kernel_path(gpu.bus_id, other.bus_id),
            "p2p": None if status is None else _P2P[status] if 0 <= status < len(_P2P) else "unknown",
            "width": links or None,
        }

    def _kernel_path(self, one: str | None, other: str | None) -> str | None:
        if not one or not other:
            return None
        with self._calls.reading("read of /sys/bus/pci"):
            places = [pci.place_of(self._sysfs, address) for address in (one, other)]
            nodes = (pci.numa_node(self._sysfs, one), pci.numa_node(self._sysfs, other))
        return pci.path_between(places[0], places[1], nodes)

    def _nics(self) -> list[Values]:
        with self._calls.reading("read of /sys/class/net"):
            found = [
                (nic, pci.numa_node(self._sysfs, nic.address), pci.link_of(self._sysfs, nic.address))
                for nic in pci.nics(self._sysfs)
            ]
        rows = []
        for gpu in self._gpus:
            for nic, node, link in found:
                row: Values = {
                    "device": gpu.key,
                    "kind": "nic",
                    "peer": nic.name,
                    "peer_kind": nic.kind,
                    "numa_node": node,
                    "path": self._kernel_path(gpu.bus_id, nic.address),
                }
                if link:
                    row |= {
                        "width": link.width,
                        "width_max": link.width_max,
                        "generation": link.generation,
                        "generation_max": link.generation_max,
                        "speed_bytes_per_s": pci.bytes_per_s(link.width, link.generation),
                        "speed_max_bytes_per_s": pci.bytes_per_s(link.width_max, link.generation_max),
                    }
                rows.append(row)
        return rows


def _bits(words: Any) -> list[int]:
    return [64 * at + bit for at, word in enumerate(words or ()) for bit in range(64) if word >> bit & 1]


def _ranges(numbers: list[int]) -> str | None:
    """Returns 0-2,5 for [0, 1, 2, 5]."""
    starts = [number for number in numbers if number - 1 not in numbers]
    ends = [number for number in numbers if number + 1 not in numbers]
    pairs = zip(starts, ends, strict=True)
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in pairs) or None


def _links_between(gpu: Device, other: Device, nvlinks: list[Values]) -> int:
    """Returns the number of NVLinks from ``gpu`` to ``other``: direct links, or else links through switches."""
    up = [row for row in nvlinks if row["kind"] == "nvlink" and row["state"] == "up"]
    direct: int = sum(row["device"] == gpu.key and row["peer"] == other.bus_id for row in up)
    if direct:
        return direct
    over: list[int] = [
        sum(row["device"] == one.key and row["peer_kind"] == "switch" for row in up) for one in (gpu, other)
    ]
    return min(over)
