"""The owner of the process that asks the driver, and the source, against a process that answers as a test wants."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import Now, Sink
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from waiting import until

from probing.daemon.clock import FakeClock
from probing.daemon.config import GpuConfig
from probing.daemon.gpu.nvml import session as session_module
from probing.daemon.gpu.nvml import source as source_module
from probing.daemon.gpu.nvml.session import Failure, NvmlSession, Reading
from probing.daemon.gpu.nvml.source import NO_GPU, NvmlSource
from probing.daemon.ipc import Channel, ChannelClosed
from probing.daemon.source import Identity
from probing.daemon.source_state import SourceState, Totals

Answer = tuple[dict[str, Any], bytes]


class Process:
    """Listens as the supervisor does, and answers polls with ``answers`` in turn; None: not at all."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "nvml.sock")
        self.answers: list[Answer | None] = []
        self.asked: list[dict[str, Any]] = []
        self.started = 0
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(self.path)
        self._socket.listen(8)
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self.started += 1
            threading.Thread(target=self._serve, args=(Channel(connection),), daemon=True).start()

    def _serve(self, channel: Channel) -> None:
        with channel:
            try:
                while True:
                    header = channel.receive().header
                    if header["op"] == "ping":
                        channel.send({"pid": os.getpid()})
                        continue
                    self.asked.append(header)
                    answer = self.answers.pop(0) if self.answers else None
                    if answer is not None:
                        channel.send(*answer)
                        if answer[0]:
                            return
            except (ChannelClosed, OSError):
                return


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Process]:
    made = Process(tmp_path)
    yield made
    made.close()


def good(**content: Any) -> Answer:
    return {}, json.dumps({"backend": "cuda", "values": {}, "lost": {}, **content}).encode()


HUNG: Answer = ({"hung": {"call": "nvmlDeviceGetX", "device": "3", "seconds": 5.5}, "events": []}, b"")


def polled(session: NvmlSession) -> Reading | Failure:
    found = until(lambda: session.poll(0.05, slow=False, links=False, pairs=False))
    assert found is not None
    return found


def test_the_first_poll_asks_for_all(process: Process) -> None:
    process.answers += [good(), good()]
    session = NvmlSession(process.path)
    first, second = polled(session), polled(session)
    assert isinstance(first, Reading)
    assert isinstance(second, Reading)
    assert (first.fresh, first.asked) == (True, {"slow", "links", "pairs"})
    assert (second.fresh, second.asked) == (False, frozenset())
    assert [header["slow"] for header in process.asked] == [True, False]
    session.close()


@pytest.mark.parametrize(
    "answer",
    [
        ({"hung": 5}, b"{}"),
        ({"failed": {"kind": 1}}, b"{}"),
        ({"events": {}}, b"{}"),
        ({}, b"[]"),
        ({}, b'{"values": 5}'),
    ],
)
def test_an_answer_of_another_type_is_a_failure(process: Process, answer: Answer) -> None:
    process.answers += [answer]
    session = NvmlSession(process.path)
    failure = polled(session)
    assert isinstance(failure, Failure)
    assert (failure.kind, failure.text) == ("lost", "the process that asks the driver: its answer cannot be read")
    session.close()


def no_start_before(wait_s: float, session: NvmlSession, process: Process, now: list[float]) -> None:
    """Checks that the session starts no process before its pause of ``wait_s`` ends, and sets the clock behind it."""
    started = process.started
    now[0] += wait_s - 0.1
    assert session.poll(0, slow=False, links=False, pairs=False) is None
    assert process.started == started
    now[0] += 0.2


def test_the_next_start_waits_longer_each_time(process: Process) -> None:
    now = [100.0]
    session = NvmlSession(process.path, retry_s=(1, 5), now=lambda: now[0])
    failed: Answer = ({"failed": {"kind": "absent", "text": "no driver"}}, b"")
    process.answers += [failed, failed, failed, good()]
    for wait_s in (1, 5, 5):
        failure = polled(session)
        assert isinstance(failure, Failure)
        assert (failure.kind, failure.text) == ("absent", "no driver")
        no_start_before(wait_s, session, process, now)
    assert isinstance(polled(session), Reading)
    session.close()


def test_none_is_started_beside_one_that_is_stuck(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    monkeypatch.setattr(session_module.os, "pidfd_open", lambda pid: read if pid == os.getpid() else -1)
    process.answers += [HUNG, good()]
    session = NvmlSession(process.path, retry_s=(0,))
    failure = polled(session)
    assert isinstance(failure, Failure)
    assert (failure.kind, failure.call, failure.device, failure.seconds) == ("hung", "nvmlDeviceGetX", "3", 5.5)
    for _ in range(20):
        assert session.poll(0, slow=False, links=False, pairs=False) is None
    assert process.started == 1
    monkeypatch.undo()
    # It has ended: its descriptor is readable.
    os.close(write)
    assert isinstance(polled(session), Reading)
    session.close()


def test_no_answer_at_all_is_a_hang(process: Process) -> None:
    now = [100.0]
    session = NvmlSession(process.path, retry_s=(0,), now=lambda: now[0])
    process.answers += [good(), None, good()]
    polled(session)
    assert session.poll(0, slow=False, links=False, pairs=False) is None
    now[0] += session_module.POLL_S + 1
    failure = session.poll(0, slow=False, links=False, pairs=False)
    assert isinstance(failure, Failure)
    assert (failure.kind, failure.text) == ("hung", "the driver has not answered for 31 s")
    session.close()


def test_a_collector_with_thousands_of_descriptors_reads_its_gpus(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(allowed[0], 4_096), allowed[1]))
    pidfd_open = os.pidfd_open
    ends: list[int] = []

    def high(fd: int) -> int:
        try:
            return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 2_000)
        finally:
            os.close(fd)

    def connected(path: str, timeout: float) -> Channel:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as low:
            low.settimeout(timeout)
            low.connect(path)
            return Channel(socket.socket(fileno=high(low.detach())))

    def opened(pid: int) -> int:
        ends.append(high(pidfd_open(pid)))
        return ends[-1]

    monkeypatch.setattr(session_module, "connect", connected)
    monkeypatch.setattr(session_module.os, "pidfd_open", opened)
    process.answers += [good(), HUNG]
    session = NvmlSession(process.path, retry_s=(0,))
    try:
        assert isinstance(polled(session), Reading)
        failure = polled(session)
        assert isinstance(failure, Failure)
        assert (failure.kind, failure.device) == ("hung", "3")
        # The process that hung, here the test itself, has not ended.
        assert session.poll(0, slow=False, links=False, pairs=False) is None
        assert min(ends) >= 2_000
    finally:
        session.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, allowed)


def test_without_a_listener_it_fails_and_tries_again(tmp_path: Path) -> None:
    session = NvmlSession(str(tmp_path / "nobody.sock"), retry_s=(0,))
    for _ in range(3):
        found = session.poll(0, slow=False, links=False, pairs=False)
        assert isinstance(found, Failure)
        assert found.kind == "ended"


class Nobody:
    def live(self) -> list[Identity]:
        return []

    def environ(self, pid: int, start_ns: int) -> dict[str, str]:
        return {}


class Given:
    """A session that answers what it is given."""

    def __init__(self, *found: Reading | Failure | None) -> None:
        self.found = list(found)
        self.restarts = 0

    def poll(self, wait_s: float, **_: bool) -> Reading | Failure | None:
        return self.found.pop(0) if self.found else None

    def again(self) -> None:
        self.restarts += 1

    reject = again

    def close(self) -> None:
        pass


def source_of(*found: Reading | Failure | None, may_lose: bool = False) -> tuple[NvmlSource, Given, Sink]:
    given, rows = Given(*found), Sink(may_lose=may_lose)
    config = GpuConfig(interval_s=0.1)
    return NvmlSource(given, Nobody(), rows, FakeClock(5, 7), "n", config), given, rows  # type: ignore[arg-type]


def state_of(source: NvmlSource) -> SourceState:
    (state,) = source.states(Totals("running", {}, {}))
    return state


def test_a_node_without_gpus_is_not_degraded() -> None:
    source, _, rows = source_of(Failure("absent", NO_GPU))
    source.tick()
    state = state_of(source)
    assert (state.state, state.reason, state.detail) == ("running", "", NO_GPU)
    assert rows.rows == []
    assert source.live_tables["gpu.devices"](FakeClock().pair()).num_rows == 0


def test_gpus_without_a_driver_are_a_degraded_source() -> None:
    source, _, _ = source_of(Failure("absent", "NVIDIA GPUs are there, but their driver is not loaded"))
    source.tick()
    assert state_of(source).state == "degraded"


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
_PARTS = ("devices", "values", "processes", "links", "events", "lost", "driver", "problems", "backend")
_DEVICE = {"device": "0", "device_id": 0, "mig": None, "uuid": "GPU-0"}


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.dictionaries(st.sampled_from(_PARTS), _JSON, max_size=4), st.dictionaries(st.text(max_size=12), _JSON))
def test_no_answer_ends_the_source(content: dict[str, Any], of_device: dict[str, Any]) -> None:
    sane = {"devices": [_DEVICE], "values": {"0": {"power_w": 5.0, **of_device}}, "lost": {}}
    strange = Reading({**sane, **content}, frozenset(), True)
    source, given_session, rows = source_of(strange, Reading(sane, frozenset(), True))
    source.tick()
    source.tick()
    assert given_session.restarts <= 2
    assert len(rows.of("gpu.utilization")) <= 2


_NUMBERS = st.none() | st.integers(-(2**70), 2**70) | st.text(max_size=3) | st.floats()


@settings(deadline=None)
@given(
    st.fixed_dictionaries(
        {
            "type": _NUMBERS,
            "data": _NUMBERS,
            "ts_ns": _NUMBERS,
            "instances": st.lists(_NUMBERS, max_size=3),
            "device": _NUMBERS,
        }
    )
)
def test_no_event_ends_the_source(event: dict[str, Any]) -> None:
    answer = Reading({"devices": [_DEVICE], "values": {}, "events": [event]}, frozenset(), True)
    source, given_session, _ = source_of(answer)
    source.tick()
    assert given_session.restarts == 0


def test_a_number_that_no_column_holds_costs_no_other_value() -> None:
    devices = [{**_DEVICE, "device": str(n), "device_id": n, "uuid": f"GPU-{n}", "minor": n << 40} for n in range(2)]
    values = {
        "0": {"sm_clock_mhz": 2**32 - 1, "total_bytes": 2**64 - 1, "power_w": 7.0},
        "1": {"sm_clock_mhz": 1980, "total_bytes": 80, "power_w": 5.0},
    }
    users = {"1": [{"pid": 2**32 - 1, "used_bytes": 3}, {"pid": 9, "used_bytes": 2**63}]}
    content: dict[str, Any] = {"devices": devices, "values": values, "processes": users}
    source, given_session, rows = source_of(Reading(content, frozenset(), True))  # type: ignore[arg-type]
    source.tick()
    found = [(row["sm_clock_mhz"], row["total_bytes"], row["power_w"]) for row in rows.of("gpu.utilization")]
    assert found == [(None, None, 7.0), (1980, 80, 5.0)]
    assert [(row["pid"], row["used_bytes"]) for row in rows.of("gpu.processes")] == [(None, 3), (9, None)]
    listed = source.live_tables["gpu.devices"](FakeClock().pair()).to_pylist()
    assert [(row["uuid"], row["minor"]) for row in listed] == [("GPU-0", 0), ("GPU-1", None)]
    assert (given_session.restarts, state_of(source).state) == (0, "running")


def test_after_answers_that_make_no_sense_the_next_start_waits_longer(process: Process) -> None:
    now = [100.0]
    session = NvmlSession(process.path, retry_s=(1, 5, 9), now=lambda: now[0])
    process.answers += [good(), good(), good(), good(), good()]

    def starts_after(wait_s: float) -> bool:
        no_start_before(wait_s, session, process, now)
        return isinstance(polled(session), Reading)

    polled(session)
    for wait_s in (1, 5):
        session.reject()
        assert starts_after(wait_s)
    # An answer that makes sense ends the row of failures.
    polled(session)
    session.reject()
    assert starts_after(1)
    session.close()


def test_an_answer_that_makes_no_sense_is_a_failure() -> None:
    broken = Reading({"devices": [{"device": "0"}], "values": {"0": 5}}, frozenset(), True)
    whole = Reading({"devices": [_DEVICE], "values": {"0": {"power_w": 5.0}}}, frozenset(), True)
    source, given_session, rows = source_of(broken, whole)
    source.tick()
    assert (state_of(source).state, given_session.restarts) == ("degraded", 1)
    assert "is malformed" in state_of(source).reason
    source.tick()
    assert state_of(source).state == "running"
    assert len(rows.of("gpu.utilization")) == 1


def test_events_that_nobody_kept_are_a_loss() -> None:
    event: dict[str, Any] = {"type": 8, "data": 79, "instances": [None, None]}
    events = [{**event, "ts_ns": n, "device": str(n % 1_000)} for n in range(5_000)]
    content: dict[str, Any] = {"devices": [_DEVICE], "values": {}, "events": events, "events_dropped": 7}
    source, _, rows = source_of(Reading(content, frozenset(), True), may_lose=True)  # type: ignore[arg-type]
    source.tick()
    (loss,) = rows.losses
    assert loss.table == "gpu.events"
    assert loss.count == 5_000 + 7 - len(rows.of("gpu.events"))
    assert len(rows.of("gpu.events")) == 4_096


def test_suppressed_events_that_no_event_follows_are_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    now = Now(1_000.0)
    monkeypatch.setattr(source_module, "time", SimpleNamespace(monotonic=now))
    event: dict[str, Any] = {"type": 8, "data": 79, "ts_ns": 5, "instances": [None, None], "device": "0"}
    content: dict[str, Any] = {"devices": [_DEVICE], "values": {}, "events": [event] * 50}
    source, _, rows = source_of(Reading(content, frozenset(), True), may_lose=True)  # type: ignore[arg-type]
    source.tick()
    assert (len(rows.of("gpu.events")), rows.losses) == (30, [])
    now.now += 61.0
    source.tick()
    source.tick()
    assert [(loss.table, loss.count) for loss in rows.losses] == [("gpu.events", 20)]


def test_a_gpu_that_stays_lost_is_tried_ever_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    now = Now(1_000.0)
    monkeypatch.setattr(source_module, "time", SimpleNamespace(monotonic=now))

    def restarts(seconds: int, *lost: int) -> int:
        """Ticks for so long while the GPUs ``lost`` are lost, and returns how often the process was started again."""
        before = given.restarts
        for _ in range(seconds):
            now.now += 1.0
            reading: dict[str, Any] = {"values": {}, "lost": {str(number): "fell off" for number in lost}}
            given.found.append(Reading(reading, frozenset(), False))  # type: ignore[arg-type]
            source.tick()
        return given.restarts - before

    source, given, _ = source_of()
    assert restarts(32, 1) == 1
    assert restarts(3_600, 1) < 12
    # Another one is tried soon.
    assert restarts(32, 1, 2) == 1


def test_counters_of_a_gpu_are_not_compared_with_those_of_another() -> None:
    def read(uuid: str, energy: int, state: str) -> Reading:
        link = {"device": "0", "kind": "nvlink", "link": 3, "path": "NV", "state": state, "crc_errors": energy}
        values = {"0": {"power_capped_total_ns": energy, "pcie_tx_bytes": energy}}
        content: dict[str, Any] = {"devices": [{**_DEVICE, "uuid": uuid}], "values": values, "links": [link]}
        return Reading(content, frozenset(), True)  # type: ignore[arg-type]

    source, _, rows = source_of(read("a", 5, "up"), read("a", 8, "up"), read("b", 4_000, "down"))
    for _ in range(3):
        source.tick()
    assert [row["power_capped_ns"] for row in rows.of("gpu.utilization")] == [None, 3, None]
    assert rows.of("gpu.utilization")[-1]["pcie_tx_bytes_per_s"] is None
    assert [(row["event"], row["value"]) for row in rows.of("gpu.events")] == [("nvlink_errors", 3)]


def test_a_link_whose_state_cannot_be_read_keeps_the_last_one() -> None:
    def read(state: str | None) -> Reading:
        link = {"device": "0", "kind": "nvlink", "link": 3, "path": "NV", "state": state}
        content = {"devices": [_DEVICE], "values": {"0": {}}, "links": [link]}
        return Reading(content, frozenset(), True)

    source, _, rows = source_of(*map(read, ["up", None, "up", None, "down"]))
    for _ in range(5):
        source.tick()
    events = [row["event"] for row in rows.of("gpu.events")]
    assert [event for event in events if event.startswith("link")] == ["link_down"]
    assert [row["state"] for row in rows.of("gpu.links")] == ["up", None, "up", None, "down"]
