"""What is bounded is shared among owners."""

from __future__ import annotations

import threading
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from probing.daemon.fairness import FairExecutor, Turns, crowding, in_turn


@given(st.lists(st.tuples(st.integers(0, 4), st.integers())))
def test_each_prefix_is_fair_and_nothing_is_lost(items: list[tuple[int, int]]) -> None:
    turns = in_turn(items, lambda item: item[0])
    assert Counter(turns) == Counter(items)
    total = Counter(owner for owner, _ in items)
    for cut in range(len(turns)):
        counts = Counter(owner for owner, _ in turns[:cut])
        most = max(counts.values(), default=0)
        # Whoever has less than another has nothing more.
        assert all(counts[owner] >= min(total[owner], most - 1) for owner in total)
    for owner in total:
        assert [item for item in turns if item[0] == owner] == [item for item in items if item[0] == owner]


def test_who_crowds() -> None:
    assert crowding([7, 5, 5, 7, 5]) == 5
    assert crowding([7, 5]) == 7
    with pytest.raises(ValueError, match="empty"):
        crowding([])


def test_owners_take_turns() -> None:
    turns: Turns[str] = Turns()
    for _ in range(23):
        turns.took("many")
    # A new owner is next, once, and then they alternate.
    taken = []
    for _ in range(6):
        owner = min("many", "few", key=turns.of)
        turns.took(owner)
        taken.append(owner)
    assert taken == ["few", "many", "few", "many", "few", "many"]
    assert turns.of("other") <= turns.of("many")


def test_who_has_many_calls_waiting_holds_nobody_up() -> None:
    executor = FairExecutor(1, "fair")
    begun, go, ran = threading.Event(), threading.Event(), list[str]()

    def first() -> None:
        begun.set()
        assert go.wait(20)

    try:
        executor.submit("many", first)
        assert begun.wait(20)
        calls = [executor.submit("many", ran.append, "many") for _ in range(5)]
        calls += [executor.submit("few", ran.append, "few") for _ in range(2)]
        failed = executor.submit("few", int, "no number")
        go.set()
        for call in calls:
            call.result(20)
        with pytest.raises(ValueError, match="no number"):
            failed.result(20)
    finally:
        go.set()
        executor.stop()
    assert ran[:4] == ["few", "many", "few", "many"]
    assert Counter(ran) == {"many": 5, "few": 2}
