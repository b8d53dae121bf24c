"""CPU that it costs to read 8 GPUs with 8 ranks and 64 other processes each second, beside nvitop's reading of them.

Ours: the source of the gpu tables and the process that asks the driver, rows made, without the store. nvitop (where it
is installed): a snapshot of each device with its processes, which reads also the host's part of these. Both read the
double of libnvidia-ml.so.1, whose own cost is in both, in the same seconds, in turn. A real driver costs more a call,
so the calls of a reading are counted as well.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from running import cpu_ns
from statistics_of_blocks import table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "integration"))

from doubles.nvml_double import build_nvml, recorded
from gpu_helpers import Gpus, gpus

GPUS, OTHERS = 8, 64
TESTS = Path(__file__).resolve().parents[1] / "tests"
_NVITOP = """
import sys
from nvitop import Device
devices = Device.all()
print("ready", flush=True)
for _ in sys.stdin:
    for device in devices:
        device.as_snapshot()
        for process in device.processes().values():
            process.as_snapshot()
    print("done", flush=True)
"""
_COUNTED = """
import collections, json, sys, time
sys.path[:0] = {path!r}
import pynvml
from pathlib import Path
from probing.daemon.gpu.nvml.calls import Calls
from probing.daemon.gpu.nvml.snapshot import Snapshots
counts = collections.Counter()
need = Calls.need
def counted(self, name, *args, **more):
    counts[name] += 1
    return need(self, name, *args, **more)
Calls.need = counted
snapshots = Snapshots(Calls(5.0), Calls(5.0), {library!r}, Path("/nowhere"))
for _ in range(3):
    snapshots.poll(slow=False, links=False, pairs=False)
counts.clear()
for _ in range(10):
    snapshots.poll(slow=False, links=False, pairs=False)
counts.pop("nvmlEventSetWait", None)
print(json.dumps(sum(counts.values()) / 10))
"""


def values(ranks: list[int], others: list[int]) -> dict[str, Any]:
    """Eight GPUs with a rank each, and the other processes spread over them."""
    made: dict[str, Any] = recorded(GPUS)
    for number in range(GPUS):
        pids = [ranks[number], *others[number::GPUS]]
        made |= {f"gpu{number}.compute.{at}": f"{pid},{1 << 30}" for at, pid in enumerate(pids)}
        made |= {f"gpu{number}.samples.{at}": f"{pid},{at + 1},50,20,0,0" for at, pid in enumerate(pids)}
        made |= {f"gpu{number}.compute.count": len(pids), f"gpu{number}.samples.count": len(pids)}
    return made


class Other:
    """nvitop in a process of its own, which reads on request."""

    def __init__(self, library: Path) -> None:
        environ = {**os.environ, "LD_LIBRARY_PATH": str(library.parent)}
        pipe = subprocess.PIPE
        command = [sys.executable, "-c", _NVITOP]
        # It logs what the double does not have, once.
        quiet = subprocess.DEVNULL
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=quiet, text=True, env=environ)
        self._hear()

    def tick(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        self._hear()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()

    def _hear(self) -> None:
        assert self.process.stdout is not None
        if not self.process.stdout.readline():
            raise RuntimeError("nvitop has ended")


def measure(ours: Gpus, other: Other | None, seconds: int) -> Mapping[str, tuple[float, float]]:
    """Returns CPU in per cent of a core and ms a reading, by name."""
    spent = dict.fromkeys(("source", "nvml process", "nvitop"), 0)
    for turn in range(seconds + 3):
        if turn == 3:
            # The first turns load what is loaded once.
            spent = dict.fromkeys(spent, 0)
        begin = time.monotonic()
        (process,) = ours.listener.processes
        before = cpu_ns([process.pid]), time.thread_time_ns()
        ours.tick()
        spent["source"] += time.thread_time_ns() - before[1]
        ours.sink.tables.clear()
        if other is not None:
            first = cpu_ns([other.process.pid])
            other.tick()
            spent["nvitop"] += cpu_ns([other.process.pid]) - first
        time.sleep(max(0.0, begin + 1 - time.monotonic()))
        # With the waits of the thread of events.
        spent["nvml process"] += cpu_ns([process.pid]) - before[0]
    return {name: (ns / seconds / 1e9 * 100, ns / seconds / 1e6) for name, ns in spent.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=60)
    options = parser.parse_args()
    sleepers = [subprocess.Popen(["sleep", "inf"]) for _ in range(GPUS + OTHERS)]
    with tempfile.TemporaryDirectory() as name:
        library = build_nvml(Path(name))
        pids = [sleeper.pid for sleeper in sleepers]
        other = None
        try:
            with closing(gpus(library, Path(name), values(pids[:GPUS], pids[GPUS:]))) as ours:
                for rank, pid in enumerate(pids[:GPUS]):
                    ours.watched.add(pid, rank)
                ours.fresh()
                if importlib.util.find_spec("nvitop"):
                    other = Other(library)
                found = measure(ours, other, options.seconds)
            script = _COUNTED.format(library=str(library), path=[str(TESTS)])
            calls = float(subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stdout)
        finally:
            if other is not None:
                other.close()
            for sleeper in sleepers:
                sleeper.kill()
                sleeper.wait()
    whole = {"ours, in all": tuple(map(sum, zip(found["source"], found["nvml process"], strict=True))), **found}
    print(
        table(
            [
                {"": name, "CPU, % of a core": f"{share:.2f}", "ms a second": f"{ms:.2f}"}
                for name, (share, ms) in whole.items()
                if ms
            ]
        )
    )
    print(f"\n{calls:.0f} calls of NVML a reading, {calls / GPUS:.0f} for each GPU")


if __name__ == "__main__":
    main()
