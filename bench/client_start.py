"""Time of probingctl's commands from exec to exit, beside a daemon and a job, as a multiple of an empty Python.

With ``--hung``, the job has 8 ranks, and one rank has kept the others waiting for a minute.

All commands take turns with `python -c pass` in rounds within one run, so the ratios hold on a busy machine, too. Two
times of `top` are measured on a terminal of 80x24: from the start to the first job on the screen, and from the key q to
the exit.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import pty
import random
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Collection, Iterable
from pathlib import Path

from at_rest import HANGS, RANKS, STEPS
from running import BenchDaemon, job
from statistics_of_blocks import ratio_of_blocks, table

HERE = Path(__file__).resolve().parent
# Exit code of `diagnose` where something is wrong.
WRONG = 3
# The time budget of each command on the machine of docs/benchmarks.md, ms.
BUDGETS = {"version": 100, "ps": 250, "nccl": 400, "stacks": 250, "status": None, "top --once": None}
# The time budgets beside a job that hangs, ms.
HUNG = {"diagnose": 600, "ps": 250, "nccl": 400, "stacks": 250}
# The time budgets for the screen of `top`, ms.
SCREEN = {"top: first frame": 500, "top: from q to its exit": 1000}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hung", action="store_true")
    options = parser.parse_args()
    daemon = BenchDaemon()
    folder = Path(tempfile.mkdtemp(prefix="probingd-bench-"))
    with contextlib.ExitStack() as ends:
        ends.callback(daemon.close)
        if options.hung:
            daemon.start()
            ends.enter_context(job("-c", STEPS + HANGS, str(folder / "rank"), ranks=RANKS))
            while daemon.run("diagnose").returncode != WRONG:
                time.sleep(0.5)
            time.sleep(60)
        else:
            ends.enter_context(job(HERE / "timed_job.py", folder / "steps", "64", "0.02", ranks=options.ranks))
            daemon.start()
            while not (daemon.ctl("nccl", "-f", "csv").count("\n") > 1):
                time.sleep(0.5)
        budgets = HUNG if options.hung else BUDGETS
        found = in_turn(daemon, options.rounds, budgets, SCREEN if not options.hung else {})
    rows = []
    empty = found["python -c pass"]
    for name, values in found.items():
        ratio = ratio_of_blocks(values, empty)
        rows.append(
            {
                "command": name,
                "ms, median (range)": f"{statistics.median(values):.0f} ({min(values):.0f} to {max(values):.0f})",
                "times an empty Python": f"{ratio.ratio:.1f} [{ratio.low:.1f}, {ratio.high:.1f}]",
                "budget, ms": {**budgets, **SCREEN}.get(name) or "",
                "rounds": len(values),
            }
        )
    print(table(rows))


def in_turn(
    daemon: BenchDaemon, rounds: int, commands: Iterable[str], screens: Collection[str]
) -> dict[str, list[float]]:
    """Returns the times of each command by name, ms."""
    target = ["-t", f"unix:{daemon.socket}"]
    program = Path(sys.executable).parent / "probingctl"
    asked: dict[str, list[str]] = {"python -c pass": [sys.executable, "-c", "pass"]}
    asked |= {name: [str(program), *name.split(), *target] for name in commands}
    found: dict[str, list[float]] = {name: [] for name in asked}
    chooser = random.Random(5)
    for _ in range(rounds):
        for name in chooser.sample(list(asked), len(asked)):
            begin = time.perf_counter()
            code = subprocess.run(asked[name], stdout=subprocess.DEVNULL, check=False).returncode
            assert code in (0, WRONG), (name, code)
            found[name].append((time.perf_counter() - begin) * 1000)
        if screens:
            for name, value in zip(screens, screen([str(program), "top", *target]), strict=True):
                found.setdefault(name, []).append(value)
    return found


def screen(command: list[str]) -> tuple[float, float]:
    """Returns the times from the start of ``top`` to the first job on its screen, and from q to its exit, ms."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    begin = time.perf_counter()
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm-256color"}
    ) as child:
        os.close(theirs)
        seen = b""
        while b" job " not in seen:
            seen += os.read(ours, 65536)
        shown = time.perf_counter()
        os.write(ours, b"q")
        # When the last process on the terminal exits, reading fails.
        with contextlib.suppress(OSError):
            while os.read(ours, 65536):
                pass
        child.wait()
        left = time.perf_counter()
    os.close(ours)
    return (shown - begin) * 1000, (left - shown) * 1000


if __name__ == "__main__":
    main()
