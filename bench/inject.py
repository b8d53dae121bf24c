"""Compares the steps of a program while code is injected into it with its steps while it is left alone, for each
CPython given.

The program works for a few milliseconds a step on a CPU of its own, with the debug allocator, and checks its results.
Windows in which code is evaluated twice a second alternate with windows in which nothing happens. The steps in which
code runs take as long as the code and its helper need, and are fewer than one in a hundred: so the 99th percentile
shows whether the other steps became slower. ``make inject`` runs this, and the long tests of injected code, with 1,009
evaluations in each CPython.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from statistics_of_blocks import ratio_of_blocks, table

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "integration")]

from inject_helpers import asked  # noqa: E402

from probing.daemon.inject.evaluation import Evaluation, evaluate  # noqa: E402

# Works until stdin ends, then writes the begin and the length of each step, ns.
STEPS = """
import array, os, select, sys, threading, time
def compute():
    total = 0.0
    for i in range(20000):
        total += i * 0.5
    parts = {str(i): [i] * 3 for i in range(2000)}
    return total, len(parts)
expected = compute()
beside = threading.Thread(target=lambda: [time.sleep(0.01) for _ in iter(int, 1)], daemon=True)
beside.start()
steps = array.array("q")
print("ready", flush=True)
while not select.select([0], [], [], 0)[0]:
    begun = time.perf_counter_ns()
    assert compute() == expected
    steps.extend((begun, time.perf_counter_ns() - begun))
sys.stdout.buffer.write(steps.tobytes())
"""
_PAUSE_S = 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--windows", type=int, default=10, help="number of windows with evaluations, and of windows without"
    )
    parser.add_argument("--evaluations", type=int, default=6, help="number of evaluations in a window")
    parser.add_argument("pythons", nargs="*", default=[sys.executable])
    options = parser.parse_args()
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cpus[1:] or cpus)
    rows = []
    for python in options.pythons:
        rows.append(measured(python, cpus[0], options.windows, options.evaluations))
        # Each interpreter takes a minute: its row is shown at once, in case a later interpreter fails.
        print(rows[-1], file=sys.stderr, flush=True)
    print(table(rows))


def measured(python: str, cpu: int, windows: int, evaluations: int) -> dict[str, object]:
    """Returns the row of one CPython."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["taskset", "-c", str(cpu), python, "-c", STEPS]
        path = "/usr/bin:/bin:/usr/sbin:/sbin"
        environment = {"PYTHONMALLOC": "debug", "PATH": path, "PYTHONPYCACHEPREFIX": folder}
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as program:
            assert program.stdout is not None
            program.stdout.readline()
            request = asked(program.pid, "len(steps)")
            begins, stops, seconds = [], [], []
            for _ in range(windows):
                begins.append(time.perf_counter_ns())
                for _ in range(evaluations):
                    stop, took = _evaluated(request)
                    stops.append(stop)
                    seconds.append(took)
                begins.append(time.perf_counter_ns())
                time.sleep(_PAUSE_S * evaluations)
            begins.append(time.perf_counter_ns())
            steps = np.frombuffer(program.communicate(b"\n", timeout=60)[0], np.int64).reshape(-1, 2)
    parts = [steps[(steps[:, 0] >= a) & (steps[:, 0] < b), 1] for a, b in itertools.pairwise(begins)]
    tails = [float(np.percentile(part, 99)) for part in parts]
    return {
        "CPython": ".".join(version_of(python)),
        "evaluations": len(stops),
        "longest stop of one, us: median, p99": f"{statistics.median(stops):.0f}, {np.percentile(stops, 99):.0f}",
        "an evaluation, ms": f"{statistics.median(seconds) * 1e3:.1f}",
        "p99 of a step beside that of windows without": ratio_of_blocks(tails[::2], tails[1::2]).percent(),
        "steps": len(steps),
    }


def _evaluated(request: Evaluation) -> tuple[float, float]:
    """Evaluates code, and waits until the next evaluation is due. Returns the longest stop in us, and the seconds until
    the answer.
    """
    begun = time.monotonic()
    answer = evaluate(request)
    took = time.monotonic() - begun
    assert int(answer["value"]) > 0
    time.sleep(max(0.0, _PAUSE_S - took))
    return float(answer["longest_stop_us"]), took


def version_of(python: str) -> list[str]:
    out = subprocess.run([python, "-c", "import sys; print(*sys.version_info[:3])"], stdout=subprocess.PIPE, check=True)
    return out.stdout.decode().split()


if __name__ == "__main__":
    main()
