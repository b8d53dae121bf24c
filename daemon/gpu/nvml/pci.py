"""Reads PCI devices from sysfs: their place in the tree, NUMA node, and link (as trained, and the best possible)."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

__all__ = (
    "Link",
    "Nic",
    "bytes_per_s",
    "generation_of",
    "link_of",
    "near_cpus",
    "nics",
    "numa_node",
    "path_between",
    "place_of",
    "slot_above",
)

MAX_NICS = 256
MAX_TEXT = 4_096
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
# The bytes per second of one lane by generation, without the overhead of 8b/10b, 128b/130b or FLITs.
_LANE_BYTES_PER_S = {
    1: 0.25e9,
    2: 0.5e9,
    3: 8e9 / 8 * 128 / 130,
    4: 16e9 / 8 * 128 / 130,
    5: 32e9 / 8 * 128 / 130,
    6: 64e9 / 8 * 242 / 256,
}
_GENERATIONS = {"2.5": 1, "5.0": 2, "5": 2, "8.0": 3, "16.0": 4, "32.0": 5, "64.0": 6}


@dataclass(frozen=True, slots=True)
class Link:
    """A PCIe link as trained, and the best width and generation that both ends support. None: unknown to the kernel."""

    width: int | None
    width_max: int | None
    generation: int | None
    generation_max: int | None


@dataclass(frozen=True, slots=True)
class Nic:
    """A network device. ``kind``: hca for an RDMA device, else nic; ``address``: the PCI address."""

    name: str
    kind: str
    address: str


def place_of(root: Path, address: str) -> tuple[str, ...]:
    """Returns the chain of devices from the host bridge (pci0000:00) down to ``address``; empty for an absent
    device.
    """
    try:
        parts = (root / "bus/pci/devices" / address).resolve(strict=True).parts
    except OSError:
        return ()
    bridges = [at for at, part in enumerate(parts) if re.fullmatch(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}", part)]
    return parts[bridges[-1] :] if bridges else ()


def path_between(one: tuple[str, ...], other: tuple[str, ...], nodes: tuple[int | None, int | None]) -> str | None:
    """Returns the type of path between two places: PIX, PXB, PHB, NODE or SYS, as in `nvidia-smi topo -m`; None if it
    is unknown.
    """
    if not one or not other:
        return None
    shared = next(
        (at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), min(len(one), len(other))
    )
    if shared == 0:
        return "NODE" if nodes[0] is not None and nodes[0] == nodes[1] else "SYS"
    if shared == 1:
        return "PHB"
    # If both devices are on one switch, each chain has two items after the shared part: the switch port and the device.
    return "PIX" if max(len(one), len(other)) - shared <= 2 else "PXB"


def numa_node(root: Path, address: str) -> int | None:
    """Returns the NUMA node of a device; None on a machine with one NUMA node."""
    text = _text(root / "bus/pci/devices" / address / "numa_node")
    return int(text) if text and text.isdigit() else None


def near_cpus(root: Path, address: str) -> str | None:
    """Returns the CPUs near a device, such as 0-47,96-143."""
    return _text(root / "bus/pci/devices" / address / "local_cpulist")


def slot_above(root: Path, address: str) -> str | None:
    """Returns the address of the port above a device; None below a host bridge."""
    place = place_of(root, address)
    return place[-2] if len(place) > 2 else None


def link_of(root: Path, address: str) -> Link | None:
    """Returns the link of a device to the port above it; None for an absent device."""
    folder = root / "bus/pci/devices" / address
    if not folder.exists():
        return None
    above = slot_above(root, address)
    ends = [folder, *([root / "bus/pci/devices" / above] if above else [])]
    return Link(
        _width(folder / "current_link_width"),
        _least([_width(end / "max_link_width") for end in ends]),
        generation_of(_text(folder / "current_link_speed")),
        _least([generation_of(_text(end / "max_link_speed")) for end in ends]),
    )


def generation_of(text: str | None) -> int | None:
    """Returns the PCIe generation of a speed as sysfs writes it: "16.0 GT/s PCIe" is 4."""
    return _GENERATIONS.get(text.partition(" ")[0]) if text else None


def bytes_per_s(width: int | None, generation: int | None) -> float | None:
    """Returns the bytes per second that ``width`` lanes carry in one direction, including packet headers."""
    lane = _LANE_BYTES_PER_S.get(generation or 0)
    return lane * width if lane and width else None


def nics(root: Path) -> list[Nic]:
    """Returns the RDMA devices and the other network interfaces on PCI, without virtual functions."""
    hcas = {
        name: address
        for name in _names(root / "class/infiniband")
        if (address := _address(root / "class/infiniband" / name))
    }
    found = [Nic(name, "hca", address) for name, address in hcas.items()]
    taken = set(hcas.values())
    for name in _names(root / "class/net"):
        address = _address(root / "class/net" / name)
        if address and address not in taken and not (root / "bus/pci/devices" / address / "physfn").exists():
            taken.add(address)
            found.append(Nic(name, "nic", address))
    return found[:MAX_NICS]


def _address(entry: Path) -> str | None:
    try:
        name = (entry / "device").resolve(strict=True).name
    except OSError:
        return None
    return name if _ADDRESS.fullmatch(name) else None


def _width(path: Path) -> int | None:
    text = _text(path)
    # The kernel writes 255 for an unknown width.
    return int(text) if text and text.isdigit() and 0 < int(text) < 255 else None


def _least(values: list[int | None]) -> int | None:
    return min((value for value in values if value is not None), default=None)


def _names(path: Path) -> list[str]:
    try:
        return sorted(os.listdir(path))[:MAX_NICS]  # noqa: PTH208
    except OSError:
        return []


def _text(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            return file.read(MAX_TEXT).decode("utf-8", "replace").strip() or None
    except OSError:
        return None
