"""Calls that end after their callers went away, and calls of many tokens and addresses."""

from __future__ import annotations

import asyncio
import gc
import threading
from contextlib import ExitStack, suppress

import pytest

from probing.api.errors import Overloaded, PeerError
from probing.daemon.query.caller import Caller
from probing.daemon.service.answering import CallAdmission, CallKind

CALLER = Caller("unix", "1000")


@pytest.mark.parametrize("waits", [True, False], ids=["caller waits", "caller went away"])
def test_an_error_reaches_its_caller_and_no_log(waits: bool, caplog: pytest.LogCaptureFixture) -> None:
    admission, begun, goes_on = CallAdmission(), threading.Event(), threading.Event()

    def fails() -> None:
        begun.set()
        goes_on.wait(10)
        raise PeerError("the collector did not answer")

    async def call() -> None:
        task = asyncio.ensure_future(admission.run(CallKind.CONTROL, CALLER, fails))
        await asyncio.to_thread(begun.wait, 10)
        if not waits:
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        goes_on.set()
        if waits:
            with pytest.raises(PeerError):
                await task
        while admission.counts["control"]:
            await asyncio.sleep(0)

    asyncio.run(call())
    gc.collect()
    admission.close()
    assert caplog.text == ""


def token(name: str, who: str) -> Caller:
    return Caller("tcp", who, name=name)


@pytest.mark.parametrize("kind", list(CallKind))
@pytest.mark.parametrize(
    ("crowd", "other"),
    [
        ([token("a", "10.0.0.1")], token("b", "10.0.0.1")),
        ([token("a", "127.0.0.1, uid 65534")], token("a", "127.0.0.1, uid 0")),
        ([token("a", f"10.0.0.{number}") for number in range(9)], token("b", "10.0.0.1")),
        # A local user may connect from each address of 127.0.0.0/8.
        ([token("", f"127.0.0.{number}, uid 65534") for number in range(9)], token("", "127.0.0.1, uid 1000")),
    ],
    ids=["token of one address", "user of one token", "token of many addresses", "user of many addresses"],
)
def test_calls_of_a_token_leave_threads_for_others(kind: CallKind, crowd: list[Caller], other: Caller) -> None:
    admission = CallAdmission()
    with ExitStack() as held:
        for caller in crowd:
            with suppress(Overloaded):
                for _ in range(kind.most):
                    held.enter_context(admission.counted(kind, caller))
        with pytest.raises(Overloaded):
            held.enter_context(admission.counted(kind, crowd[0]))
        held.enter_context(admission.counted(kind, other))
    assert not any(admission.counts.values())
    admission.close()
