"""Calls that end after their callers went away."""

from __future__ import annotations

import asyncio
import gc
import threading

import pytest

from probing.api.errors import PeerError
from probing.daemon.query.caller import Caller
from probing.daemon.service.admission import CallAdmission, CallKind

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
