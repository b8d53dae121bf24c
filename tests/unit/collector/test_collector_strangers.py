"""Records of processes that nobody knows yet wait in the ring, all at once and for a short time only."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from fakes import Now

from probing.daemon.collector.lifecycle import HOLD_S, IdentityWait

RECORD = np.dtype([("tgid", "<u4"), ("start_ns", "<u8")])


class Processes:
    """Processes below 100 are identified, those that ``ended`` never will be."""

    def __init__(self) -> None:
        self.ended: set[int] = set()
        self.looked_at: list[int] = []

    def expected(self, pid: int, start_ns: int) -> bool:
        return pid >= 100 and pid not in self.ended

    def on_mapping(self, pid: int) -> None:
        self.looked_at.append(pid)


@pytest.fixture
def processes() -> Processes:
    return Processes()


@pytest.fixture
def clock() -> Now:
    return Now(5.0)


@pytest.fixture
def strangers(processes: Processes, clock: Now) -> IdentityWait:
    return IdentityWait(processes, clock)


def records(*pids: int) -> npt.NDArray[np.void]:
    return np.array([(pid, 1000 + pid) for pid in pids], RECORD)


def test_what_is_known_waits_for_nobody(strangers: IdentityWait, processes: Processes) -> None:
    assert strangers.takes(records(7, 11, 7, 13)) == 4
    assert strangers.takes(records()) == 0
    assert processes.looked_at == []


def test_twenty_three_strangers_wait_together(strangers: IdentityWait, processes: Processes, clock: Now) -> None:
    found = records(7, 11, *range(100, 123), 7)
    assert strangers.takes(found) == 2
    clock.now += HOLD_S * 0.9
    assert strangers.takes(found) == 2
    # Each of them is looked at once, and the time of all is over at once.
    assert sorted(processes.looked_at) == list(range(100, 123))
    clock.now += HOLD_S * 0.2
    assert strangers.takes(found) == len(found)
    assert strangers.takes(found) == len(found)


def test_who_has_ended_is_not_waited_for(strangers: IdentityWait, processes: Processes) -> None:
    assert strangers.takes(records(101, 7)) == 0
    processes.ended.add(101)
    assert strangers.takes(records(101, 7)) == 2


def test_a_pid_that_is_used_again_is_another_process(strangers: IdentityWait, clock: Now) -> None:
    first, second = records(101), np.array([(101, 5)], RECORD)
    assert strangers.takes(first) == 0
    clock.now += HOLD_S * 2
    assert strangers.takes(np.concatenate([first, second])) == 1


def test_endless_strangers_take_a_bounded_room(
    strangers: IdentityWait, clock: Now, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("probing.daemon.collector.lifecycle.MAX_SEEN", 23)
    for pid in range(100, 200):
        strangers.takes(records(pid))
    assert len(strangers._since) == 23
