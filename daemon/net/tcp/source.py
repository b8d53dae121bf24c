"""The source of net.tcp, net.paths and net.sockets: TCP connections of watched processes, by sock_diag.

A row without any change is written once a minute. To list the connections of a namespace, the collector enters it,
which needs CAP_SYS_ADMIN. Without this right the namespace only gets rows of totals without addresses, from
/proc/PID/net/snmp (Documentation/networking/snmp_counter.rst) of a process in it.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from probing.api.errors import ProbingError
from probing.api.tables.net import PATHS, SOCKETS, TCP
from probing.api.tables.schema import Row
from probing.daemon.arrow import batch_of
from probing.daemon.clock import Clock, ClockPair
from probing.daemon.context import Context
from probing.daemon.net.counters import UNKNOWN, Counters
from probing.daemon.net.tcp.connections import Found, Reading, by_process, found_of, paths
from probing.daemon.net.tcp.proc_tcp import ProcSockets
from probing.daemon.net.tcp.rows import Columns, path_batch, tcp_batch
from probing.daemon.net.tcp.sock_diag import LISTEN, read_sockets
from probing.daemon.net.tcp.sockets import DiagSockets, Endpoints, Owners
from probing.daemon.processes.discovery import Discovery
from probing.daemon.processes.reader_pool import ReaderPool, payload_of
from probing.daemon.source import Identity, Loss, ProcessKey, Sink, Source
from probing.daemon.source_state import SourceState, Totals, first_of

__all__ = (
    "Quiet",
    "TcpSource",
)

# A row without any change is written again after this time, to show that the connections still exist.
AGAIN_NS = 60_000_000_000
MAX_KNOWN = 16_384


class Quiet:
    """Keeps the times at which rows were written. Not thread-safe."""

    def __init__(self) -> None:
        self._written: OrderedDict[Hashable, int] = OrderedDict()

    def wanted(self, keys: Sequence[Hashable], active: npt.NDArray[np.bool_], mono_ns: int) -> npt.NDArray[np.bool_]:
        """Returns the mask of the rows to write: active rows, and rows that were not written for a minute."""
        found = active.copy()
        for row, key in enumerate(keys):
            if not found[row]:
                found[row] = mono_ns - self._written.get(key, mono_ns - AGAIN_NS) >= AGAIN_NS
            if found[row]:
                self._written[key] = mono_ns
                self._written.move_to_end(key)
        while len(self._written) > MAX_KNOWN:
            self._written.popitem(last=False)
        return found


TIMEOUT_S = 1.0
# Columns of net.tcp for the counters of ``reading.TOTALS``.
_COLUMNS = ("segs_out", "segs_in", "retrans")


class _NamespaceTotals:
    """Keeps the last totals of each namespace. Not thread-safe."""

    def __init__(self, readers: ReaderPool) -> None:
        self._readers = readers
        self._counters = Counters()

    def rows(
        self, node: str, pair: ClockPair, namespaces: Mapping[int, ProcessKey], who: Mapping[ProcessKey, Identity]
    ) -> pa.RecordBatch | None:
        """Returns a row for each namespace, with the process that ``namespaces`` names; None if there are no rows.

        Raises ProbingError if the reader does not answer.
        """
        known = {netns: key for netns, key in namespaces.items() if key in who}
        if not known:
            return None
        targets = [list(key) for key in known.values()]
        answer = self._readers.call("tcp_totals", timeout=TIMEOUT_S, targets=targets)
        found = payload_of(list[list[int | None] | None], answer)
        read = [(netns, key, totals) for (netns, key), totals in zip(known.items(), found, strict=True) if totals]
        values = [[UNKNOWN if value is None else value for value in totals[1:]] for _, _, totals in read]
        shaped = np.array(values, np.int64).reshape(len(read), len(_COLUMNS))
        differences = self._counters.read([netns for netns, _, _ in read], shaped, pair.mono_ns)
        rows = []
        for row, (netns, key, totals) in enumerate(read):
            if not differences.new[row]:
                rise: Row = dict(zip(_COLUMNS, differences.rise[row].tolist(), strict=True))
                common = {"node": node, "ts": pair.real_ns, "netns": netns, "sockets": totals[0]}
                interval = {"interval_ns": int(differences.interval[row])}
                rows.append({**who[key]._asdict(), **common, **interval, **rise})
        return batch_of(TCP.name, rows) if rows else None


MAX_ROWS = 4_096
# The maximum share of a core that readings may take. So a node with very many connections is read less often.
_SHARE = 1 / 200


class TcpSource(Source):
    """Reads all connections of each network namespace that has a watched process, and makes rows of the connections of
    watched processes."""

    name = "tcp"
    table = TCP.name

    def __init__(
        self,
        readers: ReaderPool,
        processes: Discovery,
        sink: Sink,
        clock: Clock,
        node: str,
        interval_s: float,
        *,
        on: bool,
    ) -> None:
        self._processes, self._sink, self._clock = processes, sink, clock
        self._node, self._interval_s, self._on = node, interval_s, on
        self._owners = Owners(readers)
        self._sockets = DiagSockets(readers)
        self._before: dict[int, Reading] = {}
        self._listed: dict[int, npt.NDArray[Any]] = {}
        self._quiet = Quiet()
        self._endpoints = Endpoints()
        self._totals = _NamespaceTotals(readers)
        self._proc = ProcSockets(readers)
        self._rest_until = 0.0
        self._reasons: list[str] = []
        self._detail = ""

    @classmethod
    def make(cls, context: Context) -> TcpSource:
        net = context.config.net
        return cls(
            context.readers,
            context.processes,
            context.sink,
            context.clock,
            context.node,
            net.tcp_interval_s,
            on=net.tcp,
        )

    @property
    def tick_s(self) -> Callable[[], float] | None:
        return lambda: self._interval_s

    @property
    def namespaces(self) -> Mapping[int, ProcessKey]:
        """Returns a watched process of each network namespace, by the inode of the namespace. Thread-safe."""
        return self._owners.namespaces

    @property
    def live_tables(self) -> Mapping[str, Callable[[ClockPair], pa.RecordBatch]]:
        return {SOCKETS.name: lambda pair: self._endpoints.rows(self._node, pair.real_ns)}

    def stop(self) -> None:
        self._sockets.close()

    def tick(self) -> None:
        began = time.monotonic()
        if not self._on or began < self._rest_until:
            return
        spent = time.thread_time()
        watched = self._processes.live()
        try:
            self._owners.refresh(watched)
        except ProbingError as e:
            self._reasons = [e.message]
            return
        who = {identity.key: identity for identity in watched}
        self._reasons = self._sockets.open(self._owners.namespaces)
        readings = {netns: self._read(netns, who) for netns in self._sockets.namespaces}
        listed = self._read_listed(who)
        self._endpoints.keep({*readings, *listed}, self._clock.pair().real_ns)
        unknown = [self._rows(netns, reading, who) for netns, reading in readings.items() if reading is not None]
        self._before = {netns: reading for netns, reading in readings.items() if reading is not None}
        self._owners.unknown(any(unknown))
        self._put_totals(who)
        self._detail = f"{sum(len(reading.sockets) for reading in self._before.values())} connections"
        self._rest_until = began + (time.thread_time() - spent) / _SHARE

    def states(self, totals: Totals) -> list[SourceState]:
        if not self._on:
            return [totals.of(self.name, self.table, state="stopped", reason="net.tcp is off")]
        reason = first_of(self._reasons)
        state = "degraded" if self._reasons and not self._before else ""
        return [totals.of(self.name, self.table, state=state, reason=reason, detail=self._detail)]

    def _read(self, netns: int, who: dict[ProcessKey, Identity]) -> Reading | None:
        try:
            sockets = read_sockets(self._sockets.of(netns), lambda inodes: self._owners.of(inodes) >= 0)
        except ProbingError as e:
            self._reasons.append(e.message)
            self._sockets.drop(netns)
            return None
        owners, named = self._owners.of(sockets["inode"].astype(np.int64)), [who.get(k) for k in self._owners.processes]
        self._endpoints.read(netns, sockets, owners, named, self._clock.pair().real_ns)
        return Reading(sockets[sockets["state"] != LISTEN], time.monotonic_ns())

    def _read_listed(self, who: dict[ProcessKey, Identity]) -> list[int]:
        """Reads the sockets of the namespaces that sock_diag cannot reach. Returns the namespaces that were read."""
        namespaces = self._owners.namespaces
        try:
            found = self._proc.read({ns: namespaces[ns] for ns in self._sockets.refused if ns in namespaces})
        except ProbingError as e:
            self._reasons.append(e.message)
            return []
        named = [who.get(key) for key in self._owners.processes]
        for netns, sockets in found.items():
            owners = self._owners.of(sockets["inode"].astype(np.int64))
            self._endpoints.read(netns, sockets, owners, named, self._clock.pair().real_ns)
            strangers = sockets["inode"][(owners < 0) & (sockets["inode"] != 0)]
            self._owners.unknown(not np.isin(strangers, self._listed.get(netns, strangers[:0])).all())
        self._listed = {netns: sockets["inode"] for netns, sockets in found.items()}
        return list(found)

    def _rows(self, netns: int, now: Reading, who: dict[ProcessKey, Identity]) -> bool:
        """Writes the rows of a namespace. Returns whether there are new connections whose owner is unknown."""
        owners = self._owners.of(now.sockets["inode"].astype(np.int64))
        before = self._before.get(netns)
        if before is None:
            return False
        found = found_of(now, before, owners)
        if found is not None:
            self._put(netns, found, [who.get(key) for key in self._owners.processes], self._clock.pair())
        strangers = now.sockets["cookie"][(owners < 0) & (now.sockets["inode"] != 0)]
        return bool(len(strangers)) and not np.isin(strangers, before.sockets["cookie"]).all()

    def _put(self, netns: int, found: Found, who: Sequence[Identity | None], pair: ClockPair) -> None:
        known = np.array([identity is not None for identity in who], bool)
        named = [identity or _NOBODY for identity in who]
        at, figures = by_process(found, _peer_ranks(found, named))
        at["netns"] = np.full(len(at["process"]), netns, np.int64)
        places = (at[name].tolist() for name in ("process", "local", "peer", "peer_rank"))
        keys = [
            (*named[process].key, found.addresses[local], found.addresses[peer], rank)
            for process, local, peer, rank in zip(*places, strict=True)
        ]
        wanted = known[at["process"]] & self._quiet.wanted(keys, _active(figures), pair.mono_ns)
        kept = self._bounded(np.flatnonzero(wanted), figures, pair)
        if len(kept):
            rows = tcp_batch(self._node, pair.real_ns, named, _take(at, kept), found.addresses, _take(figures, kept))
            self._sink.put(TCP.name, rows)
        self._put_paths(found, named, known, pair)

    def _put_paths(self, found: Found, who: Sequence[Identity], known: npt.NDArray[Any], pair: ClockPair) -> None:
        runs = sorted({(one.job, one.run) for one in who})
        place = {run: index for index, run in enumerate(runs)}
        away = paths(found, [place[one.job, one.run] for one in who])
        if away is None:
            return
        at, figures = away
        keys = [
            (*runs[run], found.addresses[local], found.addresses[peer])
            for run, local, peer in zip(*(at[name].tolist() for name in ("run", "local", "peer")), strict=True)
        ]
        wanted = np.array([run[0] != "" for run in runs], bool)[at["run"]] & known.any()
        kept = self._bounded(
            np.flatnonzero(wanted & self._quiet.wanted(keys, _active(figures), pair.mono_ns)), figures, pair
        )
        if len(kept):
            rows = path_batch(self._node, pair.real_ns, runs, _take(at, kept), found.addresses, _take(figures, kept))
            self._sink.put(PATHS.name, rows)

    def _put_totals(self, who: dict[ProcessKey, Identity]) -> None:
        namespaces = self._owners.namespaces
        refused = {netns: namespaces[netns] for netns in self._sockets.refused if netns in namespaces}
        try:
            rows = self._totals.rows(self._node, self._clock.pair(), refused, who)
        except ProbingError as e:
            self._reasons.append(e.message)
            return
        if rows is not None:
            self._sink.put(TCP.name, rows)

    def _bounded(self, rows: npt.NDArray[Any], figures: Columns, pair: ClockPair) -> npt.NDArray[Any]:
        """Returns all ``rows``, or, if there are too many, the MAX_ROWS rows with the most retransmits and bytes."""
        if len(rows) <= MAX_ROWS:
            return rows
        order = np.lexsort((figures["bytes_sent"][rows], figures["retrans"][rows]))
        lost = len(rows) - MAX_ROWS
        self._sink.lost(Loss(self.name, TCP.name, "read", "too many peers", pair.real_ns, pair.real_ns, lost))
        return np.sort(rows[order[-MAX_ROWS:]])


_NOBODY = Identity(0, 0, "", "", "other")


def _peer_ranks(found: Found, who: Sequence[Identity]) -> npt.NDArray[np.int64]:
    """Returns the rank at the other end of each connection; -1 if the rank is unknown or of another run."""
    runs = {(one.job, one.run): index for index, one in enumerate(who)}
    run = np.array([runs[one.job, one.run] for one in who], np.int64)
    rank = np.array([-1 if one.rank is None else one.rank for one in who], np.int64)
    same = (found.peer_process >= 0) & (run[found.peer_process] == run[found.process])
    return np.where(same, rank[found.peer_process], -1)


def _active(figures: Columns) -> npt.NDArray[np.bool_]:
    names = ("bytes_sent", "bytes_received", "retrans", "unacked", "connecting", "timeouts", "unread_bytes")
    found: npt.NDArray[np.bool_] = np.any([figures[name] > 0 for name in names], axis=0)
    return found


def _take(columns: Columns, rows: npt.NDArray[Any]) -> Columns:
    return {name: values[rows] for name, values in columns.items()}
