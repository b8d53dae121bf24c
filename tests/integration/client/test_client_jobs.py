"""``--job`` names a job by its name, the end of it, a Slurm id, a run or a pid, in every command alike."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from client_fake_node import FakeNode, operation, process, sample, stack, thread, variable

from probing.api.proto.probing.v1 import node_pb2 as pb

Run = Callable[..., tuple[int, str, str]]
LOCAL, SLURM = "alpha/127.0.0.1:29507", "4711.0"


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNode]:
    def known(rank: int, job: str, run: str) -> dict[str, object]:
        return process("alpha", rank, 1000 + rank, job=job, run=run)

    ended = {"node": "alpha", "ts": 1, "job": "ended/job", "run": "r7", "pid": 2003, "start_ns": 1, "event": "exit"}
    tables = {
        "process.processes": [
            known(0, LOCAL, "r1"),
            known(1, SLURM, "r2"),
            known(2, "other.0", "r3"),
            known(3, "12.0", "r4"),
            known(4, "12.1", "r5"),
        ],
        "process.events": [ended],
        "comm.ops": [operation("alpha", 0, 1, job=LOCAL), operation("alpha", 1, 1, job=SLURM, run="r2")],
        "python.samples": [sample("alpha", 0, 1, 7, job=LOCAL)],
        "python.stacks": [stack("alpha", 1, ("step", "/t.py", 3))],
        "process.logs": [{"node": "alpha", "job": LOCAL, "ts": operation("alpha", 0, 1)["ts"], "line": "loss nan"}],
    }
    node = FakeNode(tmp_path, "alpha", tables)
    node.jobs = {LOCAL, SLURM}
    node.threads = [thread(0, 1000, 1000, "MainThread", ("step", "/t.py", 3))]
    node.threads[0].job = LOCAL
    value = variable(0, "loss", "float", "1.5")
    value.job = LOCAL
    node.values = [value]
    monkeypatch.setenv("PROBING_TARGET", node.address)
    yield node
    node.stop()


def _ranks(ctl: Run, text: str) -> list[int]:
    code, out, err = ctl("ps", "-f", "json", "--job", text)
    assert (code, err) == (0, "")
    return [row["rank"] for row in json.loads(out)]


def test_a_job_is_named_in_five_ways(node: FakeNode, ctl: Run) -> None:
    for text in (LOCAL, "29507", "127.0.0.1:29507", "r1", "1000"):
        assert _ranks(ctl, text) == [0], text
    # Slurm's id without the step; and a whole name is meant although others end or begin with it.
    assert _ranks(ctl, "4711") == [1]
    assert _ranks(ctl, "12.1") == [4]


def test_the_whole_name_of_an_ended_job_is_meant_although_a_job_that_runs_fits(node: FakeNode, ctl: Run) -> None:
    now = operation("alpha", 0, 1)["ts"]

    def gone(job: str) -> dict[str, object]:
        ended = {"node": "alpha", "ts": now, "job": job, "run": "r8", "pid": 9, "start_ns": 1, "rank": 0}
        return {**ended, "role": "trainer", "event": "exit", "exit_code": 1}

    # Of jobs that run, one ends with 507, one has the process 1000, one the run r2, and one is a step of 4711.
    node.insert("process.events", [gone("507"), gone("1000"), gone("r2"), gone("4711")])
    for name in ("507", "1000", "r2"):
        code, out, _ = ctl("events", "-f", "json", "--job", name)
        assert (code, [row["job"] for row in json.loads(out)]) == (0, [name])
        assert ctl("ps", "--job", name)[2].startswith(f"error: job {name} ended at ")
    assert _ranks(ctl, "4711") == [1]


@pytest.mark.parametrize(
    "command",
    [
        ("ps",),
        ("top", "--once"),
        ("nccl",),
        ("logs",),
        ("stacks",),
        ("stacks", "--merge"),
        ("vars", "loss"),
        ("profile",),
        ("config", "sampling.hz"),
        ("config", "sampling.hz=7"),
        ("vars", "--watch", "loss"),
        ("vars", "--unwatch"),
    ],
)
def test_each_command_takes_the_end_of_a_name(node: FakeNode, ctl: Run, command: tuple[str, ...]) -> None:
    whole = ctl(*command, "--job", LOCAL)
    assert whole[0] == 0, whole
    assert ctl(*command, "--job", "29507") == whole


def test_an_export_takes_the_end_of_a_name(node: FakeNode, ctl: Run, tmp_path: Path) -> None:
    node.insert("probing.table_docs", [_described("comm", "ops")])
    node.insert("probing.column_docs", [{**_described("comm", "ops"), "column_name": name} for name in ("ts", "job")])
    out = tmp_path / "ops.jsonl"
    assert ctl("export", "--tables", "comm.ops", "--job", "29507", "-o", str(out))[0] == 0
    assert [json.loads(line)["job"] for line in out.read_text().splitlines()] == [LOCAL]


def _described(schema: str, name: str) -> dict[str, object]:
    return {"node": "alpha", "ts": 0, "table_schema": schema, "table_name": name, "live": "no"}


def test_several_jobs_that_fit_are_listed(node: FakeNode, ctl: Run) -> None:
    code, out, err = ctl("nccl", "--job", ".0")
    assert (code, out) == (2, "")
    assert err == "error: .0 fits several jobs: 12.0, 4711.0, other.0\nhint: give the whole name, or a run\n"
    assert ctl("ps", "--job", "12")[2].startswith("error: 12 fits several jobs: 12.0, 12.1\n")


def test_jobs_that_ended_and_jobs_that_never_were(node: FakeNode, ctl: Run) -> None:
    code, _, err = ctl("ps", "--job", "x'y")
    assert (code, err) == (1, "error: there is no job x'y\nhint: `probingctl ps` lists the jobs that run now\n")


def test_a_job_of_another_node_is_found(node: FakeNode, ctl: Run, tmp_path: Path) -> None:
    with FakeNode(tmp_path, "beta", {"process.processes": [process("beta", 5, 1005, job="far/away:29513")]}) as beta:
        node.peers = [pb.Peer(node=n.name, address=n.address, state="healthy") for n in (node, beta)]
        code, out, _ = ctl("ps", "--all-nodes", "-f", "json", "--job", "29513")
        assert (code, [row["node"] for row in json.loads(out)]) == (0, ["beta"])


def test_what_is_compared_with_is_named_alike(node: FakeNode, ctl: Run) -> None:
    code, _, err = ctl("profile", "--job", SLURM, "--diff", "job:29507", "--since", "2m")
    assert (code, err.splitlines()[0]) == (1, f"error: there are no samples of job {SLURM} since 2m ago")
    code, out, _ = ctl("profile", "--job", "29507", "--diff", "job:29507")
    assert (code, out.splitlines()[0].partition(" since")[0]) == (0, f"is:  job {LOCAL}")


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ("job = '29507'", f"no job has the whole name 29507: write job = '{LOCAL}'"),
        ("'4711' = job AND rank = 0", "write job = '4711.0'"),
        ("o.job IN ('r1', 'x')", f"no job has the whole name r1: write job = '{LOCAL}'"),
        ("job = '12'", "no job has the whole name 12: 12 fits several jobs: 12.0, 12.1"),
        ("job = 'nosuch'", "no node knows a job nosuch"),
        ("job = $j", f"write job = '{LOCAL}'"),
    ],
)
@pytest.mark.parametrize("shown", ["*", "count(*), max(seq)"])
def test_a_query_without_rows_says_which_job_may_be_meant(
    node: FakeNode, ctl: Run, where: str, says: str, shown: str
) -> None:
    params = ("--param", "j:VARCHAR=29507") if "$j" in where else ()
    code, _, err = ctl("query", *params, f"SELECT {shown} FROM comm.ops AS o WHERE {where}")
    assert code == 0
    assert err.startswith("hint: ")
    assert says in err


@pytest.mark.parametrize(
    "sql",
    [
        f"SELECT * FROM comm.ops WHERE job = '{LOCAL}'",
        f"SELECT * FROM comm.ops WHERE job = '{LOCAL}' AND seq > 9999",
        "SELECT count(*) FROM process.processes WHERE job LIKE '%29507'",
        "SELECT * FROM comm.ops WHERE comm = '29507'",
        "SELECT count(*) FROM comm.ops WHERE seq > 9999",
        "SELECT 'job' AS x WHERE false",
    ],
)
def test_a_query_that_names_no_job_wrongly_has_no_hint(node: FakeNode, ctl: Run, sql: str) -> None:
    code, _, err = ctl("query", sql)
    assert (code, err) == (0, "")
