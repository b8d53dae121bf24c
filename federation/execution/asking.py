"""Decides whom to ask when: many nodes at once in one event loop, with places, deadlines, second tries and hedges.

A hedge is a second call to a node that takes longer than nearly all others; the first answer counts. Asking twice is
safe: a question changes nothing at a node.
"""

from __future__ import annotations

import asyncio
import math
from bisect import insort
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from probing.api.errors import PeerError, ProbingError
from probing.federation.execution.fanout import Failed, Gathered, late

__all__ = ("Again", "Ask", "Policy", "ask_many")

T = TypeVar("T")
# Asks an address: the seconds that are left, and how often it was asked before. Returns the node's name and answer.
Ask = Callable[[str, float, int], Awaitable[tuple[str, T]]]
_GLANCE_S = 0.02


class Again(Exception):
    """The call failed with ``error`` on the way, so that another one may succeed."""

    def __init__(self, error: ProbingError) -> None:
        super().__init__(error.message)
        self.error = error


@dataclass(frozen=True, slots=True)
class Policy:
    """How many nodes are asked at once, and when a node is asked again.

    ``at_once`` calls may be young; one older than ``patience_s`` leaves its place to another, so that nodes that do not
    answer hold up nobody, until ``most`` are in flight. A broken call is made again up to ``retries`` times. Once
    ``hedge_after`` nodes have answered, calls longer than nearly all others are hedged, for at most ``hedges`` of all
    nodes; 0 hedges none.
    """

    at_once: int = 96
    patience_s: float = 0.5
    most: int = 2048
    retries: int = 1
    pause_s: float = 0.1
    hedge_after: int = 20
    hedges: float = 0.05
    grace_s: float = 0.5


async def ask_many(
    addresses: Sequence[str],
    ask: Ask[T],
    timeout: float,
    policy: Policy,
    *,
    alive: Callable[[str], bool] = lambda _: True,
    answered: Callable[[str, bool], None] = lambda *_: None,
) -> Gathered[T]:
    """Calls ``ask`` for every address; returns who answered, and why the others failed, in the order of addresses.

    ``ask`` raises ProbingError or Again; another exception ends the question. Only a node that is ``alive`` is hedged.
    ``answered(address, well)`` is called as each node is done.
    """
    return await _Round(tuple(dict.fromkeys(addresses)), ask, timeout, policy, alive, answered).run()


class _Round(Generic[T]):
    def __init__(
        self,
        addresses: tuple[str, ...],
        ask: Ask[T],
        timeout: float,
        policy: Policy,
        alive: Callable[[str], bool],
        answered: Callable[[str, bool], None],
    ) -> None:
        self._addresses = addresses
        self._ask = ask
        self._timeout = timeout
        self._policy = policy
        self._alive = alive
        self._answered = answered
        self._loop = asyncio.get_running_loop()
        self._deadline = self._loop.time() + timeout
        self._places = asyncio.Semaphore(policy.at_once)
        self._flights = asyncio.Semaphore(policy.most)
        self._took: list[float] = []
        self._hedges = math.ceil(policy.hedges * len(addresses))

    async def run(self) -> Gathered[T]:
        tasks = {address: self._loop.create_task(self._one(address)) for address in self._addresses}
        try:
            if tasks:
                await asyncio.wait(
                    tasks.values(), timeout=self._timeout + self._policy.grace_s, return_when=asyncio.FIRST_EXCEPTION
                )
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)
        outcome: Gathered[T] = Gathered(self._addresses)
        broken = next((e for t in tasks.values() if not t.cancelled() and (e := t.exception())), None)
        if broken is not None:
            raise broken
        for address, task in tasks.items():
            found = late(address, self._timeout) if task.cancelled() else task.result()
            if isinstance(found, ProbingError):
                outcome.failed.append(Failed(address, "", found))
            else:
                outcome.add(address, *found)
        return outcome

    async def _one(self, address: str) -> tuple[str, T] | ProbingError:
        async with self._flights:
            await self._places.acquire()
            release = _once(self._places.release)
            leaving = self._loop.call_later(self._policy.patience_s, release)
            try:
                found: tuple[str, T] | ProbingError = await self._tries(address)
            except ProbingError as e:
                found = e
            finally:
                leaving.cancel()
                release()
        self._answered(address, not isinstance(found, ProbingError))
        return found

    async def _tries(self, address: str) -> tuple[str, T]:
        for attempt in range(self._policy.retries + 1):
            left = self._deadline - self._loop.time()
            if left <= 0:
                raise PeerError("it was not asked in time", hint="raise --timeout, or ask fewer nodes")
            try:
                return await self._hedged(address, left, attempt)
            except Again as e:
                error = e.error
            if self._deadline - self._loop.time() <= self._policy.pause_s:
                break
            await asyncio.sleep(self._policy.pause_s)
        raise error

    async def _hedged(self, address: str, left: float, attempt: int) -> tuple[str, T]:
        begun = self._loop.time()
        first = asyncio.ensure_future(self._ask(address, left, attempt))
        calls: set[asyncio.Future[tuple[str, T]]] = {first}
        try:
            while not first.done() and attempt == 0 and self._hedges > 0:
                await asyncio.wait(calls, timeout=self._until_hedge(begun))
                if not first.done() and self._may_hedge(address, begun):
                    self._hedges -= 1
                    calls.add(asyncio.ensure_future(self._ask(address, self._deadline - self._loop.time(), 1)))
                    break
            return await self._first_of(calls, begun)
        finally:
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

    async def _first_of(self, calls: set[asyncio.Future[tuple[str, T]]], begun: float) -> tuple[str, T]:
        """Returns the first answer. Where a call breaks, the other one counts."""
        pending = calls
        while True:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            broken = [call for call in done if isinstance(call.exception(), Again)]
            if len(broken) < len(done) or not pending:
                found = next((call for call in done if call not in broken), broken[0] if broken else None)
                assert found is not None
                answer = found.result()
                insort(self._took, self._loop.time() - begun)
                return answer

    def _until_hedge(self, begun: float) -> float:
        limit = self._limit()
        return 0.05 if limit is None else max(begun + limit - self._loop.time(), _GLANCE_S)

    def _limit(self) -> float | None:
        """Returns the time that nearly all answers took, with some room; None while too few are known."""
        number = len(self._took)
        if number < max(self._policy.hedge_after, len(self._addresses) // 2):
            return None
        return 1.5 * self._took[int(0.95 * number)] + _GLANCE_S

    def _may_hedge(self, address: str, begun: float) -> bool:
        limit = self._limit()
        return limit is not None and self._loop.time() - begun > limit and self._hedges > 0 and self._alive(address)


def _once(function: Callable[[], None]) -> Callable[[], None]:
    called = False

    def call() -> None:
        nonlocal called
        if not called:
            called = True
            function()

    return call
