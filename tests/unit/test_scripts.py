"""Shell scripts of packaging have no fault that shellcheck finds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHELLCHECK = Path(sys.prefix) / "bin" / "shellcheck"
SCRIPTS = sorted(path for folder in ("container", "slurm") for path in (ROOT / "packaging" / folder).glob("*.sh"))


@pytest.mark.skipif(not SHELLCHECK.exists(), reason="shellcheck is not installed")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_shellcheck_finds_nothing(script: Path) -> None:
    done = subprocess.run([SHELLCHECK, "--external-sources", script], capture_output=True, text=True, check=False)
    assert done.stdout + done.stderr == ""
