"""The gate: rows of progress by job, without a loop over ranks."""

from __future__ import annotations

from typing import Any

from watch_support import SECOND, START, progress_rows

from probing.daemon.diagnose.gate import jobs_of


def rank(number: int, **fields: Any) -> dict[str, Any]:
    return {"pid": 100 + number, "rank": number, "world_size": 3, **fields}


def test_no_rows_are_no_jobs() -> None:
    assert jobs_of(progress_rows()) == []


def test_a_job_is_as_new_as_its_newest_rank() -> None:
    (job,) = jobs_of(
        progress_rows(
            rank(0, comm="a", calls=3, last_call=START - 9, last_done=START - 7, longest_gap_ns=3 * SECOND),
            rank(0, comm="b", calls=5, last_call=START - 8, longest_gap_ns=3 * SECOND),
            rank(1, comm="a", calls=7, last_call=START - 5, last_done=START - 11, longest_gap_ns=5 * SECOND),
            rank(2),
        )
    )
    assert job.key == ("j", "r")
    assert (job.now_ns, job.newest_ns, job.usual_gap_ns, job.world_size) == (START, START - 5, 5 * SECOND, 3)
    assert (job.living, job.ended, job.failed, job.late, job.alone, job.calls) == (3, 0, 0, False, False, 15)


def test_runs_and_jobs_are_apart() -> None:
    found = jobs_of(
        progress_rows(
            rank(0, last_call=START - 3), rank(1, run="r2", last_call=START - 2), rank(2, job="k"), rank(3, job="k")
        )
    )
    assert [(*job.key, job.living, job.newest_ns) for job in found] == [
        ("j", "r", 1, START - 3),
        ("j", "r2", 1, START - 2),
        ("k", "r", 2, None),
    ]


def test_ends_are_counted_once_a_process() -> None:
    (job,) = jobs_of(
        progress_rows(
            rank(0, comm="a", ended=START - 3, signal=9, longest_gap_ns=9),
            rank(0, comm="b", ended=START - 3, signal=9, longest_gap_ns=9),
            rank(1, ended=START - 2, exit_code=0),
            rank(2, ended=START - 1, exit_code=1),
            rank(3, longest_gap_ns=4),
            # Another process of the same pid.
            rank(3, start_ns=8),
        )
    )
    assert (job.living, job.ended, job.failed, job.usual_gap_ns) == (2, 3, 2, 4)


def test_a_rank_whose_begin_was_not_seen_makes_its_job_late() -> None:
    (job,) = jobs_of(progress_rows(rank(0), rank(1, attached=START - 1)))
    assert job.late


def test_a_single_process_waits_for_nobody() -> None:
    (single,) = jobs_of(progress_rows(rank(0, world_size=None)))
    (one_of_three,) = jobs_of(progress_rows(rank(0)))
    (busy,) = jobs_of(progress_rows(rank(0, world_size=None, last_call=START)))
    assert (single.alone, one_of_three.alone, busy.alone) == (True, False, False)


def test_the_phases_of_ranks_that_live() -> None:
    (job,) = jobs_of(
        progress_rows(
            rank(0, comm="a", phase="eval", phase_since=START - 7),
            rank(0, comm="b", phase="eval", phase_since=START - 7),
            rank(1, phase="checkpoint", phase_since=START - 5),
            rank(2, phase="compile", phase_since=START - 9, ended=START - 1),
        )
    )
    assert job.phases == (("eval", START - 7), ("checkpoint", START - 5))
    assert jobs_of(progress_rows(rank(0)))[0].phases == ()
