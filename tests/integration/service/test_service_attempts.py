"""A table of attempts to get more than one may: each is refused, logged, and shows nothing."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import ssl
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from authority import Authority
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from long import examples
from query_helpers import operations
from service_helpers import Service, serving
from waiting import until

from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.api.proto.probing.v1.node_pb2_grpc import NodeStub
from probing.client.cluster import Cluster
from probing.client.wire.credentials import Tls

READER, TEAM, NODE = "reader-0123456789abcdef", "team-0123456789abcdef", "node-0123456789abcdef"
SECRET = "secret-job"
TOKENS = f"""
[[token]]
name = "reader"
value = "{READER}"
[[token]]
name = "team"
jobs = ["j"]
value = "{TEAM}"
[[token]]
name = "gn7"
scope = "peer"
value = "{NODE}"
"""
METHODS = [method.name for method in pb.DESCRIPTOR.services_by_name["Node"].methods]
few = settings(max_examples=examples(25), deadline=None, suppress_health_check=list(HealthCheck))


@dataclass
class Scene:
    """A service on TLS with tokens, rows of two jobs, and the certificates around it."""

    service: Service
    nodes: Authority
    strangers: Authority
    log: Path

    def channel(self, shown: tuple[str, str] | None = None, trusted: Authority | None = None) -> grpc.Channel:
        authority = trusted or self.nodes
        return authority.channel(self.service.tcp, shown)

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.service.tcp.rpartition(":")
        return host, int(port)

    def socket(self) -> ssl.SSLSocket:
        context = ssl.create_default_context(cafile=self.nodes.file)
        context.set_alpn_protocols(["h2"])
        return context.wrap_socket(socket.create_connection(self.address, timeout=20), server_hostname="localhost")


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    nodes = Authority(tmp_path_factory.mktemp("nodes"), "nodes")
    strangers = Authority(tmp_path_factory.mktemp("strangers"), "strangers")
    cert, key = nodes.node("n0")
    root = Path(tempfile.mkdtemp(prefix="probingd-test-"))
    tokens = root / "tokens"
    tokens.write_text(TOKENS)
    tokens.chmod(0o640)
    options = (f"--tls.cert={cert}", f"--tls.key={key}", f"--tls.peer_ca={nodes.file}", f"--token_file={tokens}")
    with serving(root, *options, log=root / "log") as service:
        rows = operations(10)
        service.collector.files.segment("comm.ops", [*rows, *({**row, "job": SECRET} for row in rows)])
        yield Scene(service, nodes, strangers, root / "log")
    shutil.rmtree(root)


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


def status(scene: Scene, *metadata: tuple[str, str], shown: tuple[str, str] | None = None) -> None:
    with scene.channel(shown) as channel:
        NodeStub(channel).Status(pb.StatusRequest(), timeout=20, metadata=metadata)


def call(token: str, method: str, request: object) -> Callable[[Scene], None]:
    def attempt(scene: Scene) -> None:
        with scene.channel() as channel:
            reply = getattr(NodeStub(channel), method)(request, timeout=20, metadata=bearer(token))
            if method in ("Query", "Facts"):
                list(reply)

    return attempt


def raw(method: str, data: bytes, service: str = "probing.v1.Node") -> Callable[[Scene], None]:
    """Sends bytes that no client would."""

    def attempt(scene: Scene) -> None:
        with scene.channel() as channel:
            channel.unary_unary(f"/{service}/{method}")(data, timeout=20, metadata=bearer(READER))

    return attempt


def expired(scene: Scene) -> None:
    scene.nodes.client("late", -2)
    status(scene, shown=(str(scene.nodes.directory / "late.pem"), str(scene.nodes.directory / "late.key")))


def wrong_authority(scene: Scene) -> None:
    status(scene, shown=scene.strangers.client("mallory"))


def another_servers_authority(scene: Scene) -> None:
    with scene.channel(trusted=scene.strangers) as channel:
        NodeStub(channel).Status(pb.StatusRequest(), timeout=20)


def plain_text(scene: Scene) -> None:
    with grpc.insecure_channel(scene.service.tcp) as channel:
        NodeStub(channel).Status(pb.StatusRequest(), timeout=20, metadata=bearer(READER))


CHANGE = pb.ConfigRequest(key="sampling.hz", value="99")
NO_SCOPE, UNKNOWN = grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED
GONE, TOO_MUCH = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED
WRONG = grpc.StatusCode.INVALID_ARGUMENT
REFUSED = f"a call asked by tcp: 127.0.0.1, uid {os.getuid()}: refused"
# Attempt, how it ends, and the line in the log; empty: gRPC refuses it before there is a call.
ATTEMPTS: dict[str, tuple[Callable[[Scene], None], tuple[grpc.StatusCode, ...], str]] = {
    "no token": (status, (UNKNOWN,), REFUSED),
    "wrong token": (
        lambda s: status(s, *bearer("x" * 23)),
        (UNKNOWN,),
        REFUSED,
    ),
    "a part of a token": (lambda s: status(s, *bearer(READER[:-1])), (UNKNOWN,), "a call asked by"),
    "basic": (lambda s: status(s, ("authorization", f"Basic {READER}")), (UNKNOWN,), "a call asked by"),
    "expired certificate": (expired, (GONE,), "its certificate is refused: certificate has expired"),
    "wrong authority": (wrong_authority, (GONE,), "its certificate is refused: .*issuer"),
    "a client that trusts another": (
        another_servers_authority,
        (GONE,),
        "refused: (it closed the connection|TLS: .*unknown ca)",
    ),
    "plain text": (plain_text, (GONE,), "refused: it does not speak TLS"),
    "read asks to change": (call(READER, "Config", CHANGE), (NO_SCOPE,), r"'sampling.hz'='99'.*reader\): refused"),
    "read asks to reset": (
        call(READER, "Config", pb.ConfigRequest(key="sampling.hz", reset=True)),
        (NO_SCOPE,),
        "reset=True.*refused",
    ),
    "read asks to pause": (call(READER, "Pause", pb.PauseRequest(paused=True)), (NO_SCOPE,), "pause .*refused"),
    "a node asks to pause": (call(NODE, "Pause", pb.PauseRequest(paused=True)), (NO_SCOPE,), r"\(gn7\): refused"),
    "read asks to run code": (
        call(READER, "Eval", pb.EvalRequest(pids=[1], code="1")),
        (NO_SCOPE,),
        "eval '1' .*refused",
    ),
    "a node asks to run code": (
        call(NODE, "Eval", pb.EvalRequest(pids=[1], code="1")),
        (NO_SCOPE,),
        r"\(gn7\): refused",
    ),
    "code for a job's token": (
        call(TEAM, "Eval", pb.EvalRequest(job="j", code="1")),
        (NO_SCOPE,),
        "eval '1' .*refused",
    ),
    "stacks of another job": (call(TEAM, "Stacks", pb.StacksRequest(job=SECRET)), (NO_SCOPE,), r"stacks .*\(team\)"),
    "stacks of all": (call(TEAM, "Stacks", pb.StacksRequest()), (NO_SCOPE,), "stacks .*refused"),
    "variables by pid": (
        call(TEAM, "Vars", pb.VarsRequest(job="j", pids=[1], names=["x"])),
        (NO_SCOPE,),
        "vars .*refused",
    ),
    "facts of another job": (call(TEAM, "Facts", pb.FactsRequest(job=SECRET)), (NO_SCOPE,), "facts .*refused"),
    "settings for a job's token": (call(TEAM, "Config", pb.ConfigRequest()), (NO_SCOPE,), "config .*refused"),
    "a table without jobs": (call(TEAM, "Query", pb.QueryRequest(sql="SELECT * FROM gpu.devices")), (WRONG,), ""),
    "oversized": (
        call(READER, "Query", pb.QueryRequest(sql="x" * (3 << 19))),
        (WRONG,),
        "the request has 15728.. bytes, at most",
    ),
    "oversized for gRPC": (call(READER, "Query", pb.QueryRequest(sql="x" * (3 << 20))), (TOO_MUCH,), ""),
    "oversized metadata": (lambda s: status(s, ("x", "y" * (40 << 10))), (TOO_MUCH,), ""),
    "malformed": (raw("Query", b"\xff" * 100), (WRONG,), "the request is malformed"),
    "no such call": (raw("Nope", b""), (grpc.StatusCode.UNIMPLEMENTED,), ""),
    "Flight, which is off": (
        raw("DoGet", b"", "arrow.flight.protocol.FlightService"),
        (grpc.StatusCode.UNIMPLEMENTED,),
        "",
    ),
}


@pytest.mark.parametrize("name", ATTEMPTS)
def test_an_attempt_is_refused_logged_and_shows_nothing(scene: Scene, name: str) -> None:
    attempt, codes, line = ATTEMPTS[name]
    with pytest.raises(grpc.RpcError) as caught:
        attempt(scene)
    assert caught.value.code() in codes
    said = f"{caught.value.details()} {caught.value.trailing_metadata()}"
    assert not any(word in said for word in (READER, TEAM, NODE, "Traceback", str(scene.log.parent)))
    if line:
        until(lambda: re.search(line, scene.log.read_text()) is not None)
    assert not scene.service.collector.paused
    assert not any(r["op"] == "config" and "value" in r for r in scene.service.collector.requests)


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT job, count(*) AS n FROM comm.ops GROUP BY job",
        f"SELECT job, count(*) AS n FROM comm.ops WHERE job = '{SECRET}' OR true GROUP BY job",
        "SELECT o.job, count(*) AS n FROM comm.ops o WHERE o.rank IN (SELECT rank FROM comm.ops) GROUP BY o.job",
    ],
)
def test_a_token_of_a_job_sees_its_rows_alone(scene: Scene, sql: str) -> None:
    with Cluster(scene.service.tcp, token=TEAM, tls=Tls(scene.nodes.file)) as cluster:
        assert cluster.query(sql).to_pylist() == [{"job": "j", "n": 10}]
    with Cluster(scene.service.tcp, token=READER, tls=Tls(scene.nodes.file)) as cluster:
        assert len(cluster.query(sql)) == 2


def test_a_recorded_connection_cannot_be_replayed(scene: Scene) -> None:
    recorded = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=_relay, args=(listener, scene.address, recorded))
        thread.start()
        with scene.nodes.channel(f"localhost:{listener.getsockname()[1]}") as channel:
            assert NodeStub(channel).Status(pb.StatusRequest(), timeout=20, metadata=bearer(READER)).node == "n0"
        thread.join(20)
    before = len(scene.service.collector.requests)

    def is_refused() -> bool:
        with socket.create_connection(scene.address, timeout=20) as again:
            with contextlib.suppress(OSError):
                again.sendall(recorded)
            # A handshake of its own and an end: no answer to the call.
            _drain(again)
        return "refused: TLS: " in scene.log.read_text()

    refused = is_refused()
    assert not any(r["op"] == "status" for r in scene.service.collector.requests[before:])
    # On a fast machine the tests before this one have used up the lines of this second.
    until(lambda: refused or is_refused())


def _relay(listener: socket.socket, address: tuple[str, int], recorded: bytearray) -> None:
    front, _ = listener.accept()
    with front, socket.create_connection(address) as back:
        answers = threading.Thread(target=_pass, args=(back, front, bytearray()))
        answers.start()
        _pass(front, back, recorded)
        back.shutdown(socket.SHUT_WR)
        answers.join(20)


def _pass(source: socket.socket, sink: socket.socket, seen: bytearray) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            seen += data
            sink.sendall(data)


def _drain(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while sock.recv(65536):
            pass


def _answers(scene: Scene) -> bool:
    return scene.service.node.Status(pb.StatusRequest(), timeout=20).node == "n0"


@few
@given(data=st.binary(min_size=1, max_size=2000))
def test_random_bytes_are_no_handshake(scene: Scene, data: bytes) -> None:
    with socket.create_connection(scene.address, timeout=20) as sock:
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        _drain(sock)
    assert _answers(scene)


@few
@given(data=st.binary(min_size=1, max_size=2000), preface=st.booleans())
def test_random_bytes_are_no_http2(scene: Scene, data: bytes, preface: bool) -> None:
    with scene.socket() as sock, contextlib.suppress(OSError):
        sock.sendall((b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" if preface else b"") + data)
        sock.settimeout(0.02)
        _drain(sock)
    assert _answers(scene)


@few
@given(data=st.binary(max_size=300), method=st.sampled_from([m for m in METHODS if m != "Sink"]))
def test_random_bytes_are_no_change(scene: Scene, data: bytes, method: str) -> None:
    with scene.channel() as channel, contextlib.suppress(grpc.RpcError):
        list(channel.unary_stream(f"/probing.v1.Node/{method}")(data, timeout=5, metadata=bearer(READER)))
    assert _answers(scene)
    assert not scene.service.collector.paused


def test_the_log_has_no_token(scene: Scene) -> None:
    text = scene.log.read_text()
    assert not any(token in text for token in (READER, TEAM, NODE))
    assert "Traceback" not in text
