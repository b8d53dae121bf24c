from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from probing.daemon.clock import SystemClock

REAL_NS, BOOT_NS = 1_700_000_000_000_000_023, 7_000_005
MS = 1_000_000


class Machine:
    """Three clocks at known offsets. Each read of a clock takes the next pause of ``pauses``, then 50 ns."""

    def __init__(self) -> None:
        self.now = 5_000_000_000
        self.offsets = {time.CLOCK_MONOTONIC: 0, time.CLOCK_BOOTTIME: BOOT_NS, time.CLOCK_REALTIME: REAL_NS}
        self.pauses: Iterator[int] = iter(())

    def read(self, clock: int) -> int:
        self.now += next(self.pauses, 50)
        return self.now + self.offsets[clock]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(time, "clock_gettime_ns", machine.read)
    return machine


def test_a_pause_between_two_reads_shifts_no_offset(machine: Machine) -> None:
    clock = SystemClock()
    first = clock.pair()
    for place in range(16):
        machine.pauses = iter([50] * place + [5 * MS])
        pair = clock.pair()
        assert (pair.mono_to_utc_ns, pair.boot_to_utc_ns) == (first.mono_to_utc_ns, first.boot_to_utc_ns)
    assert abs(first.mono_to_utc_ns - REAL_NS) <= 150


def test_pauses_in_each_read_keep_the_offset_that_is_known(machine: Machine) -> None:
    clock = SystemClock()
    first = clock.pair()
    machine.pauses = iter([50, 50, 50, 3 * MS] * 7)
    assert clock.pair().mono_to_utc_ns == first.mono_to_utc_ns


@pytest.mark.parametrize("step", [-3_600_000_000_000, -1_000, 1_000, 7 * MS])
def test_a_step_of_the_wall_clock_is_seen_at_once(machine: Machine, step: int) -> None:
    clock = SystemClock()
    before = clock.pair()
    machine.offsets[time.CLOCK_REALTIME] += step
    after = clock.pair()
    assert after.mono_to_utc_ns - before.mono_to_utc_ns == step
    assert after.boot_ns - after.mono_ns == before.boot_ns - before.mono_ns


def test_a_suspend_moves_the_time_since_boot(machine: Machine) -> None:
    clock = SystemClock()
    before = clock.pair()
    machine.offsets[time.CLOCK_BOOTTIME] += 23 * MS
    assert clock.pair().boot_to_utc_ns == before.boot_to_utc_ns - 23 * MS
