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
# To import torch takes seconds; benchmarks call nothing of it before they run.
WITHOUT_TORCH = """
import sys
from unittest.mock import MagicMock
sys.modules |= {name: MagicMock() for name in ("torch", "torch.distributed", "torch.nn", "torch.nn.parallel")}
"""


def run(code: str, *words: str | Path) -> str:
    ended = subprocess.run([sys.executable, "-c", code, *words], cwd=BENCH, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_benchmarks_can_be_imported() -> None:
    run(f"{WITHOUT_TORCH}import {', '.join(NAMES)}")


@long
@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_can_be_imported_alone(name: str) -> None:
    run(f"import {name}")


def test_listed_benchmarks_exist() -> None:
    assert set(run(LISTED, BENCH / "__main__.py").split()) <= set(NAMES)
