"""Discovery of real jobs through real readers: torchrun, bare ranks, mp.spawn, loaders, equal jobs."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from long import long
from ports import free_port
from processes_helpers import descendants, listening, start_ns_of, started
from waiting import until

from probing.daemon.clock import SystemClock
from probing.daemon.processes.discovery import Discovery
from probing.daemon.processes.reader_pool import ReaderPool
from probing.daemon.source import Identity, Loss

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = str(ROOT / "examples" / "train_ddp.py")
PROGRAMS = Path(__file__).parents[1] / "processes_programs"
LONG = ("--steps", "1000000", "--delay-ms", "20", "--report-every", "1")


class MemorySink:
    def __init__(self) -> None:
        self.batches: list[pa.RecordBatch] = []

    def put(self, table: str, batch: pa.RecordBatch) -> None:
        self.batches.append(batch)

    def lost(self, loss: Loss) -> None:
        raise AssertionError(loss)

    def events(self) -> list[dict[str, Any]]:
        return [row for batch in list(self.batches) for row in batch.drop_columns(["ts"]).to_pylist()]


class Watch:
    """A discovery with its readers, and what it said of the processes of one test."""

    def __init__(self, discovery: Discovery, sink: MemorySink) -> None:
        self.discovery = discovery
        self.sink = sink

    def below(self, root: int) -> list[Identity]:
        family = {root, *descendants(root)}
        return [who for who in self.discovery.live() if who.pid in family]

    def rows(self, root: int) -> list[dict[str, Any]]:
        family = {root, *descendants(root)}
        rows = self.discovery.rows(SystemClock().pair()).drop_columns(["ts"]).to_pylist()
        return [row for row in rows if row["pid"] in family]

    def trainers(self, root: int, count: int = 2) -> list[Identity]:
        return until(lambda: len(found := [w for w in self.below(root) if w.role == "trainer"]) == count and found)


def torchrun(port: int, *arguments: str) -> list[str]:
    program = str(Path(sys.executable).parent / "torchrun")
    return [program, "--nproc-per-node", "2", "--master-port", str(port), EXAMPLE, *arguments]


@pytest.fixture
def readers(tmp_path: Path) -> Iterator[ReaderPool]:
    with listening(tmp_path / "reader.sock", "probing.daemon.confined.reader") as listener:
        pool = ReaderPool(listener.path)
        yield pool
        pool.close()


@pytest.fixture
def make(readers: ReaderPool) -> Iterator[Callable[..., Watch]]:
    made: list[Discovery] = []

    def start(rescan_s: float = 0.2) -> Watch:
        sink = MemorySink()
        made.append(Discovery(readers, sink, SystemClock(), "n1", rescan_s=rescan_s))
        made[-1].start()
        assert made[-1].scanned(20)
        return Watch(made[-1], sink)

    yield start
    for discovery in made:
        discovery.stop()


def check_torchrun(watch: Watch, root: int, port: int) -> None:
    trainers = watch.trainers(root)
    assert [(w.rank, w.local_rank, w.world_size, w.node_rank) for w in sorted(trainers, key=lambda w: w.rank or 0)] == [
        (0, 0, 2, 0),
        (1, 1, 2, 0),
    ]
    assert {w.job for w in trainers} == {f"n1/127.0.0.1:{port}"}
    assert len({w.run for w in trainers}) == 1

    def in_groups() -> list[dict[str, Any]]:
        seen = watch.rows(root)
        return seen if all("gloo" in row["backends"] for row in seen if row["role"] == "trainer") else []

    rows = until(in_groups)
    assert sorted(row["role"] for row in rows) == ["launcher", "trainer", "trainer"]
    assert [(row["pid"], row["run"]) for row in rows if row["role"] == "launcher"] == [(root, trainers[0].run)]
    # A process that waits for a page of a file is blocked for that moment.
    until(lambda: {row["state"] for row in watch.rows(root)} == {"running"})
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert {row["python"] for row in rows} == {version}


def test_torchrun_started_first(make: Callable[..., Watch]) -> None:
    port = free_port()
    with started(torchrun(port, *LONG), until="step") as job:
        # No event comes and no second scan: the first one must find the job.
        watch = make(rescan_s=3600.0)
        check_torchrun(watch, job.pid, port)


@long
def test_torchrun_started_second(make: Callable[[], Watch]) -> None:
    watch = make()
    port = free_port()
    with started(torchrun(port, *LONG)) as job:
        until(lambda: len([w for w in watch.below(job.pid) if w.role == "trainer"]) == 2, 60)
        check_torchrun(watch, job.pid, port)


@long
def test_equal_jobs_stay_apart(make: Callable[[], Watch]) -> None:
    watch = make()
    ports = free_port(), free_port()
    runs: set[tuple[str, str]] = set()
    with ExitStack() as stack:
        # Two at once, and the first of them again when it has ended.
        jobs = [stack.enter_context(started(torchrun(port, *LONG), until="step")) for port in ports]
        for job in jobs:
            runs |= {(w.job, w.run) for w in watch.trainers(job.pid)}
        assert len(runs) == 2
        jobs[0].send_signal(signal.SIGTERM)
        jobs[0].wait(30)
        again = stack.enter_context(started(torchrun(ports[0], *LONG), until="step"))
        runs |= {(w.job, w.run) for w in watch.trainers(again.pid)}
        assert len(runs) == 3
        assert len({job for job, _ in runs}) == 2


def test_bare_ranks_one_after_the_other(make: Callable[[], Watch]) -> None:
    watch = make()
    port = str(free_port())
    runs = []
    for _ in range(2):
        with ExitStack() as stack:
            environment = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            ranks = [
                stack.enter_context(started([sys.executable, EXAMPLE, *LONG], env={**environment, "RANK": str(rank)}))
                for rank in range(2)
            ]
            who = [watch.trainers(rank.pid, 1)[0] for rank in ranks]
            assert [w.rank for w in who] == [0, 1]
            runs.append({(w.job, w.run) for w in who})
    assert [len(run) for run in runs] == [1, 1]
    assert runs[0] != runs[1]
    assert {job for run in runs for job, _ in run} == {f"n1/127.0.0.1:{port}"}


@long
def test_another_daemon_and_a_restarted_one_agree(make: Callable[[], Watch], readers: ReaderPool) -> None:
    with started(torchrun(free_port(), *LONG), until="step") as job:
        one, other = make(), make()
        names = {(w.job, w.run) for watch in (one, other) for w in watch.trainers(job.pid)}
        assert len(names) == 1
        one.discovery.stop()
        sink = MemorySink()
        again = Discovery(readers, sink, SystemClock(), "n1", rescan_s=0.2)
        assert again.restore(pa.Table.from_batches(one.sink.batches)) >= 3
        again.start()
        try:
            watch = Watch(again, sink)
            assert {(w.job, w.run) for w in watch.trainers(job.pid)} == names
            family = {job.pid, *descendants(job.pid)}
            assert [e for e in sink.events() if e["pid"] in family] == []
        finally:
            again.stop()


def test_data_loaders(make: Callable[[], Watch]) -> None:
    watch = make()
    with started(torchrun(free_port(), *LONG, "--workers", "1"), until="step") as job:
        until(
            lambda: sorted(w.role for w in watch.below(job.pid)) == ["data_loader"] * 2 + ["launcher"] + ["trainer"] * 2
        )
        assert len({(w.job, w.run) for w in watch.below(job.pid)}) == 1
        assert all(w.rank is None for w in watch.below(job.pid) if w.role == "data_loader")


@long
def test_mp_spawn(make: Callable[[], Watch]) -> None:
    watch = make()
    with started([sys.executable, str(PROGRAMS / "spawn.py"), str(free_port())], until="ready") as job:
        trainers = watch.trainers(job.pid)
        assert {w.job for w in trainers} == {f"pid:{job.pid}"}
        # Its resource tracker is a helper.
        roles = until(lambda: "launcher" in (found := [w.role for w in watch.below(job.pid)]) and found)
        assert sorted(roles) in (["launcher", "other", "trainer", "trainer"], ["launcher", "trainer", "trainer"])
        assert len({(w.job, w.run) for w in watch.below(job.pid)}) == 1


def test_states_and_the_end(make: Callable[[], Watch]) -> None:
    watch = make()
    with started(torchrun(free_port(), *LONG), until="step") as job:
        rank = watch.trainers(job.pid)[0]
        os.kill(rank.pid, signal.SIGSTOP)
        until(lambda: [r["state"] for r in watch.rows(job.pid) if r["pid"] == rank.pid] == ["stopped"])
        # The collector's event brings the reason; the scan would see only that it is gone.
        watch.discovery.on_exit(rank.pid, rank.start_ns, time.monotonic_ns(), signal.SIGKILL)
        os.kill(rank.pid, signal.SIGKILL)
        ended = until(lambda: [e for e in watch.sink.events() if e["event"] == "exit" and e["pid"] == rank.pid])
        assert [(e["signal"], e["exit_code"], e["rank"], e["role"]) for e in ended] == [(9, None, rank.rank, "trainer")]
        assert watch.discovery.identity(rank.pid, rank.start_ns) == rank


def test_a_python_that_does_not_train(make: Callable[[], Watch]) -> None:
    watch = make()
    with started(
        [sys.executable, "-c", "print('ready', flush=True); import time; time.sleep(600)"], until="ready"
    ) as p:
        watch.discovery.on_exec(p.pid, start_ns_of(p.pid), time.monotonic_ns())
        # It is looked at before what starts after it.
        with started([sys.executable, str(PROGRAMS / "spawn.py"), str(free_port())], until="ready") as job:
            assert watch.trainers(job.pid)
        assert watch.discovery.identity(p.pid, start_ns_of(p.pid)) is None
        assert watch.below(p.pid) == []


ALICE, BOB = 60021, 60022
NEEDS_ROOT = pytest.mark.skipif(os.getuid() != 0, reason="starts processes of other users")


def bare_rank(watch: Watch, user: int, rank: int, port: int, group: Path | None = None, **environ: str) -> ExitStack:
    """A rank that a user starts without a launcher, as ssh does: in a session of its own."""
    environment = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}

    def enter() -> None:
        os.setsid()
        if group is not None:
            (group / "cgroup.procs").write_text(str(os.getpid()))
        os.setresuid(user, user, user)

    command = [sys.executable, EXAMPLE, *LONG]
    stack = ExitStack()
    job = started(command, env={**environment, "RANK": str(rank), **environ}, preexec_fn=enter)
    process = stack.enter_context(job)
    # A scan in the middle of the exec sees no program: then the event has the process read again.
    watch.discovery.on_exec(process.pid, start_ns_of(process.pid), time.monotonic_ns())
    return stack


@NEEDS_ROOT
def test_ranks_that_one_user_starts_apart_are_one_job_and_another_users_is_another(make: Callable[..., Watch]) -> None:
    watch, port = make(), free_port()
    with bare_rank(watch, ALICE, 0, port), bare_rank(watch, ALICE, 1, port):

        def of(owner: int) -> list[Identity]:
            return [w for w in watch.discovery.live() if w.owner == owner and w.role == "trainer"]

        honest = until(lambda: len(of(ALICE)) == 2 and of(ALICE))
        assert {(w.job, w.rank) for w in honest} == {(f"n1/127.0.0.1:{port}", 0), (f"n1/127.0.0.1:{port}", 1)}
        assert len({w.run for w in honest}) == 1
        with bare_rank(watch, BOB, 1, port):
            (claimed,) = until(lambda: of(BOB))
            assert (claimed.job, claimed.rank) == (f"n1/127.0.0.1:{port} (uid {BOB})", 1)
            assert of(ALICE) == honest


@NEEDS_ROOT
@pytest.mark.skipif(not Path("/sys/fs/cgroup/cpu").is_dir(), reason="needs control groups of the first version")
def test_slurms_jobs_of_two_users_on_one_node(make: Callable[..., Watch]) -> None:
    """The second user's processes say that they are of the first one's job."""
    watch = make()
    root = Path("/sys/fs/cgroup/cpu/slurm")
    groups = [root / f"uid_{user}" / f"job_{number}" for user, number in ((ALICE, 4711), (BOB, 4712))]
    with ExitStack() as stack:
        for group in [root, *(group.parent for group in groups), *groups]:
            group.mkdir()
            stack.callback(
                lambda group=group: until(lambda: not (group / "cgroup.procs").read_text()) and group.rmdir()
            )
        claims = {"SLURM_JOB_ID": "4711", "WORLD_SIZE": "1"}
        second, first = (
            bare_rank(watch, user, 0, free_port(), group, **claims)
            for user, group in zip((BOB, ALICE), groups[::-1], strict=True)
        )
        with second, first:

            def names() -> dict[int, str]:
                return {
                    w.owner: w.job for w in watch.discovery.live() if w.role == "trainer" and w.owner in (ALICE, BOB)
                }

            until(lambda: names() == {ALICE: "4711", BOB: "4712"}, what=names)
