"""Sixteen processes that make 500,000 NCCL calls a second in sum: ``python bench/nccl_ingest.py [--seconds 10]``.

The library is the double of tests/doubles, and only the number of its operations matters here; probes, kernel, daemon
and log are real. Rows in the log plus counted losses equal the calls exactly, also if the collector is stopped for a
second, or the ring is too small.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from running import BenchDaemon, arguments, cpu_ns, family
from statistics_of_blocks import table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from doubles.doubles import DoubleJob, Doubles, build

PATIENCE_S = 120.0


def asked(daemon: BenchDaemon, sql: str) -> int:
    return int(json.loads(daemon.ctl("-f", "json", "query", sql))[0]["n"])


def rows_of(daemon: BenchDaemon, pids: list[int]) -> int:
    return asked(daemon, f"SELECT count(*) AS n FROM comm.ops WHERE pid IN ({', '.join(map(str, pids))})")


def rows_of_others(daemon: BenchDaemon, pids: list[int]) -> int:
    """Returns the number of rows of other processes. They share the ring, so lost records may be theirs."""
    return asked(daemon, f"SELECT count(*) AS n FROM comm.ops WHERE pid NOT IN ({', '.join(map(str, pids))})")


def lost_of(daemon: BenchDaemon) -> int:
    where = "table_name = 'comm.ops' AND stage = 'ring'"
    return asked(daemon, f"SELECT coalesce(sum(count), 0)::BIGINT AS n FROM probing.losses WHERE {where}")


def wait_until_probed(daemon: BenchDaemon, jobs: list[DoubleJob], pids: list[int]) -> None:
    """Waits until the log has calls of every process, including the last call made for this check."""
    deadline = time.monotonic() + PATIENCE_S
    sql = f"SELECT count(DISTINCT pid) AS n FROM comm.ops WHERE pid IN ({', '.join(map(str, pids))})"
    while asked(daemon, sql) < len(pids):
        if time.monotonic() > deadline:
            raise SystemExit("the calls of the job do not come into the log")
        for job in jobs:
            job.do("burst 1 0")
        time.sleep(0.2)
    before = rows_of(daemon, pids)
    for job in jobs:
        job.do("burst 1 0")
    while rows_of(daemon, pids) < before + len(jobs):
        if time.monotonic() > deadline:
            raise SystemExit("the last calls of the job do not come into the log")
        time.sleep(0.2)


def settled(daemon: BenchDaemon, pids: list[int], total: int) -> tuple[int, int]:
    """Returns (rows, losses) once their sum equals the calls, or does not change any more."""
    deadline = time.monotonic() + PATIENCE_S
    last, since = (-1, -1), time.monotonic()
    while time.monotonic() < deadline:
        now = rows_of(daemon, pids), lost_of(daemon)
        if now != last:
            last, since = now, time.monotonic()
        if sum(now) >= total or time.monotonic() - since > 10:
            break
        time.sleep(0.5)
    return last


class Case(NamedTuple):
    """A run. ``rate``: calls/s of all ``processes`` together."""

    rate: int
    seconds: float
    processes: int
    ring_bytes: int
    stall_s: float

    @property
    def each(self) -> int:
        """Calls of a process."""
        return int(self.rate * self.seconds / self.processes)


def stall(pids: list[int], case: Case) -> None:
    """Stops the collector for a while, in the middle of the calls."""
    time.sleep(min(1.0, case.seconds / 3))
    collector = next(pid for pid in pids if "probing.daemon.collector" in arguments(pid))
    os.kill(collector, signal.SIGSTOP)
    time.sleep(case.stall_s)
    os.kill(collector, signal.SIGCONT)


def measure(daemon: BenchDaemon, jobs: list[DoubleJob], case: Case) -> dict[str, object]:
    pids = [job.ranks[0].pid for job in jobs]
    wait_until_probed(daemon, jobs, pids)
    # Calls that were made before all probes were attached do not count, neither their rows nor their losses.
    known, known_lost = rows_of(daemon, pids), lost_of(daemon)
    assert daemon.process is not None
    daemon_pids = family(daemon.process.pid)
    cpu, begin = cpu_ns(daemon_pids), time.monotonic_ns()
    for job in jobs:
        job.tell(f"burst {case.each} {case.rate // case.processes}")
    if case.stall_s:
        stall(daemon_pids, case)
    slowest = max(job.hear()[0] for job in jobs)
    cores = (cpu_ns(daemon_pids) - cpu) / (time.monotonic_ns() - begin)
    calls = case.each * case.processes
    all_rows, all_lost = settled(daemon, pids, known + known_lost + calls)
    rows, lost = all_rows - known, all_lost - known_lost
    return {
        "ring": f"{case.ring_bytes >> 10} KiB",
        "stall of the collector": f"{case.stall_s:g} s",
        "processes": case.processes,
        "calls": f"{calls:,}",
        "calls/s": f"{calls / slowest * 1e9:,.0f}",
        "rows": f"{rows:,}",
        "counted as lost": f"{lost:,}",
        "rows + lost == calls": rows + lost == calls,
        "rows of other jobs": f"{rows_of_others(daemon, pids):,}",
        "daemon, cores": f"{cores:.2f}",
    }


def run(doubles: Doubles, folder: Path, case: Case) -> dict[str, object]:
    daemon = BenchDaemon()
    limits = f"[probes]\nhit_budget = 100000000\nring_bytes = {case.ring_bytes}\n"
    daemon.config.write_text(daemon.config.read_text() + limits)
    folder.mkdir()
    jobs = [DoubleJob(doubles, folder / str(number), 1) for number in range(case.processes)]
    try:
        for job in jobs:
            job.do("init world config")
        daemon.start()
        return measure(daemon, jobs, case)
    finally:
        for job in jobs:
            job.close()
        daemon.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=int, default=500_000)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--processes", type=int, default=16)
    options = parser.parse_args()
    # Not below a folder that only its owner may enter: the daemon's processes open the library.
    folder = Path(tempfile.mkdtemp(prefix="probingd-bench-nccl-"))
    folder.chmod(0o755)
    settings = (options.rate, options.seconds, options.processes)
    cases = [Case(*settings, ring, stall_s) for ring, stall_s in ((16 << 20, 0.0), (16 << 20, 1.0), (64 << 10, 0.0))]
    try:
        (folder / "doubles").mkdir()
        doubles = build(folder / "doubles")
        runs = [run(doubles, folder / str(number), case) for number, case in enumerate(cases)]
    finally:
        shutil.rmtree(folder)
    print(table(runs))


if __name__ == "__main__":
    main()
