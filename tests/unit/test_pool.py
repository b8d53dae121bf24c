"""A pool of processes, each a thread of the test."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import pytest
from waiting import until

from probing.daemon import pool as pools
from probing.daemon.ipc import Channel, ChannelClosed
from probing.daemon.pool import Policy, Pool

POLICY = Policy("reader", retry_s=(0.0, 0.0))


@pytest.fixture
def path(tmp_path: Path) -> Iterator[str]:
    """A socket behind which a process starts for each connection."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "reader.sock"))
    listener.listen()

    def serve(channel: Channel) -> None:
        with channel, suppress(ChannelClosed):
            while True:
                channel.send({"pid": 7, "op": channel.receive(60).header["op"]})

    def accept() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(Channel(listener.accept()[0]),), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    yield str(tmp_path / "reader.sock")
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


class Scarce(threading.Thread):
    """A thread that cannot be started for as often as ``left`` has its name."""

    left: ClassVar[list[str]] = []

    def start(self) -> None:
        if self.name in self.left:
            self.left.remove(self.name)
            raise RuntimeError("can't start new thread")
        super().start()


@pytest.fixture(autouse=True)
def scarce_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: Any = type("Threads", (), {**vars(threading), "Thread": Scarce})
    monkeypatch.setattr(pools, "threading", threads)


def test_a_process_is_started_once_a_thread_can_be(path: str) -> None:
    # GIVEN a moment at which this process has as many threads as it may have
    Scarce.left[:] = ["reader-start"] * 3
    pool = Pool(path, POLICY)
    until(lambda: not Scarce.left or not pool._keeper.is_alive(), what="three failed starts")
    # THEN a process is started afterwards
    process = pool.acquire(time.monotonic() + 60)
    assert process.channel.request({"op": "ping"}, timeout=60).header == {"pid": 7, "op": "ping"}
    # AND it is ended if no thread can wait for its late answer
    Scarce.left[:] = ["late-reader"]
    pool.finish(process)
    assert pool.busy == 0
    pool.close()
