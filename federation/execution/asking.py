"""Calls many nodes in one event loop: limits the calls in flight, and decides on deadlines, retries and hedges.

A hedge is a second call to a node that takes longer than nearly all other nodes; the first answer counts. Calling twice
is safe, because a query changes nothing on a node.
"""

from __future__ import annotations

import asyncio
import math
from bisect import insort
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, NamedTuple, TypeVar

from probing.api.errors import BROKEN, LATE, PeerError, ProbingError
from probing.federation.execution.answer import Failed, Gathered

__all__ = ("ONCE", "Ask", "Policy", "ask_many", "late")

T = TypeVar("T")
# A function that calls a node. Its arguments: the address, the seconds left, and the number of earlier calls.
Ask = Callable[[str, float, int], Awaitable[tuple[str, T]]]
_GLANCE_S = 0.02


class Policy(NamedTuple):
    """How many nodes are called at once, and when a node is called again.

    At most ``at_once`` calls younger than ``patience_s`` are in flight, and at most ``most`` calls in all, so nodes
    that do not answer do not delay other nodes. A broken call is repeated up to ``retries`` times, each time after
    ``pause_s``. Once half of the nodes and at least ``hedge_after`` nodes have answered, a call that takes longer than
    nearly all other calls is hedged once. ``hedges`` limits the hedges in flight, as a share of the number of nodes;
    0: no hedges. ``grace_s``: the time that calls get beyond their timeout before they are cancelled.
    """

    at_once: int = 96
    patience_s: float = 0.5
    most: int = 2048
    retries: int = 1
    pause_s: float = 0.1
    hedge_after: int = 20
    hedges: float = 0.05
    grace_s: float = 0.5


# The policy for calls that must not be repeated, because they change a node, or because the caller has used their rows.
ONCE = Policy(retries=0, hedges=0)


async def ask_many(
    addresses: Sequence[str],
    ask: Ask[T],
    timeout: float,
    policy: Policy,
    *,
    alive: Callable[[str], bool] = lambda _: True,
    answered: Callable[[str, bool], None] = lambda *_: None,
) -> Gathered[T]:
    """Calls ``ask`` for every address. Returns the answers, and the errors of the other nodes, in order of addresses.

    ``ask`` raises ProbingError, with the code BROKEN if another call may succeed; any other exception ends all
    calls. Only a node that is ``alive`` is hedged. ``answered(address, success)`` is called when a node is done.
    """
    return await _Round(tuple(dict.fromkeys(addresses)), ask, timeout, policy, alive, answered).run()


@dataclass(slots=True)
class _Call(Generic[T]):
    """The calls to one node that are in flight (``tasks``); the first to answer sets ``outcome``."""

    address: str
    begun: float
    outcome: asyncio.Future[tuple[str, T]]
    tasks: list[asyncio.Future[tuple[str, T]]] = field(default_factory=list)


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
        # Calls that may be hedged, the oldest first.
        self._waiting: dict[str, _Call[T]] = {}
        # The number of further hedges that may be in flight.
        self._hedges = math.ceil(policy.hedges * len(addresses))

    async def run(self) -> Gathered[T]:
        tasks = {address: self._loop.create_task(self._one(address)) for address in self._addresses}
        hedging = self._loop.create_task(self._hedge())
        try:
            if tasks:
                await asyncio.wait(
                    tasks.values(), timeout=self._timeout + self._policy.grace_s, return_when=asyncio.FIRST_EXCEPTION
                )
        finally:
            for task in (hedging, *tasks.values()):
                task.cancel()
            await asyncio.gather(hedging, *tasks.values(), return_exceptions=True)
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
        attempt = 0
        while (left := self._deadline - self._loop.time()) > 0:
            try:
                return await self._hedged(address, left, attempt)
            except ProbingError as e:
                left = self._deadline - self._loop.time()
                if e.code != BROKEN or attempt == self._policy.retries or left <= self._policy.pause_s:
                    raise
            attempt += 1
            await asyncio.sleep(self._policy.pause_s)
        raise PeerError("it was not called before the deadline", hint="raise --timeout, or ask fewer nodes", code=LATE)

    async def _hedged(self, address: str, left: float, attempt: int) -> tuple[str, T]:
        call: _Call[T] = _Call(address, self._loop.time(), self._loop.create_future())
        self._begin(call, left, attempt)
        if attempt == 0:
            self._waiting[address] = call
        try:
            return await call.outcome
        finally:
            self._waiting.pop(address, None)
            if len(call.tasks) > 1:
                self._hedges += 1
            if call.outcome.done() and not call.outcome.cancelled():
                call.outcome.exception()
            if pending := [task for task in call.tasks if not task.done()]:
                for task in pending:
                    task.cancel()
                await asyncio.gather(*pending, return_exceptions=True)

    def _begin(self, call: _Call[T], left: float, attempt: int) -> None:
        task = asyncio.ensure_future(self._ask(call.address, left, attempt))
        call.tasks.append(task)
        task.add_done_callback(partial(self._ended, call))

    def _ended(self, call: _Call[T], task: asyncio.Future[tuple[str, T]]) -> None:
        """Handles the end of a call to a node; the first answer counts. While another call to the node is in flight, a
        broken call is ignored, and so is any error of a hedge, because a hedge may fail although the first call
        succeeds.
        """
        error = None if task.cancelled() else task.exception()
        others = any(not other.done() for other in call.tasks)
        broken = task.cancelled() or (
            isinstance(error, ProbingError) and (error.code == BROKEN or task in call.tasks[1:])
        )
        if call.outcome.done() or (others and broken):
            return
        if task.cancelled():
            call.outcome.cancel()
        elif error is not None:
            call.outcome.set_exception(error)
        else:
            insort(self._took, self._loop.time() - call.begun)
            call.outcome.set_result(task.result())

    async def _hedge(self) -> None:
        """Starts second calls. One timer serves all nodes: a timer for each node would wake thousands of tasks."""
        while self._policy.hedges > 0:
            await asyncio.sleep(_GLANCE_S)
            limit, now = self._limit(), self._loop.time()
            for call in list(self._waiting.values()) if limit is not None else ():
                # The calls are in the order in which they began.
                if limit is None or now - call.begun <= limit or self._hedges <= 0:
                    break
                if self._alive(call.address):
                    self._hedges -= 1
                    del self._waiting[call.address]
                    self._begin(call, self._deadline - now, 1)

    def _limit(self) -> float | None:
        """Returns the time within which nearly all answers came, with some margin; None while there are too few
        answers.
        """
        number = len(self._took)
        if number < max(self._policy.hedge_after, len(self._addresses) // 2):
            return None
        return 1.5 * self._took[int(0.95 * number)] + _GLANCE_S


def late(address: str, seconds: float, what: str = "answer") -> PeerError:
    """Returns the error of a node that did not answer in time. ``what``: the late part, such as "answer"."""
    reason = f"no {what} within {round(seconds, 1):g} s"
    return PeerError(f"{address} does not answer: {reason}", hint="raise --timeout", code=LATE, reason=reason)


def _once(function: Callable[[], None]) -> Callable[[], None]:
    called = False

    def call() -> None:
        nonlocal called
        if not called:
            called = True
            function()

    return call
