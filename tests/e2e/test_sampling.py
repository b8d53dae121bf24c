"""Samples of Python stacks from a running daemon: always on, switched by job, kept by a restart, seen as profiles."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e_support import JOBS, Daemon, end_process, start_process
from long import long
from ports import free_port
from waiting import until

Launch = Callable[..., Any]
SCRIPT = JOBS / "known_work.py"
BURST = """
import os, sys, time
def late():
    end = time.process_time() + 2.4
    while time.process_time() < end:
        pass
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
space = {"late": late}
exec(compile("def only_now():\\n\\n    late()\\n\\nonly_now()\\n", "/made/up.py", "exec"), space)
os._exit(0)
"""


def rank_env(rank: int, port: int, size: int = 2) -> dict[str, str]:
    env = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    return env | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


Working = tuple[str, list[subprocess.Popen[Any]]]


@pytest.fixture(scope="module")
def working(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Working]:
    """The name of a job of two ranks that work, each on a CPU, until the last of these tests ends, and the ranks."""
    job, ranks = start(start_process, tmp_path_factory.mktemp("working"))
    yield job, ranks
    for rank in ranks:
        end_process(rank)


def start(run_job: Launch, tmp_path: Path, *prefix: str) -> Working:
    """The name of a job of two ranks, and their processes."""
    port = free_port()
    ranks = []
    for rank in range(2):
        flag = tmp_path / f"{port}.{rank}"
        ranks.append(run_job(*prefix, sys.executable, SCRIPT, flag, env=rank_env(rank, port)))
        until(flag.exists, what=f"rank {rank} to work")
    return f"n1/127.0.0.1:{port}", ranks


def functions(daemon: Daemon, job: str, where: str = "on_cpu") -> set[tuple[int, tuple[str, ...]]]:
    """(rank, functions innermost first) of the stacks that were sampled."""
    rows = daemon.rows(
        f"SELECT DISTINCT rank, frames FROM python.samples JOIN python.stacks USING (stack_id) "
        f"WHERE job = '{job}' AND {where}"
    )
    return {(r["rank"], tuple(f["func"] for f in r["frames"])) for r in rows}


def last_ns(daemon: Daemon, job: str) -> int:
    rows = daemon.rows(f"SELECT coalesce(max(epoch_ns(ts)), 0) AS t FROM python.samples WHERE job = '{job}'")
    return int(rows[0]["t"])


WORK = ("spin", "work", "main", "<module>")


def test_what_ranks_do_is_sampled(daemon: Daemon, working: Working) -> None:
    job, ranks = working
    until(lambda: {(0, WORK), (1, WORK)} <= functions(daemon, job), what="samples of both ranks")
    resting = until(
        lambda: [s for s in functions(daemon, job, "NOT on_cpu") if "rest" in s[1]], what="the thread that rests"
    )
    assert {s[1][0] for s in resting} == {"rest"}
    source = SCRIPT.read_text().splitlines()
    (frames,) = {
        json.dumps(r["frames"])
        for r in daemon.rows(
            f"SELECT frames[2:] AS frames FROM python.samples JOIN python.stacks USING (stack_id) "
            f"WHERE job = '{job}' AND on_cpu AND frames[1].func = 'spin'"
        )
    }
    for frame in json.loads(frames):
        assert frame["file"] == str(SCRIPT)
        called = {"work": "spin(", "main": "work()", "<module>": "main()"}[frame["func"]]
        assert called in source[frame["lineno"] - 1]
    (row,) = daemon.rows(
        f"SELECT count(*) AS n, bool_and(gil) AS gil, min(count) AS least, "
        f"max(abs(duration_ns - count * 1000000000 // 19)) AS off "
        f"FROM python.samples WHERE job = '{job}' AND on_cpu AND rank = 0 AND tid = {ranks[0].pid}"
    )
    assert row["n"] > 0
    assert row["gil"]
    assert row["least"] >= 1
    assert row["off"] <= row["n"]
    # A thread cannot sleep for longer than it is there. Its waits for the interpreter lock, before, are weighted.
    asleep = next(n for n, text in enumerate(source, 1) if "time.sleep(9999)" in text)
    (row,) = daemon.rows(
        f"SELECT sum(duration_ns) AS off_ns, epoch_ns(now()) - min(epoch_ns(ts)) AS lived_ns "
        f"FROM python.samples JOIN (SELECT DISTINCT ON (stack_id) stack_id, frames FROM python.stacks) "
        f"USING (stack_id) WHERE job = '{job}' AND rank = 0 AND NOT on_cpu "
        f"AND frames[1].func = 'rest' AND frames[1].lineno = {asleep}"
    )
    assert 0 < row["off_ns"] <= 1.03 * row["lived_ns"]


@long
def test_sampling_is_switched_by_job_and_process(
    daemon: Daemon, run_job: Launch, working: Working, tmp_path: Path
) -> None:
    one, ranks = start(run_job, tmp_path)
    other, _ = working
    until(lambda: functions(daemon, one) and functions(daemon, other), what="samples of both jobs")
    for key in ("sampling.hz=0", "sampling.off_cpu=false"):
        daemon.ctl("config", key, "--job", one)
    # What was on its way is stored once the other job has new samples.
    behind = last_ns(daemon, other)
    until(lambda: last_ns(daemon, other) > behind, what="newer samples of the other job")
    stopped = last_ns(daemon, one)
    behind = last_ns(daemon, other)
    until(lambda: last_ns(daemon, other) > behind + 2_000_000_000, what="newer samples of the other job")
    assert last_ns(daemon, one) == stopped
    daemon.ctl("config", "sampling.hz=99", "--pid", str(ranks[1].pid), "--for", "10m")
    fast = f"SELECT count(*) AS n FROM python.samples WHERE job = '{one}' AND epoch_ns(ts) > {stopped} AND rank = 1"
    until(lambda: daemon.rows(fast)[0]["n"], what="samples of that process")
    (row,) = daemon.rows(
        f"SELECT max(abs(duration_ns - count * 1000000000 // 99)) AS off, count(DISTINCT rank) AS ranks "
        f"FROM python.samples WHERE job = '{one}' AND epoch_ns(ts) > {stopped} AND on_cpu"
    )
    assert row["ranks"] == 1
    assert row["off"] <= 99
    settings = {(s["key"], s["job"], s["pid"]): s["value"] for s in daemon.json("config")}
    assert settings["sampling.hz", one, None] == "0"
    assert settings["sampling.hz", None, ranks[1].pid] == "99"
    daemon.ctl("config", "sampling.hz", "--reset", "--job", one)
    until(
        lambda: (
            last_ns(daemon, one) > 0
            and daemon.rows(
                f"SELECT 1 AS one FROM python.samples WHERE job = '{one}' AND rank = 0"
                f" AND epoch_ns(ts) > {stopped} LIMIT 1"
            )
        ),
        what="samples of rank 0 again",
    )
    daemon.ctl("config", "sampling.hz", "--reset", "--pid", str(ranks[1].pid))
    daemon.ctl("config", "sampling.off_cpu", "--reset", "--job", one)


@long
def test_a_killed_collector_goes_on_sampling(own_daemon: Daemon, run_job: Launch, tmp_path: Path) -> None:
    """Its own daemon: its collector is killed."""
    job, _ = start(run_job, tmp_path)
    until(lambda: functions(own_daemon, job), what="samples")
    (collector,) = own_daemon.children()["probing.daemon.collector"]
    os.kill(collector, signal.SIGKILL)
    name = "probing.daemon.collector"
    until(lambda: own_daemon.children().get(name, [collector]) != [collector], what="another collector")
    until(lambda: own_daemon.json("status")["state"] == "running", what="the daemon to run")
    before = last_ns(own_daemon, job)
    until(lambda: last_ns(own_daemon, job) > before, what="samples again")
    assert all("?" not in stack for _, stack in functions(own_daemon, job))


@long
def test_one_that_ends_at_once_keeps_its_samples(daemon: Daemon, run_job: Launch, tmp_path: Path) -> None:
    port = free_port()
    flag = tmp_path / "go"
    job = run_job(sys.executable, "-c", BURST, flag, env=rank_env(0, port, 1))
    sampled = f"SELECT 1 AS one FROM python.samples WHERE pid = {job.pid} LIMIT 1"
    until(lambda: daemon.rows(sampled), what="the process to be sampled")
    flag.touch()
    assert job.wait(30) == 0
    stack = ("late", "only_now", "<module>", "<module>")
    until(lambda: (0, stack) in functions(daemon, f"n1/127.0.0.1:{port}"), what="its last stack")
    (row,) = daemon.rows(
        f"SELECT max(frames[2].lineno) AS line, any_value(frames[2].file) AS file, sum(count) AS n FROM python.samples "
        f"JOIN python.stacks USING (stack_id) WHERE pid = {job.pid} AND frames[2].func = 'only_now' AND on_cpu"
    )
    assert (row["line"], row["file"]) == (3, "/made/up.py")
    # 2.4 s of CPU time at 19 Hz are 46 samples; on a busy machine chance decides which ticks find it on the CPU.
    assert 30 <= row["n"] <= 62


@long
def test_one_in_other_namespaces(daemon: Daemon, run_job: Launch, tmp_path: Path) -> None:
    """A process with mounts and pids of its own, as in a container, is no other than one without."""
    job, ranks = start(run_job, tmp_path, "unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
    until(lambda: {(0, WORK), (1, WORK)} <= functions(daemon, job), what="samples of both ranks")
    threads = daemon.json("stacks", "--job", job)
    mains = [t for t in threads if t["tid"] == t["pid"]]
    assert {t["frames"][-1]["func"] for t in mains} == {"<module>"}
    assert {t["pid"] for t in threads}.isdisjoint({r.pid for r in ranks})


def test_profiles(daemon: Daemon, working: Working, tmp_path: Path) -> None:
    job, _ = working
    until(lambda: {(0, WORK), (1, WORK)} <= functions(daemon, job), what="samples of both ranks")
    folded = daemon.ctl("profile", "--job", job, "--rank", "1", "-F", "folded").stdout.splitlines()
    assert folded
    assert all("main" in line and int(line.rpartition(" ")[2]) > 0 for line in folded)
    live = daemon.ctl("profile", "--job", job, "--seconds", "2", "-F", "folded").stdout
    assert "spin" in live
    # The rate was that of the profile only.
    assert {s["value"] for s in daemon.json("config", "sampling.hz")} == {"19"}
    for form, name in (("speedscope", "p.json"), ("svg", "p.svg"), ("pprof", "p.pb.gz")):
        daemon.ctl("profile", "--job", job, "--wall", "-F", form, "-o", str(tmp_path / name))
    assert json.loads((tmp_path / "p.json").read_text())["profiles"]
    assert (tmp_path / "p.svg").read_text().startswith(("<svg", "<?xml"))
    assert gzip.decompress((tmp_path / "p.pb.gz").read_bytes())


def test_watched_variables_become_rows(daemon: Daemon, working: Working) -> None:
    job, ranks = working
    until(lambda: len([r for r in daemon.json("ps") if r["job"] == job]) == 2, what="the ranks to be known")
    found = daemon.json("vars", "--job", job, "state.step", "state.loss", "api_token", "no_such_name")
    by_name = {(v["rank"], v["name"]): v for v in found}
    assert len(by_name) == 8
    for rank in (0, 1):
        assert by_name[rank, "state.step"]["number"] >= 0
        assert by_name[rank, "api_token"]["value"] == "<redacted>"
        assert by_name[rank, "no_such_name"]["value"] is None
        assert by_name[rank, "no_such_name"]["reason"]
    daemon.ctl("vars", "--job", job, "state.step", "state.loss", "--watch", "--interval", "200ms")
    metrics = f"SELECT rank, step, loss FROM python.training_metrics WHERE job = '{job}' ORDER BY ts"
    rows = until(
        lambda: (r := daemon.rows(metrics)) and {0, 1} <= {m["rank"] for m in r} and r, what="steps of both ranks"
    )
    for rank in (0, 1):
        steps = [r["step"] for r in rows if r["rank"] == rank]
        assert steps == sorted(set(steps))
    # The two are not read in one instant: the loss is that of this step, or of one beside it.
    for row in rows:
        near = [8.0 / (1 + step) for step in (row["step"] - 1, row["step"], row["step"] + 1) if step >= 0]
        assert min(abs(row["loss"] - n) for n in near) < 1e-9
    names = f"SELECT DISTINCT name FROM python.variables WHERE job = '{job}' ORDER BY name"
    assert [r["name"] for r in daemon.rows(names)] == ["state.loss", "state.step"]
    daemon.ctl("vars", "--job", job, "--unwatch")
    assert not [s for s in daemon.json("config", "variables.watch") if s["job"] == job and s["value"]]
    assert "TracerPid:\t0" in Path(f"/proc/{ranks[0].pid}/status").read_text()


def test_reading_moves_nothing(daemon: Daemon, run_job: Launch, tmp_path: Path) -> None:
    """A process that waits is read a hundred times, and has not been on a CPU, stopped or traced for it."""
    flag = tmp_path / "flag"
    code = "import sys, time\nopen(sys.argv[1], 'w').close()\ntime.sleep(9999)\n"
    job = run_job(sys.executable, "-c", code, flag, env=rank_env(0, free_port(), 1))
    until(lambda: flag.exists() and state_of(job) == "S", what="the process to sleep")
    until(lambda: [r for r in daemon.json("ps") if r["pid"] == job.pid], what="the process to be known")
    daemon.ctl("stacks", str(job.pid), "--native", "--locals")
    before = switches(job)
    for _ in range(30):
        daemon.ctl("stacks", str(job.pid))
    for _ in range(5):
        daemon.ctl("stacks", str(job.pid), "--native", "--locals")
        daemon.ctl("vars", str(job.pid), "sys")
    assert switches(job) == before
    assert state_of(job) == "S"


def state_of(job: subprocess.Popen[Any]) -> str:
    return Path(f"/proc/{job.pid}/stat").read_text().rpartition(")")[2].split()[0]


def switches(job: subprocess.Popen[Any]) -> list[str]:
    """How often it left a CPU, by itself or not; how often it was put on one; and who traces it."""
    status = Path(f"/proc/{job.pid}/status").read_text().splitlines()
    kept = [line for line in status if "ctxt_switches" in line or line.startswith("TracerPid")]
    assert "TracerPid:\t0" in kept
    return [*kept, *Path(f"/proc/{job.pid}/schedstat").read_text().split()[2:]]
