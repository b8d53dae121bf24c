"""Real jobs that a rank makes slow, two at a time so that they do not slow each other: the daemon says who and why."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from diagnosis_corpus import Case, Corpus, check, corpus_beside, selected
from diagnosis_faults import SLOW
from e2e_support import Daemon


@pytest.fixture(scope="module")
def corpus(shared_base: Path, request: pytest.FixtureRequest) -> Iterator[Corpus]:
    with corpus_beside(Daemon(shared_base, "n1"), selected(SLOW, request), 2) as corpus:
        yield corpus


@pytest.mark.parametrize("case", SLOW, ids=lambda case: case.name)
def test_the_culprit_of_a_slow_job(corpus: Corpus, case: Case) -> None:
    check(case, corpus.outcome(case))
