"""Real jobs that a rank makes slow, two at a time so that they do not slow each other: the daemon says who and why."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from diagnosis_corpus import Case, Corpus, cases_of, check, corpus_beside, selected
from diagnosis_faults import IN_GATE, SLOW
from e2e_support import Daemon


@pytest.fixture(scope="module")
def corpus(module_base: Path, request: pytest.FixtureRequest) -> Iterator[Corpus]:
    with corpus_beside(Daemon(module_base, "n1"), selected(SLOW, request), 2) as corpus:
        yield corpus


@cases_of(SLOW, IN_GATE)
def test_the_culprit_of_a_slow_job(corpus: Corpus, case: Case) -> None:
    check(case, corpus.outcome(case))
