"""When a time-out of the library ends a wait: only where it is known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from diagnosis_cases import (
    C10D,
    NOW,
    WORLD,
    ago,
    comm,
    elsewhere,
    facts,
    frame,
    history,
    in_collective,
    op,
    rank,
    thread,
)

from probing.diagnosis.facts import Condition, Facts, TimeOut, Witness
from probing.diagnosis.ladder import diagnose
from probing.diagnosis.report import finding_dict
from probing.diagnosis.verdict import Ending

S = 10**9
STILL = Condition(state="S", syscall="clock_nanosleep", interval_ns=S, cpu_ns=0, switches=0, asleep_since_ns=ago(39))
DEFAULT = TimeOut(WORLD, 1800 * S)
# Of a rank whose environment was read.
ENV = ("RANK", "0")


def hung(*limits: TimeOut, backend: str = "gloo", name: str = "all_reduce", **fields: Any) -> Facts:
    """Returns the facts of a job in which rank 0 waits for 39 s and rank 2 for 38 s for rank 1."""
    ones = [
        rank(
            r,
            *history(6, ago=40),
            op(7, name, ago=39 - r / 2),
            time_outs=limits,
            **{"stack": in_collective(), **fields},
        )
        for r in (0, 2)
    ]
    late = rank(1, *history(6, ago=40), stack=elsewhere(moving=False), condition=STILL)
    return facts(ones[0], late, ones[1], comms=[comm(WORLD, range(3), backend=backend)])


def ends(made: Facts) -> Ending | None:
    (finding, *_) = diagnose(made).findings
    assert finding.verdict.id == "not_joined"
    return finding.ends


def test_the_first_wait_ends_by_the_time_out_of_its_group() -> None:
    assert ends(hung(DEFAULT)) == Ending(NOW + (1800 - 39) * S, "gloo's time-out (30 min, the default)")
    assert ends(hung(TimeOut(WORLD, 90 * S))) == Ending(NOW + 51 * S, "gloo's time-out (90 s)")
    (finding, *_) = diagnose(hung(TimeOut(WORLD, 90 * S))).findings
    assert finding_dict(finding)["ends"] == {"at": "2027-01-15T08:00:51.000000000Z", "by": "gloo's time-out (90 s)"}


def test_without_a_known_time_out_no_time_is_claimed() -> None:
    assert ends(hung()) is None
    assert ends(hung(TimeOut("another", 90 * S))) is None
    assert ends(hung(DEFAULT, backend="mpi")) is None


def test_a_time_out_that_has_passed_is_not_repeated() -> None:
    assert ends(hung(TimeOut(WORLD, 30 * S))) is None


@pytest.mark.parametrize(
    ("env", "ended"),
    [
        ((ENV,), True),
        ((ENV, ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")), True),
        ((ENV, ("NCCL_ASYNC_ERROR_HANDLING", "0")), False),
        ((ENV, ("NCCL_ASYNC_ERROR_HANDLING", "0"), ("TORCH_NCCL_BLOCKING_WAIT", "1")), True),
        ((), False),
    ],
    ids=["default", "tear down", "no handling", "the wait itself", "an environment that was not read"],
)
def test_the_watchdog_of_nccl_ends_the_job_where_it_may(env: tuple[tuple[str, str], ...], ended: bool) -> None:
    found = ends(hung(TimeOut(WORLD, 600 * S), backend="nccl", env=env))
    assert found == (Ending(NOW + 561 * S, "NCCL's watchdog (10 min, the default)") if ended else None)


def test_a_dump_of_the_flight_recorder_goes_before_what_was_read() -> None:
    dump = Witness("flight_recorder", WORLD, ago(1), time_out_ns=77 * S)
    other = replace(dump, comm="another", time_out_ns=55 * S)
    assert ends(hung(DEFAULT, witnesses=(other, dump))) == Ending(NOW + 38 * S, "gloo's time-out (77 s)")


@pytest.mark.parametrize(("value", "known"), [("None", True), ("datetime.timedelta(seconds=5)", False)])
def test_a_barrier_with_a_time_out_of_its_own_claims_nothing(value: str, known: bool) -> None:
    stack = thread(frame(f"barrier {C10D}:5320", timeout=value), "train train.py:40")
    assert (ends(hung(DEFAULT, name="barrier", stack=stack)) is not None) is known


def test_a_wait_that_only_a_stack_shows_has_no_known_begin() -> None:
    made = hung(DEFAULT)
    ranks = tuple(replace(one, open=()) for one in made.ranks)
    assert all(finding.ends is None for finding in diagnose(replace(made, ranks=ranks)).findings)
