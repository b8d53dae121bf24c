"""PCI devices, NICs and the presence of a driver, from trees as sysfs has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from probing.daemon.gpu.nvml import pci
from probing.daemon.gpu.nvml.source import NO_GPU, why_absent

# Two sockets; on the first two GPUs and an HCA behind one switch, a third GPU behind another port of the bridge, and a
# NIC behind a second switch below the same root port.
PLACES = {
    "0000:17:00.0": "pci0000:15/0000:15:01.0/0000:16:00.0/0000:16:02.0",
    "0000:18:00.0": "pci0000:15/0000:15:01.0/0000:16:00.0/0000:16:03.0",
    "0000:19:00.0": "pci0000:15/0000:15:01.0/0000:16:00.0/0000:16:04.0",
    "0000:2a:00.0": "pci0000:15/0000:15:05.0",
    "0000:3b:00.0": "pci0000:15/0000:15:01.0/0000:16:00.0/0000:16:05.0/0000:3a:00.0/0000:3a:01.0",
    "0000:9a:00.0": "pci0000:97/0000:97:01.0",
    "0000:ca:00.0": "pci0000:c7/0000:c7:01.0",
}
NODES = dict.fromkeys(PLACES, "0") | {"0000:9a:00.0": "1", "0000:ca:00.0": "-1"}


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    devices = tmp_path / "bus/pci/devices"
    devices.mkdir(parents=True)
    for address, above in PLACES.items():
        folder = tmp_path / "devices" / above / address
        for name, text in {
            "numa_node": NODES[address],
            "local_cpulist": "0-47,96-143",
            "current_link_width": "8",
            "max_link_width": "16",
            "current_link_speed": "16.0 GT/s PCIe",
            "max_link_speed": "64.0 GT/s PCIe",
            "vendor": "0x10de",
            "class": "0x030200",
        }.items():
            write(folder / name, text)
        (devices / address).symlink_to(folder)
        parent = folder.parent
        if not (devices / parent.name).exists() and not parent.name.startswith("pci"):
            write(parent / "max_link_width", "16")
            write(parent / "max_link_speed", "32.0 GT/s PCIe")
            (devices / parent.name).symlink_to(parent)
    for kind, name, address in (
        ("infiniband", "mlx5_0", "0000:19:00.0"),
        ("net", "ib0", "0000:19:00.0"),
        ("net", "eth0", "0000:3b:00.0"),
    ):
        (tmp_path / "class" / kind / name).mkdir(parents=True)
        (tmp_path / "class" / kind / name / "device").symlink_to(devices / address)
    (tmp_path / "class/net/lo").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("one", "other", "path"),
    [
        ("17", "18", "PIX"),
        ("17", "19", "PIX"),
        ("18", "3b", "PXB"),
        ("17", "2a", "PHB"),
        ("17", "9a", "SYS"),
        ("2a", "3b", "PHB"),
        ("9a", "ca", "SYS"),
    ],
)
def test_ways_have_the_names_of_nvidia_smi(sysfs: Path, one: str, other: str, path: str) -> None:
    pair = [f"0000:{bus}:00.0" for bus in (one, other)]
    places = [pci.place_of(sysfs, address) for address in pair]
    nodes = (pci.numa_node(sysfs, pair[0]), pci.numa_node(sysfs, pair[1]))
    assert pci.path_between(places[0], places[1], nodes) == path
    assert pci.path_between(places[1], places[0], nodes[::-1]) == path


def test_two_bridges_of_one_numa_node() -> None:
    assert pci.path_between(("pci0000:15", "a"), ("pci0000:27", "b"), (0, 0)) == "NODE"
    assert pci.path_between((), ("pci0000:27", "b"), (0, 0)) is None


def test_a_link_is_as_good_as_its_weaker_end(sysfs: Path) -> None:
    link = pci.link_of(sysfs, "0000:17:00.0")
    assert link == pci.Link(width=8, width_max=16, generation=4, generation_max=5)
    assert pci.bytes_per_s(8, 4) == pytest.approx(15.75e9, rel=0.01)
    assert pci.slot_above(sysfs, "0000:17:00.0") == "0000:16:02.0"
    assert (pci.numa_node(sysfs, "0000:9a:00.0"), pci.numa_node(sysfs, "0000:ca:00.0")) == (1, None)
    assert pci.near_cpus(sysfs, "0000:17:00.0") == "0-47,96-143"


def test_a_device_that_is_not_there(sysfs: Path) -> None:
    assert pci.link_of(sysfs, "0000:ff:00.0") is None
    assert pci.place_of(sysfs, "0000:ff:00.0") == ()
    assert pci.near_cpus(sysfs, "0000:ff:00.0") is None
    assert pci.generation_of("Unknown") is None
    assert pci.bytes_per_s(16, 9) is None


def test_an_hca_is_no_nic_as_well(sysfs: Path) -> None:
    assert pci.nics(sysfs) == [pci.Nic("mlx5_0", "hca", "0000:19:00.0"), pci.Nic("eth0", "nic", "0000:3b:00.0")]
    assert pci.nics(sysfs / "nowhere") == []


def test_a_virtual_function_is_left_out(sysfs: Path) -> None:
    (sysfs / "bus/pci/devices/0000:3b:00.0/physfn").symlink_to(sysfs)
    assert [nic.name for nic in pci.nics(sysfs)] == ["mlx5_0"]


def test_whether_there_is_a_driver_to_ask(sysfs: Path, tmp_path: Path) -> None:
    dev, proc = tmp_path / "dev", tmp_path / "proc"
    assert why_absent(sysfs, dev, proc) == "NVIDIA GPUs are there, but their driver is not loaded"
    assert why_absent(tmp_path / "empty", dev, proc) == NO_GPU
    for address in PLACES:
        write(sysfs / "bus/pci/devices" / address / "class", "0x020000")
    assert why_absent(sysfs, dev, proc) == NO_GPU
    write(dev / "nvidiactl", "")
    assert why_absent(sysfs, dev, proc) == ""
