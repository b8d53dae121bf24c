"""Reads RDMA ports from sysfs, as rows of ``rdma.ports``. Needs no privileges."""

from __future__ import annotations

import os
import re
from pathlib import Path

from probing.api.tables.rdma import COUNTERS, HW_COUNTERS

__all__ = ("SYSFS", "read_ports")

SYSFS = Path("/sys/class/infiniband")
MAX_DEVICES = 256
MAX_PORTS = 256
MAX_TEXT = 256
# sysfs shows the kernel's counters of 4-byte words (IBA 16.1.3.5) as they are.
_WORD_BYTES = 4
_MAX = (1 << 63) - 1
_Port = dict[str, str | int | float | None]


def read_ports(root: Path = SYSFS) -> list[_Port]:
    """Returns a row for each port, without node and ts; no rows if there is no RDMA device. A value that cannot be read
    is None."""
    rows = []
    for device in _names(root)[:MAX_DEVICES]:
        ports = root / device / "ports"
        numbers = sorted(int(name) for name in _names(ports) if re.fullmatch(r"\d{1,3}", name))
        rows += [_port(device, number, ports / str(number)) for number in numbers[:MAX_PORTS]]
    return rows


def _port(device: str, number: int, path: Path) -> _Port:
    rate = _text(path / "rate")
    gbps = re.match(r"\d{1,6}(?:\.\d{1,3})?(?= Gb/sec)", rate or "")
    counters, hardware = path / "counters", path / "hw_counters"
    return {
        "hca": device,
        "port": number,
        "link_layer": _text(path / "link_layer"),
        "state": _state(path / "state"),
        "phys_state": _state(path / "phys_state"),
        "rate_gbps": float(gbps[0]) if gbps else None,
        "rate": rate,
        "port_xmit_data_bytes": _number(counters / "port_xmit_data", _WORD_BYTES),
        "port_rcv_data_bytes": _number(counters / "port_rcv_data", _WORD_BYTES),
        **{name: _number(counters / name) for name in COUNTERS},
        **{name: _number(hardware / name) for name in HW_COUNTERS},
    }


def _names(path: Path) -> list[str]:
    try:
        return sorted(os.listdir(path))  # noqa: PTH208
    except OSError:
        return []


def _text(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            text = file.read(MAX_TEXT).decode("utf-8", "replace").strip()
    except OSError:
        return None
    return text or None


def _state(path: Path) -> str | None:
    """``4: ACTIVE`` without its number."""
    text = _text(path)
    return text if text is None else text.partition(": ")[2] or text


def _number(path: Path, unit: int = 1) -> int | None:
    text = _text(path)
    return min(int(text) * unit, _MAX) if text and text.isascii() and text.isdigit() else None
