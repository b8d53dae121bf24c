"""Runs the check on a GPU: ``python -m gpu_kit [--out DIR] [--rehearse] [--parts NAME,...] [--python PATH]``.

It writes ``report.json`` and ``report.md`` into DIR after each part, and ends with 1 where a part failed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from gpu_kit.machine import examine
from gpu_kit.part import Check, Outcome, Part, State
from gpu_kit.parts import PARTS
from gpu_kit.patience import patient
from gpu_kit.report import exit_code, markdown, write
from gpu_kit.runner import Budget, run_parts
from gpu_kit.scene import Scene
from gpu_kit.watch import Daemon, DaemonFailed
from gpu_kit.work import free_port

__all__ = ("Run", "main")

# For everything, the installation included: below six minutes with what it takes to stop.
WHOLE_S = 335.0
DAEMON_S = 30.0
# Bytes of the end of each log that come with the report.
LOG_BYTES = 20_000


class Run:
    """One run: the daemon, and the report so far."""

    def __init__(self, out: Path, scene: Scene, options: Sequence[str] = ()) -> None:
        self._out, self._scene = out, scene
        self._daemon = Daemon(Path(scene.bin), scene.folder, options)
        self._before: list[Outcome] = []
        # What runs beside all parts.
        self._others = scene.of_part("beside")

    def start_daemon(self) -> None:
        """Starts the daemon, and notes what came of it as a part; parts that need it are skipped without it."""
        begun = time.monotonic()
        title = "the daemon starts"
        try:
            self._daemon.start(DAEMON_S)
        except (DaemonFailed, OSError) as e:
            state, why = State.FAILED, str(e)
            self._scene.machine.missing["daemon"] = f"the daemon does not run: {_reason(why)}"
        else:
            state, why = State.PASSED, ""
            self._scene.socket = str(self._daemon.socket)
        seconds = round(time.monotonic() - begun, 1)
        checks = [Check("ready", state, "ready on stdout", why or f"after {seconds:g} s")]
        self._before.append(Outcome("daemon", title, state, seconds, why, checks))
        self._scene.save()
        if self._scene.socket and self._scene.has("nccl"):
            self._others.keeper().ready(30)

    def run(self, parts: Sequence[Part], budget: Budget) -> list[Outcome]:
        """Runs the parts and returns what came of all, the daemon's start first."""
        self._write([], [part.name for part in parts])
        outcomes = run_parts(parts, self._scene, budget, self._done)
        return [*self._before, *outcomes]

    def stop(self) -> None:
        """Ends the daemon, and leaves the logs beside the report."""
        self._others.close()
        self._daemon.stop()
        logs = [self._scene.folder / "daemon.log", *sorted(self._scene.folder.glob("*/**/*log"))]
        texts = (f"--- {log.relative_to(self._scene.folder)}\n{_tail(log)}" for log in logs if log.is_file())
        (self._out / "logs.txt").write_text("\n".join(texts))

    def _done(self, outcomes: list[Outcome], waiting: list[str]) -> None:
        last = outcomes[-1]
        print(f"{last.name}: {last.state.value} in {last.seconds:g} s{': ' if last.why else ''}{last.why}", flush=True)
        if self._scene.socket and not self._daemon.alive:
            self._scene.socket = ""
            why = f"the daemon ended during {last.name}"
            self._before.append(Outcome("daemon_ended", "the daemon ran to the end", State.FAILED, 0.0, why))
            self.start_daemon()
        self._write(outcomes, waiting)

    def _write(self, outcomes: list[Outcome], waiting: list[str]) -> None:
        write(self._out, self._scene.machine.facts, [*self._before, *outcomes], waiting)


def _reason(text: str) -> str:
    """Returns the line of a log that tells why the daemon ended: its own error, else the last line."""
    lines = text.splitlines() or [""]
    return next((line for line in lines if line.startswith("error: ")), lines[-1]).removeprefix("error: ")[:200]


def _tail(log: Path) -> str:
    return log.read_bytes()[-LOG_BYTES:].decode(errors="replace")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the parts, and returns the exit code."""
    options = _arguments(argv)
    begun = float(os.environ.get("GPU_KIT_BEGUN") or time.time())
    budget = Budget(patient(options.seconds) - (time.time() - begun))
    # So that the daemon and the jobs end with us.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="gpu-kit-", dir="/var/tmp"))
    work.chmod(0o755)
    try:
        return _run(options, out, work, budget)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _run(options: argparse.Namespace, out: Path, work: Path, budget: Budget) -> int:
    machine = examine(options.python)
    settings = ["--diagnose.stall_s=2", "--nccl.ras_interval_s=1", "--gpu.interval_s=0.5", "--cuda.memory_interval_s=1"]
    scene = Scene(work, machine, bin=str(Path(sys.executable).parent))
    if options.rehearse:
        from gpu_kit.rehearsal import rehearse

        scene.machine = rehearse(machine, work / "doubles")
        scene.ras_port = free_port()
        settings += [f"--gpu.library={scene.machine.libraries.nvml}", f"--gpu.sysfs={work}/sys"]
    settings.append(f"--nccl.ras_port={scene.ras_port}")
    run = Run(out, scene, settings)
    try:
        run.start_daemon()
        outcomes = run.run([part for part in PARTS if not options.parts or part.name in options.parts], budget)
    finally:
        run.stop()
    print(markdown(scene.machine.facts, outcomes))
    return exit_code(outcomes)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="run", description="Check probingd on this machine's GPU.")
    parser.add_argument("--out", default=os.environ.get("OUT") or "gpu-kit-report", help="folder of the report")
    parser.add_argument("--rehearse", action="store_true", help="without a GPU: doubles of its libraries, built here")
    names = [part.name for part in PARTS]
    parser.add_argument("--parts", type=lambda text: text.split(","), default=[], help=f"of {', '.join(names)}")
    parser.add_argument("--seconds", type=float, default=WHOLE_S, help="time for everything")
    python = os.environ.get("GPU_KIT_PYTHON") or sys.executable
    parser.add_argument("--python", default=python, help="the interpreter of the jobs, which has torch")
    found = parser.parse_args(argv)
    if unknown := sorted(set(found.parts) - set(names)):
        parser.error(f"no part {unknown[0]}; there are {', '.join(names)}")
    return found


if __name__ == "__main__":
    sys.exit(main())
