"""Reads RDMA ports in sysfs, in a reader. A read asks the firmware of the card, which may never answer.

The files of counters stay open between two requests: a read of an open file takes a fifth of the time. Each read at
offset 0 returns the current value.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

from probing.api.errors import UsageError
from probing.api.rdma_counters import COUNTERS, HW_COUNTERS
from probing.daemon.ipc import Header, Message
from probing.daemon.net.node_sysfs import node_sysfs
from probing.daemon.processes.procfs import clean_text

__all__ = ("COUNTED", "PortReader", "device_names", "handlers")

_CLASS = "infiniband"
MAX_DEVICES = 256
MAX_PORTS = 256
MAX_OPEN = 700
MAX_NODE = 4
MAX_TEXT = 256
_MOST = (1 << 63) - 1
# The unit of some counters is 4 bytes (IBA 16.1.3.5), and sysfs shows them unchanged.
_WORD_BYTES = 4
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
# For each column of rdma.ports: candidate files below the port, each with the bytes of its unit; the first existing
# file is read. Names: hw_counters of drivers/infiniband/hw/{mlx5,bnxt_re,efa}.
_FILES: dict[str, tuple[tuple[str, int], ...]] = {
    "port_xmit_data_bytes": (("counters/port_xmit_data", _WORD_BYTES), ("hw_counters/tx_bytes", 1)),
    "port_rcv_data_bytes": (("counters/port_rcv_data", _WORD_BYTES), ("hw_counters/rx_bytes", 1)),
    "port_xmit_packets": (("counters/port_xmit_packets", 1), ("hw_counters/tx_pkts", 1)),
    "port_rcv_packets": (("counters/port_rcv_packets", 1), ("hw_counters/rx_pkts", 1)),
    **{name: ((f"counters/{name}", 1),) for name in COUNTERS},
    **{name: ((f"hw_counters/{name}", 1),) for name in HW_COUNTERS},
}
_OTHER_NAMES = {
    "np_cnp_sent": ("tx_cnp_pkts",),
    "np_ecn_marked_roce_packets": ("rx_ecn_marked_pkts",),
    "rp_cnp_handled": ("rx_cnp_pkts",),
    "out_of_sequence": ("oos_drop_count",),
    "packet_seq_err": ("seq_err_naks_rcvd",),
    "local_ack_timeout_err": ("to_retransmits",),
    "rnr_nak_retry_err": ("rnr_naks_rcvd",),
    "out_of_buffer": ("rx_out_of_buffer", "rx_drops"),
    "port_rcv_errors": ("rx_roce_errors",),
}
COUNTED = tuple(_FILES)


class PortReader:
    """Reads the ports below ``root``: /sys/class/infiniband, or a folder with the same structure. Keeps at most
    MAX_OPEN files open.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._open: dict[tuple[str, str], list[tuple[int, int] | None]] = {}
        self._folders: dict[tuple[str, str], tuple[int, int] | None] = {}
        self._ports: dict[str, list[int]] = {}
        self._count = 0

    def close(self) -> None:
        for device, port in list(self._open):
            self._forget(device, port)

    def read(self, devices: list[str], details: bool) -> list[dict[str, object]]:
        """Returns hca, port and ``counters`` (in the order of COUNTED) of each port of ``devices``; with ``details``
        also the other values of rdma.ports. A value that cannot be read is None."""
        found = []
        for device in devices[:MAX_DEVICES]:
            if not _NAME.fullmatch(device) or set(device) <= {"."}:
                raise UsageError(f"{device[:64]!r} is not a valid name of an RDMA device")
            if details or not self._ports.get(device):
                if len(self._ports) >= MAX_DEVICES:
                    self._ports.clear()
                names = _entries(self._root / device / "ports")
                ports = sorted(int(name) for name in names if re.fullmatch(r"[0-9]{1,3}", name))
                self._ports[device] = ports[:MAX_PORTS]
            of_device = _device(self._root / device) if details else {}
            for number in self._ports[device]:
                row = {"hca": device, "port": number, "counters": self._counters(device, str(number), details)}
                found.append({**row, **of_device, **_port(self._root / device, number)} if details else row)
        return found

    def _counters(self, device: str, port: str, fresh: bool) -> list[int | None]:
        files = self._open.get((device, port))
        if files is None or (fresh and self._folder(device, port) != self._folders.get((device, port))):
            # The ports are read for the first time, or their name belongs to another device now.
            self._forget(device, port)
            if self._count + len(_FILES) > MAX_OPEN:
                return self._read_once(device, port)
            self._folders[device, port] = self._folder(device, port)
            files = self._open[device, port] = self._opened(device, port)
            self._count += len(_FILES)
        values = [None if file is None else _number(*file) for file in files]
        if not any(value is not None for value in values):
            # The device is gone. If a new device has its name, the next reading opens the files of the new device.
            self._forget(device, port)
        return values

    def _read_once(self, device: str, port: str) -> list[int | None]:
        files = self._opened(device, port)
        values = [None if file is None else _number(*file) for file in files]
        _close(files)
        return values

    def _opened(self, device: str, port: str) -> list[tuple[int, int] | None]:
        path = self._root / device / "ports" / port
        return [_first(path, name, choices) for name, choices in _FILES.items()]

    def _folder(self, device: str, port: str) -> tuple[int, int] | None:
        """Returns the identity of the folder of counters; another device of the same name has another identity."""
        try:
            found = os.stat(f"{self._root}/{device}/ports/{port}/counters")  # noqa: PTH116
        except OSError:
            return None
        return found.st_ino, found.st_ctime_ns

    def _forget(self, device: str, port: str) -> None:
        self._folders.pop((device, port), None)
        files = self._open.pop((device, port), None)
        if files is not None:
            self._count -= len(_FILES)
            _close(files)


def device_names(root: Path) -> list[str]:
    """Returns the valid names of RDMA devices of this node, sorted."""
    return [name for name in _entries(root) if _NAME.fullmatch(name)][:MAX_DEVICES]


def handlers() -> dict[str, Callable[[Header], Message]]:
    ports: list[PortReader] = []

    def answer(request: Header) -> Message:
        if not ports:
            ports.append(PortReader(_root(request)))
        found = ports[0].read([str(name) for name in request.get("devices", [])], bool(request.get("details")))
        return Message({}, json.dumps(found).encode())

    def names(request: Header) -> Message:
        return Message({}, json.dumps(device_names(_root(request))).encode())

    return {"rdma_devices": names, "rdma_ports": answer}


def _root(request: Header) -> Path:
    if request.get("sysfs"):
        return Path(str(request["sysfs"]), "class", _CLASS)
    return node_sysfs(_CLASS, [int(pid) for pid in request.get("node", [])[:MAX_NODE]])


def _first(path: Path, name: str, choices: tuple[tuple[str, int], ...]) -> tuple[int, int] | None:
    """Returns (descriptor, unit) of the first existing file of ``choices`` and _OTHER_NAMES; None if none exists."""
    others = tuple((f"hw_counters/{other}", 1) for other in _OTHER_NAMES.get(name, ()))
    for file, unit in (*choices, *others):
        try:
            return os.open(path / file, os.O_RDONLY | os.O_CLOEXEC), unit
        except OSError:
            continue
    return None


def _close(files: list[tuple[int, int] | None]) -> None:
    for file in files:
        if file is not None:
            os.close(file[0])


def _number(fd: int, unit: int) -> int | None:
    try:
        text = os.pread(fd, MAX_TEXT, 0).rstrip()
    except OSError:
        return None
    if not text.isdigit():
        return None
    number = int(text) * unit
    return number if number < _MOST else _MOST


def _port(device: Path, number: int) -> dict[str, object]:
    path = device / "ports" / str(number)
    rate = _text(path / "rate")
    gbps = re.match(r"\d{1,6}(?:\.\d{1,3})?(?= Gb/sec)", rate or "")
    return {
        "link_layer": _text(path / "link_layer"),
        "state": _state(path / "state"),
        "phys_state": _state(path / "phys_state"),
        "rate_gbps": float(gbps[0]) if gbps else None,
        "rate": rate,
        "netdev": _text(path / "gid_attrs" / "ndevs" / "0") or next(iter(_entries(device / "device" / "net")), None),
    }


def _device(path: Path) -> dict[str, object]:
    numa = _text(path / "device" / "numa_node")
    try:
        address = os.path.basename(os.readlink(path / "device"))  # noqa: PTH115, PTH119
    except OSError:
        address = ""
    pci = re.fullmatch(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", address)
    return {"bus_id": address if pci else None, "numa_node": int(numa) if numa and numa.isdigit() else None}


def _entries(path: Path) -> list[str]:
    try:
        return sorted(os.listdir(path))  # noqa: PTH208
    except OSError:
        return []


def _text(path: Path) -> str | None:
    try:
        with path.open("rb", buffering=0) as file:
            return clean_text((file.read(MAX_TEXT) or b"").strip(), MAX_TEXT) or None
    except OSError:
        return None


def _state(path: Path) -> str | None:
    """Returns the word of a state: ACTIVE for ``4: ACTIVE``."""
    text = _text(path)
    return text if text is None else text.partition(": ")[2] or text
