"""`comm.ops` equals what the job itself wrote down: attached early, late, and through kills of the collector."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e_support import JOBS, Daemon, end_process, is_replaced, start_process
from long import long
from ports import free_port
from waiting import until, whole_lines

FIELDS = ("rank", "comm", "seq", "op", "bytes", "dtype", "async_op")
Key = tuple[Any, ...]
KILLS = 23


class DirectJob:
    """Two ranks of tests/jobs/direct_calls.py, with commands on their standard input."""

    def __init__(
        self, run_job: Callable[..., subprocess.Popen[bytes]], folder: Path, python_path: Path | None = None
    ) -> None:
        port = str(free_port())
        self.job = f"n1/127.0.0.1:{port}"
        self.lists = [folder / f"{port}-{rank}.jsonl" for rank in range(2)]
        self.ranks = []
        self._left_out = [0, 0]
        for rank, path in enumerate(self.lists):
            env = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "PYTHONUNBUFFERED": "1"}
            if python_path is not None:
                env["PYTHONPATH"] = str(python_path)
            self.ranks.append(
                run_job(
                    sys.executable,
                    JOBS / "direct_calls.py",
                    path,
                    env=env,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                )
            )

    def expect(self, word: bytes) -> None:
        for rank in self.ranks:
            assert rank.stdout is not None
            assert rank.stdout.readline().strip() == word

    def tell(self, command: str, ranks: Iterator[int] | tuple[int, ...] = (0, 1)) -> None:
        for rank in ranks:
            stdin = self.ranks[rank].stdin
            assert stdin is not None
            stdin.write(command.encode() + b"\n")
            stdin.flush()

    def do(self, command: str) -> None:
        self.tell(command)
        self.expect(b"done")

    def quit(self) -> None:
        self.tell("quit")
        for rank in self.ranks:
            assert rank.wait(60) == 0

    def leave_out(self) -> None:
        """Leaves out of ``calls`` what was called until now."""
        self._left_out = [len(whole_lines(path)) for path in self.lists]

    def calls(self) -> list[dict[str, Any]]:
        """What the job wrote down so far; a line that is being written is left out."""
        lists = zip(self.lists, self._left_out, strict=True)
        return [json.loads(line) for path, left_out in lists for line in whole_lines(path)[left_out:]]

    def written(self) -> int:
        return sum(path.read_bytes().count(b"\n") for path in self.lists)


def keys(rows: list[dict[str, Any]]) -> Counter[Key]:
    return Counter(tuple(row[f] for f in FIELDS) for row in rows)


def seen(daemon: Daemon, job: DirectJob, condition: str = "true") -> list[dict[str, Any]]:
    return daemon.rows(
        f"SELECT {', '.join(FIELDS)} FROM comm.ops WHERE job = '{job.job}' AND state = 'done' AND {condition}"
    )


def assert_equal(daemon: Daemon, job: DirectJob, calls: list[dict[str, Any]]) -> None:
    expected = keys(calls)
    until(lambda: len(seen(daemon, job)) >= len(calls), what="as many operations as the job made")
    found = keys(seen(daemon, job))
    assert found - expected == Counter()
    assert expected - found == Counter()
    order = "t_call <= t_start AND t_start <= t_done_lo AND t_done_lo <= t_done_hi"
    assert len(seen(daemon, job, order)) == len(calls)


def test_daemon_first(daemon: Daemon, run_job: Any, tmp_path: Path) -> None:
    job = DirectJob(run_job, tmp_path)
    job.expect(b"ready")
    job.do("rounds 3")
    calls = job.calls()
    assert len(calls) == 3 * 2 * 2 * (23 + 7 + 5)
    assert_equal(daemon, job, calls)
    job.quit()
    assert_equal(daemon, job, calls)


@long
def test_daemon_during_start_up(make_daemon: Callable[..., Daemon], run_job: Any, tmp_path: Path) -> None:
    daemon = make_daemon()
    daemon.spawn()
    job = DirectJob(run_job, tmp_path)
    daemon.wait_ready()
    job.expect(b"ready")
    job.do("rounds 3")
    assert_equal(daemon, job, job.calls())


@long
def test_daemon_in_the_middle(make_daemon: Callable[..., Daemon], run_job: Any, tmp_path: Path) -> None:
    job = DirectJob(run_job, tmp_path)
    job.expect(b"ready")
    job.do("rounds 1")
    before = len(job.calls())
    daemon = make_daemon().start()
    job.do("rounds 3")
    calls = job.calls()
    later = [c for path in job.lists for c in map(json.loads, path.read_text().splitlines()[before // 2 :])]
    assert len(calls) == before + len(later)
    # What lay before is not claimed, and the gap is reported.
    assert_equal(daemon, job, later)
    gaps = daemon.rows("SELECT pid, source, stage FROM probing.losses WHERE table_name = 'comm.ops'")
    assert {r.pid for r in job.ranks} & {g["pid"] for g in gaps}


@pytest.fixture
def copied_torch() -> Iterator[Path]:
    """A torch at a place that no daemon has seen, with an own libtorch_cpu.so."""
    # Not imported: a test that maps torch looks to the daemon like what starts the jobs.
    found = importlib.util.find_spec("torch")
    assert found is not None
    assert found.origin is not None
    source = Path(found.origin).parent
    target = Path(f"/var/tmp/probingd-torch-{os.getpid()}")
    shutil.copytree(source, target / "torch", ignore=shutil.ignore_patterns("include", "test", "*.a"))
    yield target
    shutil.rmtree(target)


@long
@pytest.mark.parametrize("early", [True, False])
def test_a_torch_never_seen_before(
    make_daemon: Callable[..., Daemon], run_job: Any, tmp_path: Path, copied_torch: Path, early: bool
) -> None:
    daemon = make_daemon()
    if early:
        daemon.start()
    job = DirectJob(run_job, tmp_path, copied_torch)
    job.expect(b"ready")
    assert str(copied_torch) in Path(f"/proc/{job.ranks[0].pid}/maps").read_text()
    if not early:
        daemon.start()
    job.do("rounds 3")
    assert_equal(daemon, job, job.calls())


@long
@pytest.mark.timeout(400)
def test_kills_of_the_collector(own_daemon: Daemon, run_job: Any, tmp_path: Path) -> None:
    """Under load that never pauses, with operations in flight at each kill, of the test's own daemon."""
    chooser = random.Random(23)
    job = DirectJob(run_job, tmp_path)
    job.expect(b"ready")
    job.tell("stream")
    written, verified = 0, 0
    for _ in range(KILLS):
        # A kill comes at a random point of the load, counted in calls of the job.
        goal = written + chooser.randrange(50, 500)
        until(lambda goal=goal: job.written() > goal, what="calls of the job")
        (pid,) = until(lambda: own_daemon.children().get("probing.daemon.collector"), what="the collector")
        os.kill(pid, signal.SIGKILL)
        until(lambda pid=pid: is_replaced(own_daemon, pid), what="the next collector")
        written = job.written()
        # All that was called by now is there once, when it is done. What earlier rounds saw is not looked at again.
        calls = [c for c in job.calls() if c["seq"] > verified]
        expected, condition = keys(calls), f"seq > {verified}"
        until(lambda e=expected, c=condition: not e - keys(seen(own_daemon, job, c)), what="what was in flight")
        assert max(keys(seen(own_daemon, job, condition)).values()) == 1
        verified = min(max(c["seq"] for c in calls if (c["rank"], c["comm"]) == key) for key in places(calls))
    # Any line ends the stream, and is then a command of its own that does nothing.
    job.do("stop")
    job.expect(b"done")
    assert_equal(own_daemon, job, job.calls())


def places(calls: list[dict[str, Any]]) -> set[tuple[int, str]]:
    return {(c["rank"], c["comm"]) for c in calls}


@long
def test_a_stalled_operation_is_in_flight(daemon: Daemon, run_job: Any, tmp_path: Path) -> None:
    job = DirectJob(run_job, tmp_path)
    job.expect(b"ready")
    job.do("rounds 1")
    job.do("stall")
    (row,) = until(
        lambda: daemon.rows(f"SELECT rank, op, state, age_ns, seq FROM comm.inflight WHERE job = '{job.job}'"),
        what="the stalled call",
    )
    assert (row["rank"], row["op"], row["state"]) == (0, "all_reduce", "started")
    assert row["age_ns"] > 0
    assert row["seq"] == json.loads(job.lists[0].read_text().splitlines()[-1])["seq"]
    job.ranks[0].kill()
    abandoned = f"SELECT rank, op FROM comm.ops WHERE job = '{job.job}' AND state = 'abandoned'"
    assert until(lambda: daemon.rows(abandoned), what="the end of the call") == [{"rank": 0, "op": "all_reduce"}]


@pytest.fixture(scope="module")
def waiting_job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DirectJob]:
    """A job that waits for commands, for all tests whose daemon comes later."""
    job = DirectJob(start_process, tmp_path_factory.mktemp("job"))
    job.expect(b"ready")
    yield job
    for rank in job.ranks:
        end_process(rank)


@long
def test_without_uprobe_multi(make_daemon: Callable[..., Daemon], waiting_job: DirectJob) -> None:
    """The road of kernels before 6.6: the collector has CAP_SYS_ADMIN there, and perf events carry the probes."""
    daemon, job = make_daemon("n1", "--probes.force_fallback=true").start(), waiting_job
    job.leave_out()
    job.do("rounds 1")
    assert_equal(daemon, job, job.calls())


def test_a_recording_replays_to_the_same_rows(
    make_daemon: Callable[..., Daemon], waiting_job: DirectJob, base: Path
) -> None:
    from probing.daemon.collector.recordings import replayed

    folder = base / "recordings"
    folder.mkdir()
    folder.chmod(0o777)
    daemon, job = make_daemon("n1", f"--probes.recordings={folder}").start(), waiting_job
    job.leave_out()
    job.do("rounds 1")
    assert_equal(daemon, job, job.calls())
    pids = {rank.pid for rank in job.ranks}
    (path,) = folder.iterdir()
    columns = ["pid", "comm_rank", *FIELDS[1:]]
    operations = [batch.select(columns) for table, batch in replayed(path) if table == "comm.ops"]
    rows = [row for batch in operations for row in batch.to_pylist()]
    # A recording has no identities, so the ranks are distinguished by their place in the group.
    found = Counter((r["comm_rank"], *(r[f] for f in FIELDS[1:])) for r in rows if r["pid"] in pids)
    assert found == keys(job.calls())
