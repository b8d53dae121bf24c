"""TLS as clients meet it: what is encrypted, which certificates are taken, and files that change while it runs."""

from __future__ import annotations

import os
import shutil
import ssl
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from authority import Authority
from ports import free_port
from service_helpers import BEARER, TOKEN, Service, refused, serving
from waiting import until

from probing.api.errors import ProbingError
from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.api.proto.probing.v1.node_pb2_grpc import NodeStub
from probing.client.cluster import Cluster
from probing.client.wire.credentials import Tls

STATUS = pb.StatusRequest()


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    made = Authority(tmp_path_factory.mktemp("nodes"), "nodes")
    made.node("n0")
    return made


@pytest.fixture(scope="module")
def people(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    made = Authority(tmp_path_factory.mktemp("people"), "people")
    made.client("alice")
    return made


@pytest.fixture
def files(open_tmp_path: Path, nodes: Authority, people: Authority) -> Path:
    """The files of a node, for itself."""
    made = open_tmp_path / "tls"
    made.mkdir()
    for source, name in ((nodes, "n0.pem"), (nodes, "n0.key"), (nodes, "nodes.pem"), (people, "people.pem")):
        shutil.copy(source.directory / name, made / name)
    return made


@pytest.fixture
def encrypted(open_tmp_path: Path, files: Path) -> Iterator[Service]:
    options = [f"--tls.cert={files}/n0.pem", f"--tls.key={files}/n0.key", f"--tls.peer_ca={files}/nodes.pem"]
    with serving(open_tmp_path, *options, f"--http=127.0.0.1:{free_port()}") as made:
        yield made


@pytest.fixture
def mutual(open_tmp_path: Path, files: Path) -> Iterator[Service]:
    options = [
        f"--tls.cert={files}/n0.pem",
        f"--tls.key={files}/n0.key",
        f"--tls.peer_ca={files}/nodes.pem",
        f"--tls.client_ca={files}/people.pem",
        "--token_file=",
    ]
    with serving(open_tmp_path, *options) as made:
        yield made


def shown(authority: Authority, name: str) -> tuple[str, str]:
    return str(authority.directory / f"{name}.pem"), str(authority.directory / f"{name}.key")


def test_the_client_speaks_tls(encrypted: Service, nodes: Authority) -> None:
    with Cluster(encrypted.tcp, token=TOKEN, tls=Tls(nodes.file), timeout=20) as cluster:
        assert cluster.query("SELECT 1 AS one").to_pylist() == [{"one": 1}]
    with Cluster(encrypted.tcp, token=TOKEN, tls=Tls(), timeout=5) as stranger, pytest.raises(ProbingError):
        stranger.query("SELECT 1")
    http = encrypted.process.args[-1].rpartition("=")[2]  # type: ignore[union-attr, index]
    request = urllib.request.Request(f"https://{http}/healthz")
    with urllib.request.urlopen(request, context=ssl.create_default_context(cafile=nodes.file), timeout=20) as page:
        assert page.read() == b"running\n"


def test_a_nodes_certificate_needs_no_token(encrypted: Service, nodes: Authority) -> None:
    with nodes.channel(encrypted.tcp, shown(nodes, "n0")) as channel:
        assert NodeStub(channel).Status(STATUS, timeout=20).node == "n0"
    with nodes.channel(encrypted.tcp) as channel:
        assert refused(lambda: NodeStub(channel).Status(STATUS, timeout=20))[1].kind == "Unauthenticated"
        assert NodeStub(channel).Status(STATUS, timeout=20, metadata=BEARER).node == "n0"


def test_a_clients_certificate_gives_read(mutual: Service, nodes: Authority, people: Authority) -> None:
    with nodes.channel(mutual.tcp, shown(people, "alice")) as channel:
        assert NodeStub(channel).Status(STATUS, timeout=20).node == "n0"
        code, error = refused(lambda: NodeStub(channel).Pause(pb.PauseRequest(paused=True), timeout=20))
        assert (code, error.kind) == (grpc.StatusCode.PERMISSION_DENIED, "PrivilegeError")
    with nodes.channel(mutual.tcp) as channel, pytest.raises(grpc.RpcError, match="UNAVAILABLE"):
        NodeStub(channel).Status(STATUS, timeout=20)
    mutual.process.terminate()
    assert mutual.process.stderr is not None
    log = mutual.process.stderr.read()
    assert f"tcp: 127.0.0.1, uid {os.getuid()} (alice): refused: the scope probe is needed" in log
    assert "peer did not return a certificate" in log


def test_new_files_count_from_the_next_connection(
    mutual: Service, files: Path, nodes: Authority, people: Authority, tmp_path: Path
) -> None:
    other = Authority(tmp_path / "other", "others")
    other.client("bob")
    with nodes.channel(mutual.tcp, shown(people, "alice")) as alice:
        assert NodeStub(alice).Status(STATUS, timeout=20).node == "n0"
        broken = files / "broken"
        broken.write_text("no certificate")
        broken.rename(files / "people.pem")
        with nodes.channel(mutual.tcp, shown(people, "alice")) as again:
            assert NodeStub(again).Status(STATUS, timeout=20).node == "n0"
        shutil.copy(other.file, files / "people.new")
        (files / "people.new").rename(files / "people.pem")
        with nodes.channel(mutual.tcp, shown(other, "bob")) as bob:
            assert NodeStub(bob).Status(STATUS, timeout=20).node == "n0"
        # An open connection does not outlive its authority.
        until(lambda: _refused(alice))


def _refused(channel: grpc.Channel) -> bool:
    try:
        NodeStub(channel).Status(STATUS, timeout=20)
    except grpc.RpcError as e:
        return e.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNAVAILABLE)
    return False
