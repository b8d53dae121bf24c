"""Who runs and who waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from probing.api.errors import QueryError, QueryTimeout
from probing.daemon.query.caller import Caller
from probing.daemon.query.concurrency import GRACE_S, ROOTS, QuerySlots


def _never() -> bool:
    return False


def _soon() -> float:
    return time.monotonic() + 0.01


def _later() -> float:
    return time.monotonic() + 60


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_all_places_but_one_may_be_taken_by_large_queries(stack: ExitStack) -> None:
    slots = QuerySlots(3)
    for _ in range(2):
        slots.grow(stack.enter_context(slots.taken(_later(), _never)))
    with slots.taken(_soon(), _never) as third:
        assert slots.held == 3
        with pytest.raises(QueryTimeout, match="busy"):
            slots.grow(third)
        assert slots.held == 2
    with slots.taken(_later(), _never), pytest.raises(QueryTimeout), slots.taken(_soon(), _never):
        pass
    assert slots.held == 2


def test_the_only_place_is_for_large_queries_too() -> None:
    slots = QuerySlots(1)
    with slots.taken(_later(), _never) as slot:
        slots.grow(slot)
        assert slots.held == 1
    assert slots.held == 0


def test_who_is_past_its_deadline_keeps_nobody_waiting(stack: ExitStack) -> None:
    slots = QuerySlots(1)
    stack.enter_context(slots.taken(time.monotonic() - GRACE_S - 1, _never))
    with slots.taken(_later(), _never):
        assert slots.held == 2


def test_who_went_away_does_not_wait(stack: ExitStack) -> None:
    slots = QuerySlots(1)
    stack.enter_context(slots.taken(_later(), _never))
    with pytest.raises(QueryError, match="cancelled"), slots.taken(_later(), lambda: True):
        pass
    assert slots.held == 1


def test_who_comes_first_goes_first_of_those_that_fit(stack: ExitStack) -> None:
    slots, order = QuerySlots(2), list[str]()
    first = ExitStack()
    slots.grow(first.enter_context(slots.taken(_later(), _never)))
    grown, release = threading.Event(), threading.Event()

    def large() -> None:
        with slots.taken(_later(), _never) as slot:
            grown.set()
            slots.grow(slot)
            order.append("large")
            release.wait(30)

    thread = threading.Thread(target=large)
    thread.start()
    assert grown.wait(30)
    # It waits for the large one before it, and small ones pass it meanwhile.
    for _ in range(3):
        with slots.taken(_later(), _never):
            order.append("small")
    first.close()
    release.set()
    thread.join(30)
    assert order == ["small"] * 3 + ["large"]
    assert slots.held == 0


def _user(uid: int) -> Caller:
    return Caller("unix", str(uid), reserved=uid == 0)


def test_a_stranger_does_not_wait_for_one_callers_queries(stack: ExitStack) -> None:
    slots = QuerySlots(4)
    for _ in range(4):
        stack.enter_context(slots.taken(_later(), _never, _user(1)))
    with pytest.raises(QueryTimeout), slots.taken(_soon(), _never, _user(1)):
        pass
    stack.enter_context(slots.taken(_later(), _never, _user(2)))
    assert slots.held == 5


def test_slow_queries_leave_places_and_one_caller_has_three_quarters(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("probing.daemon.query.concurrency.SLOW_S", 0.0)
    slots = QuerySlots(4)
    for _ in range(6):
        stack.enter_context(slots.taken(_later(), _never, _user(1)))
    with pytest.raises(QueryTimeout), slots.taken(_soon(), _never, _user(1)):
        pass
    for uid in (2, 3):
        stack.enter_context(slots.taken(_later(), _never, _user(uid)))
    with pytest.raises(QueryTimeout), slots.taken(_soon(), _never, _user(4)):
        pass
    for _ in range(ROOTS):
        stack.enter_context(slots.taken(_later(), _never, _user(0)))
    with pytest.raises(QueryTimeout), slots.taken(_soon(), _never, _user(0)):
        pass


def test_a_query_that_rests_keeps_nobody_waiting(stack: ExitStack) -> None:
    slots = QuerySlots(1)
    rests = threading.Event()
    stack.enter_context(slots.taken(_later(), _never, resting=rests.is_set))
    with pytest.raises(QueryTimeout), slots.taken(_soon(), _never):
        pass
    rests.set()
    with slots.taken(_later(), _never):
        assert slots.held == 2
