"""What is lost while no collector runs on kernels before 5.15: nothing, or a gap that is a row of probing.losses.

The collector does without the newer features; all else is the real daemon.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e_support import Daemon, remove
from long import long
from process_tree import arguments, family
from test_operations import DirectJob, is_replaced, keys, seen
from waiting import until

OLD_KERNEL = ("uprobe_multi", "perf_link", "attach_cookie")
COLLECTOR = """
import os, runpy, sys
os.environ["PROBINGD_WITHOUT"] = {without!r}
del sys.argv[1:3]
runpy.run_module("probing.daemon.collector", run_name="__main__", alter_sys=True)
"""
SUPERVISOR = """
from probing.daemon.cli.main import main
from probing.daemon.supervisor.children import PROGRAMS
PROGRAMS["collector"] = ("-I", "-c", {collector!r}, "-m", "probing.daemon.collector")
main()
"""


class OldDaemon(Daemon):
    """Its collector does without some features of the kernel."""

    without: tuple[str, ...] = ()

    @property
    def argv(self) -> list[str]:
        collector = COLLECTOR.format(without=",".join(self.without))
        return [sys.executable, "-c", SUPERVISOR.format(collector=collector), *super().argv[1:]]


@pytest.fixture
def old_daemon(base: Path) -> Iterator[Callable[..., OldDaemon]]:
    made: list[OldDaemon] = []

    def make(*without: str) -> OldDaemon:
        daemon = OldDaemon(base, "n1", "--probes.force_fallback=true")
        daemon.without = without
        made.append(daemon)
        daemon.start()
        return daemon

    yield make
    for daemon in made:
        remove(daemon)


def collector_of(daemon: Daemon) -> int:
    (pid,) = until(lambda: daemon.children().get("probing.daemon.collector"), what="the collector")
    return pid


def make_rounds_until_one_is_seen(daemon: Daemon, job: DirectJob) -> None:
    """To place the probes takes seconds: each symbol needs a program of its own."""

    def is_seen() -> bool:
        before = keys(job.calls())
        job.do("rounds 1")
        return not keys(job.calls()) - before - keys(seen(daemon, job))

    until(is_seen, 120, what="the probes")


def pins_of(daemon: Daemon, job: DirectJob) -> list[Path]:
    """Those on the library of this job: jobs of others may run here."""
    maps = Path(f"/proc/{job.ranks[0].pid}/maps").read_text().splitlines()
    inode = next(int(line.split()[4]) for line in maps if line.endswith("/libtorch_cpu.so"))
    return sorted(Path(f"/sys/fs/bpf/probingd/{daemon.instance}").rglob(f"link_gloo_*-{inode:x}-*"))


def losses(daemon: Daemon, job: DirectJob) -> list[dict[str, Any]]:
    pids = ", ".join(str(rank.pid) for rank in job.ranks)
    return daemon.rows(f"SELECT * FROM probing.losses WHERE pid IN ({pids}) AND table_name = 'comm.ops' ORDER BY ALL")


def is_zombie(pid: int) -> bool:
    """Whether its last thread has ended, and so has closed the descriptors; its parent is stopped."""
    state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return state == "Z" and [thread.name for thread in Path(f"/proc/{pid}/task").iterdir()] == [str(pid)]


def without_collector(daemon: Daemon, act: Callable[[], object]) -> None:
    """Kill the collector, and let the supervisor start another one only after ``act``."""
    assert daemon.process is not None
    pid = collector_of(daemon)
    daemon.process.send_signal(signal.SIGSTOP)
    try:
        os.kill(pid, signal.SIGKILL)
        until(lambda: is_zombie(pid), what="its end")
        act()
        assert not [p for p in family(daemon.process.pid) if p != pid and "probing.daemon.collector" in arguments(p)]
    finally:
        daemon.process.send_signal(signal.SIGCONT)
    until(lambda: is_replaced(daemon, pid), what="the next collector")


@long
@pytest.mark.timeout(400)
def test_killed_collector_loses_nothing(old_daemon: Any, run_job: Any, tmp_path: Path) -> None:
    daemon = old_daemon(*OLD_KERNEL)
    job = DirectJob(run_job, tmp_path)
    job.expect(b"ready")
    make_rounds_until_one_is_seen(daemon, job)
    pins, known, early = pins_of(daemon, job), losses(daemon, job), keys(job.calls())
    assert pins
    without_collector(daemon, lambda: job.do("rounds 1"))
    job.do("rounds 1")
    expected = keys(job.calls()) - early
    assert expected.total() == 2 * 2 * 2 * (23 + 7 + 5)
    until(lambda: not expected - keys(seen(daemon, job)), what="what was called without a collector and after")
    assert max(keys(seen(daemon, job)).values()) == 1
    assert pins_of(daemon, job) == pins
    assert losses(daemon, job) == known
    daemon.stop()
    assert not Path(f"/sys/fs/bpf/probingd/{daemon.instance}").exists()


@long
@pytest.mark.timeout(400)
def test_where_nothing_pins_the_gap_is_a_row(old_daemon: Any, run_job: Any, tmp_path: Path) -> None:
    daemon = old_daemon(*OLD_KERNEL, "event_map")
    job = DirectJob(run_job, tmp_path)
    job.expect(b"ready")
    make_rounds_until_one_is_seen(daemon, job)
    assert not pins_of(daemon, job)
    early, killed_ns = keys(job.calls()), time.time_ns()
    without_collector(daemon, lambda: job.do("rounds 1"))
    unseen = keys(job.calls()) - early
    make_rounds_until_one_is_seen(daemon, job)
    assert not unseen & keys(seen(daemon, job))
    when = f"epoch_ns(ts_from) <= {killed_ns} AND epoch_ns(ts_to) > {killed_ns}"
    gaps = daemon.rows(f"SELECT pid FROM probing.losses WHERE table_name = 'comm.ops' AND stage = 'attach' AND {when}")
    assert {gap["pid"] for gap in gaps} >= {rank.pid for rank in job.ranks}
