"""The thread that attaches the probes of logs: it outlives an error with one process, and tries those again that do not
answer.
"""

from __future__ import annotations

from typing import Any, cast

import pytest
from fakes import Readers
from waiting import until

from probing.api.errors import InternalError, ProbingError, ProcessGone, TargetTimeout
from probing.daemon.ipc import Message
from probing.daemon.logs import attachments
from probing.daemon.logs.attachments import Attachments
from probing.daemon.source import ProcessKey


def test_an_error_at_a_later_try_ends_the_tries_of_one_process_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attachments, "RETRY_S", 0.01)
    tries = iter((TargetTimeout("no answer"), OSError("no descriptor is left")))

    def maps(asked: dict[str, Any]) -> Any:
        if asked["pid"] == 8:
            return ProcessGone("process 8 exited")
        if isinstance(error := next(tries), OSError):
            raise error
        return error

    nothing: Any = None
    readers: Any = Readers(maps=maps)
    found = Attachments(nothing, readers, nothing)
    found.start()
    try:
        found.want(7, 1)
        until(lambda: readers.count("maps") == 2, what="the second try")
        found.want(8, 1)
        until(lambda: readers.count("maps") == 3, what="the other process")
    finally:
        found.stop()


@pytest.mark.parametrize(
    ("error", "quarantine_s"),
    [
        (TargetTimeout("process 7 is in quarantine"), 0.01),
        (TargetTimeout("process 7 could not be read in 2 s"), 0.0),
        (InternalError("no reader can be started"), 0.0),
    ],
)
def test_a_process_that_answers_late_is_watched(
    monkeypatch: pytest.MonkeyPatch, error: ProbingError, quarantine_s: float
) -> None:
    monkeypatch.setattr(attachments, "RETRY_S", 0.01)
    monkeypatch.setattr(attachments, "MAX_RETRY_S", 0.01)
    key, nothing, answers = ProcessKey(7, 1), cast(Any, None), [error]
    readers = Readers(maps=lambda _: answers[0] if answers else Message({}))
    monkeypatch.setattr(readers, "quarantine_s", lambda *_: quarantine_s)
    watched = Attachments(nothing, cast(Any, readers), nothing)
    watched.start()
    try:
        # GIVEN a process that does not answer for longer than a quarantine lasts
        watched.want(*key)
        until(lambda: readers.count("maps") > 20, what="many tries")
        # THEN the state of the source says so
        assert error.message in watched.reasons[key]
        # WHEN it answers
        answers.clear()
        # THEN it is found to have no libc
        until(lambda: "no libc" in watched.reasons[key], what="the answer")
    finally:
        watched.stop()
