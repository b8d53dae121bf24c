"""Jobs of the doubles of NCCL that hang, fail and are aborted: the findings of the daemon and of `diagnose`."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from double_jobs import SIZE, Job, ready
from doubles.doubles import DoubleJob, Doubles
from doubles.ras_listener import RasListener
from e2e_support import JOBS, Daemon, remove
from long import long
from ports import free_port
from waiting import until

COUNTS = ("Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce")
SYSTEM_ERROR, REMOTE_ERROR = 2, 6
FOREVER = "duration 1000000000000"
Diagnosed = dict[str, Any]


@pytest.fixture(scope="module")
def ras_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def watching(module_base: Path, ras_port: int) -> Iterator[Daemon]:
    """A daemon that takes 2 s without progress for a stall, and asks RAS each second."""
    options = ("--diagnose.stall_s=2", f"--nccl.ras_port={ras_port}", "--nccl.ras_interval_s=1")
    daemon = Daemon(module_base, "n1", *options)
    daemon.start()
    yield daemon
    remove(daemon)


@pytest.fixture(scope="module", autouse=True)
def keeper(doubles: Doubles, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process that maps the library all the time, so that its probes stay between two jobs."""
    job = DoubleJob(doubles, tmp_path_factory.mktemp("keeper"), 1, MASTER_PORT=str(free_port()))
    yield
    job.close()


@pytest.fixture
def job(watching: Daemon, start_job: Callable[..., Job], tmp_path: Path) -> Job:
    """A job of three ranks that has worked together."""
    job = start_job(TORCH_NCCL_DEBUG_INFO_TEMP_FILE=f"{tmp_path}/trace_")
    ready(watching, job)
    job.ranks.do("do 5 all_reduce 7 7")
    job.ranks.do("drain")
    return job


def world(job: Job) -> str:
    return str(next(made["comm"] for made in job.ranks.made() if made["name"] == "world"))


def diagnosed(daemon: Daemon, job: str) -> Diagnosed:
    done = daemon.ctl("-f", "json", "diagnose", "--job", job, check=None)
    assert done.returncode in (0, 3, 4), done.stderr + daemon.tail()
    answer: Diagnosed = json.loads(done.stdout)
    return {**answer, "ranks": ",".join(str(culprit["rank"]) for culprit in answer["culprits"])}


def found(daemon: Daemon, job: str, wanted: Callable[[Diagnosed], bool]) -> Diagnosed:
    """Waits until `diagnose` and the daemon have found the same, and it is ``wanted``; returns it."""
    last: list[Any] = []

    def both() -> Diagnosed | None:
        rows = daemon.rows(
            f"SELECT verdict, ranks, sentence FROM diagnosis.findings WHERE job = '{job}' AND severity = 'error'"
            " QUALIFY ts = max(ts) OVER (PARTITION BY finding_id) AND state = 'open'"
        )
        answer = diagnosed(daemon, job)
        last[:] = [rows, answer]
        same = [(row["verdict"], row["ranks"] or "") for row in rows] == [(answer["verdict"], answer["ranks"])]
        return answer if same and wanted(answer) else None

    return until(both, 90, what=lambda: f"a finding; the last was {last}", poll_s=1)


def with_evidence(daemon: Daemon, job: str, evidence: str) -> Diagnosed:
    """Waits until the evidence of `diagnose` has a text; the daemon itself looks again ever more rarely."""

    def answer() -> Diagnosed | None:
        now = diagnosed(daemon, job)
        return now if evidence in str(now["evidence"]) else None

    return until(answer, what=evidence, poll_s=1)


def is_verdict(name: str) -> Callable[[Diagnosed], bool]:
    return lambda answer: bool(answer["verdict"] == name)


def test_a_hang_in_the_middle(watching: Daemon, job: Job) -> None:
    job.ranks.do("do 1 all_gather 7 7", [0, 1])
    answer = found(watching, job.name, is_verdict("not_joined"))
    assert answer["ranks"] == "2"
    assert answer["culprits"][0]["pid"] == job.ranks.ranks[2].pid
    assert answer["victims"] == [0, 1]
    assert "has destroyed" not in str(answer["evidence"])


def test_a_rank_that_destroys_its_communicator_while_others_are_in_it(watching: Daemon, job: Job) -> None:
    job.ranks.do("destroy world", [2])
    job.ranks.do("do 1 all_gather 7 7", [0, 1])
    assert found(watching, job.name, is_verdict("not_joined"))["ranks"] == "2"
    with_evidence(watching, job.name, "rank 2 has destroyed ")


def test_a_hang_in_the_making_of_a_communicator(
    watching: Daemon, doubles: Doubles, tmp_path: Path, run_job: Callable[..., subprocess.Popen[Any]]
) -> None:
    port = free_port()
    common = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    common |= {"NCCL_DOUBLE_DIR": str(tmp_path), "LD_LIBRARY_PATH": str(doubles.folder)}
    ranks = [
        run_job(
            sys.executable,
            JOBS / "double_ranks.py",
            doubles.nccl,
            tmp_path,
            env={**common, "RANK": str(rank)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    job = f"n1/127.0.0.1:{port}"
    known = f"SELECT 1 FROM process.processes WHERE job = '{job}'"
    until(lambda: len(watching.rows(known)) == 3, what=watching.tail)
    answer = found(watching, job, is_verdict("init_stuck"))
    assert answer["ranks"] == "2"
    assert answer["culprits"][0]["pid"] == ranks[2].pid
    assert answer["victims"] == [0, 1]
    # It comes, and they have their communicator.
    assert ranks[2].stdin is not None
    ranks[2].stdin.write("\n")
    ranks[2].stdin.flush()
    for rank in ranks:
        assert rank.stdout is not None
        assert [rank.stdout.readline() for _ in range(2)] == ["ready\n", "made\n"]
    until(lambda: diagnosed(watching, job)["verdict"] != "init_stuck", what="an end of the finding")


@long
def test_an_asynchronous_error_names_the_rank_that_had_it_first(watching: Daemon, job: Job) -> None:
    job.ranks.do(FOREVER)
    job.ranks.do("do 1 all_reduce 11 7")
    job.ranks.do(f"async {SYSTEM_ERROR}", [1])
    sql = f"SELECT pid FROM comm.communicators WHERE job = '{job.name}' AND async_error = 'ncclSystemError'"
    until(lambda: watching.rows(sql), what="the error")
    job.ranks.do(f"async {REMOTE_ERROR}", [0, 2])
    answer = found(watching, job.name, is_verdict("communicator_error"))
    assert answer["ranks"] == "1"
    assert "ncclSystemError" in answer["sentence"]


@long
def test_an_abort_names_the_rank_that_did_not_join(watching: Daemon, job: Job) -> None:
    job.ranks.do("do 1 all_gather 7 7", [0, 1])
    job.ranks.do("abort world", [0, 1])
    answer = found(watching, job.name, is_verdict("communicator_error"))
    assert answer["ranks"] == "2"


def report(job: Job, launched: list[int]) -> bytes:
    status = {"init_state": 0, "async_error": 0, "finalize_called": False, "destroy_flag": False, "abort_flag": False}
    ranks = [
        {"rank": rank, "host": "127.0.0.1", "pid": job.ranks.ranks[rank].pid, "cuda_dev": rank, "nvml_dev": rank}
        | {"status": status, "collective_counts": {**dict.fromkeys(COUNTS, 0), "AllReduce": 5, "AllGather": count}}
        for rank, count in enumerate(launched)
    ]
    comm = {"hash": f"0x{world(job)}", "secondary_hash": "1:2", "size": SIZE, "ranks": ranks, "missing_ranks": []}
    return json.dumps({"nccl_version": "2.28.9", "communicators": [comm], "ras": {"collection_time_sec": 0.1}}).encode()


@long
@pytest.mark.parametrize(("launched", "says"), [([1, 1, 0], "agrees"), ([1, 1, 1], "contradicts")])
def test_ras_agrees_or_contradicts(watching: Daemon, job: Job, ras_port: int, launched: list[int], says: str) -> None:
    job.ranks.do("do 1 all_gather 7 7", [0, 1])
    alone = found(watching, job.name, is_verdict("not_joined"))
    # RAS answers from now on.
    listener = RasListener(report(job, launched), port=ras_port)
    try:
        answer = with_evidence(watching, job.name, f"NCCL's RAS {says}")
    finally:
        listener.close()
    assert answer["ranks"] == "2"
    assert (answer["confidence"] > alone["confidence"]) == (says == "agrees")
    assert ("contradicts what the probes saw" in str(answer["missing"])) == (says == "contradicts")


def write_dump(path: Path, last: int, state: str) -> None:
    now = time.time_ns()
    entries = [
        {"record_id": seq, "process_group": ("world", "world"), "collective_seq_id": seq, "p2p_seq_id": 0}
        | {"is_p2p": False, "input_sizes": [[7]], "input_dtypes": ["Float"], "time_created_ns": now}
        | {"timeout_ms": 600_000}
        | {"profiling_name": "nccl:all_gather" if seq == 6 else "nccl:all_reduce"}
        | {"state": state if seq == last else "completed"}
        for seq in range(1, last + 1)
    ]
    path.write_bytes(pickle.dumps({"version": "2.10", "entries": entries}, protocol=2))


@long
def test_dumps_of_the_flight_recorder_agree(watching: Daemon, job: Job, tmp_path: Path) -> None:
    job.ranks.do("do 1 all_gather 7 7", [0, 1])
    alone = found(watching, job.name, is_verdict("not_joined"))
    for rank, (last, state) in enumerate([(6, "started"), (6, "started"), (5, "completed")]):
        write_dump(tmp_path / f"trace_{rank}", last, state)
    answer = with_evidence(watching, job.name, "the flight recorder agrees")
    assert answer["ranks"] == "2"
    assert answer["confidence"] > alone["confidence"]
    assert alone["ends"] is None
    assert answer["ends"]["by"] == "NCCL's watchdog (10 min, the default)"


def test_doubles_that_work_are_healthy(watching: Daemon, job: Job) -> None:
    job.ranks.do("style blocking")
    job.ranks.tell("do 2003 all_reduce 7 7")
    assert diagnosed(watching, job.name)["verdict"] == "healthy"
    job.ranks.hear()
    sql = f"SELECT verdict FROM diagnosis.findings WHERE job = '{job.name}' AND severity <> 'note'"
    assert watching.rows(sql) == []
