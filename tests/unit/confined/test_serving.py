"""The server of confined processes: answers, errors, descriptors, and the end of a process whose asker is gone."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from probing.api.errors import InternalError, NotFound, UnsupportedTarget
from probing.daemon.confined.serving import internal_error, requests, serve
from probing.daemon.ipc import Channel, ChannelClosed, Message

PATIENCE = 60.0


def failed(e: Exception) -> InternalError:
    return internal_error("a test", e)


@pytest.fixture
def start() -> Iterator[Callable[[Callable[[Message], Message]], Channel]]:
    """Serves a handler in a thread, which must have ended with the test."""
    channels: list[Channel] = []
    threads: list[threading.Thread] = []

    def started(answer: Callable[[Message], Message]) -> Channel:
        ours, theirs = socket.socketpair()

        def run() -> None:
            with Channel(theirs) as server:
                serve(server, answer, failed)

        threads.append(threading.Thread(target=run))
        threads[-1].start()
        channels.append(Channel(ours))
        return channels[-1]

    yield started
    for channel in channels:
        channel.close()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()


def test_each_request_gets_its_answer(start: Callable[..., Channel]) -> None:
    channel = start(lambda request: Message({"twice": request.header["number"] * 2}, request.payload[::-1]))
    for number in range(3):
        answer = channel.request({"number": number}, b"abc", timeout=PATIENCE)
        assert (answer.header, answer.payload) == ({"twice": number * 2}, b"cba")


def test_an_error_is_answered_and_the_next_request_served(start: Callable[..., Channel]) -> None:
    def answer(request: Message) -> Message:
        if request.header["op"] == "known":
            raise UnsupportedTarget("no such file", hint="try another")
        if request.header["op"] == "unknown":
            raise KeyError("field")
        return Message({})

    channel = start(answer)
    with pytest.raises(UnsupportedTarget, match="no such file") as known:
        channel.request({"op": "known"}, timeout=PATIENCE)
    assert known.value.hint == "try another"
    with pytest.raises(InternalError, match="a test failed: KeyError: 'field'"):
        channel.request({"op": "unknown"}, timeout=PATIENCE)
    assert channel.request({"op": "fine"}, timeout=PATIENCE).header == {}


def test_an_answer_that_is_too_large_is_an_error(start: Callable[..., Channel]) -> None:
    channel = start(lambda request: Message({"text": "x" * request.header["length"]}))
    with pytest.raises(InternalError, match="message too large"):
        channel.request({"length": 2 << 20}, timeout=PATIENCE)
    assert channel.request({"length": 2}, timeout=PATIENCE).header == {"text": "xx"}


def test_descriptors_of_requests_and_answers_are_closed(start: Callable[..., Channel]) -> None:
    def answer(request: Message) -> Message:
        if request.header["op"] == "fail":
            raise NotFound("nothing")
        return Message({}, fds=[os.dup(request.fds[0])])

    channel = start(answer)
    with open(os.devnull, "rb") as file:
        before = open_descriptors()
        for _ in range(5):
            reply = channel.request({"op": "fine"}, timeout=PATIENCE, fds=[file.fileno()])
            assert os.path.samestat(os.fstat(reply.fds[0]), os.fstat(file.fileno()))
            reply.close_fds()
            with pytest.raises(NotFound):
                channel.request({"op": "fail"}, timeout=PATIENCE, fds=[file.fileno()])
        # That of the last request may not be closed yet.
        assert open_descriptors() <= before + 1


def test_requests_end_with_the_connection_and_a_closed_one_raises_in_the_body() -> None:
    ours, theirs = socket.socketpair()
    channel, server = Channel(ours), Channel(theirs)
    channel.send({"n": 1})
    channel.send({"n": 2})
    channel.close()
    assert [request.header["n"] for request in requests(server)] == [1, 2]
    with pytest.raises(ChannelClosed):
        server.send({})
    server.close()


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


HANGING = """
import sys, time
from probing.daemon.confined.serving import inherit, serve
channel = inherit(lambda: sys.stdout.write("given up\\n") and sys.stdout.flush())
def hang(request):
    sys.stdout.write("hangs\\n"); sys.stdout.flush()
    time.sleep(3600)
serve(channel, hang, lambda e: e)
"""


def test_a_process_ends_with_its_connection_whatever_it_does() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", HANGING], stdin=theirs.fileno(), stdout=subprocess.PIPE, text=True
        )
    assert process.stdout
    with process.stdout:
        channel = Channel(ours)
        channel.send({"op": "hang"})
        assert process.stdout.readline() == "given up\n"
        assert process.stdout.readline() == "hangs\n"
        assert process.poll() is None
        channel.close()
        assert process.wait(PATIENCE) == 0
