"""Asking a listener for a report: the two formats, listeners that are no RAS, and silent ones."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
from doubles.ras_listener import RasListener
from hypothesis import given, settings
from hypothesis import strategies as st
from long import examples

from probing.api.errors import ProbingError, TargetTimeout, UnsupportedTarget
from probing.daemon.nccl_uprobes.ras import client as ras_client
from probing.daemon.nccl_uprobes.ras.client import RasAnswer, RasSilent, ask_ras

REPORT = b'{"communicators": []}\n'
Listening = Callable[..., RasListener]


@pytest.fixture
def listening() -> Iterator[Listening]:
    made: list[RasListener] = []

    def listen(report: bytes = REPORT, manner: str = "json") -> RasListener:
        made.append(RasListener(report, manner))
        return made[-1]

    yield listen
    for listener in made:
        listener.close()


def ask(listener: RasListener, timeout: float = 30.0) -> RasAnswer:
    with socket.create_connection(("127.0.0.1", listener.port)) as connection:
        return ask_ras(connection, timeout)


def test_a_newer_one_answers_in_json(listening: Listening) -> None:
    listener = listening()
    assert ask(listener) == RasAnswer(REPORT, "json", 2)
    assert listener.asked == ["CLIENT PROTOCOL 2", "TIMEOUT 5", "SET FORMAT json", "VERBOSE STATUS"]


def test_an_older_one_answers_in_text(listening: Listening) -> None:
    assert ask(listening(b"NCCL version 2.24.3\n", "text")) == RasAnswer(b"NCCL version 2.24.3\n", "text", 2)


def test_one_that_is_stopped_is_silent(listening: Listening, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ras_client, "GREETING_S", 0.05)
    with pytest.raises(RasSilent):
        ask(listening(manner="mute"))


@pytest.mark.parametrize("manner", ["stranger", "gone", "chatty"])
def test_a_listener_that_is_no_ras_is_an_error(listening: Listening, manner: str) -> None:
    with pytest.raises(UnsupportedTarget):
        ask(listening(manner=manner))


@pytest.mark.parametrize("manner", ["endless", "slow"])
def test_a_report_that_does_not_end_is_given_up(
    listening: Listening, manner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ras_client, "MAX_REPORT", 1 << 40)
    with pytest.raises(TargetTimeout) as failed:
        ask(listening(b"x" * 100_000, manner), 0.3)
    assert not isinstance(failed.value, RasSilent)


def test_a_report_that_is_too_long_is_refused(listening: Listening, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ras_client, "MAX_REPORT", 1_000_000)
    with pytest.raises(UnsupportedTarget, match="more than"):
        ask(listening(manner="endless"))


def test_a_connection_that_is_reset_is_an_error(listening: Listening) -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    with closing(ours), pytest.raises(UnsupportedTarget, match="closed"):
        ask_ras(ours)


@settings(max_examples=examples(60))
@given(st.binary(max_size=300), st.booleans())
def test_any_answer_gives_a_report_or_a_typed_error(answer: bytes, greeted: bool) -> None:
    ours, theirs = socket.socketpair()
    with closing(ours):
        with closing(theirs):
            theirs.sendall(b"SERVER PROTOCOL 2\n" * greeted + answer)
            theirs.shutdown(socket.SHUT_WR)
            # Keeps the connection open until the request was read.
            try:
                found = ask_ras(ours, 5.0)
            except ProbingError:
                return
        assert found.form in ("json", "text")


def test_the_time_for_a_greeting_is_part_of_the_whole(listening: Listening) -> None:
    began = time.monotonic()
    with pytest.raises(RasSilent):
        ask(listening(manner="mute"), 0.01)
    assert time.monotonic() > began
