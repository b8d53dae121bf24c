"""Polling RAS: which processes are asked, how often, and to which job an answer belongs."""

from __future__ import annotations

import errno
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from doubles.ras_listener import RasListener
from fakes import Now, Sink
from waiting import until

from probing.api.errors import ProcessGone, TargetTimeout, UnsupportedTarget
from probing.daemon.clock import FakeClock
from probing.daemon.ipc import Message
from probing.daemon.nccl_uprobes.ras import client as ras_client
from probing.daemon.nccl_uprobes.ras import witness as ras_witness
from probing.daemon.nccl_uprobes.ras.client import RasAddress, RasSilent, connect_ras, listener_at, ras_address
from probing.daemon.nccl_uprobes.ras.json_report import handlers
from probing.daemon.nccl_uprobes.ras.witness import RasWitness
from probing.daemon.net.tcp.reading import namespace_sockets
from probing.daemon.processes import namespaces
from probing.daemon.processes.namespaces import own_namespace
from probing.daemon.source import Identity


def report(*comms: int, ranks: int = 2) -> bytes:
    communicators = [
        {
            "hash": f"0x{comm:x}",
            "secondary_hash": "0x1:0x2",
            "size": ranks,
            "ranks": [{"rank": rank, "status": {"init_state": 0}} for rank in range(ranks)],
            "missing_ranks": [],
        }
        for comm in comms
    ]
    return json.dumps({"nccl_version": "2.30.7", "communicators": communicators, "ras": {}}).encode()


def rank(pid: int, job: str = "job") -> Identity:
    return Identity(pid, 1_000, job, "run", "trainer", 0, 0, 2, 0)


class World(Sink):
    """Processes, readers, parsers and the sink in one; all processes are in our network namespace by default."""

    def __init__(self) -> None:
        super().__init__("comm.ras")
        self.living = [rank(100), rank(101)]
        self.environ: dict[int, dict[str, str]] = {}
        self.namespace: dict[int, str] = {}
        self.communicators: dict[int, list[Identity]] = {}
        self.asked: list[str] = []
        self.listeners: list[RasListener] = []
        # The user who listens.
        self.uid = 0

    def listen(self, content: bytes = b"", manner: str = "json", port: int = 0) -> RasListener:
        self.listeners.append(RasListener(content, manner, port=port))
        return self.listeners[-1]

    def owners(self, comm: str) -> list[Identity]:
        return self.communicators.get(int(comm, 16), [])

    def call(self, op: str, payload: bytes = b"", **args: Any) -> Any:
        self.asked.append(op)
        if op == "ras_report":
            return json.loads(handlers()[op](Message({"form": args["form"]}, payload)))
        if op == "tcp_sockets":
            (listed,) = namespace_sockets([[os.getpid(), 0]])
            return Message({}, json.dumps([[(*one[:7], self.uid) for one in listed or ()]]).encode())
        pid = args["pid"]
        if all(who.pid != pid for who in self.living):
            raise ProcessGone(f"process {pid} exited")
        if op == "identity":
            return Message({"environ": self.environ.get(pid, {})})
        fd = os.open(self.namespace.get(pid, "/proc/self/ns/net"), os.O_RDONLY)
        found = os.fstat(fd)
        return Message({"dev": found.st_dev, "inode": found.st_ino}, fds=[fd])

    def witness(self, port: int) -> RasWitness:
        return RasWitness(
            lambda: self.living,
            self.owners,
            self,
            self,
            self,
            FakeClock(real_ns=1_700_000_000 * 10**9),
            "node",
            port=port,
        )


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    for listener in made.listeners:
        listener.close()


def free_port(world: World) -> int:
    """A port without a listener."""
    listener = RasListener(b"")
    listener.close()
    return listener.port


def test_the_ranks_of_a_place_are_asked_once_together(world: World) -> None:
    world.communicators = {0xA: world.living}
    listener = world.listen(report(0xA, 0xB))
    assert world.witness(listener.port).ask_all() == 4
    assert listener.connections == 1
    found = {(row["comm"], row["comm_rank"]): row for row in world.rows}
    known, unknown = found[f"{0xA:016x}", 1], found[f"{0xB:016x}", 1]
    assert (known["job"], known["run"], known["node"], known["nccl_version"]) == ("job", "run", "node", "2.30.7")
    # It is not known which of the two answered.
    assert known["pid"] is None
    assert unknown["job"] is unknown["run"] is None


def test_a_process_alone_is_the_one_that_answered(world: World) -> None:
    world.living = [rank(100)]
    world.communicators = {0xA: world.living}
    world.witness(world.listen(report(0xA)).port).ask_all()
    assert {(row["pid"], row["start_ns"]) for row in world.rows} == {(100, 1_000)}


def test_a_hash_of_two_jobs_is_of_neither(world: World) -> None:
    world.communicators = {0xA: [rank(100), rank(200, "other")]}
    world.witness(world.listen(report(0xA)).port).ask_all()
    assert {row["job"] for row in world.rows} == {None}


def test_two_jobs_behind_one_address_are_both_asked_for(world: World) -> None:
    world.living = [rank(100), rank(200, "other")]
    world.communicators = {0xA: [rank(100)], 0xB: [rank(200, "other")]}
    listener = world.listen(report(0xA))
    world.witness(listener.port).ask_all()
    # Only one of them ever answers: it is reported once, and the tries end.
    assert len(world.rows) == 2
    assert listener.connections == 6
    both = world.listen(report(0xA, 0xB))
    world.witness(both.port).ask_all()
    assert both.connections == 1
    assert {row["job"] for row in world.rows} == {"job", "other"}


def test_a_process_that_is_stopped_is_a_reason(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ras_client, "GREETING_S", 0.02)
    listener = world.listen(manner="mute")
    witness = world.witness(listener.port)
    assert [witness.ask_all(), witness.ask_all()] == [0, 0]
    assert "does not answer" in witness.reason
    # Reported once, tried again each time.
    assert len(world.losses) == 1
    # A connection is made when the kernel queues it; the listener counts it when it accepts it.
    until(lambda: listener.connections >= 8)
    assert listener.connections == 8


class Slow(World):
    """A user with ``count`` processes, each with another address and a job of its own, before those of another user.
    ``takes``: the seconds of each request about the user's processes, by its name.
    """

    def __init__(self, count: int, takes: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.now, self.takes = Now(1_000.0), takes
        monkeypatch.setattr(ras_witness, "time", SimpleNamespace(monotonic=self.now))
        slow = [rank(pid, f"job {pid}")._replace(owner=1007) for pid in range(200, 200 + count)]
        self.environ = {who.pid: {"NCCL_RAS_ADDR": f"127.0.0.1:{5_000 + who.pid}"} for who in slow}
        self.living = [*slow, *self.living]
        self.communicators = {0xA: [rank(100)]}
        self.tried: list[int] = []

    def call(self, op: str, payload: bytes = b"", **args: Any) -> Any:
        pid = args["targets"][0][0] if "targets" in args else args.get("pid", 0)
        if pid >= 200 and op in self.takes:
            self.tried.append(pid)
            self.now.now += self.takes[op]
            raise RasSilent("slow") if op == "tcp_sockets" else TargetTimeout("slow")
        return super().call(op, payload, **args)


def test_places_of_a_user_keep_no_other_user_from_being_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    world = Slow(100, {"tcp_sockets": 0.0}, monkeypatch)
    try:
        assert world.witness(world.listen(report(0xA)).port).ask_all() == 2
    finally:
        world.listeners[0].close()


@pytest.mark.parametrize("op", ["tcp_sockets", "identity"])
def test_places_of_a_user_that_are_slow_let_the_others_wait_for_one(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = Slow(40, {op: 8.0}, monkeypatch)
    try:
        witness = world.witness(world.listen(report(0xA)).port)
        assert witness.ask_all() == 2
        # His own others wait for the next rounds, in which all of them are asked.
        assert world.now.now <= 1_000.0 + ras_witness.USER_S + 8.0
        if op == "tcp_sockets":
            first = list(world.tried)
            witness.ask_all()
            assert not set(first) & set(world.tried[len(first) :])
    finally:
        world.listeners[0].close()


def test_a_listener_that_is_slow_is_not_asked_for_each_job(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    now = Now(1_000.0)
    monkeypatch.setattr(ras_witness, "time", SimpleNamespace(monotonic=now))
    call = world.call

    def slow(op: str, *args: Any, **more: Any) -> Any:
        now.now += 20.0 if op == "ras_report" else 0.0
        return call(op, *args, **more)

    monkeypatch.setattr(world, "call", slow)
    world.living = [rank(100 + n, f"job {n}") for n in range(5)]
    listener = world.listen(report(0xA))
    assert world.witness(listener.port).ask_all() == 2
    assert listener.connections == 2


def test_who_reports_ever_other_communicators_fills_no_log(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ras_witness, "USER_ROWS", 100)
    reported = iter(range(1_000))
    call = world.call

    def endless(op: str, payload: bytes = b"", **args: Any) -> Any:
        return call(op, report(next(reported), ranks=60) if op == "ras_report" else payload, **args)

    monkeypatch.setattr(world, "call", endless)
    world.living = [rank(100 + n, f"job {n}") for n in range(5)]
    assert world.witness(world.listen(report(0xA)).port).ask_all() == 120


def test_where_nobody_listens_is_asked_less_and_less_often(world: World) -> None:
    port = free_port(world)
    witness = world.witness(port)
    for _ in range(16):
        witness.ask_all()
    assert world.asked.count("tcp_sockets") == 4
    assert witness.reason == ""
    assert str(port) in witness.detail
    assert not world.losses
    world.listen(report(0xA), port=port)
    while not witness.ask_all():
        assert world.asked.count("tcp_sockets") < 6
    assert witness.detail == ""


def test_what_a_user_reports_is_said_of_no_job_of_another_user(world: World) -> None:
    # GIVEN a user whose own process says where its RAS listens, and who knows the hash of another job
    world.uid = 1007
    world.living = [rank(200, "mine")._replace(owner=1007)]
    world.communicators = {0xA: [rank(100)], 0xB: world.living}
    world.witness(world.listen(report(0xA, 0xB)).port).ask_all()
    assert {(row["comm"], row["job"]) for row in world.rows} == {(f"{0xA:016x}", None), (f"{0xB:016x}", "mine")}
    # A communicator with the hash of another user's is no second job of it.
    world.clear()
    world.communicators = {0xB: [rank(100), *world.living]}
    world.witness(world.listen(report(0xB)).port).ask_all()
    assert {row["job"] for row in world.rows} == {"mine"}


def test_who_listens_at_the_port_of_a_job_is_not_asked_about_it(world: World) -> None:
    # GIVEN ranks of two users behind one address, at which only the second listens
    world.living = [rank(100), rank(200, "mine")._replace(owner=1007)]
    world.communicators = {0xA: [rank(100)]}
    world.uid = 1007
    listener = world.listen(report(0xA))
    world.witness(listener.port).ask_all()
    assert {row["job"] for row in world.rows} == {None}
    # and then a user who has no rank
    world.clear()
    world.uid = 1008
    asked, witness = listener.connections, world.witness(listener.port)
    assert witness.ask_all() == 0
    reason = f"the listener at 127.0.0.1:{listener.port} belongs to uid 1008, which owns no rank that uses this address"
    assert witness.reason == reason
    assert listener.connections == asked


def test_the_listener_of_the_address_itself_gets_the_connections() -> None:
    inet, inet6, port = socket.AF_INET, socket.AF_INET6, 28028
    any6, mapped = "0" * 32, "0000000000000000FFFF00000100007F"
    of_port_one = (inet, 10, "0100007F", 1, "00000000", 0, 17, 1)
    connection = (inet, 1, "0100007F", port, "0100007F", 99, 17, 2)
    one_v4, any_v4 = (inet, 10, "0100007F", port, "00000000", 0, 17, 3), (inet, 10, "00000000", port, "0", 0, 17, 4)
    one_v6 = (inet6, 10, "00000000000000000000000001000000", port, any6, 0, 17, 5)
    any_v6, mapped_v6 = (inet6, 10, any6, port, any6, 0, 17, 6), (inet6, 10, mapped, port, any6, 0, 17, 7)
    for listed, host, uid in (
        ([of_port_one, connection, one_v6, any_v6, one_v4], "127.0.0.1", 3),
        ([of_port_one, one_v4, any_v4], "10.0.0.1", 4),
        ([one_v6, any_v6], "127.0.0.1", 6),
        ([one_v6, mapped_v6], "127.0.0.1", 7),
        ([one_v4, one_v6], "::1", 5),
        ([one_v4, any_v6], "::1", 6),
        ([of_port_one, connection, one_v6], "127.0.0.1", None),
        ([one_v4, mapped_v6], "::1", None),
    ):
        assert listener_at(listed, host, port) == uid


def test_a_stranger_at_the_port_is_a_loss_once(world: World) -> None:
    witness = world.witness(world.listen(manner="stranger").port)
    witness.ask_all()
    witness.ask_all()
    assert [loss.reason for loss in world.losses] == ["the listener at this address is not NCCL RAS"]
    world.living = []
    witness.ask_all()
    assert witness.reason == ""


def test_a_report_without_end_is_asked_for_less_and_less_often(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ras_client, "MAX_REPORT", 1_000_000)
    listener = world.listen(manner="endless")
    witness = world.witness(listener.port)
    for _ in range(16):
        assert witness.ask_all() == 0
    assert listener.connections == 4
    assert "more than" in witness.reason
    assert witness.detail == ""
    assert len(world.losses) == 1


def test_a_malformed_report_is_a_loss(world: World) -> None:
    witness = world.witness(world.listen(b"{").port)
    assert witness.ask_all() == 0
    assert "not JSON" in world.losses[0].reason
    witness = world.witness(world.listen(b'{"communicators": [3]}').port)
    assert witness.ask_all() == 0
    assert world.losses[1].count == 1


def test_environments_give_the_address_or_switch_ras_off(world: World) -> None:
    listener = world.listen(report(0xA))
    world.living = [rank(1), rank(2), rank(3)]
    world.environ = {
        1: {"NCCL_RAS_ADDR": f"localhost:{listener.port}"},
        2: {"NCCL_RAS_ENABLE": "0"},
        3: {"NCCL_RAS_ADDR": "example.org:5000"},
    }
    witness = world.witness(free_port(world))
    assert witness.ask_all() == 2
    assert "names are not looked up" in witness.reason
    world.environ[3] = {"NCCL_RAS_ENABLE": "0"}
    witness.process_replaced(3, 1_000)
    witness.ask_all()
    assert witness.reason == ""
    assert world.asked.count("identity") == 4


def test_another_namespace_needs_a_right(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    # Any other file: it is another (device, inode), and no namespace that can be entered.
    world.namespace = {100: "/proc/self/ns/uts", 101: "/proc/self/ns/uts"}
    witness = world.witness(world.listen(report(0xA)).port)
    before = len(list(Path("/proc/self/fd").iterdir()))
    assert witness.ask_all() == 0
    assert witness.reason
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    refused = type("Libc", (), {"setns": staticmethod(lambda *_: -1)})
    monkeypatch.setattr(namespaces, "_libc", refused)
    monkeypatch.setattr(namespaces.ctypes, "get_errno", lambda: errno.EPERM)
    # The first of them is left out.
    witness.ask_all()
    witness.ask_all()
    assert witness.reason == "the process is in another network namespace, which needs CAP_SYS_ADMIN"
    assert [loss.pid for loss in world.losses] == [None, None]


@pytest.mark.parametrize(
    ("named", "hosts", "port"),
    [
        ("", ("127.0.0.1", "::1"), 28028),
        ("localhost:4000", ("127.0.0.1", "::1"), 4000),
        ("127.0.0.2:4000", ("127.0.0.2",), 4000),
        ("0.0.0.0:4000", ("127.0.0.1",), 4000),
        ("[::]:4000", ("::1", "127.0.0.1"), 4000),
        ("[::1]:4000", ("::1",), 4000),
        ("10.1.2.3:4000", ("10.1.2.3",), 4000),
    ],
)
def test_addresses(named: str, hosts: tuple[str, ...], port: int) -> None:
    assert ras_address({"NCCL_RAS_ADDR": named}, 28028) == RasAddress(hosts, port)


@pytest.mark.parametrize("named", ["host", "host:1", ":4000", "a:b:4000", "127.0.0.1:22", "127.0.0.1:70000", "x" * 600])
def test_addresses_that_are_not_asked(named: str) -> None:
    with pytest.raises(UnsupportedTarget):
        ras_address({"NCCL_RAS_ADDR": named}, 28028)


def test_another_machine_is_not_connected_to() -> None:
    # TEST-NET-1 of RFC 5737: no machine has it.
    with pytest.raises(UnsupportedTarget, match="not an address of this machine"):
        connect_ras(RasAddress(("192.0.2.1",), 4000))


def test_our_own_namespace_is_where_we_are() -> None:
    found = Path("/proc/self/ns/net").stat()
    assert own_namespace() == (found.st_dev, found.st_ino)


def test_a_reader_that_does_not_answer_is_a_reason(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def call(op: str, *args: Any, **more: Any) -> Any:
        raise TargetTimeout("slow")

    monkeypatch.setattr(world, "call", call)
    witness = world.witness(free_port(world))
    assert witness.ask_all() == 0
    assert witness.reason == "slow"
