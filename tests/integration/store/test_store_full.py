"""A real file system that is full."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CHILD = Path(__file__).parents[1] / "store_full_child.py"


def test_a_file_system_of_256_kib(tmp_path: Path) -> None:
    as_root = [] if os.geteuid() == 0 else ["--map-root-user"]
    command = ["unshare", *as_root, "--mount", sys.executable, str(CHILD), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "fine\n"
