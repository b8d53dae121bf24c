"""A worker repeats its turn by time and when it is woken, whatever a turn raises, until it is stopped."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from probing.api.errors import TargetError
from probing.daemon.worker import Worker

FOR_EVER = 3600.0


class Turns:
    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.error: Exception | None = None

    def __call__(self) -> None:
        self.begun.release()
        if self.error is not None:
            raise self.error

    def came(self, count: int = 1) -> bool:
        return all(self.begun.acquire(timeout=20) for _ in range(count))


@pytest.fixture
def turns() -> Turns:
    return Turns()


@pytest.fixture
def started(turns: Turns) -> Iterator[Callable[[float], Worker]]:
    workers: list[Worker] = []

    def start(interval_s: float) -> Worker:
        workers.append(Worker("test", turns, lambda: interval_s))
        workers[-1].start()
        return workers[-1]

    yield start
    for worker in workers:
        worker.stop()


def test_turns_come_by_time(turns: Turns, started: Callable[[float], Worker]) -> None:
    started(0.001)
    assert turns.came(3)


def test_turns_that_are_not_aligned_come_after_the_pause(turns: Turns, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("probing.daemon.worker.until_next", lambda _: FOR_EVER)
    worker = Worker("test", turns, lambda: 0.001, aligned=False)
    worker.start()
    assert turns.came(3)
    worker.stop()


def test_a_worker_that_waits_is_woken(turns: Turns, started: Callable[[float], Worker]) -> None:
    worker = started(FOR_EVER)
    assert turns.came()
    for _ in range(3):
        worker.wake()
        assert turns.came()
    assert not turns.begun.acquire(timeout=0.05)


@pytest.mark.parametrize("error", [TargetError("a target is strange"), ValueError("so is this")])
def test_a_turn_that_raises_is_logged_and_repeated(
    turns: Turns, started: Callable[[float], Worker], error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    turns.error = error
    started(0.001)
    assert turns.came(3)
    assert "strange" in caplog.text or "a turn of test failed" in caplog.text


def test_stop_ends_the_thread_and_may_come_before_the_start(turns: Turns, started: Callable[[float], Worker]) -> None:
    worker = started(FOR_EVER)
    assert turns.came()
    assert not worker.stopped
    worker.stop()
    assert worker.stopped
    worker.wake()
    assert not turns.begun.acquire(timeout=0.05)
    Worker("never started", turns, lambda: 1.0).stop()
