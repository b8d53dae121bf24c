"""Other users of the machine at the loopback ports: whatever they hold, there is a place for everybody else."""

from __future__ import annotations

import os
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import pytest
from authority import Authority
from http2_flood import PREFACE, SETTINGS, frame
from ports import free_port
from service_helpers import TOKEN, Service, serving
from test_service_metrics import fetch

from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.api.proto.probing.v1.node_pb2_grpc import NodeStub
from probing.daemon.service.relay import EACH, MOST

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="starts processes of another user")
NOBODY = 65534
TEAM = "0123456789abcdef-team"
MANY = 80


@pytest.fixture
def http() -> str:
    return f"127.0.0.1:{free_port()}"


@pytest.fixture
def service(open_tmp_path: Path, http: str) -> Iterator[Service]:
    with serving(open_tmp_path, f"--http={http}", f"--token_file={two_tokens(open_tmp_path)}") as made:
        yield made


def two_tokens(folder: Path) -> Path:
    path = folder / "tokens"
    tokens = (("ops", TOKEN), ("team", TEAM))
    path.write_text("".join(f'[[token]]\nname = "{name}"\nvalue = "{value}"\n' for name, value in tokens))
    path.chmod(0o640)
    return path


@contextmanager
def stranger(kind: str, address: str, count: int = MANY, token: str = "", *, uid: int = NOBODY) -> Iterator[None]:
    """A process of another user that holds connections, once it has opened them."""
    script = Path(__file__).parents[1] / "local_stranger.py"
    rights = ["setpriv", f"--reuid={uid}", f"--regid={NOBODY}", "--clear-groups"]
    argv = [*rights, sys.executable, str(script), kind, address, str(count), token]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        yield
        assert process.poll() is None
        process.kill()


@pytest.mark.parametrize("kind", ["silent", "trickle", "wrong"])
def test_health_and_metrics_answer_beside_a_stranger(service: Service, http: str, kind: str) -> None:
    with stranger(kind, http):
        for _ in range(5):
            assert fetch(http, "/healthz", token="") == "running\n"
            assert "probingd_build_info" in fetch(http)


def test_health_and_metrics_answer_beside_pages_that_are_not_read(service: Service, http: str) -> None:
    with stranger("unread", http, MANY, TEAM):
        for _ in range(5):
            assert fetch(http, "/healthz", token="") == "running\n"
            assert "probingd_build_info" in fetch(http)


def test_a_connection_without_token_outlasts_those_of_a_stranger(service: Service) -> None:
    host, _, port = service.tcp.rpartition(":")
    with socket.create_connection((host, int(port)), 20) as mine, stranger("silent", service.tcp):
        mine.sendall(PREFACE + frame(SETTINGS, 0, 0, b""))
        assert acknowledged(mine)


def acknowledged(sock: socket.socket) -> bool:
    """Whether gRPC acknowledges the SETTINGS (RFC 9113, 6.5) that were sent."""
    with sock.makefile("rb") as frames:
        while len(head := frames.read(9)) == 9:
            if (head[3], head[4]) == (SETTINGS, 1):
                return True
            frames.read(int.from_bytes(head[:3], "big"))
    return False


def test_a_handshake_outlasts_those_of_a_stranger(open_tmp_path: Path) -> None:
    authority = Authority(open_tmp_path / "tls")
    cert, key = authority.node("n0")
    context = ssl.create_default_context(cafile=str(authority.file))
    context.check_hostname = False
    with serving(open_tmp_path, f"--tls.cert={cert}", f"--tls.key={key}") as service:
        host, _, port = service.tcp.rpartition(":")
        mine = socket.create_connection((host, int(port)), 20)
        with stranger("silent", service.tcp), context.wrap_socket(mine) as secured:
            assert secured.version() == "TLSv1.3"


@contextmanager
def asked(address: str, token: str) -> Iterator[str]:
    """The state of the node, by a connection that stays."""
    with grpc.insecure_channel(address, options=(("grpc.use_local_subchannel_pool", 1),)) as channel:
        metadata = (("authorization", f"Bearer {token}"),)
        yield NodeStub(channel).Status(pb.StatusRequest(), metadata=metadata, timeout=20).state


@pytest.mark.parametrize(("uid", "mine"), [(NOBODY, TOKEN), (NOBODY, TEAM), (0, TOKEN)], ids=["both", "user", "token"])
def test_a_token_holds_no_place_of_another_user_or_token(service: Service, uid: int, mine: str) -> None:
    with stranger("calls", service.tcp, EACH["tcp"], TEAM, uid=uid), asked(service.tcp, mine) as state:
        assert state == "running"


def test_a_token_of_many_users_leaves_places_for_another_token(service: Service) -> None:
    with ExitStack() as held:
        for number in range(MOST["tcp"] // EACH["tcp"]):
            held.enter_context(stranger("calls", service.tcp, EACH["tcp"], TEAM, uid=NOBODY - number))
        assert held.enter_context(asked(service.tcp, TOKEN)) == "running"
        with pytest.raises(grpc.RpcError) as caught, asked(service.tcp, TEAM):
            pass
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
