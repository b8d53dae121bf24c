"""Sums of connections by process and path, from readings made here."""

from __future__ import annotations

import json
import math
import os
import socket
from typing import Any

import numpy as np
import pytest
from fakes import TOTALS, Processes, Readers, Sink

from probing.api.errors import PrivilegeError, TargetTimeout
from probing.api.tables.net import PATHS, TCP
from probing.daemon.clock import FakeClock
from probing.daemon.ipc import Message
from probing.daemon.net.tcp import reading, source
from probing.daemon.net.tcp import sockets as socket_source
from probing.daemon.net.tcp.connections import rises
from probing.daemon.net.tcp.proc_tcp import as_sockets
from probing.daemon.net.tcp.reading import TOTALS as NAMES
from probing.daemon.net.tcp.reading import held_sockets, namespace_totals
from probing.daemon.net.tcp.sock_diag import LISTEN, SOCKET, SYN_SENT, address_text
from probing.daemon.net.tcp.source import AGAIN_NS, Quiet, TcpSource
from probing.daemon.source import Identity

SECOND = 10**9
NETNS = 4026531840
TRAINER = Identity(100, 7, "j", "r", "trainer", 0)
OTHER = Identity(101, 8, "j", "r", "trainer", 1)


def sockets(*rows: dict[str, Any]) -> np.ndarray:
    """Connections from 10.0.0.1 to 10.0.0.2, with these values."""
    found = np.zeros(len(rows), SOCKET)
    for one, row in zip(found, rows, strict=True):
        values = {"family": socket.AF_INET, "state": 1, "local": "10.0.0.1", "peer": "10.0.0.2", "cwnd": 10, **row}
        for name, value in values.items():
            one[name] = np.void(socket.inet_aton(value) + bytes(12)) if name in ("local", "peer") else value
    return found


class World:
    """A source whose kernel lists ``now``, and whose processes hold ``held`` {pid: inodes}."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = sockets()
        self.held: dict[int, list[int]] = {}
        self.seconds = 1000.0
        self.reads = Readers(sockets=lambda request: [[NETNS, self.held.get(pid, [])] for pid, _ in request["targets"]])
        self.known, self.kept, self.clock = Processes(TRAINER, OTHER), Sink(), FakeClock(SECOND, 5 * SECOND)
        self.source = TcpSource(self.reads, self.known, self.kept, self.clock, "n1", 1.0, on=True)
        # The readings of a busy machine take long.
        monkeypatch.setattr(source, "_SHARE", float("inf"))
        monkeypatch.setattr(source, "read_sockets", lambda *_: self.now)
        monkeypatch.setattr(source.time, "monotonic", lambda: self.seconds)
        monkeypatch.setattr(source.time, "monotonic_ns", lambda: int(self.seconds * SECOND))
        monkeypatch.setattr("probing.daemon.net.tcp.sockets.own_namespace", lambda: (4, NETNS))

    def tick(self, *rows: dict[str, Any], after: float = 2.0) -> list[dict[str, Any]]:
        self.now = sockets(*rows)
        self.seconds += after
        self.clock.advance(int(after * SECOND))
        self.source.tick()
        return self.kept.take("net.tcp")


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = World(monkeypatch)
    yield made
    made.source.stop()


def test_a_row_a_process_and_peer_with_what_was_done(world: World) -> None:
    world.held = {100: [11, 12], 101: [13]}
    base = {"bytes_sent": 1000, "segs_out": 10, "retrans": 2, "rtt": 100, "min_rtt": 40}
    rows = [
        {"inode": 11, "cookie": 1, **base},
        {"inode": 12, "cookie": 2, **base},
        {"inode": 13, "cookie": 3, **base},
        {"inode": 99, "cookie": 4, **base, "peer": "8.8.8.8"},
    ]
    assert world.tick(*rows) == []
    later = [
        {**rows[0], "bytes_sent": 1000 + 7919, "segs_out": 31, "retrans": 5, "rtt": 300, "unread": 17, "busy": 13},
        {**rows[1], "bytes_received": 104729, "retransmits": 3, "lost": 2, "unacked": 5, "cwnd": 1, "min_rtt": 23},
        rows[2], {**rows[3], "retrans": 9000},
    ]  # fmt: skip
    first, second = world.tick(*later)
    assert (first["job"], first["run"], first["rank"], first["pid"], first["start_ns"]) == ("j", "r", 0, 100, 7)
    assert (first["local_address"], first["peer_address"], first["peer_local"]) == ("10.0.0.1", "10.0.0.2", False)
    assert (first["interval_ns"], first["sockets"], first["netns"]) == (2 * SECOND, 2, NETNS)
    assert (first["bytes_sent"], first["bytes_received"], first["segs_out"], first["retrans"]) == (7919, 104729, 21, 3)
    assert (first["rtt_ns"], first["rtt_max_ns"], first["rtt_min_ns"]) == (200_000, 300_000, 23_000)
    assert (first["timeouts"], first["longest_timeouts"], first["lost"], first["unacked"]) == (1, 3, 2, 5)
    assert (first["unread_bytes"], first["busy_ns"], first["cwnd_min"]) == (17, 13_000, 1)
    # Nothing went on in the other; a first row shows that it is there.
    assert (second["rank"], second["bytes_sent"], second["retrans"], second["rtt_ns"]) == (1, 0, 0, 100_000)
    assert [row["rank"] for row in world.tick(*later[:2], later[2])] == [0]
    (path, *_) = world.kept.take("net.paths")
    assert (path["job"], path["peer_address"], path["processes"], path["sockets"]) == ("j", "10.0.0.2", 2, 3)
    assert (path["retrans"], path["bytes_sent"], path["rtt_max_ns"]) == (3, 7919, 300_000)


def test_the_owners_of_processes_take_turns_when_their_sockets_are_listed() -> None:
    # GIVEN a user whose processes are older and have more sockets than a listing takes
    many = [Identity(200 + n, 1, "m", "r", "trainer", n, owner=7) for n in range(3)]
    loader, trainer = (
        Identity(98, 3, "j", "r", "data_loader", owner=8),
        Identity(99, 4, "j", "r", "trainer", 0, owner=8),
    )
    asked: list[int] = []

    def listed(request: dict[str, Any]) -> list[Any]:
        asked[:] = [pid for pid, _ in request["targets"]]
        return [[NETNS, [pid, 1000]] for pid in asked]

    owners = socket_source.Owners(Readers(sockets=listed))  # type: ignore[arg-type]
    owners.refresh([*many, loader, trainer])
    # THEN the sockets of the other user are listed in their turn
    assert asked == [200, 99, 201, 98, 202]
    # and a socket that processes share is that of the first trainer, whichever was listed first
    names = [owners.processes[at].pid for at in owners.of(np.array([98, 99, 202, 1000])).tolist()]
    assert names == [98, 99, 202, 200]


def test_both_ends_here_are_no_path(world: World) -> None:
    world.held = {100: [11]}
    rows = [
        {"inode": 11, "cookie": 1, "bytes_sent": 5, "peer": "10.0.0.9"},
        {"inode": 98, "cookie": 2, "local": "10.0.0.9", "peer": "10.0.0.1"},
    ]
    world.tick(*rows)
    (row,) = world.tick({**rows[0], "bytes_sent": 6}, rows[1])
    assert row["peer_local"]
    assert world.kept.take("net.paths") == []


V6 = socket.inet_pton(socket.AF_INET6, "::ffff:10.0.0.1")


def ends(number: int, one: int, other: int, **more: Any) -> list[dict[str, Any]]:
    """Both ends of a connection between two sockets (inodes) of this host, by the ports 1000 + number and 29500."""
    here = {"peer": "10.0.0.1", "local_port": 1000 + number, "peer_port": 29500, "inode": one, "cookie": 2 * number}
    there = {**here, "local_port": 29500, "peer_port": 1000 + number, "inode": other, "cookie": 2 * number + 1}
    return [{**here, **more}, {**there, **more}]


def test_the_rank_at_the_other_end(world: World) -> None:
    third = Identity(102, 9, "j", "r", "trainer", 2)
    world.known.who = [TRAINER, OTHER, third, Identity(103, 9, "else", "r", "trainer", 3)]
    world.held = {100: [11, 12, 13, 14], 101: [21, 22], 102: [31], 103: [41]}
    before = [
        *ends(1, 11, 21, bytes_sent=1),
        *ends(2, 12, 22, bytes_sent=1),
        *ends(3, 13, 31, bytes_sent=1),
        # A process of another job, and one that nobody watches.
        *ends(4, 14, 41, bytes_sent=1),
        *ends(5, 11, 99, bytes_sent=1),
        # The same ports, but at another host.
        {"inode": 11, "cookie": 77, "local_port": 1003, "peer_port": 29500, "bytes_sent": 1},
    ]
    world.tick(*before)
    rows = world.tick(*({**row, "bytes_sent": 101} for row in before))
    found = sorted((row["rank"], row["peer_address"], row["peer_rank"] or 0, row["sockets"]) for row in rows)
    assert found == [
        (0, "10.0.0.1", 0, 2),
        (0, "10.0.0.1", 1, 2),
        (0, "10.0.0.1", 2, 1),
        (0, "10.0.0.2", 0, 1),
        (1, "10.0.0.1", 0, 2),
        (2, "10.0.0.1", 0, 1),
        (3, "10.0.0.1", 0, 1),
    ]
    assert {row["peer_rank"] for row in rows if row["rank"] in (1, 2)} == {0}
    assert {row["peer_rank"] for row in rows if row["rank"] == 3 or row["peer_address"] == "10.0.0.2"} == {None}


def test_the_rank_at_the_other_end_of_ipv4_inside_ipv6(world: World) -> None:
    world.held = {100: [11], 101: [21]}
    one, other = ends(1, 11, 21, bytes_sent=1)
    world.now = sockets(one, other)
    world.now[1]["family"] = socket.AF_INET6
    world.now[1]["local"] = world.now[1]["peer"] = np.void(V6)
    listed = world.now.copy()
    for sent in (1, 5):
        world.now = listed.copy()
        world.now["bytes_sent"] = sent
        world.seconds += 2
        world.clock.advance(2 * SECOND)
        world.source.tick()
    assert [(row["rank"], row["peer_rank"]) for row in world.kept.take("net.tcp")] == [(0, 1), (1, 0)]


def test_a_new_connection_counts_from_its_begin_and_a_closed_one_not_at_all(world: World) -> None:
    world.held = {100: [11, 12]}
    world.tick({"inode": 11, "cookie": 1, "bytes_sent": 1 << 40})
    (row,) = world.tick({"inode": 12, "cookie": 2, "bytes_sent": 17})
    assert (row["bytes_sent"], row["sockets"]) == (17, 1)


def test_counters_of_32_bits_wrap_and_nothing_is_negative() -> None:
    before = sockets({"cookie": 1, "segs_out": 2**32 - 5, "bytes_sent": 100}, {"cookie": 2, "retrans": 7})
    now = sockets({"cookie": 2, "retrans": 7}, {"cookie": 1, "segs_out": 6, "bytes_sent": 90})
    found = rises(now, before)
    assert found["segs_out"].tolist() == [0, 11]
    assert found["bytes_sent"].tolist() == [0, 0]
    assert rises(now, before[:0])["retrans"].tolist() == [7, 0]


def test_a_connection_that_is_being_made_has_no_round_trip(world: World) -> None:
    world.held = {100: [11]}
    row = {"inode": 11, "cookie": 1, "state": SYN_SENT, "retransmits": 2, "retrans": 2}
    world.tick(row)
    (found,) = world.tick({**row, "retrans": 3})
    assert (found["connecting"], found["rtt_ns"], found["rtt_min_ns"], found["silent_ns"]) == (1, None, None, None)
    assert (found["retrans"], found["timeouts"]) == (1, 1)


def test_a_shared_socket_is_that_of_the_trainer(world: World) -> None:
    loader = Identity(90, 1, "j", "r", "data_loader", None)
    world.known.who = [loader, TRAINER]
    world.held = {90: [11], 100: [11]}
    world.tick({"inode": 11, "cookie": 1})
    (row,) = world.tick({"inode": 11, "cookie": 1, "bytes_sent": 5})
    assert (row["role"], row["pid"]) == ("trainer", 100)


def test_descriptors_are_looked_at_for_new_processes_and_sockets_only(world: World) -> None:
    world.held = {100: [11]}
    row = {"inode": 11, "cookie": 1}
    for _ in range(5):
        world.tick(row)
    assert world.reads.count("sockets") == 1
    # A stranger's connection is looked up once, and not again while it lasts.
    for _ in range(5):
        world.tick(row, {"inode": 55, "cookie": 5})
    assert world.reads.count("sockets") == 2
    world.held[100].append(12)
    world.tick(row, {"inode": 12, "cookie": 6}, after=10)
    (found,) = world.tick(row, {"inode": 12, "cookie": 6, "bytes_sent": 3})
    assert (found["sockets"], world.reads.count("sockets")) == (2, 3)
    world.known.who = [TRAINER, OTHER, Identity(102, 9, "j", "r", "trainer", 2)]
    world.tick(row)
    assert world.reads.count("sockets") == 4
    world.tick(row, after=socket_source.AT_LEAST_S)
    assert world.reads.count("sockets") == 5


def test_a_process_that_is_not_reached_in_time_keeps_its_sockets(world: World) -> None:
    world.held = {100: [11]}
    row = {"inode": 11, "cookie": 1}
    world.tick(row)
    world.reads.answers["sockets"] = lambda request: [None] * len(request["targets"])
    world.tick(row, {"inode": 55, "cookie": 5})
    assert world.reads.count("sockets") == 1
    # A stranger's connection causes a listing, which does not reach the trainer.
    (found,) = world.tick({**row, "bytes_sent": 7}, {"inode": 55, "cookie": 5}, after=socket_source.SOON_S)
    assert (found["pid"], found["bytes_sent"], world.reads.count("sockets")) == (100, 7, 2)


def test_the_sockets_of_processes_that_are_not_reached_are_bounded(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN room for three sockets
    monkeypatch.setattr(socket_source, "MAX_SOCKETS", 3)
    world.held = {100: [11, 12], 101: [21]}
    rows = [{"inode": inode, "cookie": inode} for inode in (11, 21)]
    world.tick(*rows)
    world.tick(*rows, {"inode": 55, "cookie": 5})
    # WHEN one process is not reached, and the other has two
    world.reads.answers["sockets"] = lambda _: [None, [NETNS, [21, 22]]]
    moved = [{**row, "bytes_sent": 7} for row in rows]
    (found,) = world.tick(*moved, {"inode": 55, "cookie": 5}, after=socket_source.SOON_S)
    # THEN there is no room for what the first had
    assert (found["pid"], world.reads.count("sockets")) == (101, 2)


def test_a_look_that_takes_long_but_little_cpu_is_taken_again_soon(world: World) -> None:
    held = world.reads.answers["sockets"]
    cpu_s = 0.005

    def slowly(request: dict[str, Any]) -> Message:
        world.seconds += 1
        return Message({"cpu_s": cpu_s}, json.dumps(held(request)).encode())

    world.reads.answers["sockets"] = slowly
    world.tick()
    # New connections, whose owners are not known yet.
    for cookie in range(2, 5):
        world.tick({"inode": cookie, "cookie": cookie}, after=socket_source.SOON_S)
    assert world.reads.count("sockets") == 3
    cpu_s = 0.1
    for cookie in range(5, 12):
        world.tick({"inode": cookie, "cookie": cookie}, after=socket_source.SOON_S)
    # At most a part in 400 of a core: 40 s.
    assert world.reads.count("sockets") == 4


def test_a_reader_that_does_not_answer_is_not_asked_each_second(world: World) -> None:
    world.reads.answers["sockets"] = lambda _: TargetTimeout("process 0 could not be read in 2 s (sockets)")
    for _ in range(3):
        world.tick({"inode": 11, "cookie": 1}, after=1)
    assert world.source.states(TOTALS)[0].state == "degraded"
    assert world.reads.count("sockets") == 1


def test_a_namespace_that_cannot_be_entered_is_reported(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = TargetTimeout("process 100 could not be read in 2 s (network)")
    world.reads.answers["tcp_totals"] = world.reads.answers["tcp_sockets"] = lambda _: [None]
    world.reads.answers["network"] = lambda _: refused
    monkeypatch.setattr("probing.daemon.net.tcp.sockets.own_namespace", lambda: (4, 1))
    world.tick()
    world.tick()
    (state,) = world.source.states(TOTALS)
    assert (state.state, state.reason) == ("degraded", f"1 network namespace not read: {refused.message}")
    assert world.reads.count("network") == 1


def test_a_namespace_that_cannot_be_entered_has_its_sums(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    totals = [[7, 1000, 2000, 17]]
    world.reads.answers["network"] = lambda _: TargetTimeout("no")
    world.reads.answers["tcp_totals"] = lambda _: totals
    world.reads.answers["tcp_sockets"] = lambda _: [None]
    monkeypatch.setattr("probing.daemon.net.tcp.sockets.own_namespace", lambda: (4, 1))
    assert world.tick() == []
    totals[0] = [9, 1031, 2001, 40]
    (row,) = world.tick()
    assert (row["pid"], row["rank"], row["netns"], row["interval_ns"]) == (100, 0, NETNS, 2 * SECOND)
    assert (row["sockets"], row["segs_out"], row["segs_in"], row["retrans"]) == (9, 31, 1, 23)
    assert (row["peer_address"], row["bytes_sent"], row["rtt_ns"]) == (None, None, None)
    # Another namespace of the same number, and none at all.
    totals[0] = [1, 5, 5, 0]
    assert world.tick() == []
    totals[0] = None  # type: ignore[call-overload]
    assert world.tick() == []


def test_a_namespace_that_cannot_be_entered_has_its_sockets(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.held = {100: [11, 12]}
    listed = [
        [socket.AF_INET, 1, "0100000A", 4001, "0200000A", 29500, 11, 5],
        [
            socket.AF_INET6,
            1,
            "0000000000000000FFFF00000100000A",
            4002,
            "B80D0120000000000000000001000000",
            29500,
            12,
            1000,
        ],
        [socket.AF_INET, LISTEN, "00000000", 7, "00000000", 0, 12, 1000],
        # Of a process that is not watched, and a connection that is over.
        [socket.AF_INET, 1, "0100000A", 4004, "0300000A", 5, 99, 1000],
        [socket.AF_INET, 6, "0100000A", 4005, "0300000A", 5, 0, 1000],
    ]
    world.reads.answers["network"] = lambda _: TargetTimeout("no")
    world.reads.answers["tcp_totals"] = lambda _: [None]
    world.reads.answers["tcp_sockets"] = lambda _: [listed]
    monkeypatch.setattr("probing.daemon.net.tcp.sockets.own_namespace", lambda: (4, 1))

    def ends() -> list[tuple[str, str, str | None, int | None]]:
        rows = world.source.live_tables["net.sockets"](world.clock.pair()).to_pylist()
        return [(row["state"], row["local_address"], row["peer_address"], row["peer_port"]) for row in rows]

    world.tick()
    assert ends() == [
        ("open", "10.0.0.1", "10.0.0.2", 29500),
        ("open", "10.0.0.1", "2001:db8::1", 29500),
        ("listens", "0.0.0.0", None, None),
    ]
    # A closed one is known for a while, and a reader that does not answer closes all.
    del listed[0]
    world.tick()
    assert ends()[-1] == ("closed", "10.0.0.1", "10.0.0.2", 29500)
    world.reads.answers["tcp_sockets"] = lambda _: TargetTimeout("no answer")
    world.tick()
    assert {state for state, *_ in ends()} == {"closed"}


def test_the_kernel_lists_sockets_of_both_families() -> None:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("::1", 0), family=socket.AF_INET6) as six:
        [listed, gone] = reading.namespace_sockets([[os.getpid(), 0], [os.getpid(), 1]])
        found = {row["inode"]: row for row in as_sockets(listed or ())}
        users = {inode: uid for *_, inode, uid in listed or ()}
        for server in (one, six):
            assert users[os.fstat(server.fileno()).st_ino] == os.geteuid()
            row = found[os.fstat(server.fileno()).st_ino]
            host, port = server.getsockname()[:2]
            assert (row["state"], row["local_port"]) == (LISTEN, port)
            assert address_text(int(row["family"]), row["local"].tobytes()) == host
    assert gone is None


def test_a_process_that_may_not_be_read_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise PrivilegeError("process 1 may not be read")

    monkeypatch.setattr(reading.Target, "link", refused)
    monkeypatch.setattr(reading.Target, "read", refused)
    assert held_sockets([[os.getpid(), 0]], math.inf) == [None]
    assert namespace_totals([[os.getpid(), 0]]) == [None]
    assert reading.namespace_sockets([[os.getpid(), 0]]) == [None]


def test_sums_of_our_own_namespace_are_read() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()):
        (found, gone) = namespace_totals([[os.getpid(), 0], [2**22 - 1, 0]])
    assert gone is None
    assert found is not None
    assert len(found) == len(NAMES)
    assert all(value is not None for value in found)
    assert found[0] >= 2


def test_every_column_is_filled(world: World) -> None:
    world.held = {100: [11], 101: [21]}
    known = {"rtt": 9, "min_rtt": 5, "delivery_rate": 7}
    rows = [*ends(1, 11, 21, **known), {"inode": 11, "cookie": 9, **known}]
    world.tick(*rows)
    found, *_ = world.tick(*({**row, "bytes_sent": 1} for row in rows))
    assert set(found) == {column.name for column in TCP.columns}
    assert [name for name, value in found.items() if value is None] == []
    (path,) = world.kept.take("net.paths")
    assert set(path) == {column.name for column in PATHS.columns}
    assert [name for name, value in path.items() if value is None] == []


def test_too_many_peers_are_counted(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "MAX_ROWS", 4)
    world.held = {100: list(range(1, 11))}
    rows = [{"inode": n, "cookie": n, "peer": f"10.0.1.{n}"} for n in range(1, 11)]
    world.tick(*rows)
    found = world.tick(*({**row, "retrans": row["cookie"]} for row in rows))
    assert sorted(row["retrans"] for row in found) == [7, 8, 9, 10]
    assert [loss.count for loss in world.kept.losses] == [6, 6]


def test_quiet_rows_come_once_a_minute() -> None:
    quiet = Quiet()
    idle = np.array([False])
    assert quiet.wanted(["a"], idle, 0).tolist() == [True]
    assert quiet.wanted(["a"], idle, AGAIN_NS - 1).tolist() == [False]
    assert quiet.wanted(["a"], ~idle, AGAIN_NS - 1).tolist() == [True]
    assert quiet.wanted(["a"], idle, AGAIN_NS).tolist() == [False]
    assert quiet.wanted(["a"], idle, 2 * AGAIN_NS).tolist() == [True]


def test_switched_off_it_reads_nothing() -> None:
    reads = Readers()
    made = TcpSource(reads, Processes(TRAINER), Sink(), FakeClock(), "n1", 1.0, on=False)
    made.tick()
    assert (reads.asked, made.states(TOTALS)[0].state) == ([], "stopped")
