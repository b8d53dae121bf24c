"""Half an hour at 100,000 events a second, with queries: memory, threads, descriptors and files must stay as they are.

A process makes NCCL calls (the double of overload.py). The real daemon stores, seals, merges and drops their rows,
because its state directory is limited to 60 MB. A client sends queries every few seconds. The resources of each process
of the daemon are recorded, and a line is fitted to the last two thirds.

Memory is the proportional share (PSS) without clean file pages, which the kernel can take back. The collector's memory
is also read five times a second, because its budget holds at any moment: 80 MB, and growth of less than 1 MB an hour
after the first third. ``--seconds 600`` is the short form.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
from overload import CALLER, build, collector_of
from running import BenchDaemon, arguments, family
from statistics_of_blocks import table

CONFIG = """[probes]
hit_budget = 100000000
[store]
max_bytes = {max_bytes}
keep_free_bytes = 0
"""
QUERIES = (
    "SELECT count(*) AS n, min(count) AS low, max(count) AS high FROM comm.ops",
    "SELECT op, count(*) AS n, avg(bytes) AS b FROM comm.ops WHERE ts > now() - INTERVAL 10 SECOND GROUP BY op",
    "SELECT * FROM comm.inflight",
)
ROLES = ("collector", "maintenance", "service", "worker", "reader", "parser", "supervisor")
BUDGET_MB, GROWTH_MB_PER_HOUR = 80.0, 1.0
LOOK_S = 0.2
# Each call has its number as its count of elements. The calls end after the given seconds, whatever rate they reached.
SOURCE = CALLER.replace("1000 + i % 7", "i").replace(
    "if (i % 100 == 0)\n",
    "if (i % 100 == 0 && now() - begin > atof(argv[3]))\n\t\t\tcalls = i + 1;\n\t\telse if (i % 100 == 0)\n",
)


def role_of(pid: int) -> str:
    words = arguments(pid)
    module = words[words.index("-m") + 1] if "-m" in words else ""
    return next((role for role in ROLES if role in module), "supervisor")


def held_kb(pid: int) -> int:
    """Returns the PSS without clean file pages, which psutil would include."""
    lines = (line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines())
    return sum(int(words[1]) for words in lines if words[0] in ("Pss_Dirty:", "SwapPss:"))


class CollectorMemory:
    """Held memory of the collector in MB, ``LOOK_S`` apart, in a thread of its own."""

    def __init__(self, pid: int) -> None:
        self.times: list[float] = []
        self.values: list[float] = []
        self._pid = pid
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        begin = time.monotonic()
        with contextlib.suppress(OSError):
            while not self._ended.wait(LOOK_S):
                self.values.append(held_kb(self._pid) / 1000)
                self.times.append(time.monotonic() - begin)

    @property
    def verdict(self) -> str:
        first = len(self.times) // 3
        hours, values = np.array(self.times[first:]) / 3600, np.array(self.values[first:])
        slope, highest = float(np.polyfit(hours, values, 1)[0]), max(self.values)
        reached = highest < BUDGET_MB and slope < GROWTH_MB_PER_HOUR
        return (
            f"collector: at most {highest:.1f} MB (budget {BUDGET_MB:g}), median {np.median(values):.1f} MB, after the"
            f" first third {slope:+.2f} MB an hour (budget {GROWTH_MB_PER_HOUR:g}): "
            f"{'reached' if reached else 'not reached'}"
        )


@contextlib.contextmanager
def collector_memory(daemon: BenchDaemon) -> Iterator[CollectorMemory]:
    memory = CollectorMemory(collector_of(daemon))
    memory._thread.start()
    try:
        yield memory
    finally:
        memory._ended.set()
        memory._thread.join()


def look(daemon: BenchDaemon) -> Counter[str]:
    """Returns memory (``held_kb``), threads and descriptors by role, and the files of the state directory."""
    assert daemon.process is not None
    found: Counter[str] = Counter()
    for pid in family(daemon.process.pid):
        # A worker may be replaced while it is read.
        with contextlib.suppress(OSError, ValueError, psutil.Error):
            role, process = role_of(pid), psutil.Process(pid)
            found[f"{role} KB"] += held_kb(pid)
            found[f"{role} threads"] += process.num_threads()
            found[f"{role} descriptors"] += process.num_fds()
            found["processes"] += 1
    for path in (daemon.base / "state").rglob("*"):
        with contextlib.suppress(OSError):
            if path.is_file():
                found["files"] += 1
                found["state KB"] += path.stat().st_size >> 10
    return found


def watch(daemon: BenchDaemon, seconds: float, every: float) -> tuple[list[float], list[Counter[str]], int]:
    begin, times, looks, asked = time.monotonic(), [], [], 0
    while (now := time.monotonic() - begin) < seconds:
        for sql in QUERIES:
            daemon.ctl("-f", "json", "query", sql)
            asked += 1
        times.append(now)
        looks.append(look(daemon))
        print(f"{now:6.0f} s: {looks[-1]['collector KB'] / 1000:.1f} MB collector", file=sys.stderr, flush=True)
        time.sleep(max(0.0, every - (time.monotonic() - begin - now)))
    return times, looks, asked


def lines(times: list[float], looks: list[Counter[str]]) -> list[dict[str, object]]:
    """Returns for each quantity the value after a third of the time, the value at the end, the highest value, and the
    slope per hour after the first third.
    """
    first = len(times) // 3
    rows: list[dict[str, object]] = []
    for name in sorted({name for one in looks for name in one}):
        values = np.array([one[name] for one in looks], float)
        slope = np.polyfit(np.array(times[first:]) / 3600, values[first:], 1)[0] if len(times) - first > 2 else 0.0
        rows.append(
            {
                "what": name,
                "after a third": f"{values[first]:,.0f}",
                "at the end": f"{values[-1]:,.0f}",
                "highest": f"{values.max():,.0f}",
                "slope an hour": f"{slope:+,.1f}",
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=1800)
    parser.add_argument("--every", type=float, default=10)
    parser.add_argument("--max-bytes", type=int, default=60 << 20)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="probingd-bench-soak-"))
    folder.chmod(0o755)
    daemon = BenchDaemon()
    daemon.config.write_text(daemon.config.read_text() + CONFIG.format(max_bytes=options.max_bytes))
    calls = int(options.rate * options.seconds)
    caller = [build(folder, SOURCE), str(calls), str(options.rate), str(options.seconds)]
    try:
        with subprocess.Popen(caller, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as job:
            assert job.stdin is not None
            assert job.stdout is not None
            daemon.start()
            job.stdin.write("\n")
            job.stdin.flush()
            with collector_memory(daemon) as memory:
                times, looks, asked = watch(daemon, options.seconds, options.every)
            reached = int(job.stdout.readline())
            time.sleep(2.5)
            found = json.loads(daemon.ctl("-f", "json", "query", QUERIES[0]))[0]
            lost = json.loads(
                daemon.ctl("-f", "json", "query", "SELECT coalesce(sum(count), 0)::BIGINT AS n FROM probing.losses")
            )[0]["n"]
            job.stdin.write("\n")
        span = found["high"] - found["low"] + 1
        print(f"calls for {options.seconds:g} s at {reached:,}/s, {asked} queries, {lost} rows lost")
        print(f"kept: {found['n']:,} rows, calls {found['low']:,} to {found['high']:,}")
        print(f"without a gap, none twice: {found['n'] <= span <= found['n'] + lost}")
        print(table(lines(times, looks)))
        print(memory.verdict)
    finally:
        daemon.close()
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
