"""``rdma`` and ``net`` on two nodes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from client_fake_node import SECOND, FakeNode, process

from probing.api.proto.probing.v1 import node_pb2 as pb

Run = Callable[..., tuple[int, str, str]]
ROWS = 7


def port(node: str, number: int, **values: Any) -> dict[str, Any]:
    at = time.time_ns() - (ROWS - number) * 5 * SECOND
    seen = {"hca": "mlx5_0", "port": 1, "link_layer": "InfiniBand", "state": "ACTIVE", "phys_state": "LinkUp"}
    rates = {"interval_ns": 5 * SECOND, "sent_gbps": 100.0, "received_gbps": 50.0, "rate_gbps": 400.0}
    counts = {"symbol_error": 10 + number, "symbol_error_new": 1, "link_downed": 3, "link_downed_new": 0}
    return {"node": node, "ts": at, **seen, **(rates if number else {}), **counts, **values}


def connection(node: str, rank: int, number: int, **values: Any) -> dict[str, Any]:
    at = time.time_ns() - (ROWS - number) * 5 * SECOND
    who = {"node": node, "job": "j1", "run": "r1", "pid": 1000 + rank, "start_ns": SECOND, "rank": rank}
    seen = {"role": "trainer", "netns": 7, "local_address": "10.0.0.1", "peer_address": "10.0.0.2", "peer_local": False}
    counts = {"sockets": 4, "connecting": 0, "bytes_sent": 1000, "bytes_received": 2000, "segs_out": 100, "retrans": 1}
    now = {"timeouts": 0, "lost": 0, "unread_bytes": 0, "unsent_bytes": 0}
    times = {"interval_ns": 5 * SECOND, "rtt_ns": 200_000, "rtt_max_ns": 300_000 + number, "rtt_min_ns": 100_000}
    return {**who, "ts": at, **seen, **counts, **now, **times, **values}


def interface(node: str, address: str, number: int, **values: Any) -> dict[str, Any]:
    at = time.time_ns() - (ROWS - number) * 5 * SECOND
    seen = {"interface": "eth0", "netns": 7, "kind": "physical", "operstate": "up", "addresses": address}
    rates = {"interval_ns": 5 * SECOND, "rx_gbps": 10.0, "tx_gbps": 20.0, "speed_gbps": 100.0}
    return {"node": node, "ts": at, **seen, **rates, **values}


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeNode]]:
    hidden = dict.fromkeys(("peer_address", "local_address", "peer_local", "bytes_sent", "rtt_ns", "timeouts", "lost"))
    inside = connection("alpha", 0, 3, peer_address="127.0.0.1", local_address="127.0.0.1", peer_local=True, retrans=0)
    alpha = FakeNode(
        tmp_path,
        "alpha",
        {
            "process.processes": [process("alpha", 0, 1000)],
            "rdma.ports": [port("alpha", n, np_cnp_sent_new=2) for n in range(ROWS)],
            "net.tcp": [
                *(connection("alpha", 0, n, timeouts=n) for n in range(ROWS)),
                inside,
                connection("alpha", 0, 3, **hidden, segs_out=50, netns=8),
            ],
            "net.interfaces": [interface("alpha", "10.0.0.1", n, rx_dropped_new=n) for n in range(ROWS)],
        },
    )
    beta = FakeNode(
        tmp_path,
        "beta",
        {
            "process.processes": [process("beta", 1, 1001)],
            "rdma.ports": [port("beta", n, state="DOWN", symbol_error_new=0) for n in range(ROWS)],
            "net.tcp": [
                connection("beta", 1, n, local_address="10.0.0.2", peer_address="10.0.0.1", retrans=0)
                for n in range(ROWS)
            ],
            "net.interfaces": [interface("beta", "10.0.0.2", n) for n in range(ROWS)],
        },
    )
    alpha.peers = [pb.Peer(node=n.name, address=n.address, state="healthy") for n in (alpha, beta)]
    monkeypatch.setenv("PROBING_TARGET", alpha.address)
    yield [alpha, beta]
    alpha.stop()
    beta.stop()


def test_rdma_shows_the_ports_with_their_traffic_and_errors(ctl: Run, cluster: list[FakeNode]) -> None:
    code, out, err = ctl("rdma", "--all-nodes", "-f", "json")
    assert (code, err) == (0, "")
    first, second = json.loads(out)
    assert (first["node"], first["hca"], first["port"], first["state"]) == ("alpha", "mlx5_0", 1, "ACTIVE")
    assert (first["sent_gbps"], first["received_most_gbps"]) == (100.0, 50.0)
    assert (first["interval_ns"], first["symbol_error"], first["symbol_error_new"]) == ((ROWS - 1) * 5 * SECOND, 16, 7)
    assert (second["node"], second["state"], second["symbol_error_new"]) == ("beta", "DOWN", 0)
    code, out, _ = ctl("rdma", "--all-nodes")
    head, alpha, beta = out.splitlines()
    assert head.split()[:3] == ["NODE", "HCA", "PORT"]
    assert "symbol_error=7" in alpha
    assert " 14 " in alpha
    assert "none" in beta
    assert "DOWN" in beta


def test_rdma_history_has_a_line_a_reading(ctl: Run, cluster: list[FakeNode]) -> None:
    _, out, _ = ctl("rdma", "mlx5_0", "--history", "--since", "5m")
    lines = out.splitlines()
    assert len(lines) == 1 + ROWS
    assert lines[1].split()[5:7] == ["-", "-"] or "-" in lines[1]
    assert "symbol_error=1" in lines[2]
    assert ctl("rdma", "mlx5_9")[0] == 1
    assert len(json.loads(ctl("rdma", "--history", "-f", "json")[1])) == ROWS


def test_net_shows_interfaces_and_the_peers_of_ranks(ctl: Run, cluster: list[FakeNode]) -> None:
    code, out, err = ctl("net", "--all-nodes", "-f", "json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert [row["node"] for row in found["interfaces"]] == ["alpha", "beta"]
    assert found["interfaces"][0]["rx_dropped_new"] == sum(range(ROWS))
    worst = found["tcp"][0]
    assert (worst["rank"], worst["retrans"], worst["segs_out"], worst["bytes_sent"]) == (0, 7, 700, 7000)
    assert (worst["timeouts"], worst["rtt_ns"], worst["rtt_max_ns"]) == (6, 200_000, 300_006)
    code, out, _ = ctl("net", "--all-nodes", "--job", "j1")
    assert "rx_dropped=21" in out
    assert "beta (10.0.0.2)" in out
    assert "alpha (10.0.0.1)" in out
    assert "1.00%" in out
    assert "6 waiting for an answer" in out
    assert "127.0.0.1" not in out
    assert "within a node, with --local: 1 peer\n" in out
    assert "(all of its container)" in out
    assert "2.00%" in out
    assert "127.0.0.1" in ctl("net", "--local")[1]
    assert ctl("net", "-f", "csv")[1].count("\n") == 4


def test_nothing_is_said_of_a_node_without_rows(ctl: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeNode(tmp_path, "n", {}) as node:
        monkeypatch.setenv("PROBING_TARGET", node.address)
        assert ctl("rdma") == (0, "no RDMA devices on this node\n", "")
        file = tmp_path / "ports.txt"
        assert ctl("rdma", "-o", str(file)) == (0, "", "")
        assert file.read_text() == "no RDMA devices on this node\n"
        # There may have been devices, whose rows are gone.
        past = ("--since", "2d", "--until", "1d")
        nothing = "no rows of RDMA devices from 2d00h ago until 24h00m ago on this node\n"
        assert ctl("rdma", *past) == (0, nothing, "")
        error = "error: there are no rows of RDMA device mlx5_0 from 2d00h ago until 24h00m ago"
        code, _, err = ctl("rdma", "mlx5_0", *past)
        assert (code, err.splitlines()[0]) == (1, error)
        code, out, _ = ctl("net")
        assert (code, out.splitlines()[0]) == (0, "no rows of interfaces yet")
        assert ctl("net", "--job", "nobody")[0] == 1


def test_rates_have_their_unit(ctl: Run, cluster: list[FakeNode]) -> None:
    slow = interface("alpha", "10.0.0.9", ROWS - 1, interface="eth9", rx_gbps=1.68e-8, tx_gbps=0.0, speed_gbps=None)
    cluster[0].insert("net.interfaces", [slow])
    head, *rows = ctl("net")[1].splitlines()
    assert head.split()[4:7] == ["SPEED", "RECEIVED", "SENT"]
    assert " ".join(next(row for row in rows if "eth0" in row).split()).endswith(
        "up 100 Gb/s 10 Gb/s 20 Gb/s rx_dropped=21 10.0.0.1"
    )
    assert " ".join(next(row for row in rows if "eth9" in row).split()).endswith("up - 17 b/s 0 b/s none 10.0.0.9")
    assert "100 Gb/s" in ctl("rdma")[1]
