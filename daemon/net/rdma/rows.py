"""Readings of RDMA ports as batches of rdma.ports."""

from __future__ import annotations

from collections.abc import Sequence
from math import nan
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from probing.api.rdma_counters import COUNTERS, HW_COUNTERS
from probing.api.tables.rdma import PORTS
from probing.daemon.columns import batch, integers, named, number_columns, numbers, texts, times
from probing.daemon.net.counters import UNKNOWN, Differences, per_second
from probing.daemon.net.rdma.reading import COUNTED

__all__ = ("Port", "Readings", "port_batch", "readings")

# A port as ``reading.PortReader`` reads it.
Port = dict[str, Any]
_TEXTS = ("hca", "link_layer", "state", "phys_state", "rate", "netdev", "bus_id")
_RATES = {
    "sent_gbps": ("port_xmit_data_bytes", 8e-9),
    "received_gbps": ("port_rcv_data_bytes", 8e-9),
    "snd_pkts_rate": ("port_xmit_packets", 1.0),
    "rcv_pkts_rate": ("port_rcv_packets", 1.0),
}


class Readings(NamedTuple):
    """``values[port, counter]`` in the order of COUNTED, UNKNOWN where a port has no such counter."""

    ports: Sequence[Port]
    names: Sequence[tuple[str, int]]
    values: npt.NDArray[np.int64]


def readings(ports: Sequence[Port]) -> Readings:
    """Returns ports as arrays."""
    values = [[UNKNOWN if value is None else value for value in port["counters"]] for port in ports]
    shaped = np.array(values, np.int64).reshape(len(ports), len(COUNTED))
    return Readings(ports, [(port["hca"], port["port"]) for port in ports], shaped)


def port_batch(node: str, ts_ns: int, found: Readings, differences: Differences) -> pa.RecordBatch:
    """Returns the rows of one reading; ``ts_ns`` is UTC."""
    count = len(found.ports)
    each = np.arange(count)
    rates = [nan if (rate := port.get("rate_gbps")) is None else rate for port in found.ports]
    columns: dict[str, pa.Array[Any]] = {
        "node": named(np.zeros(count, np.int32), (node,)),
        "ts": times(np.full(count, ts_ns, np.int64)),
        "port": numbers(np.array([port["port"] for port in found.ports], np.int32)),
        "rate_gbps": numbers(np.array(rates, float), np.isnan(rates)),
        "numa_node": integers([port.get("numa_node") for port in found.ports], each),
        "interval_ns": numbers(differences.interval, differences.new),
        **{name: texts([port.get(name) for port in found.ports], each) for name in _TEXTS},
    }
    columns |= zip(COUNTED, number_columns(found.values, found.values == UNKNOWN), strict=True)
    rises = number_columns(differences.rise, differences.missing)
    columns |= {
        f"{name}_new": rise
        for name, rise in zip(COUNTED, rises, strict=True)
        if name in COUNTERS or name in HW_COUNTERS
    }
    for rate, (name, factor) in _RATES.items():
        index = COUNTED.index(name)
        values = per_second(differences.rise[:, index], differences.interval, factor)
        columns[rate] = numbers(values, differences.missing[:, index])
    return batch(PORTS.name, columns)
