"""Fixtures of the client's tests: probingctl run in this process, and two nodes to ask."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from client_fake_node import FakeNode, hung_job

from probing.client.main import main

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[FakeNode, FakeNode]]:
    """Two nodes with a job that hangs; the first is the target of commands."""
    nodes = hung_job(tmp_path)
    monkeypatch.setenv("PROBING_TARGET", nodes[0].address)
    yield nodes
    for node in nodes:
        node.stop()


@pytest.fixture
def ctl(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command; returns its exit code, stdout and stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(list(arguments))
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return code, out, err

    return run
