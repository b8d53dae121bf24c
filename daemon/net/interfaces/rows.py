"""Readings of network interfaces as batches of net.interfaces."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from probing.api.tables.net import INTERFACE_COUNTERS, INTERFACE_EVENTS, INTERFACES
from probing.daemon.columns import batch, named, numbers, texts, times
from probing.daemon.net.counters import UNKNOWN, Differences, per_second
from probing.daemon.processes.procfs import clean_text

__all__ = ("COUNTED", "Interface", "interface_batch", "parse_dev")

COUNTED = (*INTERFACE_COUNTERS, "carrier_changes")
MAX_LINES = 1_024
_MOST = (1 << 63) - 1
_LINE = re.compile(r"\s*(.{1,64}?):\s*((?:\d{1,20}\s+){15}\d{1,20})\s*")
# Where each of INTERFACE_COUNTERS is in a line: received are bytes, packets, errs, drop, fifo, frame, compressed,
# multicast; sent are bytes, packets, errs, drop, fifo, colls, carrier, compressed.
_PLACES = (0, 1, 2, 3, 4, 5, 7, 8, 9, 10, 11, 14)
_TEXTS = ("job", "kind", "operstate", "addresses")
_RATES = {
    "rx_gbps": ("rx_bytes", 8e-9),
    "tx_gbps": ("tx_bytes", 8e-9),
    "rx_packets_rate": ("rx_packets", 1.0),
    "tx_packets_rate": ("tx_packets", 1.0),
}


class Interface(NamedTuple):
    """An interface in one reading. ``counters`` are in the order of COUNTED, UNKNOWN where one could not be read.

    Speed in Mb/s; None: not known.
    """

    name: str
    netns: int
    job: str | None
    counters: Sequence[int]
    kind: str | None = None
    operstate: str | None = None
    speed: int | None = None
    mtu: int | None = None
    addresses: str | None = None

    @property
    def key(self) -> tuple[int, str]:
        return self.netns, self.name


def parse_dev(text: str) -> dict[str, list[int]]:
    """Returns the counters of /proc/net/dev by interface, in the order of INTERFACE_COUNTERS; skips other lines."""
    found: dict[str, list[int]] = {}
    for line in text.split("\n", MAX_LINES)[:MAX_LINES]:
        match = _LINE.fullmatch(line)
        if match:
            values = match[2].split()
            found[clean_text(match[1], 32)] = [min(int(values[place]), _MOST) for place in _PLACES]
    return found


def interface_batch(
    node: str,
    ts_ns: int,
    interfaces: Sequence[Interface],
    values: npt.NDArray[np.int64],
    differences: Differences,
    rows: npt.NDArray[np.intp],
) -> pa.RecordBatch:
    """Returns ``rows`` of one reading; ``ts_ns`` is UTC."""
    count = len(rows)
    each = np.arange(count)
    kept = [interfaces[row] for row in rows]
    values, rise, missing = values[rows], differences.rise[rows], differences.missing[rows]
    interval = differences.interval[rows]
    speeds = np.array([-1 if one.speed is None else one.speed for one in kept], np.float64)
    mtus = np.array([-1 if one.mtu is None else min(one.mtu, 1 << 30) for one in kept], np.int32)
    columns: dict[str, pa.Array[Any]] = {
        "node": named(np.zeros(count, np.int32), (node,)),
        "ts": times(np.full(count, ts_ns, np.int64)),
        "netns": numbers(np.array([one.netns for one in kept], np.int64)),
        "speed_gbps": numbers(speeds / 1e3, speeds <= 0),
        "mtu": numbers(mtus, mtus < 0),
        "interval_ns": numbers(interval, differences.new[rows]),
        "interface": texts([one.name for one in kept], each),
        **{name: texts([getattr(one, name) for one in kept], each) for name in _TEXTS},
    }
    for index, name in enumerate(COUNTED):
        columns[name] = numbers(values[:, index], values[:, index] == UNKNOWN)
        if name in INTERFACE_EVENTS:
            columns[f"{name}_new"] = numbers(rise[:, index], missing[:, index])
    for rate, (name, factor) in _RATES.items():
        index = COUNTED.index(name)
        columns[rate] = numbers(per_second(rise[:, index], interval, factor), missing[:, index])
    return batch(INTERFACES.name, columns)
