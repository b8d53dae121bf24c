"""TCP ports outlive the service: nobody takes one while it restarts, under the supervisor and under systemd."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from ports import free_port
from service_helpers import BEARER, start, token_file
from stranger import bind_attempts
from waiting import until

from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.api.proto.probing.v1.node_pb2_grpc import NodeStub
from probing.daemon.config import Config
from probing.daemon.supervisor import ports as ports_module
from probing.daemon.supervisor.ports import PORTS_FD, Ports

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can become a stranger")


def config(listen: str = "", http: str = "") -> Config:
    return Config(listen=listen, http=http)


def inode(sock: socket.socket) -> int:
    return os.fstat(sock.fileno()).st_ino


def status(port: int) -> str:
    """Returns the state that the service at ``port`` of loopback reports."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        found = NodeStub(channel).Status(pb.StatusRequest(), timeout=30, metadata=BEARER, wait_for_ready=True)
        return str(found.state)


@contextlib.contextmanager
def supervised(root: Path, ports: Ports, *args: str) -> Iterator[subprocess.Popen[str]]:
    """A service that a supervisor with ``ports`` would start; it is killed."""
    with ports.offer() as channel:
        number = channel.fileno()
        process = start(root, *args, token_file(root), env={PORTS_FD: str(number)}, fds=(number,))
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=30)


@pytest.fixture
def port() -> int:
    return free_port()


def test_a_stranger_finds_no_moment_to_take_the_port(open_tmp_path: Path, port: int) -> None:
    ports = Ports(config(f"127.0.0.1:{port}"))
    ports.bind()
    assert bind_attempts(port) == []
    for _ in range(2):
        with supervised(open_tmp_path, ports, f"--listen=127.0.0.1:{port}"):
            assert status(port) == "starting"
            assert bind_attempts(port) == []
        # It was killed; the next has not begun.
        assert bind_attempts(port) == []
    ports.close()
    # The attempts can succeed.
    assert ["127.0.0.1"] in bind_attempts(port)


def test_who_connects_meanwhile_is_answered_by_the_next_service(open_tmp_path: Path, port: int) -> None:
    ports = Ports(config(f"127.0.0.1:{port}"))
    ports.bind()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        asked = NodeStub(channel).Status.future(pb.StatusRequest(), timeout=60, metadata=BEARER, wait_for_ready=True)
        with supervised(open_tmp_path, ports, f"--listen=127.0.0.1:{port}"):
            assert asked.result(60).state == "starting"
    ports.close()


def test_a_port_that_is_taken_is_handed_over_once_it_is_free(
    open_tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ports_module, "RETRY_S", 0.0)
    ports = Ports(config(f"127.0.0.1:{port}"))
    squatter = socket.create_server(("127.0.0.1", port))
    ports.bind()
    with (
        supervised(open_tmp_path, ports, f"--listen=127.0.0.1:{port}"),
        grpc.insecure_channel(f"unix:{open_tmp_path}/s.sock") as channel,
    ):
        grpc.channel_ready_future(channel).result(30)
        node = NodeStub(channel)
        (source,) = until(lambda: node.Status(pb.StatusRequest(), timeout=20).sources)
        assert (source.name, source.state) == ("tcp", "degraded")
        assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in source.reason
        squatter.close()
        assert ports.due < float("inf")
        ports.bind()
        assert ports.due == float("inf")
        assert status(port) == "starting"
        until(lambda: not node.Status(pb.StatusRequest(), timeout=20).sources)
    ports.close()


def test_http_is_kept_as_well(open_tmp_path: Path, port: int) -> None:
    ports = Ports(config(http=f"127.0.0.1:{port}"))
    ports.bind()
    for _ in range(2):
        with (
            supervised(open_tmp_path, ports, f"--http=127.0.0.1:{port}"),
            socket.create_connection(("127.0.0.1", port), timeout=60) as connection,
        ):
            connection.settimeout(60)
            connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            assert connection.recv(100).startswith(b"HTTP/1.1 ")
        assert bind_attempts(port) == []
    ports.close()


def test_a_reload_keeps_what_stays_and_closes_what_goes(port: int) -> None:
    other, third = free_port(), free_port()
    ports = Ports(config(f"127.0.0.1:{port}", f"127.0.0.1:{other}"))
    ports.bind()
    ports.configure(config(f"127.0.0.1:{port}", f"127.0.0.1:{third}"))
    ports.bind()
    assert [bool(bind_attempts(number)) for number in (port, other, third)] == [False, True, False]
    ports.configure(config())
    ports.bind()
    assert all(bind_attempts(number) for number in (port, other, third))


class Systemd:
    """What systemd does of sd_notify(3) and sd_listen_fds(3) for one unit: it stores descriptors."""

    def __init__(self, root: Path) -> None:
        self.stored: dict[str, int] = {}
        self._path = str(root / "notify")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self._path)
        self._socket.settimeout(60)

    def close(self) -> None:
        self._socket.close()
        for fd in self.stored.values():
            os.close(fd)

    def until(self, line: str) -> None:
        """Reads notifications up to that with ``line``."""
        lines: list[str] = []
        while line not in lines:
            data, fds, _, _ = socket.recv_fds(self._socket, 4096, 16)
            lines = data.decode().splitlines()
            name = next((x.removeprefix("FDNAME=") for x in lines if x.startswith("FDNAME=")), "")
            if "FDSTORE=1" in lines:
                assert name not in self.stored
                (self.stored[name],) = fds
            elif "FDSTOREREMOVE=1" in lines:
                os.close(self.stored.pop(name))

    @contextlib.contextmanager
    def run(self, root: Path, *args: str) -> Iterator[None]:
        fds = list(self.stored.values())
        places = " ".join(f"{3 + at}<&{fd} {fd}<&-" for at, fd in enumerate(fds))
        names = ":".join(self.stored)
        script = f'exec {places}; export LISTEN_PID=$$ LISTEN_FDS={len(fds)} LISTEN_FDNAMES={names}; exec "$@"'
        prefix = ["bash", "-c", script if fds else 'exec "$@"', "-"]
        process = start(root, *args, token_file(root), env={"NOTIFY_SOCKET": self._path}, fds=fds, prefix=prefix)
        try:
            yield
        finally:
            process.kill()
            process.communicate(timeout=30)


@pytest.fixture
def systemd(open_tmp_path: Path) -> Iterator[Systemd]:
    with contextlib.closing(Systemd(open_tmp_path)) as made:
        yield made


def test_systemd_keeps_the_port_from_one_service_to_the_next(open_tmp_path: Path, systemd: Systemd, port: int) -> None:
    listen = f"--listen=127.0.0.1:{port}"
    with systemd.run(open_tmp_path, listen):
        systemd.until("READY=1")
        assert list(systemd.stored) == ["tcp"]
    kept = os.fstat(systemd.stored["tcp"]).st_ino
    assert bind_attempts(port) == []
    with systemd.run(open_tmp_path, listen):
        # It stores the same socket no second time.
        systemd.until("READY=1")
        assert status(port) == "starting"
    assert os.fstat(systemd.stored["tcp"]).st_ino == kept
    assert bind_attempts(port) == []


@pytest.mark.parametrize("moved", [True, False])
def test_systemd_closes_a_port_that_is_configured_no_more(
    open_tmp_path: Path, systemd: Systemd, port: int, moved: bool
) -> None:
    other = free_port()
    with systemd.run(open_tmp_path, f"--listen=127.0.0.1:{port}"):
        systemd.until("READY=1")
    with systemd.run(open_tmp_path, *([f"--listen=127.0.0.1:{other}"] if moved else [])):
        systemd.until("READY=1")
        assert list(systemd.stored) == (["tcp"] if moved else [])
        assert bind_attempts(port)
        if moved:
            assert status(other) == "starting"
