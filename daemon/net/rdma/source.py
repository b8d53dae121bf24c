"""The source of rdma.ports: traffic, errors and state of all RDMA ports, with rates."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from math import nan
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from probing.api.errors import ProbingError, TargetTimeout
from probing.api.rdma_counters import COUNTERS, HW_COUNTERS
from probing.api.tables.rdma import PORTS
from probing.api.tables.schema import Row
from probing.daemon.backoff import Pauses
from probing.daemon.clock import Clock
from probing.daemon.columns import batch, integers, named, number_columns, numbers, texts, times
from probing.daemon.context import Context
from probing.daemon.net.counters import UNKNOWN, Counters, Differences, per_second
from probing.daemon.net.node_sysfs import node_processes
from probing.daemon.net.rdma.reading import COUNTED
from probing.daemon.processes.reader_pool import ReaderPool, payload_of
from probing.daemon.source import Sink, Source
from probing.daemon.source_state import SourceState, Totals, first_of

__all__ = ("RdmaPorts",)

_TEXTS = ("hca", "link_layer", "state", "phys_state", "rate", "netdev", "bus_id")
_RATES = {
    "sent_gbps": ("port_xmit_data_bytes", 8e-9),
    "received_gbps": ("port_rcv_data_bytes", 8e-9),
    "snd_pkts_rate": ("port_xmit_packets", 1.0),
    "rcv_pkts_rate": ("port_rcv_packets", 1.0),
}


class _Readings(NamedTuple):
    """A reading of all ports. ``values[port, counter]`` is in the order of COUNTED; UNKNOWN if the port lacks the
    counter.
    """

    ports: Sequence[Row]
    names: Sequence[tuple[str, int]]
    values: npt.NDArray[np.int64]


def _readings(ports: Sequence[Row]) -> _Readings:
    """Returns ports as arrays."""
    values = [[UNKNOWN if value is None else value for value in port["counters"]] for port in ports]
    shaped = np.array(values, np.int64).reshape(len(ports), len(COUNTED))
    return _Readings(ports, [(port["hca"], port["port"]) for port in ports], shaped)


def _port_batch(node: str, ts_ns: int, found: _Readings, differences: Differences) -> pa.RecordBatch:
    """Returns the rows of one reading as a batch; ``ts_ns`` is UTC."""
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


TIMEOUT_S = 2.0
# The timeout of a request for a single device, s. Such requests are sent if a request for all devices has timed out.
ALONE_S = 0.5
# The interval at which state, rate and the list of devices are read, s. They seldom change, and to read them takes a
# request to the firmware.
DETAILS_S = 5.0


class RdmaPorts(Source):
    """Reads RDMA ports, with one request to a reader for all devices. If no answer comes, each device is read in a
    separate request, and devices that do not answer are left out for a while. The state of the source names these
    devices."""

    name = "rdma_ports"
    table = PORTS.name

    def __init__(
        self, readers: ReaderPool, sink: Sink, clock: Clock, node: str, interval_s: float, sysfs: str = ""
    ) -> None:
        self._readers, self._sink, self._clock, self._node = readers, sink, clock, node
        self._interval_s = interval_s
        self._where: Row = {"sysfs": sysfs, "node": node_processes()}
        self._devices: list[str] = []
        self._details: dict[tuple[str, int], Row] = {}
        self._looked = -DETAILS_S
        self._counters = Counters()
        self._pauses = Pauses()
        self._reason = ""

    @classmethod
    def make(cls, context: Context) -> RdmaPorts:
        net = context.config.net
        return cls(context.readers, context.sink, context.clock, context.node, net.interval_s, net.sysfs)

    @property
    def tick_s(self) -> Callable[[], float] | None:
        return lambda: self._interval_s

    def tick(self) -> None:
        now = time.monotonic()
        details = now - self._looked >= DETAILS_S
        try:
            if details:
                answer = self._readers.call("rdma_devices", timeout=TIMEOUT_S, **self._where)
                self._devices = payload_of(list[str], answer)
                self._looked = now
            ports = self._read(details)
            self._reason = ""
        except ProbingError as e:
            self._reason = e.message
            return
        if details:
            self._details = {(port["hca"], port["port"]): port for port in ports}
        pair = self._clock.pair()
        found = _readings([{**self._details.get((p["hca"], p["port"]), {}), **p} for p in ports])
        differences = self._counters.read(found.names, found.values, pair.mono_ns)
        if ports:
            self._sink.put(self.table, _port_batch(self._node, pair.real_ns, found, differences))

    def states(self, totals: Totals) -> list[SourceState]:
        held = self._pauses.names()
        silent = [f"{first_of(held, ', ')} did not answer"] if held else []
        reason = first_of([*silent, *([self._reason] if self._reason else [])])
        detail = f"{len(self._details)} ports" if self._devices else "no RDMA devices"
        return [totals.of(self.name, self.table, state="degraded" if held else "", reason=reason, detail=detail)]

    def _read(self, details: bool) -> list[Row]:
        wanted = [device for device in self._devices if not self._pauses.held(device)]
        if not wanted:
            return []
        try:
            ports = self._ask(wanted, details, TIMEOUT_S)
        except TargetTimeout:
            return [port for device in wanted for port in self._alone(device, details)]
        self._pauses.worked(wanted)
        return ports

    def _alone(self, device: str, details: bool) -> Sequence[Row]:
        try:
            ports = self._ask([device], details, ALONE_S)
        except TargetTimeout:
            self._pauses.failed(device)
            return ()
        self._pauses.worked([device])
        return ports

    def _ask(self, devices: list[str], details: bool, timeout: float) -> list[Row]:
        answer = self._readers.call("rdma_ports", timeout=timeout, devices=devices, details=details, **self._where)
        return payload_of(list[Row], answer)
