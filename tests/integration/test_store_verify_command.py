"""`probingd verify` on the golden state directory, whole and damaged."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "store-v1"
PROBINGD = Path(sys.executable).with_name("probingd")


def verify(state: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([PROBINGD, "verify", "--state-dir", state], capture_output=True, text=True, check=False)


def test_a_whole_directory_has_no_problems(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN, tmp_path / "state")
    done = verify(tmp_path / "state")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_damaged_segment_is_named(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN, tmp_path / "state")
    segment = next((tmp_path / "state").rglob("*.parquet"))
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 1
    segment.write_bytes(data)
    done = verify(tmp_path / "state")
    assert done.returncode == 3
    assert segment.name in done.stdout


def test_no_directory_is_an_error(tmp_path: Path) -> None:
    done = verify(tmp_path / "nothing")
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert "\nhint: " in done.stderr
