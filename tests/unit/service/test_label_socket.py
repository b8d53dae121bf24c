"""The socket for labels: who sent a datagram is the kernel's word; what is malformed or too much is refused."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from probing.api.errors import NotFound, PrivilegeError
from probing.daemon.service import label_socket
from probing.daemon.service.audit import Audit
from probing.daemon.service.label_socket import MAX_DATAGRAM, NAME, LabelSocket


class Collector:
    """Keeps the requests; it answers each once ``open`` is set."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.open = threading.Event()
        self.open.set()

    def __call__(self, request: dict[str, Any]) -> None:
        self.open.wait(30)
        self.requests.append(request)
        if request["job"] == "later" and len(self.requests) == 1:
            raise NotFound("the sender is not a process of a job")
        if request["job"] == "other":
            raise PrivilegeError("uid 7 has no right to label ranks of job other, which belongs to uid 5")


def send(path: Path, *datagrams: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        for datagram in datagrams:
            sender.sendto(datagram, socket.MSG_DONTWAIT, str(path))


async def until(condition: Any) -> None:
    for _ in range(3000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("waited 30 s")


def test_a_datagram_becomes_a_request_with_its_sender(tmp_path: Path) -> None:
    collector, audit = Collector(), Audit()

    async def scene() -> None:
        labels = LabelSocket(tmp_path, collector, audit)
        labels.start()
        assert (tmp_path / NAME).stat().st_mode & 0o777 == 0o666
        datagrams = [
            {"labels": {"phase": "eval"}},
            {"labels": {"a": "b"}, "job": "j", "rank": 3, "pids": [7]},
            {"labels": {"a": "b"}, "job": "other", "by_uid": 0, "unknown": 1},
        ]
        send(tmp_path / NAME, *(json.dumps(one).encode() for one in datagrams))
        await until(lambda: len(collector.requests) == 3)
        who = {"by_pid": os.getpid(), "by_uid": os.getuid()}
        assert collector.requests == [
            {"labels": {"phase": "eval"}, "job": "", "rank": None, "pids": (), **who},
            {"labels": {"a": "b"}, "job": "j", "rank": 3, "pids": (7,), **who},
            {"labels": {"a": "b"}, "job": "other", "rank": None, "pids": (), **who},
        ]
        await until(lambda: audit.counts["PrivilegeError"] == 1)
        (state,) = labels.sources()
        assert state.detail == "2 datagrams accepted, 1 refused: PrivilegeError"
        await labels.stop()

    asyncio.run(scene())
    assert not (tmp_path / NAME).exists()


@pytest.mark.parametrize(
    "datagram",
    [
        b"",
        b"phase=eval",
        b"[]",
        b'{"labels": {"a": 1}}',
        b'{"labels": "a"}',
        b'{"rank": 1}',
        b"\xff" * 7,
        b"[" * 4000,
        json.dumps({"labels": {"a": "b" * MAX_DATAGRAM}}).encode(),
    ],
)
def test_what_is_malformed_is_refused(tmp_path: Path, datagram: bytes) -> None:
    collector, audit = Collector(), Audit()

    async def scene() -> None:
        labels = LabelSocket(tmp_path, collector, audit)
        labels.start()
        send(tmp_path / NAME, datagram, b'{"labels": {"last": "one"}}')
        await until(lambda: collector.requests)
        await labels.stop()

    asyncio.run(scene())
    assert [request["labels"] for request in collector.requests] == [{"last": "one"}]
    assert audit.counts.total() == 1


def test_a_flood_is_cut_and_ends_with_what_came_first(tmp_path: Path) -> None:
    collector, audit = Collector(), Audit()
    collector.open.clear()

    async def scene() -> None:
        labels = LabelSocket(tmp_path, collector, audit)
        labels.start()
        for number in range(101):
            datagram = json.dumps({"labels": {"n": str(number)}}).encode()
            while True:
                try:
                    send(tmp_path / NAME, datagram)
                    break
                except BlockingIOError:
                    # The kernel's queue is full: the service rests between two bursts.
                    await asyncio.sleep(0.01)
        await until(lambda: audit.counts["too many datagrams at once"] + 33 == 101)
        collector.open.set()
        await until(lambda: len(collector.requests) == 33)
        await labels.stop()

    asyncio.run(scene())
    # One was on its way, and 32 waited.
    assert [request["labels"]["n"] for request in collector.requests] == [str(number) for number in range(33)]


def test_a_datagram_whose_rank_is_not_known_yet_is_passed_on_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(label_socket, "_AGAIN_S", 0.05)
    collector, audit = Collector(), Audit()

    async def scene() -> None:
        labels = LabelSocket(tmp_path, collector, audit)
        labels.start()
        send(tmp_path / NAME, b'{"labels": {"phase": "compile"}, "job": "later"}')
        await until(lambda: len(collector.requests) == 2)
        await until(lambda: labels.sources()[0].detail == "1 datagrams accepted")
        await labels.stop()

    asyncio.run(scene())
    assert collector.requests[0] == collector.requests[1]
    assert audit.counts.total() == 0


def test_a_socket_that_another_daemon_uses_is_left(tmp_path: Path) -> None:
    async def scene() -> None:
        first, second = (LabelSocket(tmp_path, Collector(), Audit()) for _ in range(2))
        first.start()
        second.start()
        (state,) = second.sources()
        assert (state.state, state.reason.rpartition(": ")[2]) == ("degraded", "another daemon uses it")
        await second.stop()
        assert first.sources() == []
        await first.stop()
        # What a killed service left is replaced.
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as left:
            left.bind(str(tmp_path / NAME))
        third = LabelSocket(tmp_path, Collector(), Audit())
        third.start()
        assert third.sources() == []
        await third.stop()

    asyncio.run(scene())
