"""Work that comes round by time, or when a descriptor says so."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from probing.daemon.collector.ticker import Ticker


@pytest.fixture
def event() -> Iterator[int]:
    fd = os.eventfd(0, os.EFD_NONBLOCK)
    yield fd
    os.close(fd)


def test_a_step_that_fails_is_called_again_and_holds_up_no_other(until: Any, caplog: pytest.LogCaptureFixture) -> None:
    calls: list[str] = []

    def fails() -> None:
        calls.append("fails")
        raise ValueError("no")

    ticker = Ticker("test", 0.001, fails, lambda: calls.append("works"))
    ticker.start()
    until(lambda: calls.count("works") >= 3)
    ticker.stop()
    assert calls[:4] == ["fails", "works"] * 2
    assert "a step of test failed" in caplog.text


def test_nothing_is_done_until_a_descriptor_is_readable(event: int, until: Any) -> None:
    seen: list[int] = []
    asked = threading.Semaphore(0)

    def interval() -> float:
        asked.release()
        return 0.0

    ticker = Ticker("test", interval, lambda: seen.append(os.eventfd_read(event)), wakes=[event])
    ticker.start()
    asked.acquire()
    assert seen == []
    os.eventfd_write(event, 7)
    until(lambda: seen == [7])
    asked.acquire()
    os.eventfd_write(event, 11)
    until(lambda: seen == [7, 11])
    # It ends though nothing comes any more.
    ticker.stop()


def test_one_that_was_not_started_can_be_stopped() -> None:
    Ticker("test", 1.0).stop()
