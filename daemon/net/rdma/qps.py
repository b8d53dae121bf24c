"""The source of rdma.qps: queue pairs with their processes, read from the kernel for each query."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping

import pyarrow as pa

from probing.api.errors import ProbingError, TargetTimeout, UnsupportedTarget
from probing.api.tables.rdma import QPS
from probing.api.tables.schema import Row
from probing.daemon.arrow import batch_of
from probing.daemon.backoff import Pauses
from probing.daemon.clock import ClockPair
from probing.daemon.context import Context
from probing.daemon.net.node_sysfs import node_processes
from probing.daemon.net.rdma.nldev import NETLINK_RDMA, QueuePairsRead
from probing.daemon.processes.discovery import Discovery
from probing.daemon.processes.parsers import ParserPool, answer_of
from probing.daemon.processes.reader_pool import ReaderPool, payload_of
from probing.daemon.processes.target import Summary
from probing.daemon.source import Identity, Source
from probing.daemon.source_state import SourceState, Totals, first_of

__all__ = ("QueuePairs",)

TIMEOUT_S = 3.0


class QueuePairs(Source):
    """Reads queue pairs. The collector makes the socket and a parser sends the requests over it, so a card that hangs
    blocks the parser, not the collector.
    """

    name = "rdma_qps"
    table = QPS.name

    def __init__(self, readers: ReaderPool, parsers: ParserPool, processes: Discovery, node: str) -> None:
        self._readers, self._parsers, self._processes, self._node = readers, parsers, processes, node
        self._pauses = Pauses()
        self._reason = ""

    @classmethod
    def make(cls, context: Context) -> QueuePairs:
        return cls(context.readers, context.parsers.files, context.processes, context.node)

    @property
    def live_tables(self) -> Mapping[str, Callable[[ClockPair], pa.RecordBatch]]:
        return {self.table: self.rows}

    def rows(self, pair: ClockPair) -> pa.RecordBatch:
        """Returns rdma.qps as of now; no rows, and a reason in ``states``, if the kernel does not answer."""
        try:
            found = self._read()
            self._reason = first_of(found["problems"])
        except ProbingError as e:
            self._reason = e.message
            return batch_of(self.table, [])
        who = {identity.pid: identity for identity in self._processes.live()}
        names = self._names({qp["pid"] for qp in found["qps"]} - who.keys())
        common = {"node": self._node, "ts": pair.real_ns}
        rows = [{**common, **qp, **_owner(who.get(qp["pid"]), names.get(qp["pid"]))} for qp in found["qps"]]
        return batch_of(self.table, rows)

    def states(self, totals: Totals) -> list[SourceState]:
        return [totals.of(self.name, self.table, state="degraded" if self._reason else "", reason=self._reason)]

    def _read(self) -> QueuePairsRead:
        if not payload_of(list[str], self._readers.call("rdma_devices", timeout=TIMEOUT_S, node=node_processes())):
            # Without RDMA devices no socket is made, because making one would let the kernel load a module.
            return {"qps": [], "problems": []}
        if self._pauses.held("netlink"):
            raise UnsupportedTarget("queue pairs are not read for a while, since the kernel did not answer")
        try:
            with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, NETLINK_RDMA) as sock:
                answer = self._parsers.call("rdma_qps", fds=[sock.fileno()], timeout=TIMEOUT_S)
        except TargetTimeout:
            self._pauses.failed("netlink")
            raise
        except OSError as e:
            raise UnsupportedTarget(f"the kernel does not list queue pairs: {e.strerror}") from e
        self._pauses.worked(["netlink"])
        return answer_of(QueuePairsRead, answer)

    def _names(self, pids: set[int]) -> dict[int, Summary]:
        """Returns the unwatched processes with ``pids``, by pid."""
        if not pids:
            return {}
        processes = payload_of(list[Summary], self._readers.call("list", timeout=TIMEOUT_S, pids=sorted(pids)))
        return {process.pid: process for process in processes}


def _owner(who: Identity | None, other: Summary | None) -> Row:
    if who is not None:
        return {"job": who.job, "run": who.run, "start_ns": who.start_ns, "rank": who.rank}
    return {"start_ns": other.start_ns, "comm": other.comm} if other else {}
