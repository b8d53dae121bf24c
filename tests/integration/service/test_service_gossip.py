"""Three services on loopback that find each other; one stops, and comes back at another address."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from ports import free_port
from service_helpers import BEARER, refused, start, token_file
from waiting import until

from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.api.proto.probing.v1.node_pb2_grpc import NodeStub
from probing.daemon.config import CONTROL

FAST = ("--cluster.heartbeat_s=0.4", "--cluster.suspect_s=0.8", "--cluster.failed_s=3")


class Cluster:
    """Services without collectors, that answer Peers and Gossip."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.ports: dict[str, int] = {}
        self.processes: dict[str, subprocess.Popen[str]] = {}

    def start(self, name: str, *args: str) -> None:
        root = self.root / name
        (root / "s.sock.d" / CONTROL).mkdir(parents=True, exist_ok=True)
        self.ports[name] = free_port()
        seed = f"--cluster.seeds=127.0.0.1:{self.ports['a']}"
        listen = f"--listen=127.0.0.1:{self.ports[name]}"
        self.processes[name] = start(root, listen, token_file(root), seed, f"--node_name={name}", *FAST, *args)

    def stop(self, name: str) -> None:
        process = self.processes.pop(name)
        process.terminate()
        _, err = process.communicate(timeout=30)
        assert "Traceback" not in err, err

    def seen(self, name: str) -> dict[str, pb.Peer]:
        """Returns the nodes that ``name`` knows, by name."""
        with grpc.insecure_channel(f"unix:{self.root / name}/s.sock") as channel, contextlib.suppress(grpc.RpcError):
            peers = NodeStub(channel).Peers(pb.PeersRequest(), timeout=10, wait_for_ready=True).peers
            return {peer.node: peer for peer in peers}
        return {}

    def states(self, name: str) -> dict[str, str]:
        return {node: peer.state for node, peer in self.seen(name).items()}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    try:
        made.start("a")
        yield made
    finally:
        for name in list(made.processes):
            made.stop(name)


def test_services_find_each_other_and_see_one_stop_and_come_back(cluster: Cluster) -> None:
    cluster.start("b", "--cluster.labels=rack=r7,rail=2")
    cluster.start("c", f"--cluster.seeds=dns:127.0.0.1:{cluster.ports['a']}")
    healthy = dict.fromkeys("abc", "healthy")
    until(lambda: all(cluster.states(name) == healthy for name in "abc"), what=lambda: cluster.states("a"))
    assert dict(cluster.seen("c")["b"].labels) == {"rack": "r7", "rail": "2"}
    old = cluster.seen("a")["c"].address
    cluster.stop("c")
    states: list[str] = []

    def failed() -> bool:
        states.extend(state for state in [cluster.states("b").get("c", "")] if state not in states)
        return states[-1] == "failed"

    until(failed, what=lambda: states)
    assert states[-2:] == ["suspect", "failed"]
    until(lambda: cluster.states("a")["c"] == "failed")
    cluster.start("c")
    until(lambda: all(cluster.states(name) == healthy for name in "abc"), what=lambda: cluster.states("a"))
    assert old != cluster.seen("b")["c"].address == f"127.0.0.1:{cluster.ports['c']}"


def test_two_services_with_one_name_are_found(cluster: Cluster) -> None:
    cluster.start("b", "--node_name=a")

    def problem(name: str) -> str:
        return next((peer.problem for peer in cluster.seen(name).values() if peer.problem), "")

    until(lambda: problem("a") and problem("b"), what=lambda: cluster.seen("a"))
    assert problem("a") == f"127.0.0.1:{cluster.ports['b']} answers under the name a, too"


def test_gossip_needs_the_token_and_a_message_within_bounds(cluster: Cluster) -> None:
    until(lambda: cluster.states("a"))
    record = pb.MemberRecord(name="x", address="10.0.0.1:7077", incarnation=5, uid=7)
    with grpc.insecure_channel(f"127.0.0.1:{cluster.ports['a']}") as channel:
        ask = NodeStub(channel).Gossip
        code, _ = refused(lambda: ask(pb.GossipRequest(message=pb.GossipMessage(sender=record)), timeout=10))
        assert code is grpc.StatusCode.UNAUTHENTICATED
        for wrong in (
            pb.GossipMessage(),
            pb.GossipMessage(sender=pb.MemberRecord(name="x", address="unix:/etc/x", incarnation=5, uid=7)),
            pb.GossipMessage(sender=pb.MemberRecord(name="x\n", address="h:1", incarnation=5, uid=7)),
            pb.GossipMessage(sender=pb.MemberRecord(name="x", address="h:1", incarnation=1 << 60, uid=7)),
            pb.GossipMessage(sender=record, marks=range(5000)),
            pb.GossipMessage(sender=record, nonce=b"short"),
            pb.GossipMessage(sender=record, proof=bytes(65)),
            pb.GossipMessage(sender=pb.MemberRecord(name="x", address="h:1", incarnation=5, uid=7, key=bytes(32))),
            pb.GossipMessage(
                sender=pb.MemberRecord(
                    name="x", address="h:1", incarnation=5, uid=7, key=bytes(31), signature=bytes(64)
                )
            ),
            pb.GossipMessage(sender=record, updates=[pb.MemberUpdate(record=record, claim=9)]),
        ):
            code, error = refused(lambda wrong=wrong: ask(pb.GossipRequest(message=wrong), timeout=10, metadata=BEARER))
            assert error.kind == "PeerError"
    assert set(cluster.states("a")) == {"a"}
