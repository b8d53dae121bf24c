"""Values of the host's sources beside psutil's, of real processes read by a real reader."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import psutil
import pytest
from cgroup_support import cpu_group
from fakes import Processes, Sink, rows_of
from processes_helpers import descendants, start_ns_of
from waiting import until

from probing.daemon.clock import SystemClock
from probing.daemon.host.cpu.source import CpuSource, Tasks
from probing.daemon.host.node.source import NodeSource, SpaceSource
from probing.daemon.processes.reader_pool import ReaderPool
from probing.daemon.source import Identity
from probing.daemon.source_state import Totals

# Each line says how long to compute; the answer is what it took, ns. Besides, a thread that only waits.
WORKER = """
import sys, threading, time
threading.Thread(target=threading.Event().wait, daemon=True).start()
print("ready", flush=True)
for line in sys.stdin:
    began = time.thread_time_ns()
    while time.thread_time_ns() - began < int(line):
        pass
    print(time.thread_time_ns() - began, flush=True)
"""
TICK_NS = 10_000_000


class Worker:
    """A process that computes on request, and then waits."""

    def __init__(self, process: subprocess.Popen[str], pid: int) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.pid, self._in, self._out = pid, process.stdin, process.stdout
        self.psutil = psutil.Process(pid)
        self.identity = Identity(pid, start_ns_of(pid), "j", "r", "trainer", 3)

    def compute(self, ns: int) -> int:
        say(self._in, ns)
        took = int(self._out.readline())
        until(self.sleeps, what="the threads to wait")
        return took

    def sleeps(self) -> bool:
        """Whether all threads wait, and none ran between two looks: nothing that is read changes any more."""
        before, after = self._states(), self._states()
        return before == after and all(state == "S" for state, _ in after)

    def _states(self) -> list[tuple[str, str]]:
        """Returns the state of each thread, and what the scheduler counted of it."""
        return [
            ((task / "stat").read_text().rpartition(")")[2].split()[0], (task / "schedstat").read_text())
            for task in sorted(Path(f"/proc/{self.pid}/task").iterdir())
        ]


def say(pipe: IO[str], ns: int) -> None:
    pipe.write(f"{ns}\n")
    pipe.flush()


@contextmanager
def working(*prefix: str) -> Iterator[Worker]:
    command = [*prefix, sys.executable, "-u", "-c", WORKER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            made = Worker(process, max(descendants(process.pid), default=process.pid) if prefix else process.pid)
            until(made.sleeps, what="the threads to wait")
            yield made
        finally:
            process.kill()


@pytest.fixture
def worker() -> Iterator[Worker]:
    with working() as made:
        yield made


class Looks:
    def __init__(self, readers: ReaderPool, worker: Worker) -> None:
        self.rows = Sink()
        self.common: tuple[Any, ...] = (readers, Processes(worker.identity), self.rows, SystemClock(), "n1")
        self.cpu, self.node = CpuSource(*self.common, 1.0), NodeSource(*self.common, 5.0)

    def look(self) -> dict[int | None, dict[str, Any]]:
        """The rows of cpu.utilization of the process (key None) and of its threads."""
        until(self._ticks, what="an answer of a reader")
        rows = [row for row in self.rows.take("cpu.utilization") if row["job"] == "j"]
        return {row["tid"]: row for row in rows}

    def _ticks(self) -> bool:
        # A machine that is very busy needs longer for a reader than the source gives it.
        self.cpu.tick()
        return not self.cpu.states(Totals("running", {}, {}))[0].reason


def test_cpu_of_a_process_is_what_psutil_says(readers: ReaderPool, worker: Worker) -> None:
    looks, seen = Looks(readers, worker), worker.psutil
    looks.look()
    looks.look()
    before = seen.num_ctx_switches()
    took = worker.compute(230_000_000)
    rows = looks.look()
    process, main = rows[None], rows[worker.pid]
    times, switches = seen.cpu_times(), seen.num_ctx_switches()
    assert process["cum_user_ns"] == round(times.user * 1e9)
    assert process["cum_sys_ns"] == round(times.system * 1e9)
    assert abs(process["delta_total_ns"] - took) <= 3 * TICK_NS
    assert took <= main["delta_total_ns"] <= took + 3 * TICK_NS
    assert process["rss_kb"] == pytest.approx(seen.memory_info().rss // 1024, abs=512)
    assert (process["thread_count"], process["comm"]) == (seen.num_threads(), seen.name())
    assert process["delta_vol_ctxt"] == switches.voluntary - before.voluntary
    assert process["delta_invol_ctxt"] == switches.involuntary - before.involuntary
    assert process["state"] == "sleeping"
    cpus = sorted(seen.cpu_affinity())
    assert process["cpu_list"].replace("-", ",").split(",")[0] == str(cpus[0])
    assert process["processor"] in cpus


def test_waits_for_a_cpu_are_counted(readers: ReaderPool, worker: Worker) -> None:
    looks = Looks(readers, worker)
    cpu = min(os.sched_getaffinity(0))
    os.sched_setaffinity(worker.pid, {cpu})
    with working() as rival:
        os.sched_setaffinity(rival.pid, {cpu})
        looks.look()
        say(rival._in, 60_000_000_000)
        worker.compute(190_000_000)
        rows = looks.look()
    # The two share a CPU: each waits while the other one runs.
    assert rows[None]["run_delay_ns"] > 20_000_000
    assert rows[worker.pid]["run_delay_ns"] > 20_000_000
    assert rows[None]["cpu_list"] == str(cpu)


def test_a_process_in_another_pid_namespace_has_the_pid_of_the_host(readers: ReaderPool) -> None:
    with working("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child") as worker:
        looks = Looks(readers, worker)
        looks.look()
        took = worker.compute(110_000_000)
        rows = looks.look()
        assert rows[None]["pid"] == worker.pid
        assert took <= rows[worker.pid]["delta_total_ns"] <= took + 3 * TICK_NS


def test_a_process_that_ends_between_two_looks_has_no_row(readers: ReaderPool, worker: Worker) -> None:
    looks = Looks(readers, worker)
    looks.look()
    assert None in looks.look()
    worker.psutil.kill()
    worker.psutil.wait(10)
    assert looks.look() == {}


def test_a_quota_shows_as_throttling(readers: ReaderPool, worker: Worker) -> None:
    looks = Looks(readers, worker)
    with cpu_group(f"probing-host-{worker.pid}", 0.2) as group:
        (group / "cgroup.procs").write_text(str(worker.pid))
        try:
            looks.look()
            worker.compute(130_000_000)
            row = looks.look()[None]
        finally:
            (group.parent / "cgroup.procs").write_text(str(worker.pid))
    assert row["cpu_quota"] == 0.2
    assert row["throttled_periods"] >= 3
    assert row["throttled_ns"] > 100_000_000


def test_tasks_are_the_threads_that_psutil_finds(readers: ReaderPool, worker: Worker) -> None:
    tasks = Tasks(readers, Processes(worker.identity), "n1", apart_s=0)
    rows = rows_of(tasks.batch(SystemClock().pair()))
    assert sorted(row["tid"] for row in rows) == sorted(thread.id for thread in worker.psutil.threads())
    assert {row["state"] for row in rows} == {"sleeping"}
    assert all(row["wchan"] and row["delta_total_ns"] == 0 for row in rows)


def test_memory_and_disks_are_what_psutil_says(readers: ReaderPool, worker: Worker) -> None:
    looks = Looks(readers, worker)
    before = psutil.disk_io_counters(perdisk=True)
    found = json.loads(readers.call("node", targets=[list(worker.identity.key)]).payload)
    after = psutil.disk_io_counters(perdisk=True)
    assert found["memory"]["total_bytes"] == psutil.virtual_memory().total
    assert found["memory"]["swap_total_bytes"] == psutil.swap_memory().total
    assert found["disks"]
    for name, disk in found["disks"].items():
        assert before[name].read_count <= disk["reads"] <= after[name].read_count
        assert before[name].write_bytes <= disk["write_sectors"] * 512 <= after[name].write_bytes
    io = worker.psutil.io_counters()
    mine = found["processes"][0]["io"]
    assert (mine["rchar"], mine["syscw"], mine["write_bytes"]) == (io.read_chars, io.write_count, io.write_bytes)
    looks.node.tick()
    node = next(row for row in looks.rows.take("host.memory") if row["scope"] == "node")
    assert node["used_bytes"] == node["total_bytes"] - node["available_bytes"]


def test_the_space_of_file_systems_is_that_of_df(readers: ReaderPool, worker: Worker) -> None:
    looks = Looks(readers, worker)
    SpaceSource(*looks.common, 30.0).tick()
    rows = {row["mount_point"]: row for row in looks.rows.take("host.file_systems")}
    assert rows["/"]["size_bytes"] == shutil.disk_usage("/").total
    assert rows["/"]["answers"] is True
    shared = os.statvfs("/dev/shm")
    assert rows["/dev/shm"]["size_bytes"] == shared.f_blocks * shared.f_frsize
