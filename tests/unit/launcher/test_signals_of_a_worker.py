"""What ``probingctl worker`` does when it is signalled: it runs its program anew, goes on, or ends."""

from __future__ import annotations

import os
import signal
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from probing.client.commands.worker import _serve
from probing.groups.report import WorkerRow
from probing.launcher.launcher import NODE_VARIABLE, Launcher

HUP, TERM, INT = signal.SIGHUP, signal.SIGTERM, signal.SIGINT


class Replaced(BaseException):
    """In place of a program that runs anew."""


class Served:
    """A launcher that gets ``signals`` one after the other, several at once, each while it waits."""

    def __init__(self, *signals: tuple[int, ...], error: OSError | None = None) -> None:
        self.got: list[int] = []
        self.reports = 0
        self.closed = False
        self._signals, self._error = iter(signals), error

    def wait(self, _seconds: float) -> None:
        self.got += next(self._signals)

    def step(self) -> None:
        """Has nothing to do."""

    def report(self) -> list[WorkerRow]:
        self.reports += 1
        return []

    def reexec(self) -> NoReturn:
        raise self._error or Replaced

    def close(self) -> None:
        self.closed = True

    def serve(self) -> None:
        link: Any = SimpleNamespace(orders=deque(), report=lambda _: None, refused=None, problem="", close=lambda: None)
        _serve(self, link, self.got)  # type: ignore[arg-type]


def test_a_hang_up_runs_the_program_anew() -> None:
    with pytest.raises(Replaced):
        Served((), (HUP,)).serve()


@pytest.mark.parametrize("signals", [(TERM,), (INT,), (TERM, HUP), (HUP, TERM), (HUP, HUP, INT, HUP)])
def test_an_end_that_was_asked_for_is_not_lost_to_a_hang_up(signals: tuple[int, ...]) -> None:
    served = Served((), signals)
    served.serve()
    assert served.closed


def test_a_program_that_is_gone_leaves_the_launcher_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    served = Served((HUP,), (), (HUP,), (), (TERM,), error=FileNotFoundError(2, "No such file or directory"))
    served.serve()
    assert served.closed
    assert served.reports >= 5
    said = "the launcher cannot restart its program, and goes on: No such file or directory\n"
    assert capsys.readouterr().err.count(said) == 2


@pytest.fixture
def handler() -> Iterator[object]:
    def noted(*_: object) -> None:
        """Notes nothing here."""

    before = signal.signal(signal.SIGHUP, noted)
    yield noted
    signal.signal(signal.SIGHUP, before)


def test_a_failed_attempt_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, handler: object
) -> None:
    launcher = Launcher.__new__(Launcher)
    launcher.node, launcher._write = "n1", lambda _: None  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "executable", str(tmp_path / "gone"))
    monkeypatch.delenv(NODE_VARIABLE, raising=False)
    with pytest.raises(FileNotFoundError):
        launcher.reexec()
    assert NODE_VARIABLE not in os.environ
    assert signal.getsignal(signal.SIGHUP) is handler
