"""The thread that attaches the probes of logs outlives an error with one process."""

from __future__ import annotations

from typing import Any

import pytest
from fakes import Readers
from waiting import until

from probing.api.errors import ProcessGone, TargetTimeout
from probing.daemon.logs import attachments
from probing.daemon.logs.attachments import Attachments


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
