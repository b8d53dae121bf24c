"""net.interfaces of real interfaces, by real readers and parsers."""

from __future__ import annotations

from typing import Any

import pytest
from network_namespaces import acknowledged, connected, may_make_namespaces, namespaces
from processes_helpers import start_ns_of

from probing.daemon.clock import SystemClock
from probing.daemon.net.interfaces.source import InterfaceSource
from probing.daemon.net.rdma.qps import QueuePairs
from probing.daemon.net.rdma.source import RdmaPorts
from probing.daemon.processes.namespaces import own_namespace
from probing.daemon.processes.parsers import ParserPool
from probing.daemon.processes.reader_pool import ReaderPool
from probing.daemon.source import Identity, Loss, ProcessKey
from probing.daemon.source_state import Totals

TOTALS = Totals("running", {}, {})


class Rows:
    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.who: list[Identity] = []

    def put(self, table: str, batch: Any) -> None:
        del table
        # A datetime has no nanoseconds.
        self.rows += batch.select([name for name in batch.schema.names if name != "ts"]).to_pylist()

    def lost(self, loss: Loss) -> None:
        raise AssertionError(loss)

    def live(self) -> list[Identity]:
        return self.who

    def identity(self, pid: int, start_ns: int) -> Identity | None:
        return next((one for one in self.who if one.key == (pid, start_ns)), None)

    def take(self) -> list[dict[str, Any]]:
        found, self.rows = self.rows, []
        return found


@pytest.mark.skipif(not may_make_namespaces(), reason="needs root and iproute2")
def test_traffic_in_a_namespace_of_a_job(readers: ReaderPool, parsers: ParserPool) -> None:
    rows = Rows()
    with namespaces() as pair, connected(pair) as (sender, _):
        key = ProcessKey(sender.pid, start_ns_of(sender.pid))
        rows.who = [Identity(*key, "j", "r", "trainer", 0)]
        source = InterfaceSource(readers, parsers, rows, lambda: {7: key}, rows, SystemClock(), "n1", 1.0)
        source.tick()
        rows.take()
        sender.send(1_000_003)
        acknowledged(sender.port, 1_000_003, pair.near)
        source.tick()
    (row,) = [row for row in rows.take() if row["job"] == "j"]
    assert row["netns"] != own_namespace()[1]
    assert (row["interface"], row["job"], row["kind"]) == ("eth0", "j", None)
    assert 1_000_003 < row["tx_bytes"] < 1_100_000
    assert row["tx_gbps"] * row["interval_ns"] / 8 == pytest.approx(row["tx_bytes"], rel=0.01)
    assert (row["tx_dropped_new"], row["rx_errors_new"]) == (0, 0)


def test_the_interfaces_of_the_node_have_their_addresses(readers: ReaderPool, parsers: ParserPool) -> None:
    rows = Rows()
    source = InterfaceSource(readers, parsers, rows, dict, rows, SystemClock(), "n1", 1.0)
    source.tick()
    assert source.states(TOTALS)[0].reason == ""
    # Loopback has rows only while it has traffic.
    details = source._details
    assert details["lo"]["kind"] == "loopback"
    assert "127.0.0.1" in (source._addresses.of(details["lo"]["ifindex"]) or "")
    assert {row["netns"] for row in rows.take()} <= {own_namespace()[1]}


def test_rdma_is_asked_for_by_a_real_reader(readers: ReaderPool, parsers: ParserPool) -> None:
    rows = Rows()
    ports = RdmaPorts(readers, rows, SystemClock(), "n1", 1.0)
    ports.tick()
    assert ports.states(TOTALS)[0].reason == ""
    qps = QueuePairs(readers, parsers, rows, "n1")
    found = qps.rows(SystemClock().pair())
    assert qps.states(TOTALS)[0].state == "running"
    if not ports._devices:
        assert (rows.take(), found.num_rows) == ([], 0)
