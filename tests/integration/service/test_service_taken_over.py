"""A node that was taken over, with its own certificate and token, against two honest services that speak TLS.

What is claimed in another's name does not count, no address that it names is shown a token, and what callers show it is
worth nothing at the others.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from authority import Authority
from ports import free_port
from service_helpers import TOKEN, refused, start, token_file
from waiting import until

from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.api.proto.probing.v1.node_pb2_grpc import NodeServicer, NodeStub, add_NodeServicer_to_server
from probing.client.cluster import Cluster
from probing.client.wire.credentials import Tls
from probing.daemon.cluster import Membership
from probing.daemon.cluster.keys import NodeKey
from probing.daemon.cluster.machine import Machine
from probing.daemon.cluster.record import Record
from probing.daemon.config import CONTROL
from probing.daemon.service.gossip import message_of, packed

FAST = ("--cluster.heartbeat_s=0.4", "--cluster.suspect_s=0.8", "--cluster.failed_s=3")


class Honest:
    """Services without collectors, with a token of people beside the certificates of nodes."""

    def __init__(self, root: Path, authority: Authority) -> None:
        self.root = root
        self.authority = authority
        self.ports = {name: free_port() for name in "ab"}
        self.processes: dict[str, subprocess.Popen[str]] = {}

    def address(self, name: str) -> str:
        return f"127.0.0.1:{self.ports[name]}"

    def start(self, name: str, *args: str, files: tuple[str, str] | None = None, node: str = "") -> None:
        root = self.root / name
        (root / "s.sock.d" / CONTROL).mkdir(parents=True, exist_ok=True)
        self.ports.setdefault(name, free_port())
        for source, target in zip(files or self.authority.node(node or name), ("cert", "key"), strict=True):
            shutil.copy(source, root / "new")
            (root / "new").rename(root / target)
        tls = (f"--tls.cert={root}/cert", f"--tls.key={root}/key", f"--tls.peer_ca={self.authority.file}")
        seed = f"--cluster.seeds={self.address('a')}"
        listen = f"--listen={self.address(name)}"
        named = f"--node_name={node or name}"
        self.processes[name] = start(root, listen, token_file(root), seed, named, *tls, *FAST, *args)

    def peers(self, name: str = "a") -> dict[str, pb.Peer]:
        """Returns what ``name`` says of the nodes; raises AssertionError if its service has ended."""
        if (status := self.processes[name].poll()) is not None:
            raise AssertionError(f"{name} exited with {status}: {self.processes[name].communicate()[1]}")
        with grpc.insecure_channel(f"unix:{self.root / name}/s.sock") as channel, contextlib.suppress(grpc.RpcError):
            found = NodeStub(channel).Peers(pb.PeersRequest(), timeout=10, wait_for_ready=True).peers
            return {peer.node: peer for peer in found}
        return {}

    def sources(self, name: str) -> list[pb.Source]:
        with grpc.insecure_channel(f"unix:{self.root / name}/s.sock") as channel:
            return list(NodeStub(channel).Status(pb.StatusRequest(), timeout=10).sources)

    def reasons(self, name: str) -> list[str]:
        """Returns why sources of ``name`` are degraded."""
        return [source.reason for source in self.sources(name)]

    def stop(self) -> None:
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            _, err = process.communicate(timeout=30)
            assert "Traceback" not in err, err


class TakenOver(NodeServicer):  # type: ignore[misc]
    """The node ``c``: it answers gossip as a node does, keeps what it is shown, and says what a test makes it say.

    ``old``: it is of a version without keys. ``files``: its certificate and key."""

    def __init__(self, authority: Authority, *, old: bool = False, files: tuple[str, str] | None = None) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self.key = NodeKey.new()
        self.shown: list[str] = []
        self.called = threading.Event()
        self.answers_as = "c"
        self.files = files or authority.node("c")
        self.authority = authority
        own = Record("c", self.address, int(time.time()), 77)
        self.membership = Membership(Machine(own, key=None if old else self.key), time.monotonic, time.time_ns)
        # Reads the clock.
        self.membership.tick()
        self._server = grpc.server(ThreadPoolExecutor(4))
        add_NodeServicer_to_server(self, self._server)
        cert, key = (Path(name).read_bytes() for name in self.files)
        self._server.add_secure_port(self.address, grpc.ssl_server_credentials([(key, cert)]))
        self._server.start()

    def stop(self) -> None:
        self._server.stop(0).wait()

    def _note(self, context: Any) -> None:
        self.shown += [str(value) for name, value in context.invocation_metadata() if name == "authorization"]
        self.called.set()

    def Gossip(self, request: pb.GossipRequest, context: Any) -> pb.GossipReply:
        self._note(context)
        message = packed(self.membership.answer(message_of(request.message)))
        return pb.GossipReply(message=message)

    def Query(self, request: pb.QueryRequest, context: Any) -> Iterator[pb.QueryReply]:
        self._note(context)
        context.abort(grpc.StatusCode.UNAVAILABLE, "no")
        yield

    def Status(self, request: pb.StatusRequest, context: Any) -> pb.StatusReply:
        self._note(context)
        return pb.StatusReply(node=self.answers_as)

    def ask(self, address: str, method: str, request: Any, *, certificate: bool = True, **options: Any) -> Any:
        with self.authority.channel(address, self.files if certificate else None) as channel:
            return getattr(NodeStub(channel), method)(request, timeout=20, **options)

    def says(self, address: str, message: pb.GossipMessage) -> pb.GossipMessage:
        reply: pb.GossipReply = self.ask(address, "Gossip", pb.GossipRequest(message=message))
        return reply.message


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("nodes"), "nodes")


@pytest.fixture
def honest(open_tmp_path: Path, authority: Authority) -> Iterator[Honest]:
    # The path of a service's socket has at most 84 bytes; tmp_path has the name of the test, and a number that grows.
    made = Honest(open_tmp_path, authority)
    try:
        made.start("a")
        made.start("b")
        proven = {"a": "key", "b": "certificate"}
        until(lambda: {n: p.proof for n, p in made.peers().items()} == proven, what=lambda: str(made.peers()))
        yield made
    finally:
        made.stop()


@pytest.fixture
def taken(authority: Authority) -> Iterator[TakenOver]:
    made = TakenOver(authority)
    yield made
    made.stop()


def _record(taken: TakenOver) -> pb.MemberRecord:
    own = taken.membership._machine.view.own
    return pb.MemberRecord(
        name=own.name,
        address=own.address,
        incarnation=own.incarnation,
        uid=own.uid,
        key=own.key,
        signature=own.signature,
    )


def other_record(honest: Honest, taken: TakenOver, name: str) -> pb.MemberRecord:
    """Returns the record of an honest node, as it tells it to everybody."""
    reply = taken.says(honest.address(name), pb.GossipMessage(sender=_record(taken)))
    return reply.sender


def test_it_becomes_no_other_node(honest: Honest, taken: TakenOver) -> None:
    true = other_record(honest, taken, "b")
    assert (true.name, len(true.key)) == ("b", 32)
    forged = [pb.MemberRecord() for _ in range(4)]
    for record in forged:
        record.CopyFrom(true)
        record.incarnation += 50
        record.jobs.append(13)
    forged[1].address = taken.address
    forged[2].ClearField("key")
    forged[2].ClearField("signature")
    own = taken.key.signed(Record("b", taken.address, true.incarnation + 60, true.uid, jobs=(13,)))
    forged[3].CopyFrom(packed(message_of(pb.GossipMessage(sender=_record(taken)))._replace(sender=own)).sender)
    for record in forged:
        for claim in (0, 1, 2):
            update = pb.MemberUpdate(record=record, claim=claim, since_s=int(time.time()))
            taken.says(honest.address("a"), pb.GossipMessage(sender=_record(taken), updates=[update]))
        taken.says(honest.address("a"), pb.GossipMessage(sender=record))
        peer = honest.peers()["b"]
        assert (peer.address, peer.state, peer.proof) == (honest.address("b"), "healthy", "certificate")
    now = other_record(honest, taken, "b")
    assert (now.key, list(now.jobs), now.address) == (true.key, [], honest.address("b"))


def test_no_address_that_it_names_is_shown_a_token(honest: Honest, taken: TakenOver) -> None:
    invented = [
        Record("x1", taken.address, 5, 901),
        NodeKey.new().signed(Record("x2", taken.address, 5, 902)),
        Record("x3", taken.address.replace("127.0.0.1", "localhost"), 5, 903),
    ]
    base = message_of(pb.GossipMessage(sender=_record(taken)))
    for record in invented:
        taken.says(honest.address("a"), packed(base._replace(sender=record)))
    until(lambda: {"x1", "x2", "x3"} <= honest.peers("b").keys(), what=lambda: str(honest.peers("b")))
    assert taken.called.wait(20)
    until(lambda: all(honest.peers()[name].state == "failed" for name in ("x1", "x2", "x3")))
    assert not any(TOKEN in text for text in taken.shown), taken.shown


def test_an_address_outside_the_allowed_networks_is_not_connected_to(honest: Honest, taken: TakenOver) -> None:
    honest.start("d", "--cluster.allow=10.0.0.0/8")
    until(lambda: honest.peers("d").keys() >= {"a", "d"}, what=lambda: str(honest.peers("d")))
    taken.says(honest.address("d"), pb.GossipMessage(sender=_record(taken)))
    said = f"addresses of nodes are outside cluster.allow: {honest.address('b')}, {taken.address}"
    until(lambda: any(said in reason for reason in honest.reasons("d")), what=lambda: str(honest.reasons("d")))
    # The administrator named the seed.
    assert honest.peers("d")["a"].state == "healthy"


def test_what_it_is_shown_is_worth_nothing_elsewhere(honest: Honest, taken: TakenOver) -> None:
    taken.says(honest.address("a"), pb.GossipMessage(sender=_record(taken)))
    until(lambda: honest.peers().get("c", pb.Peer()).proof == "certificate", what=lambda: str(honest.peers()))
    with Cluster(
        honest.address("a"), all_nodes=True, token=TOKEN, tls=Tls(honest.authority.file), timeout=10
    ) as cluster:
        assert honest.address("b") in cluster.addresses()
        assert taken.address in cluster.addresses()
        taken.shown.clear()
        assert sorted(reply.node for _, reply in cluster.status()) == ["a", "b", "c"]
    # It cannot count in the place of another node either.
    taken.answers_as = "b"
    with Cluster(
        honest.address("a"), all_nodes=True, token=TOKEN, tls=Tls(honest.authority.file), timeout=10
    ) as cluster:
        assert sorted(address for address, _ in cluster.status()) == sorted(map(honest.address, "ab"))
        assert [f.reason for f in cluster.outcomes[-1].failed] == ["c answers as b"]
    assert taken.shown
    assert not any(TOKEN in text for text in taken.shown)
    for shown in set(taken.shown):
        for name in "ab":
            metadata = (("authorization", shown),)
            ask = lambda name=name, metadata=metadata: taken.ask(  # noqa: E731
                honest.address(name), "Status", pb.StatusRequest(), certificate=False, metadata=metadata
            )
            assert refused(ask)[1].kind == "Unauthenticated"


def test_it_gains_nothing_by_a_token_beside_its_certificate(honest: Honest, taken: TakenOver) -> None:
    file = honest.root / "a" / "token"
    file.with_suffix(".new").write_text(f'[[token]]\nname = "reader"\nvalue = "{TOKEN}"\n')
    file.with_suffix(".new").chmod(0o640)
    file.with_suffix(".new").rename(file)
    shown = (("authorization", f"Bearer {TOKEN}"),)
    request = pb.GossipRequest(message=pb.GossipMessage(sender=_record(taken)))
    assert taken.ask(honest.address("a"), "Gossip", request).message.sender.name == "a"
    code, error = refused(lambda: taken.ask(honest.address("a"), "Gossip", request, metadata=shown))
    assert (code, error.kind) == (grpc.StatusCode.PERMISSION_DENIED, "PrivilegeError")


def test_two_nodes_with_one_name_and_two_certificates_are_said(honest: Honest) -> None:
    honest.start("twin", node="b")
    until(lambda: honest.peers("twin"), what="an answer of the twin")
    until(lambda: honest.peers()["b"].problem, what=lambda: str(honest.peers()))
    found = honest.peers()["b"]
    assert (found.address, found.state) == (honest.address("b"), "healthy")
    assert found.problem.startswith(f"{honest.address('twin')} answers under this name")
    until(lambda: honest.peers("twin")["b"].problem, what=lambda: str(honest.peers("twin")))


def test_a_renewed_certificate_is_the_same_node(honest: Honest) -> None:
    honest.processes["b"].terminate()
    honest.processes.pop("b").communicate(timeout=30)
    before = honest.authority.directory / "b.pem"
    old = before.read_bytes()
    honest.start("b")
    assert before.read_bytes() != old
    until(lambda: honest.peers()["b"].state == "healthy", what=lambda: str(honest.peers()))
    found = honest.peers()["b"]
    assert (found.proof, found.problem, found.bound) == ("certificate", "", True)


def test_certificates_without_names_prove_hosts_and_keys_prove_nodes(open_tmp_path: Path, authority: Authority) -> None:
    made = Honest(open_tmp_path, authority)
    files = authority.host("shared")
    try:
        made.start("a", files=files)
        made.start("b", files=files)
        until(lambda: made.peers().get("b", pb.Peer()).proof == "key", what=lambda: str(made.peers()))
        assert made.peers()["b"].state == "healthy"
        said = "this node's certificate lacks its name, so only its key proves the name"
        assert [said in source.detail for source in made.sources("a") if source.name == "cluster"] == [True]
    finally:
        made.stop()


@pytest.mark.parametrize("named", [True, False], ids=["a certificate with its name", "a certificate without"])
def test_a_node_of_a_version_before_keys_is_a_member_and_is_said(
    honest: Honest, authority: Authority, named: bool
) -> None:
    old = TakenOver(authority, old=True, files=None if named else authority.host("shared"))
    try:
        until(lambda: old.says(honest.address("a"), pb.GossipMessage(sender=_record(old))).sender.name == "a")
        proof = "certificate" if named else ""
        until(lambda: honest.peers().get("c", pb.Peer()).proof == proof, what=lambda: str(honest.peers()))
        until(lambda: old.called.is_set() and honest.peers()["c"].state == "healthy")
        found = honest.peers()["c"]
        assert (found.bound, found.problem) == (False, "")
        (source,) = (source for source in honest.sources("a") if source.name == "cluster")
        assert ("nothing proves the names of 1: c (their versions have no keys)" in source.detail) is not named
        with Cluster(honest.address("a"), all_nodes=True, token=TOKEN, tls=Tls(authority.file), timeout=10) as cluster:
            asked = cluster.addresses()
        assert (old.address in asked) is named
        if not named:
            assert [failed.reason for failed in cluster.absent] == [
                "nothing proves its name to the target, so it is not shown your token"
            ]
    finally:
        old.stop()
