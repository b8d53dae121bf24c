"""Rivals of the daemon beside a job: ``py-spy record``, and Probing in a virtual environment of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

from running import BIN

__all__ = ("PROBING", "probing_reason", "py_spy")

# Python of the environment that `make probing-venv` makes: Probing needs its own, because it has our sdk's import name.
PROBING = Path(__file__).resolve().parents[1] / ".build" / "probing-0.2.4" / "bin" / "python"
_ASK = "import probing, torch, sys; sys.exit(0 if hasattr(probing, 'query') else 'the module has no query')"


def probing_reason() -> str:
    """Returns why Probing cannot be run; empty when it can."""
    if not PROBING.exists():
        return f"there is no {PROBING}: make probing-venv"
    asked = subprocess.run(
        [PROBING, "-c", _ASK], env={**os.environ, "PROBING": "1"}, capture_output=True, text=True, check=False
    )
    return asked.stderr.strip().rpartition("\n")[2] if asked.returncode else ""


@contextlib.contextmanager
def py_spy(pids: list[int], folder: Path) -> Iterator[None]:
    """Runs ``py-spy record`` at 100 Hz on each process."""
    options = ("--rate", "100", "--nonblocking", "-d", "3600", "-f", "raw")
    running = [
        subprocess.Popen(
            [BIN / "py-spy", "record", *options, "-o", folder / f"{pid}.txt", "-p", str(pid)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for pid in pids
    ]
    try:
        yield
    finally:
        for process in running:
            process.send_signal(signal.SIGINT)
            process.wait()
