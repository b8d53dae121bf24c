"""A pool of workers that start slowly, each a thread of the test."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest
from waiting import until

from probing.api.errors import QueryError, QueryTimeout
from probing.daemon.ipc import Channel, ChannelClosed
from probing.daemon.query.pool import QUERY, WorkerPool


class Listener:
    """Starts a worker for each connection; each is warm once ``may_start`` is set, and answers requests then."""

    def __init__(self, path: Path) -> None:
        self.may_start = threading.Event()
        self.started = 0
        self.ended = 0
        self.served: list[int] = []
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(path))
        self._socket.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self.may_start.set()
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                self.started += 1
                threading.Thread(target=self._work, args=(Channel(connection), self.started), daemon=True).start()

    @contextmanager
    def _counted(self) -> Iterator[None]:
        try:
            yield
        finally:
            self.ended += 1

    def _work(self, channel: Channel, number: int) -> None:
        with self._counted(), channel, suppress(ChannelClosed):
            assert channel.receive(60).header["op"] == "warm"
            assert self.may_start.wait(60)
            channel.send({"warm": True})
            ends = False
            while not ends:
                header = channel.receive(60).header
                if header.get("hangs"):
                    channel.receive(60)
                if header.get("holds"):
                    channel.send({})
                self.served.append(number)
                channel.send({"end": {}})
                ends = bool(header.get("ends"))


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[Listener]:
    made = Listener(tmp_path / "sql.sock")
    yield made
    made.close()


@pytest.fixture
def pool(tmp_path: Path, listener: Listener) -> Iterator[WorkerPool]:
    made = WorkerPool(str(tmp_path / "sql.sock"))
    yield made
    made.close()


def ask(pool: WorkerPool, seconds: float, *, cancelled: bool = False, ends: bool = False) -> None:
    for _ in pool.run({"ends": ends}, b"", deadline=time.monotonic() + seconds, cancelled=lambda: cancelled):
        pass


def test_a_query_that_gives_up_does_not_end_the_start_of_a_worker(pool: WorkerPool, listener: Listener) -> None:
    for _ in range(3):
        with pytest.raises(QueryTimeout, match="no worker was started in time"):
            ask(pool, 0.01)
    with pytest.raises(QueryError, match="cancelled"):
        ask(pool, 60, cancelled=True)
    assert pool.busy == 0
    listener.may_start.set()
    for _ in range(2):
        ask(pool, 60)
    assert listener.started == 1
    assert listener.served == [1, 1]


def test_a_worker_that_ended_while_it_was_idle_costs_no_query(pool: WorkerPool, listener: Listener) -> None:
    listener.may_start.set()
    ask(pool, 60, ends=True)
    until(lambda: listener.ended == 1, what="the end of the idle worker")
    ask(pool, 60)
    assert listener.served == [1, 2]


def test_a_query_whose_worker_was_ended_after_the_deadline_did_not_end_in_time(
    pool: WorkerPool, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    def descheduled(*_: object) -> bool:
        until(lambda: listener.ended == 1, what="the end of the worker")
        return True

    listener.may_start.set()
    ask(pool, 60)
    monkeypatch.setattr("probing.daemon.query.pool.GRACE_S", 0.0)
    monkeypatch.setattr("probing.daemon.query.pool.wait_readable", descheduled)
    with pytest.raises(QueryTimeout, match="did not end in time"):
        list(pool.run({"hangs": True}, b"", deadline=time.monotonic() + 0.1, cancelled=lambda: False))


def test_a_worker_that_never_starts_is_replaced(tmp_path: Path, listener: Listener) -> None:
    pool = WorkerPool(str(tmp_path / "sql.sock"), QUERY._replace(start_s=1.0, retry_s=(0.0, 0.0)))
    until(lambda: listener.started == 2, what="the start of another worker")
    listener.may_start.set()
    ask(pool, 60)
    assert 1 not in listener.served
    pool.close()


def test_a_spare_worker_is_kept_until_it_was_not_needed_for_a_while(tmp_path: Path, listener: Listener) -> None:
    listener.may_start.set()
    pool = WorkerPool(str(tmp_path / "sql.sock"), QUERY._replace(long_s=1.0, idle_s=4.0))
    # GIVEN a query that has just begun on the only warm worker: it is about to end
    with closing(pool.run({"holds": True}, b"", deadline=time.monotonic() + 60, cancelled=lambda: False)) as running:
        next(running)
        assert len(list(running)) == 1
    assert listener.started == 1
    for _ in range(3):
        # GIVEN a query that has been in progress on it for long
        running = pool.run({"holds": True}, b"", deadline=time.monotonic() + 60, cancelled=lambda: False)
        next(running)
        # WHEN another worker was started meanwhile
        until(lambda: listener.started == 2, what="the start of a spare worker")
        assert len(list(running)) == 1
    # THEN one more was started, and not one more each time
    assert listener.started == 2
    # AND it ends after a while
    until(lambda: listener.ended == 1, what="the end of the spare worker")
    ask(pool, 60)
    assert listener.started == 2
    pool.close()
