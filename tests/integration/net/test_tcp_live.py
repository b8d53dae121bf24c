"""net.tcp, net.paths and net.sockets of real connections, on loopback and between network namespaces.

What ``ss`` says is compared with it.
"""

from __future__ import annotations

import re
import socket
from contextlib import ExitStack
from typing import Any

import pytest
from network_namespaces import Peer, acknowledged, connected, may_make_namespaces, namespaces, ss
from processes_helpers import start_ns_of
from waiting import until

from probing.daemon.clock import SystemClock
from probing.daemon.net.tcp import sock_diag
from probing.daemon.net.tcp.source import TcpSource
from probing.daemon.processes.reader_pool import ReaderPool
from probing.daemon.source import Identity, Loss
from probing.daemon.source_state import Totals

pytestmark = pytest.mark.skipif(not may_make_namespaces(), reason="needs root and iproute2")
TOTALS = Totals("running", {}, {})


class World:
    """A source that watches ``peers`` as ranks 0, 1, ..."""

    def __init__(self, readers: ReaderPool, *peers: Peer) -> None:
        self.who = [
            Identity(peer.pid, start_ns_of(peer.pid), "j", "r", "trainer", rank) for rank, peer in enumerate(peers)
        ]
        self.rows: dict[str, list[dict[str, Any]]] = {}
        self.source = TcpSource(readers, self, self, SystemClock(), "n1", 1.0, on=True)
        until(self._seen, what="the sockets of all processes")

    def _seen(self) -> bool:
        """A reader that gets no CPU leaves processes out, which are read again later."""
        self.source._owners._due = 0.0
        self.source.tick()
        return len(set(self.source._owners._owners.tolist())) == len(self.who)

    def live(self) -> list[Identity]:
        return self.who

    def put(self, table: str, batch: Any) -> None:
        # A datetime has no nanoseconds.
        rows = batch.select([name for name in batch.schema.names if name != "ts"]).to_pylist()
        self.rows.setdefault(table, []).extend(rows)

    def lost(self, loss: Loss) -> None:
        raise AssertionError(loss)

    def tick(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """New rows of net.tcp and net.paths."""
        self.source._rest_until = 0.0
        self.source.tick()
        return self.rows.pop("net.tcp", []), self.rows.pop("net.paths", [])


def number(text: str, name: str) -> float:
    found = re.search(rf"\b{name}:([0-9.]+)", text)
    return float(found[1]) if found else 0


def test_bytes_and_round_trips_on_loopback_are_those_of_ss(readers: ReaderPool) -> None:
    with connected() as (sender, taker):
        world = World(readers, sender, taker)
        try:
            world.tick()
            sender.send(104_729)
            taker.send(7_919)
            acknowledged(taker.port, 7_919)
            said = acknowledged(sender.port, 104_729)
            rows, paths = world.tick()
        finally:
            world.source.stop()
    first, second = sorted(rows, key=lambda row: row["rank"])
    assert (first["bytes_sent"], first["bytes_received"]) == (104_729, 7_919)
    assert (second["bytes_sent"], second["bytes_received"]) == (7_919, 104_729)
    assert (first["pid"], first["job"], first["sockets"], first["retrans"]) == (sender.pid, "j", 1, 0)
    assert (first["local_address"], first["peer_address"], first["peer_local"]) == ("127.0.0.1", "127.0.0.1", True)
    assert (first["peer_rank"], second["peer_rank"]) == (1, 0)
    assert first["rtt_ns"] == pytest.approx(number(said, "rtt") * 1e6, abs=1e3)
    assert first["rtt_min_ns"] == pytest.approx(number(said, "minrtt") * 1e6, abs=1e3)
    assert (first["cwnd_min"], first["segs_out"]) == (number(said, "cwnd"), number(said, "segs_out") - 2)
    # Nothing leaves the node.
    assert paths == []


def test_a_slow_path_to_another_host_has_a_long_round_trip(readers: ReaderPool) -> None:
    with namespaces() as pair, connected(pair) as (sender, _):
        world = World(readers, sender)
        try:
            world.tick()
            pair.slow("2mbit")
            sender.send(100_003)
            said = acknowledged(sender.port, 100_003, pair.near)
            (row,), (path,) = world.tick()
        finally:
            world.source.stop()
    assert (row["local_address"], row["peer_address"], row["peer_local"]) == ("10.77.0.1", "10.77.0.2", False)
    assert row["bytes_sent"] == 100_003 + row["bytes_retrans"]
    assert row["rtt_ns"] == pytest.approx(number(said, "rtt") * 1e6, abs=1e3)
    # 10 segments take 60 ms at 2 Mb/s; without the queue a round trip takes microseconds.
    assert row["rtt_ns"] > 10_000_000 > row["rtt_min_ns"]
    same = ("rtt_ns", "bytes_sent", "retrans", "local_address", "peer_address", "job", "sockets")
    assert [path[name] for name in same] == [row[name] for name in same]
    assert path["processes"] == 1


def test_retransmits_of_one_rank_and_its_wait_for_an_answer(readers: ReaderPool) -> None:
    with namespaces() as pair, connected(pair) as (sender, _), connected(pair) as (idle, _):
        world = World(readers, sender, idle)
        try:
            world.tick()
            pair.lose()
            sender.send(1_009)
            until(lambda: number(ss(sender.port, pair.near), "backoff") >= 1, what="a time-out")
            rows, (path, *_) = world.tick()
            waiting = next(row for row in rows if row["rank"] == 0)
            assert (waiting["timeouts"], waiting["longest_timeouts"] >= 1, waiting["unacked"]) == (1, True, 1)
            assert waiting["retrans"] >= 1
            assert waiting["bytes_retrans"] == 1_009 * waiting["retrans"]
            assert path["retrans"] == sum(row["retrans"] for row in rows)
            assert all(row["retrans"] == row["timeouts"] == 0 for row in rows if row["rank"] == 1)
            pair.mend()
            said = acknowledged(sender.port, 1_009, pair.near)
            rows, _ = world.tick()
            again = next(row for row in rows if row["rank"] == 0)
            assert (again["timeouts"], again["unacked"]) == (0, 0)
            total = int(re.findall(r"retrans:\d+/(\d+)", said)[0])
            assert waiting["retrans"] + again["retrans"] == total
        finally:
            world.source.stop()


def test_a_socket_that_a_rank_closed_is_still_known_as_its_own(readers: ReaderPool) -> None:
    with connected() as (sender, taker):
        world = World(readers, sender, taker)

        def states() -> dict[int, str]:
            table = world.source.live_tables["net.sockets"](SystemClock().pair())
            # A listening socket has no other end.
            rows = [row for row in table.drop_columns(["ts", "seen"]).to_pylist() if row["peer_address"] is not None]
            assert {address for row in rows for address in (row["local_address"], row["peer_address"])} == {"127.0.0.1"}
            return {row["rank"]: row["state"] for row in rows if row["local_port"] == (sender, taker)[row["rank"]].port}

        def now(wanted: dict[int, str]) -> bool:
            world.tick()
            return states() == wanted

        try:
            until(lambda: now({0: "open", 1: "open"}), what="both ends of the connection")
            sender.send(-1)
            until(lambda: now({0: "closed", 1: "open"}), what="the end of the connection of rank 0")
        finally:
            world.source.stop()


def test_very_many_connections_of_others_hide_none_of_a_rank(
    readers: ReaderPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN connections of this process, which is not watched, in more pieces than one
    with socket.create_server(("127.0.0.1", 0), backlog=300) as listener, ExitStack() as others:
        for _ in range(300):
            others.enter_context(socket.create_connection(listener.getsockname()))
            others.enter_context(listener.accept()[0])
        _check_very_many_connections(readers, monkeypatch)


def _check_very_many_connections(readers: ReaderPool, monkeypatch: pytest.MonkeyPatch) -> None:
    with connected() as (sender, taker):
        world = World(readers, sender, taker)
        try:
            world.tick()
            # AND lists of which only the first piece is kept whole, as if there were 70,000 connections
            monkeypatch.setattr(sock_diag, "MAX_BYTES", 1)
            monkeypatch.setattr(sock_diag, "REST_BYTES", 1)
            sender.send(104_729)
            acknowledged(sender.port, 104_729)
            rows, _ = world.tick()
            # THEN the rows of the ranks are there
            assert sorted((row["rank"], row["bytes_received"]) for row in rows) == [(0, 0), (1, 104_729)]
            assert world.source._reasons == []
            # More connections than can be listed are a reason, and the namespace is read again later.
            monkeypatch.setattr(sock_diag, "MAX_RESTS", -1)
            world.tick()
            assert world.source._reasons == ["a network namespace has more connections than can be listed"]
            monkeypatch.undo()
            world.tick()
            assert world.source._reasons == []
        finally:
            world.source.stop()


def test_sockets_in_a_namespace_do_not_keep_it_alive(readers: ReaderPool) -> None:
    with namespaces() as pair:
        with connected(pair) as (sender, _):
            world = World(readers, sender)
            world.tick()
            assert len(world.source.namespaces) == 1
        world.who = []
        world.source._owners._due = 0.0
        world.tick()
        assert (dict(world.source.namespaces), list(world.source._sockets.namespaces)) == ({}, [])
        assert world.source.states(TOTALS)[0].reason == ""
