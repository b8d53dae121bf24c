"""A directory for a launcher and its owner's keys; what a test leaves running is ended."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from launcher_helpers import end, living


@pytest.fixture
def name(request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of a group, of this test only."""
    group = re.sub(r"[^A-Za-z0-9]+", "-", request.node.name)[-60:].strip("-")
    yield group
    left = living(group)
    end(group)
    assert left == {}, "the test left processes of its group"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path
