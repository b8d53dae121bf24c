"""Runs parts: each in a process group of its own, which is killed at the part's deadline, and never the whole run."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from gpu_kit.part import Outcome, Part, State, outcome, read_checks
from gpu_kit.patience import patient
from gpu_kit.scene import Scene

__all__ = ("EXIT_SKIPPED", "Budget", "run_part", "run_parts")

EXIT_SKIPPED = 77
# Less than this is no time to begin a part in.
LEAST_S = 3.0
# Bytes of the end of a part's log that explain why it ended.
TAIL_BYTES = 500
# What has this package.
_ROOT = Path(__file__).resolve().parents[1]


class Budget:
    """The time for all parts together, from now on."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        return self._end - time.monotonic()


def run_parts(
    parts: Sequence[Part], scene: Scene, budget: Budget, done: Callable[[list[Outcome], list[str]], None]
) -> list[Outcome]:
    """Runs ``parts`` in turn and returns what came of each; ``done`` is told after each, with the names to come."""
    outcomes: list[Outcome] = []
    for number, part in enumerate(parts):
        outcomes.append(_in_time(part, scene, budget))
        done(outcomes, [waiting.name for waiting in parts[number + 1 :]])
    return outcomes


def _in_time(part: Part, scene: Scene, budget: Budget) -> Outcome:
    missing = next((scene.machine.missing[need] for need in part.needs if scene.machine.missing.get(need)), "")
    if missing:
        return Outcome(part.name, part.title, State.SKIPPED, 0.0, missing)
    seconds = min(patient(part.deadline_s), budget.left_s)
    if seconds < LEAST_S:
        return Outcome(part.name, part.title, State.SKIPPED, 0.0, "the time for all parts was over")
    return run_part(part, scene, seconds)


def run_part(part: Part, scene: Scene, seconds: float) -> Outcome:
    """Runs a part in a process group of its own, which is killed after ``seconds``; returns what came of the part."""
    folder = scene.folder / part.name
    folder.mkdir(parents=True, exist_ok=True)
    checks, why, log = folder / "checks.jsonl", folder / "why", folder / "log"
    checks.unlink(missing_ok=True)
    why.unlink(missing_ok=True)
    begun = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "gpu_kit.one_part", part.name, str(scene.folder)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": f"{_ROOT}:{os.environ.get('PYTHONPATH', '')}"},
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            # Also after a good end: a job that outlived its part would disturb the next one.
            _kill_group(process)
    took = time.monotonic() - begun
    return outcome(part, read_checks(checks), took, **_ended(code, seconds, why, log))


def _ended(code: int | None, seconds: float, why: Path, log: Path) -> dict[str, State | str]:
    if code is None:
        return {"ended": State.TIMED_OUT, "why": f"its deadline of {seconds:.0f} s passed"}
    if code == 0:
        return {"ended": State.PASSED}
    said = why.read_text() if why.exists() else ""
    if code == EXIT_SKIPPED:
        return {"ended": State.SKIPPED, "why": said}
    what = f"it was killed by signal {-code}" if code < 0 else f"it ended with {code}"
    return {"ended": State.FAILED, "why": said or f"{what}: {log.read_text(errors='replace')[-TAIL_BYTES:].strip()}"}


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
