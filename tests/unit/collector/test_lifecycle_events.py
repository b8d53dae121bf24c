"""What the source of processes does with the kernel's events."""

from __future__ import annotations

from unittest.mock import Mock

import numpy as np
import pytest

from probing.daemon.clock import ClockPair
from probing.daemon.collector.libraries import watch
from probing.daemon.collector.lifecycle import EXEC, EXIT, FORK, OOM, SCAN_S, Lifecycle
from probing.daemon.source_state import Totals

RECORD = np.dtype([(name, "u8") for name in ("type", "tgid", "start_ns", "ktime", "ppid", "exit_code")])


@pytest.mark.parametrize(
    ("kind", "looked_at"), [(FORK, []), (EXEC, [23]), (EXIT, [23]), (OOM, [])], ids=["fork", "exec", "exit", "oom"]
)
def test_files_are_looked_at_when_a_process_stops_mapping_them(kind: int, looked_at: list[int]) -> None:
    libraries = Mock()
    lifecycle = Lifecycle(Mock(), Mock(), libraries, Mock(), list)
    lifecycle.assemble(np.array([(kind, 23, 1, 2, 1, 0)], RECORD), ClockPair(0, 0, 0))
    assert [call.args[0] for call in libraries.changed.call_args_list] == looked_at


def test_young_processes_are_polled_where_the_kernel_reports_no_mappings(monkeypatch: pytest.MonkeyPatch) -> None:
    libraries, now = Mock(), [1000.0]
    monkeypatch.setattr(watch.time, "monotonic", lambda: now[0])
    lifecycle = Lifecycle(Mock(), None, libraries, Mock(), list)

    def looked_at() -> list[int]:
        libraries.seen.reset_mock()
        lifecycle.read_mappings()
        return sorted(call.args[0] for call in libraries.seen.call_args_list)

    events = [(EXEC, 23, 1, 2, 1, 0), (EXEC, 7, 1, 2, 1, 0), (FORK, 5, 1, 2, 1, 0)]
    lifecycle.assemble(np.array(events, RECORD), ClockPair(0, 0, 0))
    assert looked_at() == [7, 23]
    assert looked_at() == []
    now[0] += watch.INTERVAL_S
    lifecycle.assemble(np.array([(EXIT, 23, 1, 2, 1, 0)], RECORD), ClockPair(0, 0, 0))
    assert looked_at() == [7]
    libraries.scan.assert_not_called()
    now[0] += watch.AGE_S
    assert looked_at() == []
    libraries.scan.assert_called_once()
    assert "perf_event_paranoid" in lifecycle.states(Totals("running", {}, {}))[0].reason


def test_all_processes_are_scanned_after_a_cpu_came_online(monkeypatch: pytest.MonkeyPatch) -> None:
    libraries, mappings, now = Mock(), Mock(lost=0), [1000.0]
    monkeypatch.setattr(watch.time, "monotonic", lambda: now[0])
    mappings.read.return_value = []
    lifecycle = Lifecycle(Mock(), mappings, libraries, Mock(), list)
    for refreshed, scans in ((False, 0), (True, 1), (False, 1)):
        mappings.refresh.return_value = refreshed
        now[0] += SCAN_S
        lifecycle.read_mappings()
        assert libraries.scan.call_count == scans


def test_only_so_many_young_processes_are_polled() -> None:
    processes = watch.YoungProcesses()
    for pid in range(watch.MAX_YOUNG + 23):
        processes.add(pid)
    assert processes.due() == list(range(23, watch.MAX_YOUNG + 23))


def test_a_young_process_is_polled_less_often_as_it_ages(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(watch.time, "monotonic", lambda: now[0])
    processes, looks = watch.YoungProcesses(), []
    processes.add(23)
    for tenth in range(int(10 * watch.AGE_S) + 100):
        now[0] = 1000 + tenth / 10
        looks += [tenth / 10 for _ in processes.due()]
    pauses = np.diff(looks)
    assert looks[:5] == [0, 1, 2, 3, 4]
    assert (np.diff(pauses) >= 0).all()
    # Within a quarter of its age, and a tenth of a second for this loop.
    assert (pauses[5:] <= watch.SHARE * np.array(looks[5:-1]) + 0.11).all()
    assert watch.AGE_S * (1 - watch.SHARE) < looks[-1] < watch.AGE_S
    assert len(looks) == 17
