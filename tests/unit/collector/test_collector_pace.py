"""Processes that map files without a pause are looked at ever more rarely, and after the last time once more."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from probing.daemon.collector import lifecycle
from probing.daemon.collector.lifecycle import LAST_S, QUIET_S, Pace


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    time = [1000.0]
    monkeypatch.setattr(lifecycle, "time", SimpleNamespace(monotonic=lambda: time[0]))
    return time


def test_the_first_time_passes_at_once_and_the_last_time_is_not_left_out(now: list[float]) -> None:
    made = Pace()
    assert made.passing([7, 8]) == [7, 8]
    assert made.passing([7]) == []
    now[0] += 0.3
    assert made.passing([]) == [7]
    assert made.passing([]) == []


def test_who_comes_without_a_pause_passes_ever_more_rarely(now: list[float]) -> None:
    made = Pace()
    passed = 0
    for _ in range(1000):
        passed += len(made.passing([7]))
        now[0] += 0.1
    # After 0, 0.2, 0.6, 1.4, 3, 6.2, 12.6 s, and then each 10 s.
    assert passed == 7 + int((100 - 12.6) / LAST_S)
    now[0] += QUIET_S + 1
    assert made.passing([]) == [7]
    assert made.passing([7]) == [7]
    assert made.passing([]) == []
