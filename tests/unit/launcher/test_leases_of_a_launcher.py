"""Leases on their way from the daemon to a launcher, and what a launcher does with them."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from types import SimpleNamespace

import pytest
from group_records import FENCE_S, NS, running

from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.client.launching import Lease, Link
from probing.launcher.held import Held
from probing.launcher.launcher import Launcher
from probing.launcher.state import History

GROUP = running(on_hang="restart_without_node", fence_s=FENCE_S)
NAME = GROUP.spec.name
BOOT_S = 5000.0


class Machine:
    """The clocks of a machine, in seconds; ``monotonic`` stands still while the machine is suspended."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # It was suspended before.
        self.boot, self.monotonic = BOOT_S, 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.monotonic)
        monkeypatch.setattr(time, "clock_gettime", lambda _: self.boot)

    def passes(self, seconds: float, *, suspended: bool = False) -> None:
        self.boot += seconds
        self.monotonic += 0.0 if suspended else seconds


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


@pytest.fixture
def link() -> Link:
    made = Link.__new__(Link)
    made.orders, made._wake, made.problem = [], lambda: None, None  # type: ignore[assignment]
    made._workers, made._rows, made._logs, made._sent = (), b"[]", [], OrderedDict()
    return made


def sent(link: Link, reports: int = 1) -> None:
    """Sends reports, each at once after the one before."""

    async def send() -> None:
        link._changed = asyncio.Event()
        made = link._reports()
        for _ in range(reports):
            await anext(made)
            link._changed.set()
        await made.aclose()

    asyncio.run(send())


def leased(link: Link, report: int) -> float:
    """Returns when the report was sent to which the daemon's lease refers, in seconds since boot."""
    link._note(pb.WorkOrder(leased=NAME, generation=GROUP.generation, report=report))
    lease = link.orders.pop()
    assert isinstance(lease, Lease)
    return lease.sent


def launcher(machine: Machine) -> Launcher:
    made = Launcher.__new__(Launcher)
    made._clock = SimpleNamespace(boot_id="boot", boot_ns=lambda: round(machine.boot * NS))  # type: ignore[assignment]
    made._dirty = False
    history = History(NAME, GROUP.key, generation=GROUP.generation, phase="running")
    held = Held(history, (), None)  # type: ignore[arg-type]
    held.group = GROUP
    made._held = {NAME: held}
    return made


@pytest.mark.parametrize(("seconds", "lives"), [(FENCE_S - 1, True), (FENCE_S + 1, False), (3600.0, False)])
@pytest.mark.parametrize("suspended", [False, True])
def test_a_lease_counts_from_its_report_also_over_a_suspension(
    machine: Machine, link: Link, seconds: float, lives: bool, suspended: bool
) -> None:
    sent(link)
    machine.passes(seconds, suspended=suspended)
    one = launcher(machine)
    one.renew(NAME, GROUP.generation, leased(link, 1) + FENCE_S)
    lease = one._held[NAME].history.lease
    assert (lease is not None) == lives
    assert lease is None or lease[1] == round((BOOT_S + FENCE_S) * NS)


def test_a_lease_outlives_many_reports(machine: Machine, link: Link) -> None:
    # Each part of a log that somebody reads is sent with a report, while slow voters are asked for the lease.
    sent(link, reports=5003)
    machine.passes(2.0)
    for report in (1, 2503, 5003):
        assert leased(link, report) == BOOT_S
