"""A driver that hangs, disappears and returns; GPUs that are lost and come back; events as they happen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from doubles.nvml_double import GPM, mig, recorded
from gpu_helpers import Gpus
from long import long_unless
from waiting import until

Make = Callable[..., Gpus]
# Type of NVML, our word for it.
DRIVER_EVENTS = [
    (0x1, 0, "ecc_single_bit"),
    (0x2, 0, "ecc_double_bit"),
    (0x4, 5, "pstate"),
    (0x8, 79, "xid"),
    (0x10, 0, "clocks"),
    (0x400, 0, "page_retired"),
    (0x800, 0, "page_retirement_failed"),
    (0x1000, 0, "poison"),
    (0x4000, 0, "gpu_unavailable"),
    (0x8000, 1, "recovery_action"),
]


@pytest.mark.parametrize(("kind", "data", "name"), DRIVER_EVENTS)
def test_each_event_of_the_driver_is_a_row(driver: Make, kind: int, data: int, name: str) -> None:
    node = driver(recorded(8))
    node.fresh()
    node.double.event(5, kind, data)
    row = node.event(name)
    assert (row["device_id"], row["uuid"]) == (5, node.double.values["gpu5.uuid"])
    assert row["xid"] == (data if name == "xid" else None)
    assert row["value"] == (None if name == "xid" or not data else data)
    assert (row["gpu_instance"], row["compute_instance"], row["suppressed"]) == (None, None, 0)


def test_23_xids_are_23_rows_in_order(driver: Make) -> None:
    node = driver(recorded(2))
    node.fresh()
    for number in range(23):
        node.double.event(number % 2, 0x8, 31 + number)

    def come() -> bool:
        node.tick()
        return len(node.rows("events")) >= 23

    until(come, what=lambda: str(node.events()))
    rows = node.rows("events")
    assert [(row["xid"], row["device_id"]) for row in rows] == [(31 + n, n % 2) for n in range(23)]
    assert [row["ts"] for row in rows] == sorted(row["ts"] for row in rows)


def test_an_xid_of_a_mig_device_names_its_instances(driver: Make) -> None:
    values = {**recorded(2), "gpu1.mig.mode": 1, **mig(1, 0, 9, 1 << 30)}
    node = driver(values)
    node.fresh()
    node.double.event(1, 0x8, 94, (9, 0))
    row = node.event("xid")
    assert (row["device_id"], row["xid"], row["gpu_instance"], row["compute_instance"]) == (1, 94, 9, 0)


def test_throttling_remaps_and_recovery_are_events(driver: Make) -> None:
    node = driver(recorded(2))
    node.fresh()
    node.double.write(**{"gpu1.clock_event_reasons": 0x40 | 0x8})
    row = node.event("throttled")
    assert (row["device_id"], row["detail"]) == (1, "clocks are held down: hw_slowdown,hw_thermal")
    assert node.rows("utilization")[-1]["clock_event_reasons"] == "hw_slowdown,hw_thermal"
    node.double.write(**{"gpu1.clock_event_reasons": 0})
    assert node.event("unthrottled")["device_id"] == 1


@pytest.mark.parametrize(
    "call",
    ["nvmlDeviceGetPowerUsage", long_unless(False, "nvmlInitWithFlags"), long_unless(False, "nvmlEventSetWait_v2")],
)
def test_a_call_that_hangs_is_reported_and_the_process_replaced(driver: Make, call: str) -> None:
    values = recorded(8)
    node = driver(values, "--gpu.call_timeout_s=0.3")
    if call != "nvmlInitWithFlags":
        node.fresh()
    before = len(node.listener.processes)
    node.double.write(hang=call)
    if call == "nvmlInitWithFlags":
        # Starting a driver may take a minute: the first start is not given up so soon.
        for _ in range(5):
            node.tick()
        assert node.events() == []
        node.double.set({}, drop=("hang",))
        assert len(node.fresh()) == 8
        return
    row = node.event("call_hung")
    assert call.removesuffix("_v2") in row["detail"]
    assert row["value"] >= 300
    assert node.state().state == "degraded"
    assert "did not return within" in node.state().reason
    node.double.set({}, drop=("hang",))
    assert len(node.fresh()) == 8
    assert node.event("driver_back")["device_id"] is None
    assert (node.state().state, node.state().reason) == ("running", "")
    assert len(node.listener.processes) > before
    until(lambda: None not in [p.poll() for p in node.listener.processes[:-1]], what="the end of the stuck process")


def test_events_that_wait_are_not_lost_with_the_process(driver: Make) -> None:
    node = driver(recorded(2), "--gpu.call_timeout_s=0.3")
    node.fresh()
    node.double.event(1, 0x8, 119)
    node.double.write(hang="nvmlDeviceGetPowerUsage")
    assert node.event("call_hung")
    assert node.event("xid")["xid"] == 119


def test_one_gpu_that_hangs_is_named(driver: Make) -> None:
    node = driver(recorded(8), "--gpu.call_timeout_s=0.3")
    node.fresh()
    node.double.write(**{"gpu6.hang": "nvmlDeviceGetFieldValues"})
    row = node.event("call_hung")
    assert (row["device_id"], row["uuid"]) == (6, node.double.values["gpu6.uuid"])
    assert "nvmlDeviceGetFieldValues" in row["detail"]


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (9, "not loaded"),
        long_unless(False, 18, "different versions"),
        long_unless(False, 4, "no permission"),
        long_unless(False, 999, "does not start"),
    ],
)
def test_a_driver_that_disappears_and_returns(driver: Make, code: int, text: str) -> None:
    node = driver(recorded(4))
    assert len(node.fresh(turns=3)) == 4
    # As it is when the modules are removed: what is open fails first, then the start.
    node.double.write(init=code, **{"error.nvmlDeviceGetPowerUsage": 1})
    assert node.event("driver_lost")["device_id"] is None

    def named() -> bool:
        node.tick()
        return text in node.state().reason

    until(named, what=lambda: str(node.state()))
    assert node.state().state == "degraded"
    node.double.set({"gpu0.field.197": 5, "driver_version": "560.1"}, drop=("init", "error.nvmlDeviceGetPowerUsage"))
    rows = node.fresh()
    # A counter that began anew has no rate.
    assert [row["pcie_tx_bytes_per_s"] for row in rows] == [None] * 4
    assert node.event("driver_back")["detail"].startswith("the driver answers again")
    assert {row["driver_version"] for row in node.devices()} == {"560.1"}
    assert [name for name, _ in node.events()].count("driver_lost") == 1


@pytest.mark.parametrize(
    ("call", "code", "text"),
    [
        ("error.nvmlDeviceGetCount_v2", 999, "nvmlDeviceGetCount gives code 999"),
        long_unless(False, "error.nvmlDeviceGetCount_v2", 15, "fallen off the bus"),
        long_unless(False, "init", 15, "fallen off the bus"),
    ],
)
def test_a_start_that_fails_has_a_reason(driver: Make, call: str, code: int, text: str) -> None:
    node = driver({**recorded(1), call: code})

    def degraded() -> bool:
        node.tick()
        return node.state().state == "degraded"

    until(degraded)
    assert text in node.state().reason
    node.double.set({}, drop=(call,))
    assert len(node.fresh()) == 1


def test_a_driver_that_comes_late(driver: Make) -> None:
    node = driver({**recorded(1), "init": 9})

    def degraded() -> bool:
        node.tick()
        return node.state().state == "degraded"

    until(degraded)
    node.double.set({}, drop=("init",))
    assert len(node.fresh()) == 1
    # It was never there: that it came is no return.
    assert node.events() == []


@pytest.mark.parametrize(("code", "text"), [(15, "fallen off the bus"), (16, "needs a reset")])
def test_a_gpu_that_is_lost_and_comes_back(driver: Make, code: int, text: str) -> None:
    node = driver(recorded(8))
    assert len(node.fresh()) == 8
    node.double.write(**{"gpu3.lost": code})
    row = node.event("gpu_lost")
    assert (row["device_id"], row["uuid"]) == (3, node.double.values["gpu3.uuid"])
    assert text in row["detail"]
    # The others go on.
    assert sorted(row["device_id"] for row in node.fresh()) == [0, 1, 2, 4, 5, 6, 7]
    assert (node.state().state, text in node.state().reason) == ("degraded", True)
    assert {row["device_id"]: row["state"] for row in node.devices()}[3] == "lost"
    node.double.set({}, drop=("gpu3.lost",))
    assert node.event("gpu_back")["device_id"] == 3
    assert len(node.fresh()) == 8
    assert node.state().state == "running"


def test_a_gpu_that_is_lost_at_the_start(driver: Make) -> None:
    node = driver({**recorded(2), "gpu1.lost": 15})
    assert [row["device_id"] for row in node.fresh()] == [0]
    assert node.event("gpu_lost")["device_id"] == 1
    assert "GPU 1" in node.state().reason


def test_counters_that_go_back_have_no_rate(driver: Make) -> None:
    node = driver(recorded(1))
    node.fresh(turns=2)
    node.double.write(**{"gpu0.field.197": 3, "gpu0.field.139.all": 1, "gpu0.field.74": 0})
    (row,) = node.fresh()
    assert (row["pcie_tx_bytes_per_s"], row["nvlink_rx_bytes_per_s"], row["power_capped_ns"]) == (None, None, None)
    (row,) = node.fresh()
    assert (row["pcie_tx_bytes_per_s"], row["power_capped_ns"]) == (0.0, 0)


def test_nonsense_of_the_driver_is_null(driver: Make) -> None:
    values = {
        **recorded(1),
        "gpu0.util.gpu": 4294967295,
        "gpu0.gpm.2": "nan",
        "gpu0.gpm.5": -1.0,
        "gpu0.field.83": 18446744073709551615,
        "gpu0.field.82": "i-1",
        "gpu0.pstate": 32,
    }
    node = driver(values)
    (row,) = node.fresh(turns=2)
    names = ("gpu_util_pct", "sm_active_pct", "tensor_active_pct", "energy_j", "mem_temperature_c", "pstate")
    assert [row[name] for name in names] == [None] * 6
    assert row["mem_controller_util_pct"] is not None


def test_a_sample_that_failed_once_is_taken_again(driver: Make) -> None:
    node = driver(recorded(1))

    def shows(value: float | None) -> bool:
        return node.fresh()[0]["sm_active_pct"] == value

    until(lambda: shows(GPM[2]))
    node.double.write(**{"error.nvmlGpmSampleGet": 10})
    until(lambda: shows(None))
    node.double.set({}, drop=("error.nvmlGpmSampleGet",))
    until(lambda: shows(GPM[2]))
    # A refusal is final.
    node.double.write(**{"error.nvmlGpmSampleGet": 3})
    until(lambda: shows(None))
    node.double.set({}, drop=("error.nvmlGpmSampleGet",))
    assert [shows(None) for _ in range(3)] == [True] * 3


def test_a_process_that_is_killed_is_started_again(driver: Make) -> None:
    node = driver(recorded(2))
    node.fresh()
    node.listener.processes[0].kill()
    assert len(node.fresh()) == 2
    assert len(node.listener.processes) == 2
    assert node.event("driver_back")


def test_without_a_library_it_says_so(driver: Make, tmp_path: Path) -> None:
    node = driver(recorded(1), f"--gpu.library={tmp_path}/libnvidia-ml.so.1")

    def degraded() -> bool:
        node.tick()
        return node.state().state == "degraded"

    until(degraded)
    assert "libnvidia-ml.so.1" in node.state().reason
