"""Changes by proposers: over which nodes, after which failures, and with which errors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest
from fakes import SkippingLoop
from register_network import tokens_of, value_of, voters_of

from probing.api.errors import PeerError, StoreFull, UsageError
from probing.groups.proposer import Proposer
from probing.groups.register import (
    MAX_COUNTER,
    MAX_VALUE,
    Accepted,
    Acceptor,
    Ballot,
    Committed,
    Promise,
    Proposal,
    Quorum,
    Refusal,
)

T = TypeVar("T")
ABC = ("a", "b", "c")


class Nodes:
    """The acceptors of some nodes. ``reached``: those that answer; the others refuse the connection, or stay
    ``silent``.

    ``before``: what happens before an acceptor gets a request.
    """

    def __init__(self, names: str = "abcdefxyz") -> None:
        self.states = {name: Acceptor() for name in names}
        self.reached = set(names)
        self.silent: set[str] = set()
        self.requests: list[tuple[str, str]] = []
        self.pauses: list[int] = []
        self.before: Callable[[str, str], None] = lambda node, request: None

    async def prepare(self, node: str, ballot: Ballot) -> Promise | Refusal:
        return await self._asked(node, "prepare", lambda state: state.prepare(ballot))

    async def accept(self, node: str, proposal: Proposal) -> Accepted | Refusal:
        return await self._asked(node, "accept", lambda state: state.accept(proposal))

    async def _asked(self, node: str, name: str, request: Callable[[Acceptor], tuple[Acceptor, T]]) -> T:
        self.before(node, name)
        self.requests.append((name, node))
        if node in self.silent:
            await asyncio.Event().wait()
        if node not in self.reached:
            raise PeerError("the connection was refused")
        self.states[node], answer = request(self.states[node])
        return answer

    async def pause(self, attempt: int) -> None:
        self.pauses.append(attempt)

    def proposer(self, node: str, voters: tuple[str, ...] = ABC) -> Proposer:
        quorum = lambda value: Quorum(tuple(voters_of(value)) if value else voters)  # noqa: E731
        return Proposer(node, self, quorum, self.pause)

    def change(self, node: str, token: str, voters: str = "", learned: Committed | None = None) -> Committed:
        """Appends ``token``, and gives the value new voters if there are any."""

        def update(value: bytes) -> bytes | None:
            tokens = tokens_of(value)
            present = voters_of(value) if value else ABC
            return None if token in tokens else value_of([*tokens, token], voters or present)

        return run(self.proposer(node).change(learned or Committed(), update))


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    loop = SkippingLoop()
    try:
        return loop.run_until_complete(coroutine)
    finally:
        loop.close()


def only_on(nodes: Nodes, names: str, request: str = "accept") -> None:
    """Lets a request of this kind reach only the nodes ``names``, and others reach all."""
    everyone = set(nodes.states)

    def before(node: str, name: str) -> None:
        nodes.reached = set(names) if name == request else everyone

    nodes.before = before


def test_a_change_is_committed_by_all_voters_and_the_next_one_is_made_from_it() -> None:
    nodes = Nodes()
    first = nodes.change("x", "one")
    assert first == Committed(Ballot(1, "x"), value_of(["one"], ABC))
    assert [nodes.states[name].accepted.value for name in "abcd"] == [first.value] * 3 + [b""]
    second = nodes.change("y", "two", learned=first)
    assert second == Committed(Ballot(2, "y"), value_of(["one", "two"], ABC))
    # A node that has learned nothing needs a higher ballot than its first.
    assert tokens_of(nodes.change("z", "three").value) == ["one", "two", "three"]
    assert nodes.pauses == [1]


def test_a_value_that_a_quorum_shows_is_read_without_a_second_request() -> None:
    nodes = Nodes()
    first = nodes.change("x", "one")
    nodes.requests.clear()
    assert run(nodes.proposer("y").change(first, lambda value: None)) == first
    assert run(nodes.proposer("z").change(first, lambda value: value)) == first
    assert {name for name, _ in nodes.requests} == {"prepare"}
    assert run(Nodes().proposer("y").change(Committed(), lambda value: None)) == Committed()


@pytest.mark.parametrize(
    ("silent", "reason"),
    [("", " (the connection was refused)"), ("c", " (the connection was refused)"), ("bc", "")],
)
def test_nodes_that_do_not_answer_are_named(silent: str, reason: str) -> None:
    nodes = Nodes()
    nodes.reached -= {"b", "c"}
    nodes.silent = set(silent)
    with pytest.raises(PeerError) as error:
        nodes.change("a", "one")
    assert error.value.message == f"2 of 3 nodes do not answer: b, c{reason}"
    assert "probingd running on that node" in error.value.hint
    assert nodes.states["a"].accepted == Proposal()
    nodes.reached.add("b")
    nodes.silent = set()
    two = nodes.change("a", "two", voters="ab")
    nodes.reached -= {"a"}
    with pytest.raises(PeerError, match=r"^1 of 2 nodes does not answer: a"):
        nodes.change("b", "three", learned=two)


def test_the_next_proposer_completes_a_change_that_it_meets() -> None:
    nodes = Nodes()
    only_on(nodes, "a")
    with pytest.raises(PeerError, match="2 of 3 nodes do not answer: b, c") as error:
        nodes.change("x", "one")
    assert "may still be made" in error.value.hint
    nodes.before = lambda node, name: None
    nodes.reached = set("ab")
    assert tokens_of(nodes.change("y", "two").value) == ["one", "two"]


def test_a_change_that_is_not_met_again_is_not_made() -> None:
    nodes = Nodes()
    only_on(nodes, "a")
    with pytest.raises(PeerError):
        nodes.change("x", "one")
    nodes.before = lambda node, name: None
    nodes.reached = set("bc")
    assert tokens_of(nodes.change("y", "two").value) == ["two"]
    nodes.reached = set("abc")
    assert tokens_of(nodes.change("x", "one").value) == ["two", "one"]


def test_a_disturbed_attempt_is_repeated_with_a_higher_ballot_after_a_pause() -> None:
    nodes = Nodes()
    disturbed = iter(range(1, 4))

    def before(node: str, name: str) -> None:
        if name == "accept" and node == "a" and (number := next(disturbed, None)):
            for voter in ABC:
                nodes.states[voter], _ = nodes.states[voter].prepare(Ballot(10 * number, "z"))

    nodes.before = before
    assert nodes.change("x", "one").ballot == Ballot(31, "x")
    assert nodes.pauses == [1, 2, 3]


def test_after_many_disturbed_attempts_the_other_proposer_is_named() -> None:
    nodes = Nodes()

    def before(node: str, name: str) -> None:
        if name == "accept":
            state = nodes.states[node]
            nodes.states[node], _ = state.prepare(Ballot(state.promised.counter + 1, "z"))

    nodes.before = before
    with pytest.raises(PeerError, match=r"^10 attempts to change the record conflicted with changes by z$") as error:
        nodes.change("x", "one")
    assert "may still be made" in error.value.hint
    assert nodes.pauses == list(range(1, 11))


def test_voters_are_replaced_with_a_quorum_of_the_old_and_of_the_new_ones() -> None:
    nodes = Nodes()
    first = nodes.change("x", "one")
    for reached, problem in (("abde", ""), ("abd", "2 of 3 nodes do not answer: e, f"), ("adef", "b, c")):
        trial = Nodes()
        trial.states = dict(nodes.states)
        trial.reached = set(reached)
        if problem:
            with pytest.raises(PeerError, match=problem):
                trial.change("x", "two", voters="def", learned=first)
        else:
            assert trial.change("x", "two", voters="def", learned=first).value == value_of(["one", "two"], "def")


def test_old_voters_lead_to_the_new_ones() -> None:
    nodes = Nodes()
    nodes.change("x", "one", voters="bcd")
    nodes.change("x", "two", voters="cde")
    nodes.change("x", "three", voters="def")
    assert nodes.change("y", "four").value == value_of(["one", "two", "three", "four"], "def")


def test_new_voters_are_enough_once_a_voter_has_learned_their_value() -> None:
    nodes = Nodes()
    moved = nodes.change("x", "one", voters="cde")
    nodes.reached = set("cde")
    with pytest.raises(PeerError, match="2 of 3 nodes do not answer: a, b"):
        nodes.change("y", "two")
    nodes.states["c"] = nodes.states["c"].learn(moved)
    assert tokens_of(nodes.change("y", "two").value) == ["one", "two"]


def test_a_proposer_with_an_old_value_needs_the_voters_on_which_an_unfinished_change_rests() -> None:
    # The voters were axy, then abc. A change to def was accepted by a and d only: it is not committed, and b and c,
    # a quorum of abc, do not show it. If a, y, d and e were enough to complete it, b and c could commit another change.
    nodes = Nodes()
    oldest = nodes.change("z", "one", voters="axy")
    only_on(nodes, "abcx")
    present = nodes.change("z", "two", voters="abc", learned=oldest)
    only_on(nodes, "ad")
    with pytest.raises(PeerError):
        nodes.change("z", "unfinished", voters="def", learned=present)
    nodes.before = lambda node, name: None

    nodes.reached = set("aydef")
    with pytest.raises(PeerError, match="2 of 3 nodes do not answer: b, c"):
        nodes.change("y", "three", learned=oldest)
    nodes.reached = set("bc")
    assert tokens_of(nodes.change("b", "four", learned=present).value) == ["one", "two", "four"]
    nodes.reached = set(nodes.states)
    assert tokens_of(nodes.change("y", "three", learned=oldest).value) == ["one", "two", "four", "three"]


def test_errors_of_a_change_end_it_before_anything_is_proposed() -> None:
    nodes = Nodes()

    def refused(value: bytes) -> bytes:
        raise UsageError("the group runs")

    for update, text in ((refused, "the group runs"), (lambda value: b"x" * (MAX_VALUE + 1), "1,048,577 bytes")):
        with pytest.raises(UsageError, match=text):
            run(Proposer("x", nodes, lambda value: Quorum(ABC), nodes.pause).change(Committed(), update))
    assert {name for name, _ in nodes.requests} == {"prepare"}


def test_a_node_that_fails_with_any_error_counts_as_silent() -> None:
    nodes = Nodes()

    def before(node: str, name: str) -> None:
        if name == "accept" and node in broken:
            raise StoreFull("no space is left\x1b[2J" + 1000 * "x")

    nodes.before = before
    broken = "a"
    assert tokens_of(nodes.change("a", "one").value) == ["one"]
    broken = "ab"
    with pytest.raises(
        PeerError, match=r"^2 of 3 nodes do not answer: a, b \(no space is left\\x1b\[2Jx+…\)$"
    ) as error:
        nodes.change("a", "two")
    assert len(error.value.message) < 300


@pytest.mark.parametrize(
    "answer",
    [
        Promise(Proposal(Ballot(MAX_COUNTER + 1, "b"), b"value", ABC), Committed()),
        Promise(Proposal(Ballot(1, "b"), b"x" * (MAX_VALUE + 1), ABC), Committed()),
        Promise(Proposal(), Committed(Ballot(1, "\n"), b"value")),
        Refusal(Ballot(1 << 80, "b")),
    ],
)
def test_a_malformed_answer_is_none(answer: Promise | Refusal) -> None:
    class Malformed(Nodes):
        async def prepare(self, node: str, ballot: Ballot) -> Promise | Refusal:
            return answer if node == "b" else await super().prepare(node, ballot)

    nodes = Malformed()
    assert tokens_of(nodes.change("x", "one").value) == ["one"]
    nodes.reached = set("ab")
    with pytest.raises(PeerError, match="2 of 3 nodes do not answer: b, c"):
        nodes.change("x", "two")


def test_voters_that_lost_their_state_are_named() -> None:
    nodes = Nodes()
    first = nodes.change("x", "one")
    nodes.states |= {"b": Acceptor(), "c": Acceptor()}
    nodes.reached = set("bc")
    with pytest.raises(PeerError, match=r"^the record is lost on b, c$") as error:
        nodes.change("x", "two", learned=first)
    assert "state directory" in error.value.hint


def test_a_newer_value_that_a_voter_has_only_learned_disturbs_the_attempt() -> None:
    nodes = Nodes()
    nodes.reached = set("ac")
    newer = Proposal(Ballot(5, "z"), value_of(["newer"], ABC), ABC)

    def before(node: str, name: str) -> None:
        # a has promised, and c has not; the newer value is committed by a and b.
        if node == "c" and not nodes.pauses:
            nodes.states |= {voter: nodes.states[voter].accept(newer)[0] for voter in "ab"}
            nodes.states["c"] = nodes.states["c"].learn(Committed(newer.ballot, newer.value))

    nodes.before = before
    assert nodes.change("y", "one") == Committed(Ballot(6, "y"), value_of(["newer", "one"], ABC))
    assert nodes.pauses == [1]


def test_a_proposer_waits_for_no_more_voters_than_a_quorum() -> None:
    nodes = Nodes()
    nodes.silent = {"c"}
    assert tokens_of(nodes.change("x", "one").value) == ["one"]

    async def left() -> int:
        await nodes.proposer("x").change(Committed(), lambda value: None)
        return len(asyncio.all_tasks()) - 1

    assert run(left()) == 0
