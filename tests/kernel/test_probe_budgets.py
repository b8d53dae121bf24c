"""Budgets on the live kernel: a process that is over its own loses hits, which are counted, and nobody else any."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from counted_calls import Target

from probing.daemon.bpf.session import Session
from probing.daemon.clock import ClockPair, SystemClock
from probing.daemon.collector.losses import LossMeter
from probing.daemon.source import Loss, ProbeSlot

SLOT = 3
Open = Callable[..., Session]
Until = Callable[..., object]


@pytest.fixture
def target_fd(target_path: Path) -> Iterator[int]:
    fd = os.open(target_path, os.O_RDONLY)
    yield fd
    os.close(fd)


def attach(session: Session, fd: int, target: Target) -> None:
    session.attach_uprobe("on_call", fd, [target.offsets[0]], SLOT)


def take(session: Session) -> np.ndarray[Any, Any]:
    ring = session.rings["calls"]
    drained = ring.drain()
    ring.commit(drained.position)
    return drained.records


@pytest.fixture
def victim(target_path: Path) -> Iterator[Target]:
    target = Target(target_path)
    yield target
    target.close()


class Losses:
    """A ``Sink`` for losses."""

    def __init__(self) -> None:
        self.rows: list[Loss] = []

    def lost(self, loss: Loss) -> None:
        self.rows.append(loss)

    def put(self, table: str, batch: Any) -> None:
        raise AssertionError(table)


class Time:
    """A clock whose monotonic time is put forward by hand."""

    def __init__(self) -> None:
        self.ahead_ns = 0

    def pair(self) -> ClockPair:
        pair = SystemClock().pair()
        return ClockPair(pair.mono_ns + self.ahead_ns, pair.boot_ns, pair.real_ns)


def meter(session: Session, sink: Losses, clock: Time, budget: int, blinded: list[Any]) -> LossMeter:
    slots = {SLOT: ProbeSlot("on_call", "calls", "comm.ops")}
    return LossMeter(session, clock, sink, {}, slots, budget, {}, list, lambda mono, pid: blinded.append(pid))  # type: ignore[arg-type]


def test_a_process_over_its_budget_takes_nothing_from_others(
    open_session: Open, probe_object: Path, target: Target, victim: Target, target_fd: int
) -> None:
    session, clock, losses, blinded = open_session(probe_object), Time(), Losses(), []
    attach(session, target_fd, target)
    losses_meter = meter(session, losses, clock, 2 * 211, blinded)
    # All on one CPU, whose hits the budget counts.
    for process in (target, victim):
        os.sched_setaffinity(process.pid, {min(os.sched_getaffinity(0))})
    target.call(7919)
    # Less than half of the budget, which is the victim's own in this second as in any other.
    victim.call(199)
    records = take(session)
    assert (records["tgid"] == victim.pid).sum() == 199
    admitted = int((records["tgid"] == target.pid).sum())
    refused = 7919 - admitted
    assert admitted >= 2 * 211
    assert refused > 0
    counters = session.counters()[f"probe:{SLOT}"]
    assert (counters["hits"], counters["refused"], counters["off_ns"]) == (7919 + 199, refused, 0)
    clock.ahead_ns += 2_000_000_000
    losses_meter.tick()
    assert [(loss.pid, loss.count, loss.table) for loss in losses.rows] == [(target.pid, refused, "comm.ops")]
    assert blinded == [target.pid]
    assert losses_meter.off == []
    clock.ahead_ns += 2_000_000_000
    losses_meter.tick()
    assert len(losses.rows) == 1


def test_a_process_that_was_refused_is_let_in_again(
    open_session: Open, probe_object: Path, target: Target, target_fd: int, until: Until
) -> None:
    session = open_session(probe_object)
    attach(session, target_fd, target)
    session.set_budget(SLOT, 7)
    target.call(211)
    refused = session.counters()[f"probe:{SLOT}"]["refused"]
    assert refused == 211 - len(take(session)) > 0

    def let_in() -> int:
        target.call(1)
        return len(take(session))

    until(let_in)
    session.set_budget(SLOT, 0)
    target.call(23)
    assert len(take(session)) == 23


def test_refusals_while_no_collector_runs_are_reported_by_the_next(
    open_session: Open, probe_object: Path, target: Target, victim: Target, target_fd: int
) -> None:
    session, clock, losses = open_session(probe_object), Time(), Losses()
    attach(session, target_fd, target)
    first = meter(session, losses, clock, 7, [])
    victim.call(211)
    clock.ahead_ns += 2_000_000_000
    first.tick()
    reported = losses.rows.pop()
    assert reported.pid == victim.pid
    session.close(keep=True)
    session = open_session(probe_object)
    target.call(223)
    clock.ahead_ns = 0
    second = meter(session, losses, clock, 7, [])
    clock.ahead_ns += 2_000_000_000
    second.tick()
    total = session.counters()[f"probe:{SLOT}"]["refused"]
    assert [(loss.pid, loss.count) for loss in losses.rows] == [(target.pid, total - (reported.count or 0))]
    assert losses.rows[0].ts_from_ns == reported.ts_to_ns


def test_more_than_all_processes_may_hit_switches_a_probe_off(
    open_session: Open, probe_object: Path, target_path: Path, target_fd: int, until: Until
) -> None:
    """Each process keeps to its own budget, and there are many of them."""
    session, clock, losses, blinded = open_session(probe_object), Time(), Losses(), []
    targets = [Target(target_path) for _ in range(23)]
    attach(session, target_fd, targets[0])
    losses_meter = meter(session, losses, clock, 3, blinded)

    def hit() -> int:
        for each in targets:
            os.sched_setaffinity(each.pid, {min(os.sched_getaffinity(0))})
            each.call(2)
        return session.counters()[f"probe:{SLOT}"]["off_ns"]

    until(hit)
    for each in targets:
        each.close()
    counters = session.counters()[f"probe:{SLOT}"]
    assert counters["refused"] == counters["hits"] - len(take(session))
    clock.ahead_ns += 2_000_000_000
    losses_meter.tick()
    assert losses_meter.off == ["on_call"]
    assert sum(loss.count or 0 for loss in losses.rows) == counters["refused"]
    (switched,) = [loss for loss in losses.rows if loss.pid is None]
    assert "switched off" in switched.reason
    assert None in blinded
    clock.ahead_ns += 12_000_000_000
    losses_meter.tick()
    clock.ahead_ns += 2_000_000_000
    losses_meter.tick()
    assert losses_meter.off == []
