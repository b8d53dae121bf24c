"""A stranger listens on the loopback port of a node: it is shown no token, and the command says so."""

from __future__ import annotations

import os
import pwd
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from client_fake_node import FakeNode, process
from ports import free_port
from stranger import UID, Impostor
from waiting import until

from probing.api.errors import PrivilegeError, ProbingError
from probing.client.cluster import Cluster
from probing.client.wire.proven import Listener, ProvenRoute, listeners, require_proven, trusted_users

Run = Callable[..., tuple[int, str, str]]
TOKEN = "0123456789abcdef-token"
ALONE = "SELECT count(*) AS n FROM process.processes"
# A user of the machine who asks, and is not root.
ALICE = 4321
pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can become a stranger")


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROBING_AUTH_TOKEN", TOKEN)


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def node(tmp_path: Path, port: int) -> Iterator[FakeNode]:
    """A node of root's, which listens on loopback."""
    with FakeNode(
        tmp_path, "alpha", {"process.processes": [process("alpha", 0, 1000)]}, tcp=f"127.0.0.1:{port}"
    ) as made:
        yield made


def shown(stranger: Impostor) -> list[str]:
    """Returns the tokens that a stranger was shown, and ends it."""
    return [metadata["authorization"] for _, metadata in stranger.end() if "authorization" in metadata]


COMMANDS = (
    ("status",),
    ("query", ALONE),
    ("ps",),
    ("stacks",),
    ("vars", "loss"),
    ("config", "sampling.hz=7"),
    ("pause",),
    ("query", "--all-nodes", ALONE),
    ("nodes",),
    ("tables",),
)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_no_command_shows_a_stranger_the_token(ctl: Run, words: tuple[str, ...], port: int) -> None:
    with Impostor(f"127.0.0.1:{port}") as stranger:
        code, _, err = ctl(words[0], "-t", f"127.0.0.1:{port}", *words[1:])
        assert code == 1
        assert f"127.0.0.1:{port} is not probingd's: the user nobody (uid {UID}) listens there" in err
        assert "the token was not sent" in err
        assert "hint: use the node's Unix socket" in err
        assert stranger.end() == []


@pytest.mark.parametrize(
    ("listens", "asked"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("0.0.0.0", "127.0.0.1"),
        ("[::]", "127.0.0.1"),
        ("127.0.0.9", "127.0.0.9"),
        ("[::1]", "[::1]"),
        ("[::]", "[::1]"),
        ("0.0.0.0", "localhost"),
    ],
)
def test_however_it_listens(listens: str, asked: str, port: int) -> None:
    with (
        Impostor(f"{listens}:{port}") as stranger,
        Cluster(f"{asked}:{port}", token=TOKEN, timeout=20) as cluster,
    ):
        with pytest.raises(PrivilegeError, match="is not probingd's"):
            cluster.status()
        assert stranger.end() == []


def test_a_node_beside_it_is_asked(node: FakeNode, ctl: Run, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name localhost may have two addresses, and a stranger may listen on that which the daemon leaves free."""

    def both(_: str, number: int, *__: object) -> list[tuple[object, ...]]:
        kinds = (socket.AF_INET6, "::1"), (socket.AF_INET, "127.0.0.1")
        return [(family, socket.SOCK_STREAM, 6, "", (host, number)) for family, host in kinds]

    monkeypatch.setattr(socket, "getaddrinfo", both)
    with Impostor(f"[::1]:{port}") as stranger:
        assert ctl("query", "-t", f"localhost:{port}", ALONE)[0] == 0
        assert node.metadata[-1]["authorization"] == f"Bearer {TOKEN}"
        assert stranger.end() == []


def test_of_many_nodes_only_the_stranger_is_left_out(node: FakeNode, ctl: Run, port: int) -> None:
    other = free_port()
    with Impostor(f"127.0.0.1:{other}") as stranger:
        code, out, err = ctl("query", "--nodes", f"127.0.0.1:{port},127.0.0.1:{other}", "-f", "json", ALONE)
        assert code == 0
        assert '"n": 1' in out.replace('"n":1', '"n": 1')
        assert f"127.0.0.1:{other} is not probingd's" in err
        assert shown(stranger) == []
    assert {found["authorization"] for found in node.metadata} == {f"Bearer {TOKEN}"}


def test_a_port_that_changes_hands_under_an_open_connection(tmp_path: Path, port: int) -> None:
    """gRPC connects again by itself: each connection is looked at, not the first alone."""
    address = f"127.0.0.1:{port}"
    first = FakeNode(tmp_path, "alpha", tcp=address)
    with Cluster(address, token=TOKEN) as one, Cluster(address, nodes=[address], token=TOKEN) as cluster:
        assert name_of(one) == "alpha"
        assert cluster.query("SELECT count(*) AS n FROM comm.ops").num_rows == 1
        first.stop()
        with Impostor(address) as stranger:
            for ask in (one.status, lambda: cluster.query("SELECT count(*) AS n FROM comm.ops")):
                # Until gRPC has noticed the end, and has connected anew.
                until(lambda ask=ask: "not probingd's" in failure(ask))
            assert shown(stranger) == []
        with FakeNode(tmp_path, "beta", tcp=address):
            # What was refused does not stay refused.
            until(lambda: name_of(one) == "beta")


def failure(ask: Callable[[], object]) -> str:
    try:
        ask()
    except ProbingError as e:
        return e.message
    return ""


def name_of(cluster: Cluster) -> str:
    try:
        return cluster.status()[0][1].node
    except ProbingError:
        return ""


def test_a_stranger_that_gives_the_port_back_at_once(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection stays with it, whoever listens afterwards."""
    held = [socket.create_server(("127.0.0.1", port))]
    looks = 0

    def looked(host: str, number: int) -> frozenset[Listener]:
        nonlocal looks
        found = listeners(host, number)
        looks += 1
        if looks % 2:
            # Between the look and the connection another socket takes the port, here one of root's as well.
            held.pop().close()
            held.append(socket.create_server(("127.0.0.1", port)))
        return found

    route = ProvenRoute(f"127.0.0.1:{port}")
    monkeypatch.setattr("probing.client.wire.proven.listeners", looked)
    with socket.socket(socket.AF_UNIX) as near:
        near.connect("\0" + route.target.removeprefix("unix-abstract:"))
        near.settimeout(30)
        assert near.recv(1) == b""
    assert "changes hands" in str(route.problem)
    route.close()
    held.pop().close()


NOBODY, ROOT, NEXT = Listener(1, UID), Listener(2, 0), Listener(3, 0)


@pytest.mark.parametrize(
    ("before", "after", "proven"),
    [
        ({ROOT}, {ROOT}, True),
        ({ROOT, NEXT}, {ROOT}, True),
        (set(), {ROOT}, False),
        ({ROOT}, set(), False),
        ({ROOT}, {NEXT}, False),
        ({NOBODY}, {ROOT}, None),
        ({ROOT}, {NOBODY}, None),
        ({NOBODY}, {NOBODY}, None),
        ({ROOT, NOBODY}, {ROOT}, None),
    ],
)
def test_which_listener_had_the_connection(before: set[Listener], after: set[Listener], proven: bool | None) -> None:
    if proven is None:
        with pytest.raises(PrivilegeError, match="is not probingd's"):
            require_proven("127.0.0.1:1", frozenset(before), frozenset(after))
    else:
        assert require_proven("127.0.0.1:1", frozenset(before), frozenset(after)) is proven


def test_whose_listeners_are_trusted() -> None:
    assert {0, os.geteuid(), pwd.getpwnam("probing-service").pw_uid} <= trusted_users()
    assert UID not in trusted_users()


def test_nobody_else_uses_the_way_of_this_process(node: FakeNode, port: int) -> None:
    route = ProvenRoute(f"127.0.0.1:{port}")
    code = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(chr(0) + sys.argv[1]); print(s.recv(9))"
    name = route.target.removeprefix("unix-abstract:")
    words = [sys.executable, "-I", "-c", code, name]
    assert subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout == "b''\n"
    route.close()


def as_user(user: int, *words: str, namespace: bool = False) -> subprocess.CompletedProcess[str]:
    """Runs probingctl as ``user``, in a user namespace of its own that knows nobody else if ``namespace``."""
    prefix = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]
    prefix += ["unshare", "--user", "--map-root-user"] if namespace else []
    program = str(Path(sys.executable).with_name("probingctl"))
    return subprocess.run([*prefix, program, *words], capture_output=True, text=True, timeout=60, cwd="/", check=False)


def test_a_user_asks_a_daemon_of_root(node: FakeNode, port: int) -> None:
    done = as_user(ALICE, "status", "-t", f"127.0.0.1:{port}")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_user_asks_by_a_tunnel_of_its_own(port: int) -> None:
    """Its own processes could read the token anyway; others' tunnels are strangers."""
    with Impostor(f"127.0.0.1:{port}", user=ALICE) as tunnel:
        assert as_user(ALICE, "status", "-t", f"127.0.0.1:{port}").returncode == 1
        assert as_user(ALICE + 1, "status", "-t", f"127.0.0.1:{port}").returncode == 1
        assert shown(tunnel) == [f"Bearer {TOKEN}"]


@pytest.mark.parametrize("service", ["probing-service"])
def test_a_user_asks_a_service_that_systemd_keeps_the_port_for(port: int, service: str) -> None:
    with Impostor(f"127.0.0.1:{port}", user=pwd.getpwnam(service).pw_uid) as made:
        assert as_user(ALICE, "status", "-t", f"127.0.0.1:{port}").returncode == 1
        assert shown(made) == [f"Bearer {TOKEN}"]


def test_in_a_container_that_does_not_know_the_owner(node: FakeNode, port: int) -> None:
    """There all users outside look alike: root's daemon and a stranger."""
    for listens in (f"127.0.0.1:{port}", f"127.0.0.1:{free_port()}"):
        stranger = None if listens.endswith(f":{port}") else Impostor(listens)
        done = as_user(ALICE, "status", "-t", listens, namespace=True)
        assert done.returncode == 1
        assert "a user whom this container cannot see listens there; the token was not sent" in done.stderr
        assert stranger is None or shown(stranger) == []
    # A tunnel inside of the container is seen.
    own = free_port()
    with Impostor(f"127.0.0.1:{own}", user=ALICE) as tunnel:
        as_user(ALICE, "status", "-t", f"127.0.0.1:{own}", namespace=True)
        assert shown(tunnel) == [f"Bearer {TOKEN}"]


def test_without_a_token_nothing_changes(monkeypatch: pytest.MonkeyPatch, node: FakeNode, ctl: Run, port: int) -> None:
    monkeypatch.delenv("PROBING_AUTH_TOKEN")
    assert ctl("query", "-t", f"127.0.0.1:{port}", ALONE)[0] == 0
    assert "authorization" not in node.metadata[-1]


def test_a_port_where_nobody_listens_and_one_that_says_nothing(ctl: Run, port: int) -> None:
    code, _, err = ctl("status", "-t", f"127.0.0.1:{port}")
    assert (code, "connection refused" in err) == (1, True)
    with socket.create_server(("127.0.0.1", port)):
        begun = time.monotonic()
        code, _, err = ctl("status", "-t", f"127.0.0.1:{port}", "--timeout", "1s")
        assert (code, "does not answer" in err) == (1, True)
        assert time.monotonic() - begun < 20


def test_large_answers_and_half_read_ones_pass(tmp_path: Path, port: int) -> None:
    rows = [process("alpha", rank, 1000 + rank, job=f"job-{rank}-{'x' * 400}") for rank in range(5000)]
    address = f"127.0.0.1:{port}"
    with FakeNode(tmp_path, "alpha", {"process.processes": rows}, tcp=address) as node:
        sql = "SELECT * FROM process.processes ORDER BY rank"
        with Cluster(address, token=TOKEN) as by_tcp, Cluster(node.address) as by_unix:
            assert by_tcp.query(sql).equals(by_unix.query(sql))
            for _ in range(3):
                with by_tcp.stream(sql) as rows:
                    next(iter(rows))
            assert name_of(by_tcp) == "alpha"
