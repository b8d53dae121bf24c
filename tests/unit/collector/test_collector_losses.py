"""Gaps of pauses: reported when the probes are resumed, also after a short pause or a restart. Gaps of a daemon that
stood still.
"""

from __future__ import annotations

from typing import Any

import pytest

from probing.daemon.clock import ClockPair
from probing.daemon.collector.losses import LossMeter
from probing.daemon.source import Loss


class PausedSession:
    def __init__(self, paused: bool) -> None:
        self.paused = paused
        self.paused_ns = 0

    def counters(self) -> dict[str, dict[str, int]]:
        return {}

    def refusals(self, before_ns: int) -> dict[int, Any]:
        return {}


class Losses(list[Loss]):
    lost = list.append


class StoppedClock:
    real_ns = 1_000

    def pair(self) -> ClockPair:
        return ClockPair(self.real_ns, self.real_ns, self.real_ns)


def test_a_pause_of_an_earlier_daemon_is_a_gap_from_its_begin() -> None:
    session: Any = PausedSession(True)
    session.paused_ns = 7
    losses = Losses()
    meter = LossMeter(session, StoppedClock(), losses, {"ops": "comm.ops"}, {}, 0, {}, list, lambda *_: None)  # type: ignore[arg-type]
    meter.pause(False)
    assert [(loss.ts_from_ns, loss.ts_to_ns) for loss in losses] == [(7, 1_000)]


@pytest.mark.parametrize("restarted", [False, True])
def test_a_pause_that_no_tick_saw_is_a_gap_of_every_table(restarted: bool) -> None:
    session: Any = PausedSession(restarted)
    clock, losses = StoppedClock(), Losses()
    tables = {"ops": "comm.ops", "events": "process.events"}
    meter = LossMeter(session, clock, losses, tables, {}, 0, {}, list, lambda *_: None)  # type: ignore[arg-type]
    if not restarted:
        clock.real_ns = 1_007
        meter.pause(True)
    clock.real_ns = 1_030
    meter.pause(False)
    meter.pause(False)
    since = 1_000 if restarted else 1_007
    assert [(loss.table, loss.reason, loss.ts_from_ns, loss.ts_to_ns) for loss in losses] == [
        (table, "all probes were paused", since, 1_030) for table in ("comm.ops", "process.events")
    ]


def test_a_time_in_which_the_daemon_stood_still_is_a_gap_of_every_table() -> None:
    session: Any = PausedSession(False)
    losses = Losses()
    clock: Any = StoppedClock()
    clock.pair = lambda: ClockPair(mono_ns=5_000, boot_ns=5_000, real_ns=1_005_000)
    tables = {"ops": "comm.ops", "events": "process.events"}
    meter = LossMeter(session, clock, losses, tables, {}, 0, {}, list, lambda *_: None)  # type: ignore[arg-type]
    meter.stood_still(3_000, 5_000)
    assert [(loss.source, loss.table, loss.ts_from_ns, loss.ts_to_ns, loss.count) for loss in losses] == [
        ("ops", "comm.ops", 1_003_000, 1_005_000, None),
        ("events", "process.events", 1_003_000, 1_005_000, None),
    ]
