"""Offsets of clocks: the true one always lies within the bound, whatever the network does."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from probing.federation.execution.clocks import Clocks, Offset, measured, spread_ns

SECOND = 1_000_000_000
YEAR = 365 * 86_400 * SECOND


def test_a_node_that_does_not_say_its_time_has_no_offset() -> None:
    assert measured(5, 10, 0) is None
    assert measured(10, 5, 7) is None


def test_an_offset_is_half_a_round_trip_sharp() -> None:
    assert measured(1000, 1200, 5_001_100) == Offset(5_000_000, 100)
    found = measured(2 * SECOND, 4 * SECOND, 3 * SECOND + YEAR)
    assert found is not None
    assert (found.offset_ns, found.error_ns, found.apart) == (YEAR, SECOND, True)
    assert not Offset(5, 5).apart


@given(
    st.integers(-YEAR, YEAR),
    st.lists(st.tuples(st.integers(0, SECOND), st.integers(0, SECOND), st.integers(0, 10)), min_size=1, max_size=20),
)
def test_several_answers_sharpen_it_and_the_true_offset_stays_inside(
    offset: int, trips: list[tuple[int, int, int]]
) -> None:
    clocks, now = Clocks(), 2 * YEAR
    errors = []
    for there, back, pause in trips:
        sent = now
        now += there + back
        best = clocks.add("n", measured(sent, now, sent + there + offset), now)
        assert best is not None
        assert best.low_ns <= offset <= best.high_ns
        errors.append(best.error_ns)
        now += pause
    assert errors[-1] <= min((there + back + 1) // 2 for there, back, _ in trips) + len(trips) * 50_000_000
    assert clocks.of("n", now) is not None
    assert clocks.of("other", now) is None


def test_a_clock_that_was_set_counts_as_it_is_now() -> None:
    clocks = Clocks()
    clocks.add("n", Offset(0, 100), 0)
    assert clocks.add("n", Offset(5000, 100), 10) == Offset(5000, 100)


def test_an_old_measurement_blunts() -> None:
    clocks = Clocks()
    clocks.add("n", Offset(0, 100), 0)
    later = clocks.add("n", None, 100 * SECOND)
    assert later == Offset(0, 100 + 5_000_000)


def test_clocks_are_apart_by_the_sum_of_what_is_not_known() -> None:
    assert spread_ns([Offset(0, 10), Offset(100, 5)]) == 115
    assert spread_ns([Offset(0, 10), None]) is None
    assert spread_ns([]) is None
