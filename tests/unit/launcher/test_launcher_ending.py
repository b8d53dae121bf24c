"""When which signal is sent to which process that is to be ended."""

from __future__ import annotations

import signal

import pytest

from probing.launcher.ending import Ending
from probing.launcher.processes import Stat

TERM = (signal.SIGTERM, signal.SIGCONT)
KILL = (signal.SIGKILL,)


def process(pid: int, start_ns: int = 1) -> Stat:
    return Stat(pid, 1, pid, "S", start_ns, 1)


@pytest.mark.parametrize(
    ("now", "stage"), [(0, "save"), (69, "save"), (70, "term"), (80, "term"), (81, "kill"), (1000, "kill")]
)
def test_stages_follow_each_other(now: int, stage: str) -> None:
    assert Ending(5, 0, grace_ns=11, save_ns=70).stage(now) == stage


def test_a_save_step_may_end_sooner() -> None:
    ending = Ending(5, 0, grace_ns=11, save_ns=70)
    ending.saved(31)
    assert [ending.stage(now) for now in (30, 31, 41, 42)] == ["save", "term", "term", "kill"]
    ending.saved(99)
    assert ending.stage(41) == "term"


def test_the_end_of_a_lease_hurries() -> None:
    ending = Ending(5, 0, grace_ns=11, save_ns=70)
    ending.limit(50)
    assert [ending.stage(now) for now in (49, 50)] == ["save", "kill"]
    ending.limit(60)
    assert ending.stage(50) == "kill"


def test_each_process_gets_sigterm_once_and_sigkill_until_it_is_gone() -> None:
    sent: list[tuple[int, ...]] = []

    def send(stat: Stat, *numbers: int) -> bool:
        sent.append((stat.pid, *numbers))
        return True

    ending = Ending(5, 0, grace_ns=11, save_ns=3)
    ending.signal(0, [process(31)], send)
    assert sent == []
    ending.signal(3, [process(31)], send)
    ending.signal(4, [process(31), process(37)], send)
    # Another process that got the pid.
    ending.signal(5, [process(31, start_ns=5)], send)
    assert sent == [(31, *TERM), (37, *TERM), (31, *TERM)]
    sent.clear()
    ending.signal(14, [process(31)], send)
    ending.signal(15, [process(31)], send)
    assert sent == [(31, *KILL), (31, *KILL)]
