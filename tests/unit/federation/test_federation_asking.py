"""Asking many nodes in one event loop: places, deadlines, second tries and hedges, with no network."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from fakes import SkippingLoop

from probing.api.errors import BROKEN, Overloaded, PeerError, ProbingError, QueryError, QueryMemory
from probing.federation.execution.answer import Gathered
from probing.federation.execution.asking import Policy, ask_many

QUICK = Policy(pause_s=0.0, patience_s=0.01, grace_s=0.0)


class Double:
    """Nodes ``n0``, ``n1``, ...: an entry of ``faults`` is raised, or a time that the first call takes."""

    def __init__(self, **faults: list[Exception | float]) -> None:
        self.faults = faults
        self.calls: Counter[str] = Counter()
        self.flying = self.most = 0

    async def ask(self, address: str, seconds: float, attempt: int) -> tuple[str, int]:
        self.calls[address] += 1
        self.flying += 1
        self.most = max(self.most, self.flying)
        try:
            await asyncio.sleep(0)
            if self.faults.get(address):
                fault = self.faults[address].pop(0)
                if isinstance(fault, Exception):
                    raise fault
                await asyncio.sleep(fault)
            return address, attempt
        finally:
            self.flying -= 1


def asked(double: Double, number: int, policy: Policy = QUICK, timeout: float = 30.0, **more: Any) -> Gathered[int]:
    addresses = [f"n{i}" for i in range(number)]
    with asyncio.Runner(loop_factory=SkippingLoop) as runner:
        return runner.run(ask_many(addresses, double.ask, timeout, policy, **more))


def test_all_answer_in_the_order_of_their_addresses_and_few_at_once() -> None:
    double = Double()
    done: list[tuple[str, bool]] = []
    found = asked(double, 50, Policy(at_once=4, patience_s=60), answered=lambda a, well: done.append((a, well)))
    assert [a.address for a in found.answered] == list(found.asked) == [f"n{i}" for i in range(50)]
    assert double.most <= 4
    assert sorted(done) == sorted((f"n{i}", True) for i in range(50))


def test_nobody_is_asked() -> None:
    assert asked(Double(), 0).report() == {"asked": [], "answered": [], "failed": []}


def test_a_call_that_broke_on_the_way_is_made_again_and_an_answer_with_an_error_is_not() -> None:
    double = Double(
        n1=[PeerError("it broke", code=BROKEN)],
        n2=[PeerError("it broke", code=BROKEN)] * 9,
        n3=[QueryError("no such column")],
    )
    found = asked(double, 5)
    assert {a.address: a.value for a in found.answered} == {"n0": 0, "n1": 1, "n4": 0}
    assert {f.address: f.reason for f in found.failed} == {"n2": "it broke", "n3": "no such column"}
    assert double.calls == {"n0": 1, "n1": 2, "n2": 2, "n3": 1, "n4": 1}


def test_who_does_not_answer_holds_up_nobody_and_is_named_at_the_deadline() -> None:
    silent = {f"n{i}": [3600.0] for i in range(0, 40, 2)}
    double = Double(**silent)
    # Fewer places than silent nodes.
    found = asked(double, 40, Policy(at_once=4, patience_s=0.01, hedges=0, grace_s=0.0), timeout=1.0)
    assert [a.address for a in found.answered] == [f"n{i}" for i in range(1, 40, 2)]
    assert {f.reason for f in found.failed} == {"no answer within 1 s"}
    assert double.flying == 0


def test_a_slow_call_is_hedged_and_the_first_answer_counts() -> None:
    double = Double(n7=[3600.0], n9=[3600.0])
    found = asked(double, 60, alive=lambda address: address != "n9", timeout=3.0)
    assert {a.address: a.value for a in found.answered if a.value} == {"n7": 1}
    assert [f.address for f in found.failed] == ["n9"]
    assert (double.calls["n7"], double.calls["n9"]) == (2, 1)
    assert max(Counter(a.address for a in found.answered).values()) == 1


def test_few_hedges_are_in_flight() -> None:
    double = Double(**{f"n{i}": [3600.0, 3600.0] for i in range(30)})
    asked(double, 100, timeout=1.0)
    assert double.calls.total() == 105


def test_slow_calls_that_answer_leave_the_hedges_to_a_call_that_does_not() -> None:
    # The calls before that of n7 take both hedges, and answer; n7 answers only the second call.
    double = Double(**{f"n{i}": [0.5, 3600.0] for i in range(5)}, n7=[3600.0])
    found = asked(double, 40, timeout=3.0)
    assert (len(found.answered), found.answered[7].value, double.calls["n7"]) == (40, 1, 2)


def test_a_broken_hedge_leaves_the_first_call() -> None:
    double = Double(n7=[0.5, PeerError("it broke", code=BROKEN)])
    found = asked(double, 60)
    assert (len(found.answered), found.answered[7].value, double.calls["n7"]) == (60, 0, 2)


@pytest.mark.parametrize("error", [Overloaded("too many calls"), PeerError("connection refused"), QueryMemory("full")])
def test_a_hedge_that_fails_by_itself_leaves_the_first_call(error: ProbingError) -> None:
    double = Double(n7=[0.5, error])
    found = asked(double, 60)
    assert (len(found.answered), found.answered[7].value, double.calls["n7"]) == (60, 0, 2)


def test_the_error_of_the_first_call_counts_while_its_hedge_is_in_flight() -> None:
    async def ask(address: str, seconds: float, attempt: int) -> tuple[str, int]:
        if address == "n7":
            await asyncio.sleep(3600.0 if attempt else 0.5)
            raise QueryError("no such column")
        return address, attempt

    with asyncio.Runner(loop_factory=SkippingLoop) as runner:
        found = runner.run(ask_many([f"n{i}" for i in range(60)], ask, 30.0, QUICK))
    assert [(f.address, f.reason) for f in found.failed] == [("n7", "no such column")]


def test_a_node_under_two_addresses_counts_once() -> None:
    async def ask(address: str, seconds: float, attempt: int) -> tuple[str, int]:
        return "same", 1

    found = asyncio.run(ask_many(["a", "b", "a"], ask, 5.0, QUICK))
    assert [a.address for a in found.answered] == ["a"]
    assert [f.reason for f in found.failed] == ["it answers as same, the name of the node at a"]


def test_an_error_of_ours_ends_the_question() -> None:
    async def ask(address: str, seconds: float, attempt: int) -> tuple[str, int]:
        if address == "b":
            raise MemoryError
        await asyncio.sleep(3600)
        return address, 1

    with pytest.raises(MemoryError):
        asyncio.run(ask_many(["a", "b"], ask, 30.0, QUICK))
