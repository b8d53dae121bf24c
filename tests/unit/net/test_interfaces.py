"""The source of net.interfaces on texts as /proc/net/dev has them, and a tree as /sys/class/net."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
from fakes import TOTALS, Processes, Readers, Sink
from hypothesis import given
from hypothesis import strategies as st
from infiniband import write

from probing.api.errors import TargetTimeout
from probing.api.tables.net import INTERFACE_COUNTERS, INTERFACES
from probing.daemon.clock import FakeClock
from probing.daemon.net.interfaces import source as interface_source
from probing.daemon.net.interfaces.addresses import read_addresses
from probing.daemon.net.interfaces.reading import read_details, read_links
from probing.daemon.net.interfaces.source import InterfaceSource, parse_dev
from probing.daemon.processes.namespaces import own_namespace
from probing.daemon.source import Identity, ProcessKey

SECOND = 10**9
HEAD = "Inter-|   Receive                  |  Transmit\n face |bytes packets |bytes packets\n"
ETH0 = {"kind": "physical", "operstate": "up", "mtu": 1500, "speed": 100_000, "carrier_changes": 3, "ifindex": 2}


def line(name: str, **values: int) -> str:
    """``values`` by column of net.interfaces; the others are 0."""
    order = (
        "rx_bytes",
        "rx_packets",
        "rx_errors",
        "rx_dropped",
        "rx_fifo_errors",
        "rx_frame_errors",
        "",
        "multicast",
        "tx_bytes",
        "tx_packets",
        "tx_errors",
        "tx_dropped",
        "",
        "",
        "tx_carrier_errors",
        "",
    )
    return f"  {name}: " + "  ".join(str(values.get(column, 0)) for column in order) + "\n"


class World:
    def __init__(self) -> None:
        self.found: list[list[Any] | None] = []
        self.details: Any = {"eth0": ETH0, "lo": {**ETH0, "kind": "loopback", "ifindex": 1}}
        self.namespaces: dict[int, ProcessKey] = {}
        self.reads = Readers(links=lambda _: self.found, link_details=lambda _: self.details)
        self.parsers = Readers(interface_addresses=lambda _: None)
        self.kept, self.clock = Sink(), FakeClock(SECOND, 5 * SECOND)
        known = Processes(Identity(77, 7, "j", "r", "trainer", 1))
        self.source = InterfaceSource(
            self.reads,
            self.parsers,
            known,
            lambda: self.namespaces,
            self.kept,
            self.clock,
            "n1",
            1.0,  # type: ignore[arg-type]
        )
        self.parsers.call = lambda *_, **__: {"2": ["10.0.0.1", "fe80::1"]}  # type: ignore[method-assign, assignment]

    def tick(self, *texts: str | None) -> list[dict[str, Any]]:
        netns = [own_namespace()[1], *self.namespaces]
        self.found = [text and [number, text] for number, text in zip(netns, texts, strict=False)]  # type: ignore[misc]
        self.clock.advance(SECOND)
        self.source.tick()
        return self.kept.take("net.interfaces")


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(interface_source, "DETAILS_S", 0.0)
    return World()


def test_a_row_a_physical_interface_with_rates(world: World) -> None:
    (row,) = world.tick(HEAD + line("eth0", rx_bytes=1000, tx_bytes=2000) + line("lo", rx_bytes=5))
    assert (row["interface"], row["kind"], row["operstate"], row["mtu"]) == ("eth0", "physical", "up", 1500)
    assert (row["speed_gbps"], row["addresses"], row["carrier_changes"]) == (100.0, "10.0.0.1, fe80::1", 3)
    assert (row["rx_bytes"], row["interval_ns"], row["rx_gbps"], row["rx_dropped_new"]) == (1000, None, None, None)
    world.details = {**world.details, "eth0": {**ETH0, "carrier_changes": 5, "speed": None}}
    (row,) = world.tick(
        HEAD + line("eth0", rx_bytes=1000 + 10**9, tx_bytes=2000, rx_packets=17, tx_dropped=23) + line("lo", rx_bytes=5)
    )
    assert (row["rx_gbps"], row["tx_gbps"], row["rx_packets_rate"]) == (pytest.approx(8.0), 0, 17)
    assert (row["tx_dropped_new"], row["carrier_changes_new"], row["rx_errors_new"]) == (23, 2, 0)
    assert (row["speed_gbps"], row["interval_ns"]) == (None, SECOND)


def test_others_have_rows_while_they_have_traffic(world: World) -> None:
    world.details["veth7"] = {**ETH0, "kind": "virtual"}
    world.tick(HEAD + line("lo", rx_bytes=5) + line("veth7"))
    rows = world.tick(HEAD + line("lo", rx_bytes=6) + line("veth7", multicast=9))
    assert [row["interface"] for row in rows] == ["lo"]
    rows = world.tick(HEAD + line("lo", rx_bytes=6) + line("veth7", multicast=9, tx_errors=1))
    assert [(row["interface"], row["tx_errors_new"]) for row in rows] == [("veth7", 1)]


def test_the_namespaces_of_jobs_are_read_too(world: World) -> None:
    world.namespaces = {4026531999: ProcessKey(77, 7)}
    world.tick(HEAD, HEAD + line("eth0", rx_bytes=100))
    (row,) = world.tick(HEAD, HEAD + line("eth0", rx_bytes=1100))
    assert (row["interface"], row["netns"], row["job"]) == ("eth0", 4026531999, "j")
    assert (row["rx_gbps"], row["operstate"], row["addresses"]) == (pytest.approx(8e-6), None, None)
    assert world.reads.asked[-1][1]["targets"] == [[77, 7]]
    # Its process has ended, and another namespace has an interface of the same name.
    assert world.tick(HEAD, None) == []
    assert world.tick(HEAD, HEAD + line("eth0", rx_bytes=5000)) == []


def test_very_many_interfaces_of_a_namespace_displace_none_of_another(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interface_source, "MAX_ROWS", 4)
    world.namespaces = {4026531998: ProcessKey(77, 7), 4026531999: ProcessKey(77, 7)}

    def texts(count: int) -> list[str]:
        many = "".join(line(f"dummy{n}", rx_bytes=count) for n in range(9))
        return [HEAD + line("eth0", rx_bytes=count), HEAD + many, HEAD + line("eth1", rx_bytes=count)]

    world.tick(*texts(100))
    rows = world.tick(*texts(200))
    # THEN the namespaces take turns, and what is left out is a loss
    assert sorted(row["interface"] for row in rows) == ["dummy0", "dummy1", "eth0", "eth1"]
    assert [(loss.table, loss.count) for loss in world.kept.losses] == [("net.interfaces", 7)]


def test_an_interface_that_is_made_anew_has_no_rate_from_two_lives(world: World) -> None:
    world.tick(HEAD + line("eth0", rx_bytes=1000, rx_errors=7))
    (row,) = world.tick(HEAD + line("eth0", rx_bytes=5000, rx_errors=0))
    assert (row["rx_gbps"], row["interval_ns"], row["rx_errors_new"]) == (None, None, None)
    (row,) = world.tick(HEAD + line("eth0", rx_bytes=5000, rx_errors=1))
    assert (row["rx_gbps"], row["rx_errors_new"]) == (0, 1)


def test_what_does_not_answer_is_left_alone_and_holds_up_nothing_else(world: World) -> None:
    world.reads.answers["link_details"] = lambda _: TargetTimeout("process 0 could not be read in 1 s (link_details)")
    world.tick(HEAD + line("lo", rx_bytes=1))
    (row,) = world.tick(HEAD + line("lo", rx_bytes=2))
    assert (row["interface"], row["kind"], row["carrier_changes"]) == ("lo", None, None)
    assert world.reads.count("link_details") == 1
    (state,) = world.source.states(TOTALS)
    assert (state.state, "link_details" in state.reason) == ("running", True)
    world.reads.answers["links"] = lambda _: TargetTimeout("process 0 could not be read in 1 s (links)")
    assert world.tick() == []
    assert world.source.states(TOTALS)[0].state == "degraded"


def test_every_column_is_filled(world: World) -> None:
    counters = {name: n for n, name in enumerate(INTERFACE_COUNTERS, 1)}
    world.tick(HEAD + line("eth0", **counters))
    (row,) = world.tick(HEAD + line("eth0", **counters))
    assert {name: row[name] for name in INTERFACE_COUNTERS} == counters
    assert set(row) == {column.name for column in INTERFACES.columns}
    assert [name for name, value in row.items() if value is None] == ["job"]


def test_lines_that_are_none_are_left_out() -> None:
    huge = "9" * 20
    text = HEAD + line("a") + "  eth1: 1 2 3\n" + f"  b: {' '.join([huge] * 16)}\n" + "x" * 100 + "\n" + line("\x1b[2J")
    found = parse_dev(text)
    assert list(found) == ["a", "b", "\\x1b[2J"]
    assert set(found["b"]) == {(1 << 63) - 1}


@given(st.text(max_size=300))
def test_no_text_is_too_strange(text: str) -> None:
    assert all(min(counters) >= 0 for counters in parse_dev(text).values())


def test_the_kernel_and_its_sysfs_are_read() -> None:
    (node, gone, own) = read_links([[2**22 - 1, 0], [os.getpid(), 0]])
    assert gone is None
    assert node is not None
    assert own is not None
    assert own[0] == own_namespace()[1]
    assert "lo" in parse_dev(node[1])
    assert read_details()["lo"]["kind"] == "loopback"
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, socket.NETLINK_ROUTE) as sock:
        found = read_addresses(sock)
    assert "127.0.0.1" in found[str(socket.if_nametoindex("lo"))]


def test_details_of_a_tree(tmp_path: Path) -> None:
    for name, text in (("mtu", "9000\n"), ("speed", "-1\n"), ("operstate", "down\n"), ("type", "1\n")):
        write(tmp_path / "eth0" / name, text)
    (tmp_path / "eth0" / "device").symlink_to("gone")
    assert read_details(tmp_path)["eth0"] == {
        "kind": "physical",
        "operstate": "down",
        "mtu": 9000,
        "speed": None,
        "carrier_changes": None,
        "ifindex": None,
    }
    assert read_details(tmp_path / "none") == {}


def test_a_job_in_the_namespace_of_the_node_adds_no_rows(world: World) -> None:
    world.namespaces = {own_namespace()[1]: ProcessKey(77, 7)}
    world.tick(HEAD + line("eth0"), HEAD + line("eth0"))
    (row,) = world.tick(HEAD + line("eth0", rx_bytes=5), HEAD + line("eth0", rx_bytes=5))
    assert (row["kind"], row["job"]) == ("physical", None)
