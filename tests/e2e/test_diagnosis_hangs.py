"""Real jobs that hang: the daemon names the culprits and what they do, also when it restarts or starts late."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

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
from diagnosis_faults import HANGS, IN_GATE, LATE
from e2e_support import Daemon, remove
from long import LONG, long

CASES = {case.name: case for case in HANGS}
# Their jobs hang on for the daemon that comes late.
KEPT = LATE if LONG else ("stopped", "lock")


@pytest.fixture(scope="module")
def corpus(module_base: Path, request: pytest.FixtureRequest) -> Iterator[Corpus]:
    with corpus_beside(Daemon(module_base, "n1"), selected(HANGS, request), 3, keep=KEPT) as corpus:
        yield corpus


@pytest.fixture(scope="module")
def late_daemon(module_base: Path, corpus: Corpus) -> Iterator[Daemon]:
    """A daemon that starts when the jobs of KEPT hang already."""
    for name in KEPT:
        corpus.outcome(CASES[name])
    daemon = watching(Daemon(module_base, "n2")).start()
    yield daemon
    remove(daemon)


@cases_of(HANGS, IN_GATE)
def test_the_culprit_of_a_hang(corpus: Corpus, case: Case) -> None:
    check(case, corpus.outcome(case))


@pytest.mark.parametrize("name", KEPT)
def test_a_daemon_that_comes_late_names_the_culprit(corpus: Corpus, late_daemon: Daemon, name: str) -> None:
    check(CASES[name], observe(late_daemon, CASES[name], corpus.kept[name]))


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
