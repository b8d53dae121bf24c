"""The source of rdma.ports: rates, counters that go back or vanish, devices that do not answer."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes import TOTALS, Readers, Sink
from infiniband import make_port, write

from probing.api.errors import TargetTimeout
from probing.api.rdma_counters import COUNTERS, HW_COUNTERS
from probing.api.tables.rdma import PORTS
from probing.daemon import backoff
from probing.daemon.clock import FakeClock
from probing.daemon.net.rdma import source as port_source
from probing.daemon.net.rdma.reading import PortReader, device_names
from probing.daemon.net.rdma.source import RdmaPorts

SECOND = 10**9


class World:
    """A source on a tree of files; devices in ``hanging`` do not answer."""

    def __init__(self, root: Path) -> None:
        self.root, self.hanging = root, set[str]()
        self.reader, self.kept, self.clock = PortReader(root), Sink(), FakeClock(SECOND, 5 * SECOND)
        self.reads = Readers(rdma_devices=lambda _: device_names(root), rdma_ports=self._ports)
        self.source = RdmaPorts(self.reads, self.kept, self.clock, "n1", 1.0)

    def _ports(self, request: dict[str, Any]) -> Any:
        if self.hanging & set(request["devices"]):
            return TargetTimeout("process 0 could not be read in 2 s (rdma_ports)")
        return self.reader.read(request["devices"], request["details"])

    def tick(self, after_ns: int = SECOND) -> list[dict[str, Any]]:
        self.clock.advance(after_ns)
        self.source.tick()
        return self.kept.take("rdma.ports")


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(port_source, "DETAILS_S", 0.0)
    made = World(tmp_path / "infiniband")
    yield made
    made.reader.close()


def test_the_rates_are_those_of_the_interval(world: World) -> None:
    path = make_port(world.root, "mlx5_0", 1, **{"hw_counters/np_cnp_sent": "17\n"})
    make_port(world.root, "mlx5_1", 1)
    first, _ = world.tick()
    assert (first["node"], first["hca"], first["port"], first["state"]) == ("n1", "mlx5_0", 1, "ACTIVE")
    assert first["ts"] == 6 * SECOND
    assert (first["interval_ns"], first["sent_gbps"], first["symbol_error_new"]) == (None, None, None)
    write(path / "counters/port_xmit_data", str(1000 + 250_000_000))
    write(path / "counters/port_rcv_packets", str(200 + 3001))
    write(path / "counters/symbol_error", "7\n")
    write(path / "hw_counters/np_cnp_sent", "40\n")
    first, second = world.tick(2 * SECOND)
    assert first["interval_ns"] == 2 * SECOND
    assert (first["sent_gbps"], first["received_gbps"]) == (pytest.approx(4.0), 0)
    assert (first["rcv_pkts_rate"], first["snd_pkts_rate"]) == (1500.5, 0)
    assert (first["symbol_error"], first["symbol_error_new"], first["np_cnp_sent_new"]) == (7, 7, 23)
    assert (first["link_downed"], first["link_downed_new"], first["rp_cnp_handled_new"]) == (3, 0, None)
    assert (second["hca"], second["sent_gbps"], second["link_downed_new"]) == ("mlx5_1", 0, 0)


def test_every_column_is_filled_where_the_device_has_all(world: World) -> None:
    files = {f"counters/{name}": f"{i}" for i, name in enumerate(COUNTERS, 1)}
    files |= {f"hw_counters/{name}": f"{i}" for i, name in enumerate(HW_COUNTERS, 1)}
    write(world.root.parent / "0000:17:00.0" / "numa_node", "1\n")
    make_port(world.root, "mlx5_0", 1, **files, **{"gid_attrs/ndevs/0": "eth7\n"})
    (world.root / "mlx5_0" / "device").symlink_to(world.root.parent / "0000:17:00.0")
    world.tick()
    (row,) = world.tick()
    assert set(row) == {column.name for column in PORTS.columns}
    assert [name for name, value in row.items() if value is None] == []


def test_a_counter_that_goes_back_gives_no_rates_and_nothing_negative(world: World) -> None:
    path = make_port(world.root, "mlx5_0", 1)
    world.tick()
    # A counter of 32 bits wraps: what else rose may be of another life.
    write(path / "counters/port_xmit_data", "13\n")
    write(path / "counters/symbol_error", "5\n")
    (row,) = world.tick()
    rates = ("interval_ns", "sent_gbps", "received_gbps", "snd_pkts_rate", "rcv_pkts_rate", "symbol_error_new")
    assert [row[name] for name in rates] == [None] * len(rates)
    assert (row["port_xmit_data_bytes"], row["symbol_error"]) == (52, 5)
    write(path / "counters/symbol_error", "6\n")
    (row,) = world.tick()
    assert (row["symbol_error_new"], row["sent_gbps"], row["interval_ns"]) == (1, 0, SECOND)


def test_a_counter_that_vanishes_is_null_and_has_no_rise_when_it_is_back(world: World) -> None:
    path = make_port(world.root, "mlx5_0", 1, **{"counters/symbol_error": "2\n"})
    world.tick()
    (path / "counters/symbol_error").unlink()
    (row,) = world.tick()
    assert (row["symbol_error"], row["symbol_error_new"], row["link_downed_new"]) == (None, None, 0)
    write(path / "counters/symbol_error", "11\n")
    (row,) = world.tick()
    assert (row["symbol_error"], row["symbol_error_new"]) == (11, None)


def test_a_device_that_vanishes_and_returns_has_no_rate_from_two_lives(world: World) -> None:
    make_port(world.root, "mlx5_0", 1)
    make_port(world.root, "mlx5_1", 1)
    assert len(world.tick()) == 2
    shutil.rmtree(world.root / "mlx5_1")
    assert [row["hca"] for row in world.tick()] == ["mlx5_0"]
    make_port(world.root, "mlx5_1", 1, **{"counters/port_xmit_data": "99999\n"})
    _, back = world.tick()
    assert (back["hca"], back["sent_gbps"], back["interval_ns"]) == ("mlx5_1", None, None)


def test_a_device_that_does_not_answer_holds_up_no_other(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for device in range(3):
        make_port(world.root, f"mlx5_{device}", 1)
    world.hanging = {"mlx5_1"}
    assert [row["hca"] for row in world.tick()] == ["mlx5_0", "mlx5_2"]
    (state,) = world.source.states(TOTALS)
    assert (state.state, state.reason) == ("degraded", "mlx5_1 did not answer")
    # It is left alone.
    asked = world.reads.count("rdma_ports")
    assert len(world.tick()) == 2
    assert world.reads.count("rdma_ports") == asked + 1
    monkeypatch.setattr(backoff.time, "monotonic", lambda: 10.0**9)
    world.hanging = set()
    assert len(world.tick()) == 3
    assert world.source.states(TOTALS)[0].state == "running"


def test_a_node_without_devices_writes_nothing(world: World) -> None:
    assert world.tick() == []
    (state,) = world.source.states(TOTALS)
    assert (state.state, state.reason, state.detail) == ("running", "", "no RDMA devices")
    assert world.reads.count("rdma_ports") == 0
