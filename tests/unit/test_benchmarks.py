"""Nothing else runs the benchmarks often: each can at least be imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from long import long

BENCH = Path(__file__).resolve().parents[2] / "bench"
NAMES = sorted(path.stem for path in BENCH.glob("[!_]*.py"))
LISTED = "import runpy, sys; print(*runpy.run_path(sys.argv[1])['ALL'])"


def test_benchmarks_can_be_imported() -> None:
    assert NAMES
    ended = subprocess.run(
        [sys.executable, "-c", f"import {', '.join(NAMES)}"], cwd=BENCH, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr


@long
@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_can_be_imported_alone(name: str) -> None:
    ended = subprocess.run([sys.executable, "-c", f"import {name}"], cwd=BENCH, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_listed_benchmarks_exist() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", LISTED, BENCH / "__main__.py"], capture_output=True, text=True, check=True
    )
    assert set(ended.stdout.split()) <= set(NAMES)
