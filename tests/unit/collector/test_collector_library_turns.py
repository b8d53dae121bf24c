"""Whose turn it is: each process once, users in turn, what is fresh first, and a user who rests holds up nobody."""

from __future__ import annotations

import pytest

from probing.daemon.collector.libraries import turns as library_turns
from probing.daemon.collector.libraries.turns import Turns


def uid_of(pid: int) -> int:
    """Processes of user 7 are 700 to 799."""
    return pid // 100


def taken(turns: Turns) -> list[int]:
    """All that can be had now."""
    found = []
    while (turn := turns.take(0.0)) is not None:
        found.append(turn.pid)
    return found


def test_a_process_waits_once_and_what_is_fresh_comes_first() -> None:
    turns = Turns(uid_of)
    turns.add([701, 702, 701], fresh=False)
    turns.add([702, 703, 703], fresh=True)
    turns.add([703], fresh=False)
    assert taken(turns) == [702, 703, 701]
    assert taken(turns) == []


def test_a_flood_of_one_user_holds_another_up_by_one_turn() -> None:
    turns = Turns(uid_of)
    turns.add(range(700, 790), fresh=True)
    assert turns.take(0.0) is not None
    turns.add([801], fresh=True)
    turns.add([802], fresh=False)
    assert {turn.pid for turn in (turns.take(0.0), turns.take(0.0)) if turn} >= {801}
    order = taken(turns)
    assert order.index(802) <= 1
    assert len(order) == 89 - 1 + 1


def test_a_user_who_rests_is_scanned_and_nothing_more() -> None:
    turns = Turns(uid_of)
    turns.add([701], fresh=True)
    turns.rest(7, 30.0)
    assert taken(turns) == []
    turns.add([702], fresh=False)
    turn = turns.take(0.0)
    assert turn is not None
    assert (turn.pid, turn.may_attach) == (702, False)
    turns.hold(turn)
    turns.add([801], fresh=True)
    assert taken(turns) == [801]
    turns._users[7].rests_until = 0.0
    assert taken(turns) == [701, 702]


def test_a_user_who_wastes_much_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library_turns, "CREDIT_A_SECOND", 0.0)
    turns = Turns(uid_of)
    for _ in range(10):
        turns.waste(7, 10, 1.0)
    turns.add([701, 801], fresh=True)
    assert taken(turns) == [701, 801]
    turns.waste(7, 1, 1.0)
    turns.add([701, 801], fresh=True)
    assert taken(turns) == [801]
    monkeypatch.setattr(library_turns, "CREDIT_A_SECOND", 1e9)
    turns._users[7].rests_until = 0.0
    turns.waste(7, 1, 1.0)
    assert taken(turns) == [701]


def test_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library_turns, "MAX_WAITING", 5)
    turns = Turns(uid_of)
    turns.add(range(700, 707), fresh=True)
    assert turns.refused == 2
    assert len(taken(turns)) == 5


def test_a_process_is_tried_again_ever_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library_turns, "FIRST_RETRY_S", 0.002)
    turns = Turns(uid_of)
    spans = []
    for _ in range(5):
        turns.again(701)
        spans.append(turns._retries[701].span)
        assert turns.take(30.0) is not None
    assert spans == [0.002, 0.004, 0.008, 0.016, 0.032]
    turns.settled(701)
    turns.again(701)
    assert turns._retries[701].span == 0.002


def test_nobody_waits_after_the_end() -> None:
    turns = Turns(uid_of)
    turns.stop()
    turns.add([701], fresh=True)
    assert turns.take(30.0) is None
