"""Real jobs in which a rank dies, or will for lack of memory: the daemon names the first one and the cause."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from diagnosis_corpus import Case, Corpus, cases_of, check, corpus_beside, selected
from diagnosis_faults import DEATHS, IN_GATE, MEMORY
from e2e_support import Daemon

ALL = (*MEMORY, *DEATHS)


@pytest.fixture(scope="module")
def corpus(module_base: Path, request: pytest.FixtureRequest) -> Iterator[Corpus]:
    options: dict[str, Mapping[str, object]] = {"logs": {"enabled": True}, "host": {"memory_interval_s": 1}}
    with corpus_beside(Daemon(module_base, "n1"), selected(ALL, request), 3, **options) as corpus:
        yield corpus


@cases_of(ALL, IN_GATE)
def test_the_culprit_of_a_death(corpus: Corpus, case: Case) -> None:
    check(case, corpus.outcome(case))
