"""The facts of a node before a job: network, tables, who may ask for what, and parts that fail or are late."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from probing.api.errors import QueryTimeout, TargetError, UsageError
from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.daemon.arrow import batch_of, ipc_bytes
from probing.daemon.query.answer import Item, StatementEnd
from probing.daemon.query.caller import Caller
from probing.daemon.service.preflight import network
from probing.daemon.service.preflight.gather import Asked, Preflight
from probing.daemon.service.preflight.request import MAX_PEERS, asked_of
from probing.diagnosis.preflight.facts import Interface, NodeFacts, Version

UNIX, TCP = Caller("unix", "0", 1), Caller("tcp", "10.0.0.9")
_HEAD = "  sl  local_address rem_address   st tx_queue rx_queue\n"


def sockets(folder: Path, *lines: str) -> list[Path]:
    path = folder / "tcp"
    path.write_text(_HEAD + "".join(f"   {n}: {line} 00000000:00000000\n" for n, line in enumerate(lines)))
    return [path, folder / "tcp6"]


@pytest.mark.parametrize(
    ("line", "state"),
    [
        ("00000000:733C 00000000:0000 0A", "listening"),
        ("0100007F:733C 0100007F:1F90 01", "taken"),
        ("0100007F:733C 0100007F:1F90 06", "free"),
        ("0100007F:1F90 0100007F:733C 01", "free"),
        ("garbage", "free"),
    ],
)
def test_the_port_is_free_listening_or_taken(tmp_path: Path, line: str, state: str) -> None:
    assert network.port_state(29500, sockets(tmp_path, line)) == state


def test_interfaces_are_those_of_sysfs(tmp_path: Path) -> None:
    for name, state in (("lo", "unknown\n"), ("bond0", "up\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "operstate").write_text(state)
    (tmp_path / "odd").mkdir()
    # A file beside the links to devices, as bonding has it.
    (tmp_path / "bonding_masters").write_text("bond0\n")
    found = network.interfaces(tmp_path)
    assert found == (Interface("bond0", "up"), Interface("lo", "unknown"), Interface("odd", None))
    assert "lo" in {interface.name for interface in network.interfaces()}


@pytest.fixture
def listener() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_the_master_is_resolved_and_its_port_looked_at_where_it_is_local(listener: str) -> None:
    host, _, port = listener.rpartition(":")
    here = network.master(host, int(port))
    assert (here.addresses, here.local, here.port) == (("127.0.0.1",), True, "listening")
    # An address for documentation (RFC 5737) is of no host.
    away = network.master("192.0.2.1", 29500)
    assert (away.local, away.port) == (False, None)
    with pytest.raises(socket.gaierror):
        network.master("no-such-host.invalid", 29500)


def test_round_trips_are_measured_or_say_why_not(listener: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        closed = f"127.0.0.1:{other.getsockname()[1]}"
    first, second, third = asyncio.run(network.round_trips([listener, closed, "no-such-host.invalid:1"], 10))
    assert (first.address, first.why) == (listener, "")
    assert first.round_trip_ns is not None
    assert first.round_trip_ns > 0
    assert (second.round_trip_ns, second.why) == (None, "Connection refused")
    assert third.round_trip_ns is None
    assert third.why
    late = asyncio.run(network.round_trips([listener], 0))
    assert late[0].why == "there was no time left"


class Tables:
    """Answers the statements by the table that they read."""

    def __init__(self, rows: dict[str, list[dict[str, Any]]], fail: str = "") -> None:
        self.rows = rows
        self.fail = fail

    def run_all(self, statements: Sequence[str], *, timeout: float, max_bytes: int, rows_only: bool) -> Iterator[Item]:
        for index, sql in enumerate(statements):
            table = next(
                word for word in sql.split() if "." in word and word.split(".")[0] in ("gpu", "rdma", "host", "process")
            )
            if table == self.fail:
                yield StatementEnd(index, error=QueryTimeout("too late"))
                continue
            yield ipc_bytes(batch_of(table, self.rows.get(table, [])))
            yield StatementEnd(index, 0)


class Interpreters:
    def __init__(self, error: Exception | None = None, wait: threading.Event | None = None) -> None:
        self.error = error
        self.wait = wait
        self.asked: list[str] = []

    def versions(self, python: str, timeout: float) -> list[Version]:
        self.asked.append(python)
        if self.wait:
            self.wait.wait(30)
        if self.error:
            raise self.error
        return [Version("python", "3.11.9")]


ROWS: dict[str, list[dict[str, Any]]] = {
    "gpu.devices": [{"device_id": 0, "uuid": "GPU-1", "name": "H100", "state": "ok", "driver_version": "575.51"}],
    "gpu.utilization": [{"uuid": "GPU-1", "temperature_c": 45.0, "ecc_uncorrected": 1}],
    "rdma.ports": [{"hca": "mlx5_0", "port": 1, "state": "ACTIVE", "rate_gbps": 400.0}],
    "host.file_systems": [{"mount_point": "/", "size_bytes": 10, "available_bytes": 5, "answers": True}],
    "process.processes": [{"pid": 7, "start_ns": 1, "rank": 0, "local_rank": 0, "world_size": 1}],
    "process.envs": [{"pid": 7, "start_ns": 1, "name": "NCCL_DEBUG", "value": "INFO"}],
}


def facts(tables: Tables, interpreters: Interpreters, asked: Asked, timeout: float = 20.0) -> NodeFacts:
    async def gather() -> NodeFacts:
        preflight = Preflight("n0", tables, interpreters)
        try:
            return await preflight.facts(asked, timeout)
        finally:
            preflight.close()

    return asyncio.run(gather())


def test_facts_come_from_tables_network_and_interpreter(listener: str) -> None:
    host, _, port = listener.rpartition(":")
    asked = Asked("/opt/python", (host, int(port)), (listener,), job="j")
    found = facts(Tables(ROWS), Interpreters(), asked)
    assert found.problems == ()
    [device] = found.devices
    assert (device.uuid, device.temperature_c, device.ecc_uncorrected) == ("GPU-1", 45.0, 1)
    versions = {version.name: version.value for version in found.versions}
    assert versions["driver"] == "575.51"
    assert versions["python"] == "3.11.9"
    assert versions["kernel"]
    assert (found.ports[0].rate_gbps, found.file_systems[0].available_bytes) == (400.0, 5)
    assert (found.ranks[0].rank, found.ranks[0].variables[0].value) == (0, "INFO")
    assert found.master is not None
    assert found.master.port == "listening"
    assert found.reached[0].round_trip_ns
    assert len(found.boot_id) == 36


def test_without_python_nothing_is_started() -> None:
    interpreters = Interpreters()
    facts(Tables(ROWS), interpreters, Asked())
    assert interpreters.asked == []


def test_a_part_that_fails_costs_only_itself() -> None:
    error = TargetError("/opt/python cannot be started")
    asked = Asked("/opt/python", ("no-such-host.invalid", 1))
    found = facts(Tables(ROWS, "rdma.ports"), Interpreters(error), asked)
    assert {problem.what for problem in found.problems} == {"versions", "master", "ports"}
    assert found.problem("versions") == "/opt/python cannot be started"
    assert found.devices
    assert found.interfaces


def test_a_part_that_hangs_is_late_and_the_others_are_there() -> None:
    stuck = threading.Event()
    found = facts(Tables(ROWS), Interpreters(wait=stuck), Asked("/opt/python"), timeout=0.7)
    stuck.set()
    assert found.problem("versions") == "it took too long"
    assert found.devices


def test_to_start_a_process_needs_admin_and_to_connect_anywhere_probe() -> None:
    request = pb.PreflightRequest(python="/opt/python", peers=["10.0.0.1:7070", "10.0.0.2:22"])
    local = asked_of(request, UNIX, {"10.0.0.1:7070"})
    assert (local.python, local.peers, local.unmeasured) == ("/opt/python", ("10.0.0.1:7070", "10.0.0.2:22"), ())
    remote = asked_of(request, TCP, {"10.0.0.1:7070"})
    assert (remote.python, remote.peers) == ("", ("10.0.0.1:7070",))
    assert [problem.what for problem in remote.refused] == ["versions"]
    assert "admin" in remote.refused[0].why
    [unmeasured] = remote.unmeasured
    assert (unmeasured.address, unmeasured.why.startswith("not measured: ")) == ("10.0.0.2:22", True)


@pytest.mark.parametrize(
    "request_",
    [
        pb.PreflightRequest(peers=["nowhere"]),
        pb.PreflightRequest(peers=["h:0"]),
        pb.PreflightRequest(peers=["h:99999"]),
        pb.PreflightRequest(peers=["unix:/x"]),
        pb.PreflightRequest(peers=["h:1"] * (MAX_PEERS + 1)),
        pb.PreflightRequest(job="x" * 5000),
        pb.PreflightRequest(master_addr="x" * 300),
        pb.PreflightRequest(master_addr="x", master_port=70_000),
    ],
)
def test_requests_are_bounded(request_: pb.PreflightRequest) -> None:
    with pytest.raises(UsageError):
        asked_of(request_, UNIX, ())
