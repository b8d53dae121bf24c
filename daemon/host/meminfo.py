"""Reads the memory of the node from /proc/meminfo, which needs no privileges."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

__all__ = ("NodeMemory", "read_meminfo")

_LINE = re.compile(rb"^(MemTotal|MemAvailable):[ \t]*(\d{1,12}) kB$", re.MULTILINE)


class NodeMemory(NamedTuple):
    """The memory of the node. ``available_bytes``: bytes that processes can get without swapping, caches included.
    None: unknown.
    """

    total_bytes: int | None
    available_bytes: int | None


def read_meminfo(path: Path = Path("/proc/meminfo")) -> NodeMemory:
    """Returns the memory of the node, as far as it can be read."""
    try:
        data = path.read_bytes()
    except OSError:
        return NodeMemory(None, None)
    found = {name: int(number) * 1024 for name, number in _LINE.findall(data[: 64 << 10])}
    return NodeMemory(found.get(b"MemTotal"), found.get(b"MemAvailable"))
