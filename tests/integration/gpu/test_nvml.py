"""Values, processes and links as they were set in the double; MIG; what a device or driver does not have."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from doubles.nvml_double import GPM, mig, recorded
from gpu_helpers import Gpus

from probing.api.tables.gpu import UTILIZATION

Make = Callable[..., Gpus]
# Of all columns those that a GPU of NVIDIA cannot have, or that retired pages had before rows were remapped.
NEVER = {
    "renderer_util_pct",
    "tiler_util_pct",
    "vector_util_pct",
    "retired_pages_sbe",
    "retired_pages_dbe",
    "retirement_pending",
    "mig",
}


def number(values: dict[str, Any], key: str) -> int:
    return int(str(values[key]).lstrip("uL"))


def test_every_metric_equals_the_driver_s_value(driver: Make) -> None:
    values = recorded(8)
    node = driver(values)
    node.fresh(turns=2)
    # Counters have grown by another prime in each GPU.
    grown = {
        "82": 0,
        "83": 7000,
        "74": 1009,
        "269": 1013,
        "270": 1019,
        "271": 1021,
        "197": 10007,
        "198": 10009,
        "138.all": 10037,
        "139.all": 10039,
    }
    changes: dict[str, Any] = {
        f"gpu{n}.field.{field}": number(values, f"gpu{n}.field.{field}") + more * (n + 1)
        for n in range(8)
        for field, more in grown.items()
        if more
    }
    node.double.set(changes)
    after = {**values, **changes}
    rows = node.fresh()
    assert [row["device_id"] for row in rows] == list(range(8))
    for n, row in enumerate(rows):
        told = {key.removeprefix(f"gpu{n}."): value for key, value in after.items() if key.startswith(f"gpu{n}.")}
        seconds = row["wall_ns"] / 1e9
        assert 0 < seconds < 60
        wanted = {
            "backend": "cuda",
            "node": "node",
            "uuid": told["uuid"],
            "name": "NVIDIA H100 80GB HBM3",
            "chip": "hopper",
            "memory_model": "discrete",
            "total_bytes": told["memory.total"],
            "used_bytes": told["memory.used"],
            "free_bytes": told["memory.free"],
            "reserved_bytes": told["memory.reserved"],
            "driver_mem_bytes": told["memory.reserved"],
            "mem_used_pct": pytest.approx(100 * told["memory.used"] / told["memory.total"]),
            "gpu_util_pct": told["util.gpu"],
            "mem_controller_util_pct": told["util.memory"],
            "encoder_util_pct": told["util.encoder"],
            "decoder_util_pct": told["util.decoder"],
            "temperature_c": told["temperature.0"],
            "power_w": told["power_mw"] / 1000,
            "power_limit_w": told["power_limit_mw"] / 1000,
            "mem_temperature_c": number(told, "field.82"),
            "energy_j": told["field.83"] / 1000,
            "sm_clock_mhz": told["clock_mhz.1"],
            "mem_clock_mhz": told["clock_mhz.2"],
            "pstate": 0,
            "clock_event_reasons": "sw_power_cap",
            "power_capped_ns": 1009 * (n + 1),
            "sw_thermal_ns": 1013 * (n + 1),
            "hw_thermal_ns": 1019 * (n + 1),
            "power_brake_ns": 1021 * (n + 1),
            "pcie_tx_bytes_per_s": pytest.approx(10007 * (n + 1) / seconds),
            "pcie_rx_bytes_per_s": pytest.approx(10009 * (n + 1) / seconds),
            "nvlink_tx_bytes_per_s": pytest.approx(10037 * 1024 * (n + 1) / seconds),
            "nvlink_rx_bytes_per_s": pytest.approx(10039 * 1024 * (n + 1) / seconds),
            "graphics_active_pct": GPM[1],
            "sm_active_pct": GPM[2],
            "sm_occupancy_pct": GPM[3],
            "tensor_active_pct": GPM[5],
            "dram_active_pct": GPM[10],
            "mem_bandwidth_util_pct": GPM[10],
            "fp64_active_pct": GPM[11],
            "fp32_active_pct": GPM[12],
            "fp16_active_pct": GPM[13],
            "ecc_corrected": told["field.3"],
            "ecc_uncorrected": told["field.4"],
            "ecc_corrected_total": told["field.5"],
            "ecc_uncorrected_total": told["field.6"],
            "remapped_corrected": number(told, "field.142"),
            "remapped_uncorrected": number(told, "field.143"),
            "remap_pending": False,
            "remap_failed": False,
            "pcie_replays": told["field.94"],
            "pcie_errors": told["field.179"] + told["field.180"],
            "recovery_action": "none",
            "processes": 0,
        }
        assert {name: row[name] for name in wanted} == wanted
        assert {column.name for column in UTILIZATION.columns} == {*wanted, *NEVER, "ts", "device_id", "wall_ns"}
        assert {name: row[name] for name in NEVER} == dict.fromkeys(NEVER)


def test_devices_say_what_they_are(driver: Make) -> None:
    node = driver(recorded(2))
    node.fresh()
    first, second = node.devices()
    assert (first["bus_id"], second["bus_id"]) == ("0000:17:00.0", "0000:18:00.0")
    wanted = {
        "chip": "hopper",
        "compute_capability": "9.0",
        "total_bytes": 85520809984,
        "total_mem_bytes": 85520809984,
        "minor": 1,
        "serial": "165201",
        "ecc": True,
        "mig_mode": False,
        "max_sm_clock_mhz": 1980,
        "gpm": True,
        "max_mem_clock_mhz": 2619,
        "pcie_width": 16,
        "pcie_width_max": 16,
        "pcie_gen": 5,
        "pcie_gen_max": 5,
        "numa_node": 0,
        "cpu_list": "0-47",
        "state": "ok",
        "reason": None,
        "driver_version": "550.54.15",
        "cuda_version": "12.4",
        "parent_uuid": None,
        "device_id": 1,
        "mig": None,
    }
    assert {name: second[name] for name in wanted} == wanted
    assert node.state().state == "running"
    assert node.state().detail == "2 GPUs, driver 550.54.15"


@pytest.mark.parametrize("old", [0, 1])
def test_gpus_name_the_clique_of_their_fabric(driver: Make, old: int) -> None:
    own = {"clique": 5, "cluster": 0x1F, "old": old}
    values = {f"gpu{n}.fabric.{name}": value for n in (0, 1) for name, value in own.items()}
    node = driver({**recorded(3), **values, "gpu1.fabric.state": 2})
    node.fresh()
    found = [(row["fabric_cluster"], row["fabric_clique"]) for row in node.devices()]
    # The second has not registered yet, the third has no fabric.
    assert found == [("1f1f1f1f-1f1f-1f1f-1f1f-1f1f1f1f1f1f", 5), (None, None), (None, None)]


def test_eight_gpus_with_mig(driver: Make) -> None:
    values = recorded(8)
    for n in range(8):
        values |= {f"gpu{n}.mig.mode": 1}
        for at in range(7):
            values |= mig(n, at, at + 7, (n * 7 + at + 1) * 1_000_003)
        for name in ("util.gpu", "util.memory", "samples.count", "compute.count"):
            del values[f"gpu{n}.{name}"]
    values |= {"gpu5.mig3.compute.count": 1, "gpu5.mig3.compute.0": "4242,777,10,0"}
    node = driver(values)
    node.watched.add(4242, 3)
    rows = node.fresh(turns=2)
    assert len(rows) == 8 * 8
    parts = {(row["device_id"], row["mig"]): row for row in rows}
    for (gpu, at), row in parts.items():
        if at is None:
            assert (row["gpu_util_pct"], row["power_w"] is None) == (None, False)
            continue
        total = (gpu * 7 + at + 1) * 1_000_003
        assert (row["total_bytes"], row["used_bytes"]) == (total, total // 3)
        assert row["uuid"] == values[f"gpu{gpu}.mig{at}.uuid"]
        assert (row["sm_active_pct"], row["tensor_active_pct"]) == (GPM[2] + at, GPM[5] + at)
        assert (row["power_w"], row["temperature_c"], row["gpu_util_pct"]) == (None, None, None)
        assert row["processes"] == (1 if (gpu, at) == (5, 3) else 0)
    (used,) = node.fresh("processes")
    assert (used["device_id"], used["mig"], used["rank"], used["used_bytes"]) == (5, 3, 3, 777)
    devices = {(row["device_id"], row["mig"]): row for row in node.devices()}
    assert len(devices) == 64
    part = devices[5, 3]
    assert (part["parent_uuid"], part["gpu_instance"], part["compute_instance"], part["sm_count"]) == (
        values["gpu5.uuid"],
        10,
        0,
        16,
    )
    assert "56 MIG devices" in node.state().detail


def test_a_gpu_without_anything_has_nulls(driver: Make) -> None:
    node = driver({"count": 1, "gpu0.uuid": "GPU-bare", "gpu0.name": "Bare", "driver_version": "1.0"})
    (row,) = node.fresh(turns=2)
    known = {name for name, value in row.items() if value is not None}
    assert known == {"node", "ts", "backend", "device_id", "uuid", "name", "memory_model", "wall_ns"}
    assert node.state().state == "running"


def test_an_older_driver_is_read_by_older_calls(driver: Make) -> None:
    values = recorded(1)
    for field in ("197", "198", "138.all", "139.all", "3", "4", "5", "6", "94", "142", "143", "144", "145", "82"):
        del values[f"gpu0.field.{field}"]
    values |= {
        "gpu0.gpm": 0,
        "gpu0.error.nvmlDeviceGetMemoryInfo_v2": 13,
        "gpu0.error.nvmlDeviceGetTemperatureV": 13,
        "gpu0.error.nvmlDeviceGetCurrentClocksEventReasons": 13,
        "gpu0.pcie.throughput_kb.0": 17,
        "gpu0.pcie.throughput_kb.1": 19,
        "gpu0.ecc.0.0": 23,
        "gpu0.ecc.1.0": 29,
        "gpu0.ecc.0.1": 31,
        "gpu0.ecc.1.1": 37,
        "gpu0.retired.0": 41,
        "gpu0.retired.1": 43,
        "gpu0.pcie.replays": 47,
    }
    (row,) = driver(values).fresh(turns=2)
    wanted = {
        "pcie_tx_bytes_per_s": 17000,
        "pcie_rx_bytes_per_s": 19000,
        "ecc_corrected": 23,
        "ecc_uncorrected": 29,
        "ecc_corrected_total": 31,
        "ecc_uncorrected_total": 37,
        "retired_pages_sbe": 41,
        "retired_pages_dbe": 43,
        "pcie_replays": 47,
        "reserved_bytes": None,
        "temperature_c": values["gpu0.temperature.0"],
        "clock_event_reasons": "sw_power_cap",
        "sm_active_pct": None,
        "nvlink_rx_bytes_per_s": None,
        "mem_temperature_c": None,
        "used_bytes": int(values["gpu0.memory.used"]) + int(values["gpu0.memory.reserved"]),
    }
    assert {name: row[name] for name in wanted} == wanted


def test_processes_are_joined_to_ranks(driver: Make) -> None:
    values = recorded(4)
    values |= {
        "gpu1.compute.count": 2,
        "gpu1.compute.0": "501,1009",
        "gpu1.compute.1": "502,18446744073709551615",
        "gpu1.samples.count": 3,
        "gpu1.samples.0": "501,10,83,47,3,5",
        "gpu1.samples.1": "501,9,1,1,1,1",
        "gpu1.samples.2": "502,11,4294967295,0,0,0",
        "gpu2.graphics.count": 1,
        "gpu2.graphics.0": "503,1013",
    }
    node = driver(values)
    node.watched.add(501, 6)
    node.watched.add(503, None, role="data_loader")
    node.fresh()
    rows = {row["pid"]: row for row in node.rows("processes")}
    assert set(rows) == {501, 502, 503}
    rank = rows[501]
    wanted = {
        "job": "job",
        "run": "run",
        "rank": 6,
        "role": "trainer",
        "start_ns": 5010,
        "device_id": 1,
        "uuid": values["gpu1.uuid"],
        "source": "driver",
        "kind": "compute",
        "used_bytes": 1009,
        "sm_pct": 83.0,
        "mem_pct": 47.0,
        "encoder_pct": 3.0,
        "decoder_pct": 5.0,
    }
    assert {name: rank[name] for name in wanted} == wanted
    stranger = rows[502]
    assert (stranger["job"], stranger["used_bytes"], stranger["sm_pct"]) == (None, None, None)
    assert (rows[503]["kind"], rows[503]["role"], rows[503]["rank"]) == ("graphics", "data_loader", None)


def test_ranks_in_containers_are_joined_by_communicator_and_environment(driver: Make) -> None:
    import pyarrow as pa

    values = recorded(4)
    values |= {f"gpu{n}.compute.0": f"{n + 7},1009" for n in range(4)} | {f"gpu{n}.compute.count": 1 for n in range(4)}
    node = driver(values)
    # The driver's pids 7 to 10 are those of another namespace.
    node.watched.add(601, 0, CUDA_VISIBLE_DEVICES="2")
    node.watched.add(602, 1, CUDA_VISIBLE_DEVICES=str(values["gpu3.uuid"]))
    node.watched.add(603, 2)
    node.watched.add(604, None, role="data_loader", CUDA_VISIBLE_DEVICES="1")
    batch = pa.RecordBatch.from_pylist([{"pid": 603, "start_ns": 6030, "bus_id": "0000:18:00.0"}])
    node.source.observed_tables["comm.communicators"](batch, None)  # type: ignore[arg-type]
    node.fresh()
    found = {row["pid"]: (row["device_id"], row["source"]) for row in node.rows("processes") if row["rank"] is not None}
    assert found == {601: (2, "environment"), 602: (3, "environment"), 603: (1, "communicator")}
    # The program that replaced it has no communicator yet.
    node.source.process_replaced(603, 6030)
    assert 603 not in {row["pid"] for row in node.fresh("processes")}


def test_links(driver: Make) -> None:
    values = recorded(4)
    values |= {"gpu2.nvlink1.state": 0, "gpu3.pcie.width": 8, "p2p.0.1.0": 4}
    node = driver(values)
    node.fresh()
    rows = node.rows("links")
    pairs = {(row["device_id"], row["peer_id"]): row for row in rows if row["kind"] == "gpu"}
    assert len(pairs) == 12
    assert (pairs[0, 1]["path"], pairs[0, 1]["p2p"], pairs[1, 0]["p2p"]) == ("NV2", "disabled by a registry key", "ok")
    assert (pairs[0, 2]["path"], pairs[2, 0]["width"]) == ("NV1", 1)
    nvlinks = {(row["device_id"], row["link"]): row for row in rows if row["kind"] == "nvlink"}
    assert (len(nvlinks), nvlinks[2, 1]["state"], nvlinks[2, 0]["state"]) == (8, "down", "up")
    one = nvlinks[1, 1]
    told = {
        name: values[f"gpu1.field.{number}.1"]
        for name, number in (("replays", 161), ("recoveries", 162), ("crc_errors", 163))
    }
    assert {name: one[name] for name in told} == told
    assert (one["peer"], one["peer_kind"], one["speed_bytes_per_s"]) == ("0000:a1:00.0", "switch", 26562e6)
    pcie = {row["device_id"]: row for row in rows if row["kind"] == "pcie"}
    assert [pcie[n]["state"] for n in range(4)] == ["full", "full", "full", "degraded"]
    assert (pcie[3]["width"], pcie[3]["width_max"], pcie[3]["fatal_errors"]) == (8, 16, values["gpu3.field.180"])
    assert pcie[3]["crc_errors"] == values["gpu3.field.176"] + values["gpu3.field.178"]
    assert pcie[3]["speed_max_bytes_per_s"] == pytest.approx(63e9, rel=0.01)


def test_without_nvlink_the_way_is_that_of_pcie(driver: Make) -> None:
    values = {key: value for key, value in recorded(3).items() if "nvlink" not in key}
    node = driver(values)
    node.fresh()
    pairs = {(row["device_id"], row["peer_id"]): row["path"] for row in node.rows("links") if row["kind"] == "gpu"}
    assert (pairs[0, 1], pairs[0, 2], pairs[2, 1]) == ("PIX", "SYS", "SYS")


def test_the_process_writes_nowhere(driver: Make, tmp_path: Path) -> None:
    node = driver(recorded(1))
    node.fresh()
    (process,) = node.listener.processes
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    assert status["NoNewPrivs"] == "1"
    assert status["Seccomp"] == "2"
    assert json.dumps(sorted(path.name for path in tmp_path.iterdir())) == '["nvml.sock"]'
