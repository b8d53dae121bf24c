"""The source of net.interfaces: traffic, errors and state of network interfaces, with rates."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from probing.api.errors import ProbingError, TargetTimeout
from probing.api.tables.net import INTERFACE_COUNTERS, INTERFACE_EVENTS, INTERFACES
from probing.api.tables.schema import Row
from probing.daemon.backoff import Pauses
from probing.daemon.clock import Clock
from probing.daemon.columns import batch, named, numbers, texts, times
from probing.daemon.context import Context
from probing.daemon.fairness import in_turn
from probing.daemon.net.counters import UNKNOWN, Counters, Differences, per_second
from probing.daemon.net.node_sysfs import node_processes
from probing.daemon.net.tcp.source import TcpSource
from probing.daemon.processes.namespaces import own_namespace
from probing.daemon.processes.parsers import ParserPool, answer_of
from probing.daemon.processes.procfs import clean_text
from probing.daemon.processes.reader_pool import ReaderPool, payload_of
from probing.daemon.source import Loss, Processes, ProcessKey, Sink, Source
from probing.daemon.source_state import SourceState, Totals, first_of

__all__ = (
    "InterfaceSource",
    "parse_dev",
)

_COUNTED = (*INTERFACE_COUNTERS, "carrier_changes")
MAX_LINES = 1_024
# The interval at which the addresses are read, s.
AGAIN_S = 300.0
_MOST = (1 << 63) - 1
_LINE = re.compile(r"\s*(.{1,64}?):\s*((?:\d{1,20}\s+){15}\d{1,20})\s*")
# The index of each of INTERFACE_COUNTERS in a line. A line has received bytes, packets, errs, drop, fifo, frame,
# compressed, multicast; then sent bytes, packets, errs, drop, fifo, colls, carrier, compressed.
_PLACES = (0, 1, 2, 3, 4, 5, 7, 8, 9, 10, 11, 14)
_TEXTS = ("job", "kind", "operstate", "addresses")
_RATES = {
    "rx_gbps": ("rx_bytes", 8e-9),
    "tx_gbps": ("tx_bytes", 8e-9),
    "rx_packets_rate": ("rx_packets", 1.0),
    "tx_packets_rate": ("tx_packets", 1.0),
}


class _Interface(NamedTuple):
    """An interface in one reading. ``counters``: values in the order of _COUNTED, UNKNOWN for a counter that was not
    read. ``speed``: Mb/s, None if unknown.
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


def _interface_batch(
    node: str,
    ts_ns: int,
    interfaces: Sequence[_Interface],
    values: npt.NDArray[np.int64],
    differences: Differences,
    rows: npt.NDArray[np.intp],
) -> pa.RecordBatch:
    """Returns the ``rows`` of one reading as a batch; ``ts_ns`` is UTC."""
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
    for index, name in enumerate(_COUNTED):
        columns[name] = numbers(values[:, index], values[:, index] == UNKNOWN)
        if name in INTERFACE_EVENTS:
            columns[f"{name}_new"] = numbers(rise[:, index], missing[:, index])
    for rate, (name, factor) in _RATES.items():
        index = _COUNTED.index(name)
        columns[rate] = numbers(per_second(rise[:, index], interval, factor), missing[:, index])
    return batch(INTERFACES.name, columns)


TIMEOUT_S = 1.0
DETAILS_S = 10.0
MAX_ROWS = 512


class _Addresses:
    """The addresses in the network namespace of this process, read every five minutes. Not thread-safe."""

    def __init__(self, parsers: ParserPool) -> None:
        self._parsers = parsers
        self._asked = -AGAIN_S
        self._found: dict[str, list[str]] = {}

    def of(self, ifindex: int | None) -> str | None:
        """Returns the addresses of an interface, comma separated; None if it has none."""
        return ", ".join(self._found.get(str(ifindex), ())) or None

    def refresh(self, *, now: bool = False) -> None:
        """Reads the addresses if the last reading is five minutes old, or if ``now``. Raises ProbingError if the kernel
        does not answer."""
        if not now and time.monotonic() - self._asked < AGAIN_S:
            return
        self._asked = time.monotonic()
        with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, socket.NETLINK_ROUTE) as sock:
            answer = self._parsers.call("interface_addresses", fds=[sock.fileno()], timeout=TIMEOUT_S)
        self._found = answer_of(dict[str, list[str]], answer)


class InterfaceSource(Source):
    """Reads the counters of all interfaces at each tick, and every 10 s their details, which seldom change."""

    name = "interfaces"
    table = INTERFACES.name

    def __init__(
        self,
        readers: ReaderPool,
        parsers: ParserPool,
        processes: Processes,
        namespaces: Callable[[], Mapping[int, ProcessKey]],
        sink: Sink,
        clock: Clock,
        node: str,
        interval_s: float,
    ) -> None:
        self._readers, self._processes, self._namespaces = readers, processes, namespaces
        self._sink, self._clock, self._node, self._interval_s = sink, clock, node, interval_s
        self._addresses = _Addresses(parsers)
        self._details: dict[str, Row] = {}
        self._looked = -DETAILS_S
        self._counters = Counters()
        self._pauses = Pauses()
        self._reasons: dict[str, str] = {}

    @classmethod
    def make(cls, context: Context) -> InterfaceSource:
        tcp = context.find(TcpSource)
        return cls(
            context.readers,
            context.parsers.stacks,
            context.processes,
            lambda: tcp.namespaces,
            context.sink,
            context.clock,
            context.node,
            context.config.net.interval_s,
        )

    @property
    def tick_s(self) -> Callable[[], float] | None:
        return lambda: self._interval_s

    def tick(self) -> None:
        if time.monotonic() - self._looked >= DETAILS_S:
            self._looked = time.monotonic()
            self._ask("link_details", self._read_details)
            self._ask("addresses", self._addresses.refresh)
        self._ask("links", self._read)

    def states(self, totals: Totals) -> list[SourceState]:
        reason = first_of(list(self._reasons.values()))
        return [totals.of(self.name, self.table, state="degraded" if "links" in self._reasons else "", reason=reason)]

    def _ask(self, what: str, read: Callable[[], None]) -> None:
        """Calls ``read``, unless the request ``what`` timed out lately: each further call may block one more reader in
        the kernel."""
        if self._pauses.held(what):
            return
        try:
            read()
        except TargetTimeout as e:
            self._pauses.failed(what)
            self._reasons[what] = e.message
        except ProbingError as e:
            self._reasons[what] = e.message
        else:
            self._pauses.worked([what])
            self._reasons.pop(what, None)

    def _read_details(self) -> None:
        answer = self._readers.call("link_details", timeout=TIMEOUT_S, node=node_processes())
        found = payload_of(dict[str, Row], answer)
        if found.keys() != self._details.keys():
            self._ask("addresses", lambda: self._addresses.refresh(now=True))
        self._details = found

    def _read(self) -> None:
        keys = list(self._namespaces().values())
        targets = [list(key) for key in keys]
        answer = self._readers.call("links", timeout=TIMEOUT_S, targets=targets, node=node_processes())
        found = payload_of(list[tuple[int, str] | None], answer)
        pair = self._clock.pair()
        interfaces = list(self._interfaces([None, *keys], found))
        if not interfaces:
            self._counters = Counters()
            return
        values = np.array([one.counters for one in interfaces], np.int64)
        differences = self._counters.read([one.key for one in interfaces], values, pair.mono_ns)
        physical = np.array([one.kind == "physical" for one in interfaces])
        # Any user can make namespaces with many interfaces, so the namespaces take turns.
        wanted = in_turn(np.flatnonzero(physical | _moved(differences)).tolist(), lambda row: interfaces[row].netns)
        rows = np.array(wanted[:MAX_ROWS], np.intp)
        if lost := len(wanted) - len(rows):
            reason = f"more than {MAX_ROWS} interfaces had traffic"
            self._sink.lost(Loss(self.name, self.table, "read", reason, pair.real_ns, pair.real_ns, lost))
        if len(rows):
            made = _interface_batch(self._node, pair.real_ns, interfaces, values, differences, rows)
            self._sink.put(self.table, made)

    def _interfaces(
        self, keys: Sequence[ProcessKey | None], found: Sequence[tuple[int, str] | None]
    ) -> Iterator[_Interface]:
        """Yields the interfaces in the answer ``found``. ``keys``: for each entry of ``found``, the process that was
        read; None for the node. Each namespace counts once, since jobs may share the namespace of the node."""
        seen: set[int] = set()
        for key, (netns, text) in ((key, one) for key, one in zip(keys, found, strict=False) if one):
            if netns in seen:
                continue
            seen.add(netns)
            who = self._processes.identity(*key) if key else None
            ours = key is None and netns == own_namespace()[1]
            for name, counters in parse_dev(text).items():
                known = self._details.get(name, {}) if key is None else {}
                carrier = known.get("carrier_changes")
                yield _Interface(
                    name,
                    netns,
                    who.job if who else None,
                    [*counters, UNKNOWN if carrier is None else carrier],
                    known.get("kind"),
                    known.get("operstate"),
                    known.get("speed"),
                    known.get("mtu"),
                    self._addresses.of(known.get("ifindex")) if ours else None,
                )


def _moved(differences: Differences) -> npt.NDArray[np.bool_]:
    """Returns the mask of the rows in which a counter other than multicast grew."""
    quiet = [_COUNTED.index("multicast")]
    rise = np.delete(np.where(differences.missing, 0, differences.rise), quiet, axis=1)
    return np.asarray((rise > 0).any(axis=1))
