"""Two readings of the kernel's view of a process become one condition with differences."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest

from probing.daemon.diagnose.gather.conditions import EarlierReadings, conditions_of, idle_cpus_of, read_conditions
from probing.daemon.diagnose.gather.processes import Key

KEY = Key(100, 7)


def reading(mono_ns: int, **values: Any) -> dict[str, Any]:
    own = {"pid": 100, "start_ns": 7, "mono_ns": mono_ns, "state": "S", "last_cpu": 1, **values}
    return {"processes": [own], "loads": values.pop("loads", []), "failures": []}


def test_counters_are_differences_and_the_rest_is_as_it_is_now() -> None:
    first = reading(1000, cpu_ns=13, write_bytes=5, switches=None, oom_kills=2, threads=3)
    second = reading(1400, cpu_ns=30, write_bytes=5, switches=7, oom_kills=3, threads=4, wchan="pipe_read")
    found = conditions_of(first, second)[KEY]
    assert (found.interval_ns, found.cpu_ns, found.write_bytes, found.switches) == (400, 17, 0, None)
    assert (found.oom_kills, found.threads, found.wchan, found.state) == (3, 4, "pipe_read", "S")


def test_one_reading_has_no_differences() -> None:
    found = conditions_of(None, reading(1000, cpu_ns=13, rss_bytes=5))[KEY]
    assert (found.interval_ns, found.cpu_ns, found.rss_bytes) == (None, None, 5)


@pytest.mark.parametrize(
    ("before", "now", "idle"),
    [
        ({0: 5, 1: 5}, {0: 1005, 1: 205}, (0,)),
        ({0: 5}, {0: 1005, 1: 1005}, (0,)),
        ({0: 5}, {0: 5}, ()),
        ({}, {0: 1005}, None),
        ({0: 5}, {}, None),
    ],
)
def test_a_cpu_is_free_if_it_was_idle_for_a_third_of_the_time(
    before: dict[int, int], now: dict[int, int], idle: tuple[int, ...] | None
) -> None:
    first, second = ({"idle": one, "idle_at_ns": at} for one, at in ((before, 100), (now, 1100)))
    assert idle_cpus_of(first, second) == idle
    assert idle_cpus_of(None, second) is None


def test_a_reading_has_the_idle_time_of_each_cpu_of_this_machine() -> None:
    class Asked:
        def conditions(self, pids: list[int], job: str, timeout: float) -> dict[str, Any]:
            return {"processes": [], "loads": None, "failures": [], "asked": (pids, job, timeout)}

    found = read_conditions(Asked(), "job", 2.0)  # type: ignore[arg-type]
    assert found["asked"] == ([], "job", 2.0)
    assert found["idle"].keys() == set(range(os.cpu_count() or 0))
    assert all(0 < ns < time.clock_gettime_ns(time.CLOCK_BOOTTIME) * 2 for ns in found["idle"].values())


def test_another_process_with_the_pid_is_not_compared() -> None:
    assert conditions_of(reading(1000, cpu_ns=13, start_ns=6), reading(1400, cpu_ns=30))[KEY].cpu_ns is None


def test_the_time_of_the_last_run_is_utc() -> None:
    now, mono = time.time_ns(), time.monotonic_ns()
    found = conditions_of(None, reading(mono, asleep_ns=39_000_000_000))[KEY]
    assert found.asleep_since_ns == pytest.approx(now - 39_000_000_000, abs=10**9)


def test_neighbours_are_those_on_the_cpu_of_the_main_thread() -> None:
    def loads(hog: int, far: int, own: int) -> list[list[Any]]:
        return [[1, 1, "hog", 1, hog], [2, 1, "far", 0, far], [100, 7, "python", 1, own]]

    first = reading(1000) | {"loads": loads(10, 10, 10)}
    second = reading(1400) | {"loads": loads(23, 50, 60)}
    assert conditions_of(first, second)[KEY].neighbours == (("hog", 1, 13),)


def test_children_are_pairs_of_plain_values() -> None:
    found = conditions_of(None, reading(1000, children=[["ninja", 5, "R"]]))[KEY]
    assert found.children == (("ninja", 5, "R"),)


S = 1_000_000_000


def pair(at_s: float) -> list[dict[str, Any]]:
    """The two readings of a look."""
    return [reading(round(at_s * S) - 400_000_000), reading(round(at_s * S))]


def test_a_kept_reading_makes_the_next_look_cover_the_time_since() -> None:
    earlier = EarlierReadings()
    first = pair(100)
    # The last reading of a look is kept, for the next one.
    assert earlier.extend("j", first) == first
    assert earlier.extend("j", later := pair(123)) == [first[1], later[1]]
    assert earlier.extend("other", later) == later
    # One of more than 45 s ago makes room for a newer one, and one of more than 90 s ago is too old.
    assert earlier.extend("j", fourth := pair(152)) == [first[1], fourth[1]]
    assert earlier.extend("j", fifth := pair(160)) == [fourth[1], fifth[1]]
    assert earlier.extend("j", sixth := pair(243)) == sixth


def test_a_reading_of_another_look_at_the_same_time_is_not_compared() -> None:
    # Two clients ask at once: the one that took its reading first may come last.
    earlier = EarlierReadings()
    earlier.keep("j", pair(100)[1])
    for at_s in (99.9, 100.0, 100.9):
        assert earlier.extend("j", both := pair(at_s)) == both
    assert len(earlier.extend("j", pair(101.0))) == 2


def test_readings_of_few_jobs_are_kept_and_old_ones_go() -> None:
    earlier = EarlierReadings()
    for job in range(65):
        earlier.keep(str(job), reading(S + job))
    last = pair(20)
    assert earlier.extend("1", last)[0] == reading(S + 1)
    assert earlier.extend("0", last) == last
    earlier.keep("next", reading(100 * S))
    assert sorted(earlier._kept) == ["0", "next"]


def test_a_job_without_processes_is_not_compared() -> None:
    earlier = EarlierReadings()
    empty: dict[str, Any] = {"processes": [], "loads": None, "failures": []}
    earlier.keep("j", empty)
    assert earlier.extend("j", last := pair(100)) == last
    assert earlier.extend("j", [empty]) == [empty]
