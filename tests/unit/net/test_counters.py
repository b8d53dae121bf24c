"""Differences of counters between readings."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from probing.daemon.net.counters import UNKNOWN, Counters, per_second

SECOND = 10**9


def values(*rows: list[int]) -> np.ndarray:
    return np.array(rows, np.int64)


def test_a_first_reading_has_no_differences() -> None:
    found = Counters().read(["a"], values([7, 8]), SECOND)
    assert found.new.all()
    assert found.missing.all()


def test_rows_are_matched_by_name() -> None:
    counters = Counters()
    counters.read(["a", "b"], values([10], [20]), SECOND)
    found = counters.read(["b", "c", "a"], values([23], [99], [17]), 3 * SECOND)
    assert found.rise[[0, 2], 0].tolist() == [3, 7]
    assert found.missing[:, 0].tolist() == [False, True, False]
    assert found.interval[[0, 2]].tolist() == [2 * SECOND] * 2
    assert per_second(found.rise[:, 0], found.interval, 10.0)[[0, 2]].tolist() == [15.0, 35.0]


def test_one_counter_that_went_back_voids_the_row() -> None:
    counters = Counters()
    counters.read(["a", "b"], values([10, 1], [10, 1]), SECOND)
    found = counters.read(["a", "b"], values([9, 100], [11, 2]), 2 * SECOND)
    assert found.missing.tolist() == [[True, True], [False, False]]
    assert found.new.tolist() == [True, False]


def test_the_same_instant_gives_no_rate() -> None:
    counters = Counters()
    counters.read(["a"], values([1]), SECOND)
    assert counters.read(["a"], values([5]), SECOND).missing.all()


_COUNTS = st.lists(st.integers(UNKNOWN, 2**63 - 1), min_size=3, max_size=3)


@given(st.lists(st.dictionaries(st.sampled_from("abc"), _COUNTS, min_size=1), min_size=2, max_size=6))
def test_no_history_gives_a_negative_figure(readings: list[dict[str, list[int]]]) -> None:
    counters = Counters()
    for tick, reading in enumerate(readings):
        found = counters.read(list(reading), values(*reading.values()), tick * SECOND)
        known = found.rise[~found.missing]
        assert (known >= 0).all()
        assert (found.interval[~found.new] > 0).all()
