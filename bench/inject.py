"""Steps of a program into which code is put, beside a copy of it that is left alone, for each CPython given.

Both run at the same time with the debug allocator, work for a few milliseconds a step and check their results. In one
of them code is evaluated once a second: the steps in which that happens take as long as the code and its helper need,
and are fewer than one in a hundred. `make inject` runs this, and the long tests of injected code, with 1,009
evaluations in each CPython.
"""

from __future__ import annotations

import argparse
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

from probing.daemon.inject.evaluation import evaluate  # noqa: E402

# Works until stdin ends, then prints the length of each step, ns.
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
    steps.append(time.perf_counter_ns() - begun)
sys.stdout.buffer.write(steps.tobytes())
"""
BLOCKS = 20
# As the supervisor and probingd-injector@.service start an injector.
_NICE = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--evaluations", type=int, default=61)
    parser.add_argument("--pause", type=float, default=1.0, help="seconds between two evaluations")
    parser.add_argument("pythons", nargs="*", default=[sys.executable])
    options = parser.parse_args()
    os.setpriority(os.PRIO_PROCESS, 0, -_NICE)
    rows = []
    for python in options.pythons:
        rows.append(measured(python, options.evaluations, options.pause))
        # Each takes a minute: what was measured is shown even if a later interpreter fails.
        print(rows[-1], file=sys.stderr, flush=True)
    print(table(rows))


def measured(python: str, evaluations: int, pause: float) -> dict[str, object]:
    """Returns the row of one CPython."""
    with tempfile.TemporaryDirectory() as folder:
        # This process has the priority of an injector; the programs do not.
        command = ["nice", "-n", str(_NICE), python, "-c", STEPS]
        environment = {"PYTHONMALLOC": "debug", "PATH": "/usr/bin:/bin:/usr/sbin:/sbin", "PYTHONPYCACHEPREFIX": folder}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "env": environment}
        with subprocess.Popen(command, **pipes) as entered, subprocess.Popen(command, **pipes) as alone:  # type: ignore[call-overload]
            for process in (entered, alone):
                process.stdout.readline()
            request, stops, seconds = asked(entered.pid, "len(steps)"), [], []
            for _ in range(evaluations):
                begun = time.monotonic()
                found = evaluate(request)
                seconds.append(time.monotonic() - begun)
                stops.append(found["longest_stop_us"])
                assert int(found["value"]) > 0
                time.sleep(pause)
            ended = [np.frombuffer(process.communicate(b"\n", timeout=60)[0], np.int64) for process in (entered, alone)]
    tails = [[float(np.percentile(block, 99)) for block in np.array_split(steps, BLOCKS)] for steps in ended]
    ratio = ratio_of_blocks(*tails)
    return {
        "CPython": ".".join(map(str, version_of(python))),
        "evaluations": evaluations,
        "longest stop of one, us: median, p99": f"{statistics.median(stops):.0f}, {np.percentile(stops, 99):.0f}",
        "an evaluation, ms": f"{statistics.median(seconds) * 1e3:.1f}",
        "p99 of a step beside the control's": ratio.percent(),
        "steps": len(ended[0]),
    }


def version_of(python: str) -> list[str]:
    out = subprocess.run([python, "-c", "import sys; print(*sys.version_info[:3])"], stdout=subprocess.PIPE, check=True)
    return out.stdout.decode().split()


if __name__ == "__main__":
    main()
