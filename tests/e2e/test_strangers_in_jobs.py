"""A stranger claims ranks of a job: its hang is named in time, with the right rank, and nothing else is named."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from attack_scene import MEMBER, STRANGER, as_user, attacker, under_way
from diagnosis_corpus import Case, await_fault, await_steps, check, observe, watching
from diagnosis_faults import HANGS
from diagnosis_jobs import Ranks, folder_of_job
from e2e_support import BIN, EXAMPLE, Daemon, kill_family, remove, start_process
from ports import free_port
from waiting import until

CASE = next(case for case in HANGS if case.name == "lock")
# More than the daemon watches.
MANY = 97


@pytest.fixture(scope="module")
def daemon(module_base: Path) -> Iterator[Daemon]:
    made = watching(Daemon(module_base, "n1")).start()
    yield made
    remove(made)


@pytest.fixture
def make_ranks(daemon: Daemon) -> Iterator[Callable[[], Ranks]]:
    """Starts a job of MEMBER, and waits until it works."""
    with contextlib.ExitStack() as stack:

        def make() -> Ranks:
            folder = stack.enter_context(folder_of_job())
            os.chown(folder, MEMBER, MEMBER)
            made = Ranks(daemon.name, folder, CASE.script, CASE.name, CASE.ranks)
            stack.callback(made.wait)
            stack.callback(made.kill)
            made.start(as_user(MEMBER))
            await_steps(daemon, CASE, made)
            return made

        yield make


@pytest.fixture
def ranks(make_ranks: Callable[[], Ranks]) -> Ranks:
    return make_ranks()


def jobs(daemon: Daemon, where: str) -> dict[str, int]:
    """The number of living trainers by job."""
    rows = daemon.rows(
        "SELECT job, count(*) AS n FROM process.processes"
        f" WHERE role = 'trainer' AND state <> 'exited' AND {where} GROUP BY job"
    )
    return {row["job"]: row["n"] for row in rows}


def seen(daemon: Daemon, job: str, count: int) -> Callable[[], bool]:
    return lambda: jobs(daemon, f"owner = {STRANGER}").get(job, 0) == count


def named(daemon: Daemon, ranks: Ranks, case: Case = CASE) -> None:
    """The job hangs, and the finding is right."""
    ranks.go()
    await_fault(case, ranks)
    outcome = observe(daemon, case, ranks)
    check(case, outcome)
    mine = {process.pid for process in ranks.processes}
    assert {culprit["pid"] for culprit in outcome.answer["culprits"]} <= mine
    assert jobs(daemon, f"owner = {MEMBER}") == {ranks.job: case.ranks}


@pytest.mark.timeout(300)
def test_who_claims_a_rank_is_no_rank_of_the_job(daemon: Daemon, ranks: Ranks) -> None:
    other = f"{ranks.job} (uid {STRANGER})"
    with under_way("claim", str(ranks.port), "1", ""):
        until(seen(daemon, other, 1), what=lambda: jobs(daemon, "true"))
        named(daemon, ranks)


@pytest.mark.timeout(300)
def test_collectives_of_a_stranger_do_not_hide_a_hang(daemon: Daemon, ranks: Ranks, base: Path) -> None:
    other = f"{ranks.job} (uid {STRANGER})"
    folder = base / "theirs"
    folder.mkdir()
    os.chown(folder, STRANGER, STRANGER)
    with (
        attacker("pair", str(ranks.port), folder, "0") as first,
        attacker("pair", str(ranks.port), folder, "1") as second,
    ):
        until(seen(daemon, other, 2), what=lambda: jobs(daemon, "true"))
        calls = f"SELECT count(*) AS n FROM comm.ops WHERE job = '{other}'"
        until(lambda: daemon.rows(calls)[0]["n"] > 23, what="the collectives of the stranger")
        named(daemon, ranks)
        first.kill()
        second.kill()


@pytest.mark.timeout(300)
def test_who_dies_as_a_rank_of_a_healthy_job_pages_nobody_about_it(daemon: Daemon, ranks: Ranks) -> None:
    other = f"{ranks.job} (uid {STRANGER})"
    with under_way("claim", str(ranks.port), "2", "1") as process:
        until(seen(daemon, other, 1), what=lambda: jobs(daemon, "true"))
        process.communicate("\n")
    ends = f"SELECT exit_code FROM process.events WHERE event = 'exit' AND job = '{other}'"
    assert until(lambda: daemon.rows(ends), what=lambda: daemon.tail()) == [{"exit_code": 1}]
    # No finding of the job is about anything but its hang, which comes later than looks at a death.
    named(daemon, ranks)


@pytest.mark.timeout(300)
def test_many_jobs_of_a_stranger_leave_room_for_others(daemon: Daemon, make_ranks: Callable[[], Ranks]) -> None:
    with under_way("many", str(MANY)):
        until(lambda: len(jobs(daemon, f"owner = {STRANGER}")) >= MANY, what=lambda: jobs(daemon, "true"))
        named(daemon, make_ranks())


@pytest.mark.timeout(300)
def test_ranks_that_roots_launcher_starts_as_a_user_are_the_users(daemon: Daemon) -> None:
    port = free_port()
    rank = [*as_user(MEMBER), sys.executable, str(EXAMPLE), "--steps", "1000000", "--delay-ms", "20"]
    launch = [str(BIN / "torchrun"), "--nproc-per-node", "3", "--master-port", str(port), "--no-python", *rank]
    launcher = start_process(*launch, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        job = f"{daemon.name}/127.0.0.1:{port}"
        until(lambda: jobs(daemon, f"owner = {MEMBER}") == {job: 3}, what=lambda: jobs(daemon, "true"))
        rows = daemon.rows(f"SELECT DISTINCT run, owner FROM process.processes WHERE job = '{job}'")
        assert [row["owner"] for row in rows] == [MEMBER]
        (of_launcher,) = daemon.rows(f"SELECT job, role FROM process.processes WHERE pid = {launcher.pid}")
        assert (of_launcher["job"], of_launcher["role"]) == (job, "launcher")
    finally:
        kill_family(launcher)
        launcher.wait()
