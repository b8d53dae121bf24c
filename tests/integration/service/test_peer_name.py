"""The name of the other end of a TCP connection: the user of a process of this machine, as the kernel knows it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
from waiting import until

from probing.daemon.service.connections import peer_name

NOBODY = 65534
_CONNECT = """
import socket, sys
family, host, port = socket.AddressFamily(int(sys.argv[1])), sys.argv[2], int(sys.argv[3])
sock = socket.socket(family)
sock.connect((host, port))
sys.stdin.read()
"""


@pytest.fixture(params=["127.0.0.1", "::1"])
def listener(request: pytest.FixtureRequest) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in request.param else socket.AF_INET
    with socket.create_server((request.param, 0), family=family) as made:
        yield made


def accepted(listener: socket.socket) -> socket.socket:
    sock, _ = listener.accept()
    return sock


@pytest.mark.skipif(os.getuid() != 0, reason="starts a process of another user")
@pytest.mark.parametrize("mapped", [False, True])
def test_a_process_of_another_user_is_named(listener: socket.socket, mapped: bool) -> None:
    host, port = listener.getsockname()[:2]
    family = socket.AF_INET6 if mapped else listener.family
    target = f"::ffff:{host}" if mapped and listener.family == socket.AF_INET else host
    rights = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    argv = [*rights, sys.executable, "-c", _CONNECT, str(int(family)), target, str(port)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, cwd="/") as process, accepted(listener) as sock:
        assert peer_name(sock) == f"{host}, uid {NOBODY}"
        process.kill()
        process.wait()
        # A socket without process is nobody's, not root's.
        until(lambda: peer_name(sock) == host)


def test_two_connections_of_this_process_have_its_name(listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    for _ in range(2):
        with socket.create_connection((host, port)), accepted(listener) as sock:
            assert peer_name(sock) == f"{host}, uid {os.getuid()}"


def test_a_connection_that_has_ended_is_unknown(listener: socket.socket) -> None:
    with socket.create_connection(listener.getsockname()[:2]):
        sock = accepted(listener)
    sock.close()
    assert peer_name(sock) == "unknown"


class _Elsewhere:
    """A connection of another machine, from a port on which a socket listens here."""

    family = socket.AF_INET

    def __init__(self, listener: socket.socket) -> None:
        self._port = listener.getsockname()[1]

    def getpeername(self) -> tuple[str, int]:
        return "192.0.2.7", self._port

    def getsockname(self) -> tuple[str, int]:
        return "192.0.2.1", 7077


def test_a_peer_of_another_machine_has_no_user() -> None:
    with socket.create_server(("", 0)) as listener:
        assert peer_name(_Elsewhere(listener)) == "192.0.2.7"
