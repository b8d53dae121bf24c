"""A tree as /sys/class/infiniband is."""

from __future__ import annotations

from pathlib import Path

__all__ = ("make_port", "write")


def write(path: Path, text: str | bytes) -> None:
    """Writes in place: an open file shows it, as one of sysfs does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())


def make_port(root: Path, device: str, port: int, **files: str) -> Path:
    """A port with some counters, and ``files`` below it. Returns its folder."""
    path = root / device / "ports" / str(port)
    standard = {
        "state": "4: ACTIVE\n",
        "phys_state": "5: LinkUp\n",
        "rate": "400 Gb/sec (4X NDR)\n",
        "link_layer": "InfiniBand\n",
        "counters/port_xmit_data": "1000\n",
        "counters/port_rcv_data": "2000\n",
        "counters/port_xmit_packets": "100\n",
        "counters/port_rcv_packets": "200\n",
        "counters/symbol_error": "0\n",
        "counters/link_downed": "3\n",
    }
    for name, text in {**standard, **files}.items():
        write(path / name, text)
    return path
