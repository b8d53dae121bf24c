"""Settings of the tests of the watch and of what it gathers."""

from __future__ import annotations

import pytest

from probing.daemon.diagnose.gather import readings


@pytest.fixture(autouse=True)
def _readings_are_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read twice is read again soon: the processes are made up."""
    monkeypatch.setattr(readings, "APART_S", 0.02)
