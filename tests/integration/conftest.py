"""Fixtures of several files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from service_helpers import Service, serving


@pytest.fixture
def service(open_tmp_path: Path) -> Iterator[Service]:
    with serving(open_tmp_path) as made:
        yield made
