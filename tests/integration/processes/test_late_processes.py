"""Readers and parsers that answer after their deadline: a stopped one looks like one that gets no CPU."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from processes_helpers import Listener, start_ns_of
from waiting import until

from probing.api.errors import TargetTimeout
from probing.daemon import pool as pool_module
from probing.daemon.ipc import Channel, Message
from probing.daemon.processes import reader_pool
from probing.daemon.processes.parsers import ParserPool
from probing.daemon.processes.reader_pool import ReaderPool

PATIENCE = 20.0


def answer_bytes() -> bytes:
    left, right = socket.socketpair()
    with left, right:
        Channel(left).send({"pid": 23})
        return right.recv(4096)


ANSWER = answer_bytes()


@pytest.fixture
def pool(listener: Listener) -> Iterator[ReaderPool]:
    """One reader, which has started."""
    made = ReaderPool(listener.path, size=1)
    made.call("ping", timeout=PATIENCE)
    yield made
    made.close()


def ask(pool: ReaderPool, timeout: float) -> int:
    return int(pool.call("identity", pid=os.getpid(), timeout=timeout).header["pid"])


def ask_many(pool: ReaderPool, timeout: float) -> int:
    key = (os.getpid(), start_ns_of(os.getpid()))
    ((_, answer),) = pool.call_each("identity", {key: dict}, timeout=timeout, patience=timeout)
    if not isinstance(answer, Message):
        raise answer
    return int(answer.header["pid"])


@pytest.mark.parametrize("late", [ask, ask_many])
def test_a_late_reader_serves_on(
    listener: Listener, pool: ReaderPool, monkeypatch: pytest.MonkeyPatch, late: Callable[[ReaderPool, float], int]
) -> None:
    monkeypatch.setattr(pool_module, "MIN_LATE_S", PATIENCE)
    (reader,) = listener.processes
    reader.send_signal(signal.SIGSTOP)
    with pytest.raises(TargetTimeout):
        late(pool, 0.05)
    reader.send_signal(signal.SIGCONT)
    # Its late answer, about this process, is not taken for that to the next request.
    assert pool.call("identity", pid=os.getppid(), timeout=PATIENCE).header["pid"] == os.getppid()
    assert listener.processes == [reader]


@pytest.mark.parametrize("late", [ask, ask_many])
def test_a_reader_that_stays_away_is_replaced(
    listener: Listener, pool: ReaderPool, monkeypatch: pytest.MonkeyPatch, late: Callable[[ReaderPool, float], int]
) -> None:
    monkeypatch.setattr(pool_module, "MAX_LATE_S", 0.05)
    (reader,) = listener.processes
    reader.send_signal(signal.SIGSTOP)
    with pytest.raises(TargetTimeout):
        late(pool, 0.05)
    until(lambda: len(listener.processes) == 2)
    assert pool.call("identity", pid=os.getppid(), timeout=PATIENCE).header["pid"] == os.getppid()
    reader.send_signal(signal.SIGCONT)
    assert reader.wait(PATIENCE) == 0


def test_a_late_parser_serves_on(
    parser_listener: Listener, parser_pool: ParserPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "MIN_LATE_S", PATIENCE)
    with Path("/bin/true").open("rb") as file:
        assert parser_pool.symbols(file.fileno(), ["first"], timeout=PATIENCE).symbols == ()
        (parser,) = parser_listener.processes
        parser.send_signal(signal.SIGSTOP)
        with pytest.raises(TargetTimeout):
            parser_pool.symbols(file.fileno(), ["nothing"], timeout=0.05)
        parser.send_signal(signal.SIGCONT)
        assert parser_pool.symbols(file.fileno(), ["nothing"], timeout=PATIENCE).symbols == ()
        assert parser_listener.processes == [parser]


def test_an_answer_that_begins_in_time_is_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_pool, "TRANSFER_S", PATIENCE)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "reader.sock"))
        listener.listen()
        pool = ReaderPool(str(tmp_path / "reader.sock"), size=1)
        connection, _ = listener.accept()
        with connection, Channel(connection) as reader, ThreadPoolExecutor() as executor:
            reader.receive(PATIENCE)
            reader.send({"pid": os.getpid()})
            begun = time.monotonic()
            answer = executor.submit(ask, pool, 0.5)
            reader.receive(PATIENCE)
            connection.sendall(ANSWER[:1])
            until(lambda: time.monotonic() > begun + 2.0)
            connection.sendall(ANSWER[1:])
            assert answer.result() == 23
            pool.close()
