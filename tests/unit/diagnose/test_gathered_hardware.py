"""Hardware from rows of its tables: the real statements in a DuckDB of their own, and the live tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import duckdb
import pytest

from probing.daemon.arrow import batch_of
from probing.daemon.diagnose.gather.hardware import hardware_of, hardware_statements
from probing.daemon.diagnose.gather.processes import Key
from probing.diagnosis.hardware_facts import Disk, FileSystem, Gpu, Hardware, HardwareEvent, NetworkPath, NetworkPort

S = 1_000_000_000
NOW = 1_700_000_000 * S
TABLES = (
    "gpu.utilization",
    "gpu.events",
    "gpu.processes",
    "process.kmsg",
    "rdma.ports",
    "net.tcp",
    "host.disk",
    "host.file_systems",
)
RANKS = {Key(100, 7): 0, Key(101, 8): 1}
ONE, OTHER = {"job": "j", "pid": 100, "start_ns": 7}, {"job": "j", "pid": 101, "start_ns": 8}
Stored = Mapping[str, Sequence[Mapping[str, Any]]]


def found(stored: Stored, live: Stored | None = None) -> Hardware:
    with duckdb.connect() as db:
        for name in TABLES:
            given = [{"node": "n", "ts": NOW - S, **row} for row in stored.get(name, ())]
            db.execute(f"CREATE SCHEMA IF NOT EXISTS {name.partition('.')[0]}")
            db.register("given", batch_of(name, given))
            db.execute(f"CREATE TABLE {name} AS FROM given")
            db.unregister("given")
        statements = hardware_statements("j", NOW)
        rows = {name: db.sql(sql).to_arrow_table().to_pylist() for name, sql in statements.items()}
    return hardware_of(rows, live or {}, RANKS)


def test_nothing_stored_is_no_hardware() -> None:
    assert found({}) == Hardware()


def test_gpus_have_their_readings_their_state_and_the_ranks_that_use_them() -> None:
    def reading(device: int, ago_s: int, **values: Any) -> dict[str, Any]:
        return {"ts": NOW - ago_s * S, "device_id": device, "name": "H100", "wall_ns": S, "power_brake_ns": 0, **values}

    hardware = found(
        {
            "gpu.utilization": [
                reading(0, 2, gpu_util_pct=80.0, sm_clock_mhz=1000, power_capped_ns=S // 2, hw_thermal_ns=S // 4),
                reading(
                    0,
                    1,
                    gpu_util_pct=90.0,
                    sm_clock_mhz=1200,
                    power_capped_ns=0,
                    sw_thermal_ns=S // 4,
                    temperature_c=88.0,
                    recovery_action="none",
                    total_bytes=80,
                ),
                reading(0, 90, gpu_util_pct=0.0, sm_clock_mhz=9),
                reading(0, 1, mig=0, gpu_util_pct=None, sm_clock_mhz=9),
            ],
            "gpu.processes": [
                {**ONE, "device_id": 0},
                {**OTHER, "device_id": 0},
                {**OTHER, "job": "k", "device_id": 1},
            ],
        },
        {
            "gpu.devices": [
                {
                    "device_id": 0,
                    "mig": None,
                    "state": "ok",
                    "reason": None,
                    "max_sm_clock_mhz": 1980,
                    "pcie_width": 8,
                    "pcie_width_max": 16,
                    "bus_id": "0000:17:00.0",
                },
                {"device_id": 1, "mig": None, "state": "lost", "reason": "GPU is lost", "name": "H100", "bus_id": None},
                {"device_id": 0, "mig": 0, "state": "gone", "bus_id": None},
            ]
        },
    )
    assert hardware.gpus == (
        Gpu(0, (0, 1), "H100", "ok", None, pytest.approx(0.85), 1100.0, 1980, 88.0, 0.25, 0.25, 0.0, None, None, None,  # type: ignore[arg-type]
            None, "none", 8, 16, 80),
        Gpu(1, (), "H100", "lost", "GPU is lost"),
    )  # fmt: skip


def test_events_are_counted_and_those_of_the_kernel_get_the_number_of_their_gpu() -> None:
    device = {"device_id": 3, "mig": None, "state": "ok", "bus_id": "0000:17:00.0"}
    xid = {"event": "xid", "xid": 79, "device_id": 3, "detail": "Xid 79"}
    hardware = found(
        {
            "gpu.events": [
                {**xid, "ts": NOW - 30 * S},
                {**xid, "ts": NOW - 20 * S},
                {"event": "pstate"},
                {**xid, "ts": NOW - 4000 * S},
            ],
            "process.kmsg": [
                {"kind": "xid", "device": "0000:17:00", "code": 79, "message": "NVRM: Xid"},
                {"kind": "xid", "device": "0000:17:00", "code": 48, "message": "NVRM: Xid", "pid": 100},
                {"kind": "memory_error", "device": "MC0", "code": 1},
                {"kind": "memory_error", "device": "MC0", "code": 2},
                {"kind": "other"},
                {"kind": "oom_kill"},
            ],
        },
        {"gpu.devices": [device]},
    )
    assert hardware.events[0] == HardwareEvent("gpu", "xid", NOW - 30 * S, NOW - 20 * S, 2, "Xid 79", 3, None, 79)
    kernel = {(one.kind, one.code): one for one in hardware.events[1:]}
    assert kernel.keys() == {("xid", 48), ("memory_error", None)}
    assert (kernel["xid", 48].gpu, kernel["xid", 48].pid) == (3, 100)
    assert (kernel["memory_error", None].count, kernel["memory_error", None].part) == (2, "MC0")


def test_a_gpu_that_is_gone_is_not_the_one_that_has_its_number() -> None:
    gone = {"device_id": 1, "mig": None, "state": "gone", "name": "gone", "bus_id": "0000:17:00.0"}
    listed = {**gone, "state": "ok", "name": "H100", "bus_id": "0000:18:00.0"}
    last = {**gone, "device_id": 2, "name": "last", "bus_id": "0000:19:00.0"}
    lines = [{"kind": "xid", "device": f"0000:1{n}:00", "code": 70 + n, "message": "NVRM: Xid"} for n in (7, 8, 9)]
    for devices in ([gone, listed, last], [last, listed, gone]):
        hardware = found({"process.kmsg": lines}, {"gpu.devices": devices})
        assert [(gpu.device, gpu.name, gpu.state) for gpu in hardware.gpus] == [(1, "H100", "ok"), (2, "last", "gone")]
        assert {event.code: event.gpu for event in hardware.events} == {77: None, 78: 1, 79: 2}


def test_errors_of_nvlink_are_those_of_the_kernel_by_unit_and_severity() -> None:
    def line(ago_s: int, what: str, link: int) -> dict[str, Any]:
        text = f"NVRM: Xid (PCI:0000:17:00): 145, {what} XC0 i0 Link {link} (0x{ago_s:08x} 0x00000001)"
        return {"kind": "xid", "device": "0000:17:00", "code": 145, "message": text, "ts": NOW - ago_s * S}

    fabric = {"fabric_cluster": "1b0c", "fabric_clique": 3}
    hardware = found(
        {
            "gpu.events": [{"event": "xid", "xid": 145, "device_id": 3, "detail": "Xid 145"}],
            "process.kmsg": [
                line(30, "RLW_RXPIPE Nonfatal", 4),
                line(20, "RLW_RXPIPE Nonfatal", 5),
                line(10, "RLW_SRC_TRACK  Fatal  ", 6),
            ],
        },
        {"gpu.devices": [{"device_id": 3, "mig": None, "state": "ok", "bus_id": "0000:17:00.0", **fabric}]},
    )
    assert [gpu.fabric for gpu in hardware.gpus] == ["1b0c/3"]
    events = [(one.source, one.code, one.gpu, one.count, one.first_ns, one.text[28:60]) for one in hardware.events]
    assert events == [
        ("kernel", 145, 3, 1, NOW - 10 * S, "145, RLW_SRC_TRACK  Fatal   XC0 "),
        # The first of both lines.
        ("kernel", 145, 3, 2, NOW - 30 * S, "145, RLW_RXPIPE Nonfatal XC0 i0 "),
    ]
    assert "Link 4" in hardware.events[1].text


def test_ports_paths_disks_and_file_systems() -> None:
    port = {"hca": "mlx5_0", "port": 1, "state": "ACTIVE", "phys_state": "LinkUp", "interval_ns": 5 * S}
    tcp = {**OTHER, "role": "trainer", "peer_address": "10.0.0.2", "segs_out": 1000, "rtt_ns": 90_000}
    hardware = found(
        {
            "rdma.ports": [{**port, "symbol_error_new": 23}, {**port, "symbol_error_new": 5, "link_downed_new": 0}],
            "net.tcp": [
                {**tcp, "retrans": 7},
                {**tcp, "retrans": 23, "longest_timeouts": 0},
                {**tcp, "role": "launcher"},
                {**tcp, "peer_address": None},
            ],
            "host.disk": [
                {
                    "scope": "device",
                    "device": "sda",
                    "busy_ns": 50 * S,
                    "wall_ns": 100 * S,
                    "reads": 0,
                    "read_ns": 0,
                    "writes": 4,
                    "write_ns": 8 * S,
                    "in_flight": 3,
                },
                {"scope": "process", **ONE, "wall_ns": S},
            ],
            "host.file_systems": [
                {
                    "scope": "node",
                    "mount_point": "/",
                    "fs_type": "ext4",
                    "used_bytes": 30,
                    "available_bytes": 10,
                    "answers": True,
                    "read_only": False,
                },
                {
                    "scope": "process",
                    **OTHER,
                    "mount_point": "/dev/shm",
                    "fs_type": "tmpfs",
                    "used_bytes": 9,
                    "available_bytes": 0,
                },
                {"scope": "process", **OTHER, "job": "k", "mount_point": "/dev/shm"},
            ],
        },
        {"rdma.qps": [{**ONE, "hca": "mlx5_0", "port": 1}, {**ONE, "pid": None, "hca": "mlx5_0", "port": 1}]},
    )
    assert hardware.ports == (NetworkPort("mlx5_0", 1, (0,), None, "ACTIVE", "LinkUp", (("symbol_error", 28),), 10.0),)
    assert hardware.paths == (NetworkPath(1, "10.0.0.2", 2000, 30, 0, 90_000, False),)
    assert hardware.disks == (Disk("sda", 0.5, None, 2e9, 3),)
    assert set(hardware.file_systems) == {
        FileSystem("/", "ext4", None, 0.75, 10, True, False),
        FileSystem("/dev/shm", "tmpfs", 1, 1.0, 0, None, None),
    }


def test_a_disk_is_idle_while_it_has_no_rows() -> None:
    one = {"scope": "device", "busy_ns": S, "wall_ns": S, "reads": 0, "read_ns": 0, "writes": 4, "write_ns": 8 * S}
    hardware = found({"host.disk": [{**one, "device": "sda", "in_flight": 3}]}, {})
    assert [(disk.name, round(disk.busy or 0, 3)) for disk in hardware.disks] == [("sda", 0.017)]
