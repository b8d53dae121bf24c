"""Quorums that overlap, acceptors that keep their promises, and states that come from a file."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest

from probing.api.errors import FormatError, UsageError
from probing.groups.register import (
    MAX_COUNTER,
    MAX_VALUE,
    MAX_VOTERS,
    ZERO,
    Accepted,
    Acceptor,
    Ballot,
    Committed,
    Promise,
    Proposal,
    Quorum,
    Refusal,
)

FIRST, SECOND, THIRD = Ballot(1, "gn1"), Ballot(1, "gn2"), Ballot(2, "gn1")
VOTERS = ("gn1", "gn2", "gn3")


def subsets(names: tuple[str, ...]) -> list[tuple[str, ...]]:
    return [subset for size in range(len(names) + 1) for subset in combinations(names, size)]


@pytest.mark.parametrize("number", range(1, MAX_VOTERS + 1))
def test_two_quorums_share_a_node_and_of_two_halves_exactly_one_is_a_quorum(number: int) -> None:
    voters = tuple(f"gn{i}" for i in range(number))
    quorum = Quorum(voters)
    met = [set(nodes) for nodes in subsets(voters) if quorum.is_met(nodes)]
    assert all(a & b for a in met for b in met)
    for nodes in subsets(voters):
        others = [voter for voter in voters if voter not in nodes]
        assert quorum.is_met(nodes) != quorum.is_met(others)


def test_the_first_of_an_even_number_of_voters_has_two_votes() -> None:
    assert Quorum(("gn1", "gn2")).is_met(["gn1"])
    assert not Quorum(("gn1", "gn2")).is_met(["gn2"])
    four = Quorum(("gn1", "gn2", "gn3", "gn4"))
    assert four.is_met(["gn1", "gn4"])
    assert not four.is_met(["gn2", "gn3"])
    assert four.is_met(["gn2", "gn3", "gn4"])
    assert not Quorum(VOTERS).is_met(["gn1"])


def test_other_nodes_do_not_count() -> None:
    assert not Quorum(VOTERS).is_met(["gn1", "gn4", "gn5", ""])


@pytest.mark.parametrize(
    "voters", [(), ("gn1", "gn1"), tuple("abcdefgh"), ("",), ("gn1", "a b"), ("gn\n1",), ("g" * 256,)]
)
def test_voters_out_of_bounds_are_no_quorum(voters: tuple[str, ...]) -> None:
    with pytest.raises(UsageError):
        Quorum(voters)


def test_ballots_are_ordered_by_counter_and_then_by_node() -> None:
    assert ZERO < FIRST < SECOND < THIRD


def test_an_acceptor_promises_each_ballot_once_and_no_lower_one() -> None:
    empty = Acceptor()
    state, answer = empty.prepare(SECOND)
    assert answer == Promise(Proposal(), Committed())
    assert (empty.promised, state.promised) == (ZERO, SECOND)
    for ballot in (FIRST, SECOND):
        assert state.prepare(ballot) == (state, Refusal(SECOND))
    assert state.prepare(THIRD)[1] == Promise(Proposal(), Committed())


def test_an_acceptor_accepts_what_it_promised_and_newer_proposals_only() -> None:
    state, _ = Acceptor().prepare(SECOND)
    assert state.accept(Proposal(FIRST, b"first", VOTERS)) == (state, Refusal(SECOND))
    second = Proposal(SECOND, b"second", VOTERS)
    state, answer = state.accept(second)
    assert (answer, state.accepted) == (Accepted(SECOND), second)
    assert state.accept(second) == (state, Accepted(SECOND))
    # A voter that the new value adds was not asked for a promise.
    third = Proposal(THIRD, b"third", VOTERS)
    state, answer = state.accept(third)
    assert (answer, state.promised) == (Accepted(THIRD), THIRD)
    assert state.prepare(Ballot(3, "gn9"))[1] == Promise(third, Committed())


def test_a_newer_committed_value_replaces_an_older_one() -> None:
    second, first = Committed(SECOND, b"second"), Committed(FIRST, b"first")
    state = Acceptor().learn(second)
    assert state.committed == second
    assert state.learn(first) is state
    assert state.learn(second) is state
    assert state.learn(Committed(THIRD, b"third")).committed.value == b"third"
    assert state.prepare(THIRD)[1] == Promise(Proposal(), second)


@pytest.mark.parametrize(
    "ballot",
    [ZERO, Ballot(-1, "gn1"), Ballot(0, "gn1"), Ballot(MAX_COUNTER + 1, "gn1"), Ballot(1, ""), Ballot(1, "g\x1b[1m")],
)
def test_requests_with_ballots_out_of_bounds_are_refused(ballot: Ballot) -> None:
    for request in (
        lambda: Acceptor().prepare(ballot),
        lambda: Acceptor().accept(Proposal(ballot, b"value", VOTERS)),
        lambda: Acceptor().learn(Committed(ballot, b"value")),
    ):
        with pytest.raises(UsageError, match="out of bounds"):
            request()


def test_values_out_of_bounds_are_refused() -> None:
    for value in (b"", b"x" * (MAX_VALUE + 1)):
        with pytest.raises(UsageError, match="bytes"):
            Acceptor().accept(Proposal(FIRST, value, VOTERS))
        with pytest.raises(UsageError, match="bytes"):
            Acceptor().learn(Committed(FIRST, value))
    with pytest.raises(UsageError, match="0 voters"):
        Acceptor().accept(Proposal(FIRST, b"value"))


def full() -> Acceptor:
    state, _ = Acceptor().accept(Proposal(FIRST, bytes(range(256)), VOTERS))
    return state.prepare(THIRD)[0].learn(Committed(FIRST, bytes(range(256))))


@pytest.mark.parametrize("state", [Acceptor(), Acceptor().prepare(FIRST)[0], full()])
def test_a_state_comes_back_from_its_file(state: Acceptor) -> None:
    assert Acceptor.from_dict(json.loads(json.dumps(state.to_dict()))) == state


def changed(path: tuple[str | int, ...], value: object) -> Callable[[dict[str, Any]], None]:
    def change(document: Any) -> None:
        for part in path[:-1]:
            document = document[part]
        document[path[-1]] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        changed(("promised",), None),
        changed(("promised",), [1]),
        changed(("promised",), [True, "gn1"]),
        changed(("promised",), [2.0, "gn1"]),
        changed(("promised",), [10**400, "gn1"]),
        changed(("promised",), [-1, "gn1"]),
        changed(("promised",), [2, "gn1\n"]),
        changed(("promised",), [0, ""]),
        changed(("accepted",), []),
        changed(("accepted", "ballot"), [3, "gn1"]),
        changed(("accepted", "ballot"), [0, ""]),
        changed(("accepted", "value"), "***"),
        changed(("accepted", "value"), ""),
        changed(("accepted", "value"), 7),
        changed(("accepted", "value"), "A" * (2 * MAX_VALUE)),
        changed(("accepted", "base"), []),
        changed(("accepted", "base"), "gn1"),
        changed(("accepted", "base"), ["gn1", "gn1"]),
        changed(("accepted", "base"), list("abcdefgh")),
        changed(("committed",), 7),
        changed(("committed", "ballot"), ["gn1", 1]),
        changed(("committed", "value"), ""),
    ],
)
def test_a_malformed_state_is_refused(change: Callable[[dict[str, Any]], None]) -> None:
    document = copy.deepcopy(json.loads(json.dumps(full().to_dict())))
    change(document)
    with pytest.raises(FormatError, match="the state of a record is malformed"):
        Acceptor.from_dict(document)


@pytest.mark.parametrize("document", [None, [], "", 7])
def test_a_document_of_another_type_is_no_state(document: object) -> None:
    with pytest.raises(FormatError):
        Acceptor.from_dict(document)
