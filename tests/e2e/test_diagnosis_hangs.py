"""Real jobs that hang: the daemon names the culprits and what they do, also when it restarts or starts late."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from diagnosis_corpus import (
    Case,
    Corpus,
    await_fault,
    await_steps,
    cases_of,
    check,
    corpus_beside,
    observe,
    selected,
    start,
    watching,
)
from diagnosis_faults import DIVERGENCES, HANGS, IN_GATE, LATE
from diagnosis_jobs import Ranks, folder_of_job
from e2e_support import Daemon, remove
from long import LONG, long
from waiting import until

ALL = (*HANGS, *DIVERGENCES)
CASES = {case.name: case for case in HANGS}
# Their jobs hang on for the daemon that comes late.
KEPT = LATE if LONG else ("stopped", "lock")


@pytest.fixture(scope="module")
def corpus(module_base: Path, request: pytest.FixtureRequest) -> Iterator[Corpus]:
    with corpus_beside(Daemon(module_base, "n1"), selected(ALL, request), 3, keep=KEPT) as corpus:
        yield corpus


@pytest.fixture(scope="module")
def late_daemon(module_base: Path, corpus: Corpus) -> Iterator[Daemon]:
    """A daemon that starts when the jobs of KEPT hang already."""
    for name in KEPT:
        corpus.outcome(CASES[name])
    daemon = watching(Daemon(module_base, "n2")).start()
    yield daemon
    remove(daemon)


# A rank that makes progress is named after a minute.
@pytest.mark.timeout(300)
@cases_of(ALL, IN_GATE)
def test_the_culprit_of_a_hang(corpus: Corpus, case: Case) -> None:
    check(case, corpus.outcome(case))


@pytest.mark.parametrize("name", KEPT)
def test_a_daemon_that_comes_late_names_the_culprit(corpus: Corpus, late_daemon: Daemon, name: str) -> None:
    check(CASES[name], observe(late_daemon, CASES[name], corpus.kept[name]))


def test_a_hang_of_gloo_ends_by_its_default_time_out(corpus: Corpus) -> None:
    corpus.outcome(CASES["lock"])
    job = corpus.kept["lock"].job

    def by() -> str:
        answer = json.loads(corpus.daemon.ctl("-f", "json", "diagnose", "--job", job, check=3).stdout)
        return answer["ends"]["by"] if answer["ends"] else ""

    assert until(by, what="the time-out of the group") == "gloo's time-out (30 min, the default)"


@long
def test_a_hang_ends_when_its_finding_says(make_daemon: Callable[..., Daemon]) -> None:
    daemon, case = watching(make_daemon("n4")).start(), CASES["lock"]
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(folder_of_job())
        ranks = Ranks(daemon.name, folder, case.script, case.name, case.ranks, TIME_OUT_S="30")
        stack.callback(ranks.wait)
        stack.callback(ranks.kill)
        ranks.start()
        await_steps(daemon, case, ranks)
        ranks.go()
        await_fault(case, ranks)
        of_job = f"WHERE job = '{ranks.job}'"
        ends = f"SELECT epoch_ns(ends) AS at, ends_by FROM diagnosis.findings {of_job} AND ends IS NOT NULL LIMIT 1"
        (said,) = until(lambda: daemon.rows(ends), what=lambda: f"the time of the end:\n{daemon.tail()}")
        assert said["ends_by"] == "gloo's time-out (30 s)"
        failed = f"SELECT epoch_ns(t_done_hi) AS at FROM comm.ops {of_job} AND error LIKE 'Timed out waiting 30000ms%'"
        (end,) = until(lambda: daemon.rows(failed), what=lambda: f"the end of the wait:\n{ranks.output()}")
    # The wait for a peer begins a little after the call.
    assert 0 <= (end["at"] - said["at"]) / 1e9 < 10


# The last test that needs the job.
def test_a_job_that_hung_until_it_was_ended_keeps_its_story(corpus: Corpus) -> None:
    corpus.outcome(CASES["lock"])
    ranks = corpus.kept["lock"]
    for process in ranks.processes:
        process.send_signal(signal.SIGTERM)

    def story() -> dict[str, Any]:
        shown = corpus.daemon.ctl("-f", "json", "diagnose", "--job", ranks.job, check=None).stdout
        answer: dict[str, Any] = json.loads(shown) if shown.startswith("{") else {"sentence": shown}
        return answer if answer["sentence"].startswith("until it ended at ") else {}

    answer = until(story, what=lambda: corpus.daemon.ctl("diagnose", check=None).stdout)
    assert (answer["verdict"], [one["rank"] for one in answer["culprits"]]) == ("not_joined", [1])
    assert "ranks 0-1 were killed by SIGTERM" in answer["evidence"]
    assert "a scheduler or a user ended it: it is not a fault of a rank" in answer["evidence"]
    assert [stack["role"] for stack in answer["stacks"]] == ["culprit", "victim"]
    ctl, job = corpus.daemon.ctl, ("--job", ranks.job)
    (shown,) = [part for part in ctl("top", "--once").stdout.split("\n\n") if f"job {ranks.job} " in part]
    assert "FAILED FIRST" not in shown
    for command in (("stacks",), ("vars", "loss"), ("ps",), ("ranks", "check"), ("preflight",)):
        assert f"error: job {ranks.job} ended at 2" in ctl(*command, *job, check=1).stderr, command
    rows = json.loads(ctl("-f", "json", "diagnose", "--history", *job).stdout)
    hang = next(row for row in rows if row["verdict"] == "not_joined")
    page = ctl("diagnose", hang["finding_id"][:12]).stdout
    assert page.startswith(f"finding {hang['finding_id']}  opened ")
    assert "Stack of rank 1 (culprit)" in page


@long
def test_a_daemon_that_restarts_during_the_stall_names_the_culprit(make_daemon: Callable[..., Daemon]) -> None:
    daemon, case = watching(make_daemon("n3")).start(), CASES["lock"]
    with contextlib.ExitStack() as stack:
        ranks = start(case, daemon.name, stack)
        await_steps(daemon, case, ranks)
        ranks.go()
        await_fault(case, ranks)
        daemon.stop()
        daemon.start()
        check(case, observe(daemon, case, ranks))
