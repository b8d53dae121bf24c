"""Parts of the source of GPUs: rates, changes, limits, and which devices an environment shows."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pynvml
import pytest
from hypothesis import given
from hypothesis import strategies as st

from probing.daemon.gpu.nvml import calls as calls_module
from probing.daemon.gpu.nvml import snapshot
from probing.daemon.gpu.nvml import users as users_module
from probing.daemon.gpu.nvml.calls import Calls, DeviceLost
from probing.daemon.gpu.nvml.devices import Device, find_devices
from probing.daemon.gpu.nvml.fleet import Fleet
from probing.daemon.gpu.nvml.rows import (
    Counters,
    Limiter,
    changes_of,
    driver_event,
    link_changes,
    link_row,
    reasons_text,
    utilization_row,
)
from probing.daemon.gpu.nvml.topology import Topology
from probing.daemon.gpu.nvml.users import Place, Users, own_device, visible_devices
from probing.daemon.source import Identity

SECOND = 10**9


def test_a_counter_that_goes_back_has_no_rate() -> None:
    counters = Counters()
    assert counters.per_second("a", 100, SECOND) is None
    assert counters.per_second("a", 150, 3 * SECOND) == 25
    assert counters.per_second("a", 7, 4 * SECOND) is None
    assert counters.per_second("a", 9, 5 * SECOND) == 2
    assert counters.per_second("a", None, 6 * SECOND) is None
    assert counters.per_second("a", 11, 7 * SECOND) is None
    counters.forget()
    assert counters.more("a", 20, 8 * SECOND) is None


@given(st.lists(st.tuples(st.none() | st.integers(0, 2**64), st.integers(0, 2**62)), max_size=20))
def test_no_rate_is_negative(steps: list[tuple[int | None, int]]) -> None:
    counters = Counters()
    for value, at_ns in steps:
        rate = counters.per_second("a", value, at_ns)
        assert rate is None or rate >= 0


def places(split: tuple[int, ...] = ()) -> list[Place]:
    found = []
    for number in range(4):
        found.append(Place(str(number), number, None, (f"GPU-{number}aaa-bbb",)))
        if number in split:
            found += [
                Place(f"{number}.{at}", number, at, (f"MIG-{number}{at}cc-dd", f"MIG-GPU-{number}aaa-bbb/{at + 7}/0"))
                for at in range(2)
            ]
    return found


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("2", ["2"]),
        ("3,1", ["3", "1"]),
        (" 0 , 2 ", ["0", "2"]),
        ("", []),
        ("-1", []),
        ("1,-1,2", ["1"]),
        ("1,9,2", ["1"]),
        ("0,0", ["0"]),
        ("GPU-1aaa-bbb", ["1"]),
        ("GPU-3", ["3"]),
        ("GPU-", []),
        ("NoDevFiles", []),
        ("1" * 5000, []),
    ],
)
def test_visible_devices_are_those_of_cuda(text: str, wanted: list[str]) -> None:
    assert [place.key for place in visible_devices({"CUDA_VISIBLE_DEVICES": text}, places())] == wanted


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("MIG-11cc-dd", "1.1"),
        ("MIG-GPU-1aaa-bbb/7/0", "1.0"),
        ("MIG-GPU-1aaa-bbb/8/0", "1.1"),
        ("1", "1.0"),
        ("0", "0"),
    ],
)
def test_mig_devices_by_uuid_by_instance_and_by_the_number_of_their_gpu(text: str, wanted: str) -> None:
    assert [place.key for place in visible_devices({"CUDA_VISIBLE_DEVICES": text}, places((1,)))] == [wanted]


@pytest.mark.parametrize(
    ("environ", "local_rank", "wanted"),
    [
        ({}, 1, None),
        ({"CUDA_VISIBLE_DEVICES": "3"}, None, "3"),
        ({"CUDA_VISIBLE_DEVICES": "3,1"}, 1, "1"),
        ({"CUDA_VISIBLE_DEVICES": "3,1"}, None, None),
        ({"CUDA_VISIBLE_DEVICES": "3,1"}, 2, None),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0, None),
        ({"NVIDIA_VISIBLE_DEVICES": "2,3", "CUDA_VISIBLE_DEVICES": "1"}, 0, "3"),
        ({"NVIDIA_VISIBLE_DEVICES": "GPU-3aaa-bbb,GPU-1aaa-bbb"}, 0, "1"),
        ({"NVIDIA_VISIBLE_DEVICES": "all"}, 2, "2"),
        ({"NVIDIA_VISIBLE_DEVICES": "void"}, 2, "2"),
        ({"NVIDIA_VISIBLE_DEVICES": "something else"}, 2, "2"),
    ],
)
def test_the_device_of_a_rank(environ: dict[str, str], local_rank: int | None, wanted: str | None) -> None:
    place = own_device(environ, places(), local_rank)
    assert (place and place.key) == wanted


def test_a_container_with_one_mig_device() -> None:
    for text in ("1:1", "MIG-11cc-dd"):
        place = own_device({"NVIDIA_VISIBLE_DEVICES": text, "CUDA_VISIBLE_DEVICES": "0"}, places((1,)), 3)
        assert place is not None
        assert place.key == "1.1"


@given(st.text(max_size=60), st.text(max_size=60), st.none() | st.integers(-5, 9))
def test_any_text_names_known_devices(cuda: str, nvidia: str, local_rank: int | None) -> None:
    known = places((0, 2))
    place = own_device({"CUDA_VISIBLE_DEVICES": cuda, "NVIDIA_VISIBLE_DEVICES": nvidia}, known, local_rank)
    assert place is None or place in known


def test_reasons_have_names() -> None:
    assert reasons_text(None) is None
    assert reasons_text(0) == ""
    assert reasons_text(0x4 | 0x40) == "sw_power_cap,hw_thermal"
    assert reasons_text(0x1 | 0x2000) == "gpu_idle,0x2000"


def test_throttling_begins_and_ends_once() -> None:
    quiet, capped, hot = {"clock_events": 0}, {"clock_events": 4}, {"clock_events": 0x4 | 0x40}
    assert list(changes_of(quiet, capped)) == []
    (begun,) = changes_of(capped, hot)
    assert (begun["event"], begun["value"]) == ("throttled", 0x40)
    assert "hw_thermal" in begun["detail"]
    assert list(changes_of(hot, hot)) == []
    assert [change["event"] for change in changes_of(hot, quiet)] == ["unthrottled"]
    assert list(changes_of({"clock_events": None}, quiet)) == []


def test_what_grows_and_what_is_asked_for_are_events() -> None:
    before = {"remapped_uncorrected": 2, "remap_failed": 0, "recovery_action": 0, "retired_pages_dbe": None}
    now = {"remapped_uncorrected": 5, "remap_failed": 1, "recovery_action": 4, "retired_pages_dbe": 3}
    found = list(changes_of(before, now))
    assert [(change["event"], change.get("value")) for change in found] == [
        ("row_remapped", 3),
        ("remap_failed", None),
        ("recovery_action", 4),
    ]
    assert "drain_and_reset" in found[2]["detail"]
    assert list(changes_of(now, before)) == [
        {"event": "recovery_action", "value": 0, "detail": "the driver asks for: none"}
    ]


def test_a_link_that_goes_down_with_errors() -> None:
    before = {"link": 3, "state": "up", "replays": 5, "crc_errors": 7, "recoveries": None}
    now = {"link": 3, "state": "down", "replays": 5, "crc_errors": 18, "recoveries": 1}
    found = [(row["event"], row["value"]) for row in link_changes(before, now)]
    assert found == [("link_down", 3), ("nvlink_errors", 11)]
    assert [row["event"] for row in link_changes(now, before)] == ["link_up"]


def test_an_xid_keeps_its_number() -> None:
    row = driver_event({"type": 8, "data": 79, "ts_ns": 5, "instances": [3, None]})
    assert (row["event"], row["xid"], row["value"], row["detail"]) == ("xid", 79, None, "Xid 79")
    assert (row["gpu_instance"], row["compute_instance"], row["ts"]) == (3, None, 5)
    assert driver_event({"type": 8, "data": 999, "ts_ns": 5, "instances": [None, None]})["detail"].endswith("number")
    assert driver_event({"type": 1 << 40, "data": 1 << 70, "ts_ns": 5, "instances": [None, None]})["event"] == "unknown"


def test_too_many_events_of_a_kind_are_counted() -> None:
    limiter = Limiter(most=3, seconds=60)
    assert [limiter.passes("a", 0.1 * n) for n in range(5)] == [0, 0, 0, None, None]
    assert limiter.passes("b", 1.0) == 0
    assert limiter.forgotten(59.9) == 0
    assert limiter.passes("a", 61.0) == 2
    assert limiter.passes("a", 61.1) == 0
    # Of those after the last event that passed nobody else would know.
    assert [limiter.passes("a", 61.2 + 0.1 * n) for n in range(5)] == [0, None, None, None, None]
    assert limiter.passes("b", 62.0) == 0
    assert limiter.forgotten(120.9) == 0
    assert [limiter.forgotten(121.0), limiter.forgotten(121.0)] == [4, 0]
    assert limiter.passes("a", 130.0) == 0


def test_units_are_bytes_joules_and_watts() -> None:
    counters = Counters()
    facts = {"device_id": 3, "uuid": "GPU-x", "mig": None}
    first = {
        "nvlink_rx_kib": 1000,
        "pcie_tx_bytes": 500,
        "power_capped_total_ns": 11,
        "energy_mj": 7001,
        "total_bytes": 400,
        "used_bytes": 100,
        "dram_active_pct": 12.5,
        "clock_events": 4,
    }
    row = utilization_row("3", facts, first, counters, SECOND)
    assert (row["nvlink_rx_bytes_per_s"], row["wall_ns"], row["power_capped_ns"]) == (None, None, None)
    assert (row["energy_j"], row["mem_used_pct"], row["mem_bandwidth_util_pct"]) == (7.001, 25.0, 12.5)
    later = {**first, "nvlink_rx_kib": 1017, "pcie_tx_bytes": 730, "power_capped_total_ns": 24}
    row = utilization_row("3", facts, later, counters, 3 * SECOND)
    assert (row["nvlink_rx_bytes_per_s"], row["pcie_tx_bytes_per_s"]) == (17 * 1024 / 2, 115.0)
    assert (row["wall_ns"], row["power_capped_ns"], row["device_id"]) == (2 * SECOND, 13, 3)


def test_traffic_comes_from_gpm_or_a_sample_where_there_are_no_counters() -> None:
    gpm = utilization_row("0", {}, {"pcie_rx_mib_per_s": 3.0, "nvlink_tx_mib_per_s": 5.0}, Counters(), 0)
    assert (gpm["pcie_rx_bytes_per_s"], gpm["nvlink_tx_bytes_per_s"]) == (3 << 20, 5 << 20)
    assert utilization_row("0", {}, {"pcie_rx_kb_per_s": 7}, Counters(), 0)["pcie_rx_bytes_per_s"] == 7000
    assert utilization_row("0", {}, {}, Counters(), 0)["pcie_rx_bytes_per_s"] is None


@pytest.mark.parametrize(
    ("width", "speed", "busy", "state"),
    [(16, 5, 0, "full"), (8, 5, 0, "degraded"), (16, 1, 3, "full"), (16, 3, 97, "degraded"), (None, 5, 97, None)],
)
def test_pcie_is_degraded_by_lanes_or_by_speed_under_load(
    width: int | None, speed: int, busy: int, state: str | None
) -> None:
    link = {"device": "0", "kind": "pcie", "width": width, "width_max": 16, "generation": speed, "generation_max": 5}
    assert link_row(link, {}, {"gpu_util_pct": busy}, Counters(), 0)["state"] == state


def test_a_lost_gpu_stays_in_the_list() -> None:
    fleet = Fleet()
    facts = [{"device": str(n), "device_id": n, "mig": None, "uuid": f"GPU-{n}", "name": "H100"} for n in range(3)]
    assert fleet.take({"backend": "cuda", "devices": facts, "driver": {"driver_version": "1.2"}, "lost": {}}) == {}
    assert fleet.take({"lost": {"1": "fell off"}}) == {1: "fell off"}
    assert fleet.take({"lost": {"1": "fell off"}}) == {}
    # A fresh process cannot open it, and later on not even see it.
    assert fleet.take({"devices": [facts[0], facts[2]], "lost": {"1": "fell off"}}) == {}
    states = {row["device_id"]: (row["uuid"], row["name"], row["state"], row["reason"]) for row in fleet.rows("n", 5)}
    assert states[1] == ("GPU-1", "H100", "lost", "fell off")
    assert states[0][2:] == ("ok", None)
    # That it is not even listed does not mean that it answers again.
    assert fleet.take({"devices": [facts[0], facts[2]], "lost": {}}) == {}
    assert [row["state"] for row in fleet.rows("n", 5)] == ["ok", "gone", "ok"]
    assert fleet.gpu_row("1") == {"device_id": 1, "uuid": "GPU-1"}
    assert fleet.take({"devices": facts, "lost": {}}) == {1: None}
    assert fleet.take({"devices": facts, "lost": {}}) == {}
    assert [row["state"] for row in fleet.rows("n", 5)] == ["ok"] * 3


def test_a_gpu_that_is_gone_stays_in_the_list_when_another_gets_its_number() -> None:
    def listed(*uuids: str) -> list[dict[str, Any]]:
        return [{"device": str(n), "device_id": n, "mig": None, "uuid": uuid} for n, uuid in enumerate(uuids)]

    def states() -> list[tuple[str, str]]:
        return sorted((row["uuid"], row["state"]) for row in fleet.rows("n", 5))

    fleet = Fleet()
    fleet.take({"devices": listed("a", "b", "c"), "lost": {}})
    assert fleet.take({"lost": {"1": "fell off"}}) == {1: "fell off"}
    assert fleet.take({"devices": listed("a", "c"), "lost": {}}) == {}
    assert states() == [("a", "ok"), ("b", "gone"), ("c", "ok")]
    assert fleet.gpu_row("1") == {"device_id": 1, "uuid": "c"}
    # A reason of the GPU that has the number now is none of the GPU that had it.
    assert fleet.take({"lost": {"1": "needs a reset"}}) == {1: "needs a reset"}
    assert states() == [("a", "ok"), ("b", "gone"), ("c", "lost")]
    assert fleet.take({"devices": listed("c", "b", "a"), "lost": {}}) == {0: None}
    assert states() == [("a", "ok"), ("b", "ok"), ("c", "ok")]


def test_a_gpu_that_was_lost_from_the_start_comes_back() -> None:
    fleet = Fleet()
    facts = [{"device": str(n), "device_id": n, "mig": None, "uuid": f"GPU-{n}"} for n in range(2)]
    assert fleet.take({"devices": facts[:1], "lost": {"1": "fell off"}}) == {1: "fell off"}
    assert fleet.take({"devices": facts, "lost": {}}) == {1: None}


def test_an_error_of_the_driver_takes_no_link_down() -> None:
    before, now = ({"link": 3, "state": state, "crc_errors": 7} for state in ("up", None))
    assert list(link_changes(before, now)) == list(link_changes(now, before)) == []
    assert list(link_changes(now, now)) == []


def test_a_text_that_is_no_unicode_costs_no_other_value() -> None:
    serial = pynvml.convertStrBytes(lambda: b"16\xff5")
    calls = Calls(1.0)
    assert calls.ask("nvmlDeviceGetSerial", device="0", function=serial) == "16\ufffd5"
    assert calls.running is None


def test_a_problem_ends_when_the_call_succeeds() -> None:
    codes = {"0": 999, "1": 999}

    def read(device: str) -> str:
        if codes[device]:
            raise pynvml.NVMLError(codes[device])
        return device

    calls = Calls(1.0)

    def ask() -> list[str | None]:
        return [calls.ask("nvmlDeviceGetX", device, device=device, function=read) for device in codes]

    assert ask() == [None, None]
    assert calls.problems == ["nvmlDeviceGetX failed with code 999"]
    codes["1"] = 0
    assert ask() == [None, "1"]
    assert calls.problems == ["nvmlDeviceGetX failed with code 999"]
    codes["0"] = 0
    assert ask() == ["0", "1"]
    assert calls.problems == []


class Driver:
    """A driver that knows the state of link 0."""

    def __init__(self) -> None:
        self.state: int | None = 1

    def ask(self, name: str, *_: Any, device: str = "", **_more: Any) -> int | None:
        return self.state if (name, device) == ("nvmlDeviceGetNvLinkState", "0 0") else None

    def reading(self, _: str) -> Any:
        return nullcontext()


def test_a_link_that_the_driver_cannot_read_is_not_down(tmp_path: Path) -> None:
    driver = Driver()
    topology = Topology(cast("Any", driver), [Device("0", None, 0)], tmp_path)
    states = []
    for driver.state in (1, None, 0):
        states += [row["state"] for row in topology.counted() if row["kind"] == "nvlink"]
    assert states == ["up", None, "down"]


def test_a_lost_gpu_costs_only_its_own_pairs(tmp_path: Path) -> None:
    class Pairs(Driver):
        def ask(self, name: str, *args: Any, device: str = "", **_more: Any) -> int | None:
            if name == "nvmlDeviceGetTopologyCommonAncestor" and "lost" in args:
                raise DeviceLost("fell off the bus")
            return 40 if name == "nvmlDeviceGetTopologyCommonAncestor" else None

    gpus = [Device(str(n), "lost" if n == 1 else n, n) for n in range(4)]
    rows = Topology(cast("Any", Pairs()), gpus, tmp_path).pairs([])
    found = [(row["device"], row["peer_id"], row["path"]) for row in rows]
    assert found == [(str(a), b, "NODE") for a in (0, 2, 3) for b in (0, 2, 3) if a != b]


def test_addresses_of_processes_that_nobody_reports_as_ended_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(users_module, "MANY", 4)
    alive = {(5, 50), (6, 60)}
    monkeypatch.setattr(users_module, "is_alive", lambda pid, start_ns: (pid, start_ns) in alive)
    watched = SimpleNamespace(live=lambda: [Identity(5, 50, "job", "run", "trainer", 0)], environ=lambda *_: {})
    users = Users(cast("Any", watched))
    devices = {"0": {"device_id": 0, "uuid": "GPU-0", "bus_id": "0000:17:00.0"}}

    def note(*processes: tuple[int, int]) -> list[dict[str, Any]]:
        rows = [{"pid": pid, "start_ns": start_ns, "bus_id": "0000:17:00.0"} for pid, start_ns in processes]
        users.note(pa.RecordBatch.from_pylist(rows))
        return list(users.rows(devices, {}, {}))

    note(*alive)
    for number in range(100):
        assert [row["pid"] for row in note((1_000 + number, 1))] == [5]
        assert len(users._addresses) <= 5
    assert alive <= set(users._addresses)


def test_samples_from_before_the_clock_was_set_back_keep_no_newer_ones_away(monkeypatch: pytest.MonkeyPatch) -> None:
    samples: list[tuple[int, ...]] = []

    class Samples:
        def ask(self, name: str, _: object, *since_us: int, **_more: Any) -> Any:
            if name == "nvmlDeviceGetProcessUtilization":
                return [sample for sample in samples if sample[1] > since_us[0]]
            return [(77, 5)]

    def shown(now_s: int, sm_pct: int) -> Any:
        monkeypatch.setattr(snapshot, "time", SimpleNamespace(time_ns=lambda: now_s * SECOND))
        samples.append((77, now_s * 1_000_000, sm_pct, 0, 0, 0))
        ((entry, *_),) = [readings.read(Device("0", None, 0), slow=False)]
        return entry.get("sm_pct")

    readings = snapshot._ProcessReadings(cast("Any", Samples()))
    assert [shown(100_000, 10), shown(100_001, 11)] == [10, 11]
    assert [shown(90_000, 12), shown(90_001, 13)] == [12, 13]


def test_a_gpu_may_take_long_when_it_is_opened_first(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(5.0)
    allowed_s: list[float] = []

    def opened(number: int) -> int:
        assert calls.running is not None
        allowed_s.append(calls.running.allowed_s)
        return number

    # What the driver lacks is as in an old one.
    errors = {name: getattr(pynvml, name) for name in ("NVMLError", "NVMLLibraryMismatchError")}
    functions = {"nvmlDeviceGetCount": lambda: 1, "nvmlDeviceGetHandleByIndex": opened}
    monkeypatch.setattr(calls_module, "pynvml", SimpleNamespace(**errors, **functions))
    for starts in (True, False):
        assert [device.key for device in find_devices(calls, starts=starts)[0]] == ["0"]
    assert allowed_s[0] >= Calls.START_S
    assert allowed_s[1] == 5.0


def test_the_device_of_a_process_is_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[dict[str, str]] = []

    def counted(environ: dict[str, str], places: list[Place], local_rank: int | None) -> Place | None:
        found.append(environ)
        return own_device(environ, places, local_rank)

    monkeypatch.setattr(users_module, "own_device", counted)
    who = Identity(5, 50, "job", "run", "trainer", 0, 1)
    environ = {"CUDA_VISIBLE_DEVICES": "0,1"}
    live = [who]
    users = Users(cast("Any", SimpleNamespace(live=lambda: live, environ=lambda *_: dict(environ))))
    devices: dict[str, dict[str, Any]] = {"0": {"device_id": 0, "uuid": "GPU-0"}}

    def shown() -> list[int]:
        return [row["device_id"] for row in users.rows(devices, {}, {})]

    assert [shown(), shown(), len(found)] == [[0], [0], 1]
    devices["1"] = {"device_id": 1, "uuid": "GPU-1"}
    assert [shown(), shown(), len(found)] == [[1], [1], 2]
    environ["CUDA_VISIBLE_DEVICES"] = "1,0"
    assert [shown(), shown(), len(found)] == [[0], [0], 3]
    live[0] = who._replace(local_rank=0)
    assert [shown(), shown(), len(found)] == [[1], [1], 4]
    live.clear()
    assert [shown(), len(users._own)] == [[], 0]
