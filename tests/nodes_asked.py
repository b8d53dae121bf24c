"""Merging the answers of nodes that are functions: each is called in a thread, by the rules of ``ask_many``."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from probing.federation.execution.answer import Answer, Gather, Gathered, Reply, Take
from probing.federation.execution.asking import ONCE, Policy, ask_many
from probing.federation.execution.merge import run_all
from probing.federation.planning.split import Plan

__all__ = ("QUICK", "Ask", "by_threads", "fan_out", "run")

T = TypeVar("T")
# Asks an address for the rows of one SELECT, or of several by name.
Ask = Callable[[str, str, float], Reply]
AskAll = Callable[[str, Mapping[str, str], float], Sequence[Reply]]
QUICK = ONCE._replace(grace_s=0.0)


def fan_out(
    addresses: Sequence[str], ask: Callable[[str, float], tuple[str, T]], timeout: float, policy: Policy = QUICK
) -> Gathered[T]:
    """Calls ``ask(address, seconds_left)`` for every address at once; it returns the node's name and its answer."""

    async def in_thread(address: str, seconds: float, _attempt: int) -> tuple[str, T]:
        outcome: Future[tuple[str, T]] = Future()
        outcome.set_running_or_notify_cancel()

        def call() -> None:
            try:
                outcome.set_result(ask(address, seconds))
            except BaseException as e:
                outcome.set_exception(e)

        # Nobody waits for a thread whose node hangs.
        threading.Thread(target=call, daemon=True).start()
        return await asyncio.wrap_future(outcome)

    async def asked() -> Gathered[T]:
        return await ask_many(addresses, in_thread, timeout, policy)

    return asyncio.run(asked())


def by_threads(ask: AskAll) -> Gather:
    """Returns what asks each address by ``ask`` in a thread."""

    def gather(
        addresses: Sequence[str], statements: Mapping[str, str], timeout: float, take: Take
    ) -> Gathered[tuple[Reply, ...]]:
        def parts(address: str, seconds: float) -> tuple[str, tuple[Reply, ...]]:
            replies = tuple(take(reply) for reply in ask(address, statements, seconds))
            return (replies[0].node if replies else address), replies

        return fan_out(addresses, parts, timeout)

    return gather


def run(plan: Plan, addresses: Sequence[str], ask: Ask, **options: Any) -> Answer:
    """As ``run_all`` of one plan, whose parts are asked one after the other by ``ask(address, sql, seconds)``."""

    def ask_all(address: str, statements: Mapping[str, str], seconds: float) -> list[Reply]:
        return [ask(address, sql, seconds) for sql in statements.values()]

    return run_all({"": plan}, addresses, by_threads(ask_all), **options)[""]
