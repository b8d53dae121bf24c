"""Starts simulations, for tests and benchmarks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from simulator.cast import Cast

__all__ = ("Simulation", "simulated")

_TESTS = Path(__file__).resolve().parents[1]


class Simulation:
    """A simulation that runs: its ``cast``, and figures of its nodes."""

    def __init__(self, cast: Cast, process: subprocess.Popen[str]) -> None:
        self.cast = cast
        self._process = process

    def figures(self) -> dict[str, Any]:
        """Returns what the nodes measured since the last call: the median of their times to answer, ms."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        found: dict[str, Any] = json.loads(self._process.stdout.readline())
        return found


@contextmanager
def simulated(cast: Cast) -> Iterator[Simulation]:
    """Runs the nodes of ``cast`` in processes of their own."""
    # The facts of jobs are made by builders of the tests of diagnosis.
    own = (str(_TESTS), str(_TESTS / "unit" / "diagnosis"))
    paths = os.pathsep.join(filter(None, (*own, os.environ.get("PYTHONPATH", ""))))
    with ExitStack() as stack:
        started = [stack.enter_context(_process(cast, number, paths)) for number in range(cast.processes)]
        yield Simulation(cast, started[0])


@contextmanager
def _process(cast: Cast, number: int, paths: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "simulator", json.dumps(asdict(cast)), str(number)]
    env = {**os.environ, "PYTHONPATH": paths, "GRPC_VERBOSITY": "NONE"}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        if process.stdout.readline() != "ready\n":
            raise RuntimeError("the simulation did not start")
        yield process
    finally:
        process.stdin.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
