"""Healthy jobs that look as if they hung for a while: the daemon finds nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from diagnosis_corpus import watching
from diagnosis_healthy import HEALTHY, QUIET, HealthyJobs, complaints, noted
from e2e_support import Daemon
from long import long

SECONDS = 45
LONG_S = 6.0


# The jobs run for SECONDS, and their normal end takes two minutes at most.
@long
@pytest.mark.timeout(300)
def test_nothing_is_wrong_with_healthy_jobs(make_daemon: Callable[..., Daemon]) -> None:
    daemon = watching(make_daemon()).start()
    jobs = HealthyJobs(daemon, LONG_S)
    jobs.run(SECONDS)
    by_job = {ranks.job: healthy.name for healthy, ranks in jobs.started}
    assert set(by_job.values()) == {healthy.name for healthy in HEALTHY}
    found = [f"{by_job.get(r['job'])}: {r['verdict']} {r['ranks']!r}: {r['sentence']}" for r in complaints(daemon)]
    assert found == []
    for job in by_job:
        shown = daemon.ctl("diagnose", "--job", job, check=None)
        assert shown.returncode == 0, f"{by_job[job]}:\n{shown.stdout}\n{shown.stderr}"
    # Jobs with the same script, and the runs of one job, are not mixed.
    sizes = daemon.rows(
        "SELECT job, run, count(DISTINCT rank) AS ranks, count(*) AS processes FROM process.processes "
        "WHERE role = 'trainer' GROUP BY ALL"
    )
    assert all(row["ranks"] == row["processes"] for row in sizes)


@long
@pytest.mark.timeout(300)
def test_what_a_job_waits_for_is_noted(make_daemon: Callable[..., Daemon]) -> None:
    daemon = watching(make_daemon()).start()
    jobs, notes = HealthyJobs(daemon, LONG_S, QUIET), set[tuple[str, str]]()
    jobs.run(SECONDS, lambda: notes.update(noted(daemon)))
    by_job = {ranks.job: healthy.name for healthy, ranks in jobs.started}
    assert [f"{by_job.get(r['job'])}: {r['sentence']}" for r in complaints(daemon)] == []
    assert {(by_job.get(job), verdict) for job, verdict in notes} == {(one.name, one.note) for one in QUIET}
