"""A short crowd on a service; ``make crowd`` has 100 clients for a minute."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from crowd_scene import crowd


@pytest.mark.skipif(os.getuid() != 0, reason="starts processes of other users")
def test_a_crowd_keeps_nobody_from_an_answer(open_tmp_path: Path) -> None:
    found, root = crowd(open_tmp_path, 3, asking=1, idle=1)
    assert (found.failed, root.failed, found.starved) == ([], [], 0)
    assert found.seconds
    assert root.seconds
