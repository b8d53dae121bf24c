"""Watched values that are NaN, infinite, or jump."""

from __future__ import annotations

import random
from math import inf, nan

import pytest
from diagnosis_cases import ago, facts, rank
from hypothesis import given
from hypothesis import strategies as st

from probing.diagnosis.case import Case
from probing.diagnosis.facts import Facts, Rank, Series
from probing.diagnosis.rules.numbers import find
from probing.diagnosis.verdict import Finding

USUAL = tuple(2 + 0.1 * ((i * 7) % 5) for i in range(30))


def watched(number: int, *values: float, name: str = "trainer.loss", late: float = 0) -> Rank:
    """Returns a rank with readings a second apart, the last one ``late`` s later than that of others."""
    times = tuple(ago(len(values) - i - late) for i in range(len(values)))
    return rank(number, series=(Series(name, times, values),))


def found_in(made: Facts) -> list[Finding]:
    return list(find(Case(made)))


@pytest.mark.parametrize("value", [nan, inf, -inf])
def test_a_loss_that_is_no_number_any_more(value: float) -> None:
    (finding,) = found_in(facts(watched(0, *USUAL, 2.0), watched(1, *USUAL, value)))
    assert (finding.severity, [c.rank for c in finding.culprits]) == ("error", [1])
    assert finding.sentence == f"trainer.loss of rank 1 (node a, pid 4001) is {value:g}"
    assert finding.since_ns == ago(1)


def test_on_all_ranks_at_once_nobody_is_named() -> None:
    (finding,) = found_in(facts(watched(0, *USUAL, nan), watched(1, *USUAL, nan)))
    assert (finding.sentence, finding.culprits) == ("trainer.loss of ranks 0-1 is nan", ())


def test_the_rank_on_which_it_was_first_is_named() -> None:
    (finding,) = found_in(
        facts(watched(0, *USUAL, nan, late=5), watched(1, *USUAL, nan), watched(2, *USUAL, nan, late=5))
    )
    assert [c.rank for c in finding.culprits] == [1]
    assert finding.victims == (0, 2)
    assert finding.sentence == "trainer.loss of ranks 0-2 is nan, first on rank 1"


def test_where_only_one_rank_is_watched_it_is_not_to_blame() -> None:
    (finding,) = found_in(facts(watched(0, *USUAL, nan), rank(1)))
    assert (finding.culprits, finding.missing) == ((), ("trainer.loss of rank 1: not watched there",))
    assert finding.confidence < 0.9


def test_a_value_that_was_never_finite() -> None:
    assert found_in(facts(watched(0, inf, inf, name="best_metric"))) == []
    assert len(found_in(facts(watched(0, nan, name="loss")))) == 1


def test_a_loss_that_recovered() -> None:
    assert found_in(facts(watched(0, *USUAL, nan, 2.0))) == []


def test_a_jump() -> None:
    (finding,) = found_in(facts(watched(0, *USUAL, 2.0, 2.0, 2.0), watched(1, *USUAL, 90.0, 95.0, 100.0)))
    assert (finding.severity, finding.confidence) == ("warning", 0.6)
    assert finding.sentence == "trainer.loss of rank 1 (node a, pid 4001) jumps from 2.2 to 100"


@pytest.mark.parametrize("values", [(*USUAL, 90.0, 2.0, 2.0), (*USUAL, 9.0, 9.0, 9.0), (2.0,) * 10 + (90.0,) * 3])
def test_no_jump(values: tuple[float, ...]) -> None:
    assert found_in(facts(watched(0, *values))) == []


def test_only_a_loss_jumps() -> None:
    assert found_in(facts(watched(0, *USUAL, 900.0, 900.0, 900.0, name="step"))) == []
    assert found_in(facts(watched(0, *(1e9,) * 30, nan, name="rss_bytes"))) == []


def test_a_name_of_a_target_becomes_no_escape_sequence() -> None:
    (finding,) = found_in(facts(watched(0, *USUAL, nan, name="\x1b[31mloss")))
    assert "\x1b" not in finding.sentence


@given(st.integers(0, 1 << 30), st.floats(0.001, 100), st.floats(0, 0.5))
def test_a_loss_that_falls_with_noise_is_well(seed: int, scale: float, noise: float) -> None:
    rng = random.Random(seed)
    values = [scale * (0.2 + 1 / (1 + i / 20)) * (1 + rng.uniform(-noise, noise)) for i in range(100)]
    assert found_in(facts(watched(0, *values))) == []
