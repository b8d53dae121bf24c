"""A job that has ended: every command says so in one sentence, or marks what it shows as last seen."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from client_fake_node import SECOND, FakeNode, operation, process

from probing.api.errors import NotFound, UsageError
from probing.client import Cluster

Run = Callable[..., tuple[int, str, str]]
OVER, LONG_AGO, LIVE = "alpha/127.0.0.1:29507", "alpha/127.0.0.1:29508", "alpha/127.0.0.1:29509"


def exit_of(job: str, rank: int, ago_s: float, **more: Any) -> dict[str, Any]:
    at = time.time_ns() - round(ago_s * SECOND)
    row = {"node": "alpha", "ts": at, "job": job, "run": "r1", "pid": 1000 + rank, "start_ns": (1000 + rank) * SECOND}
    return {**row, "event": "exit", "role": "trainer", "rank": rank, "signal": 15, **more}


def rows_of(job: str, ago_s: float) -> dict[str, list[dict[str, Any]]]:
    """Rows of two ranks until so long ago."""
    at = time.time_ns() - round(ago_s * SECOND)
    who = [{"node": "alpha", "job": job, "run": "r1", "pid": 1000 + r, "rank": r, "role": "trainer"} for r in (0, 1)]
    start = {1000 + r: (1000 + r) * SECOND for r in (0, 1)}
    step = {"ts": at, "t_start": at - SECOND, "t_end": at, "duration_ns": SECOND, "comm_ns": SECOND // 2, "step": 7}
    tcp = {"ts": at, "local_address": "10.0.0.1", "peer_address": "10.0.0.2", "retrans": 0, "segs_out": 9}
    kept = ("node", "job", "run", "pid", "rank")
    return {
        "train.steps": [{**{n: w[n] for n in kept}, **step, "start_ns": start[w["pid"]]} for w in who],
        "process.memory": [{**w, "ts": at, "start_ns": start[w["pid"]], "rss_bytes": 324_000_000} for w in who],
        "net.tcp": [{**w, **tcp, "start_ns": start[w["pid"]], "bytes_sent": 5, "bytes_received": 5} for w in who],
        "comm.ops": [operation("alpha", w["rank"], 3, job=job, run="r1", ts=at) for w in who],
    }


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNode]:
    """A job that ended seconds ago, one that ended an hour ago, and one that lives."""
    tables: dict[str, list[dict[str, Any]]] = {
        "process.processes": [process("alpha", 0, 3000, job=LIVE)],
        "process.events": [exit_of(OVER, r, 5) for r in (0, 1)] + [exit_of(LONG_AGO, r, 3600) for r in (0, 1)],
    }
    for job, ago_s in ((OVER, 6), (LONG_AGO, 3601)):
        for name, rows in rows_of(job, ago_s).items():
            tables.setdefault(name, []).extend(rows)
    node = FakeNode(tmp_path, "alpha", tables)
    node.jobs = {LIVE}
    node.settings["logs.enabled"] = "false"
    monkeypatch.setenv("PROBING_TARGET", node.address)
    yield node
    node.stop()


@pytest.mark.parametrize(
    "command",
    [
        ("ps",),
        ("top", "--once"),
        ("top",),
        ("nccl",),
        ("stacks",),
        ("stacks", "--merge"),
        ("vars", "loss"),
        ("vars", "--watch", "loss"),
        ("config", "sampling.hz=7"),
        ("balance",),
        ("memory",),
        ("net",),
        ("gpu",),
        ("topo",),
        ("ranks", "check"),
        ("preflight",),
    ],
)
@pytest.mark.parametrize("form", ["table", "json"])
def test_a_command_for_living_processes_says_when_a_job_ended(
    node: FakeNode, ctl: Run, command: tuple[str, ...], form: str
) -> None:
    words = [] if command == ("top",) else ["-f", form]
    code, out, err = ctl(*command, "--job", "29508", *words)
    assert (code, out) == (1, "")
    error, hint = err.splitlines()
    assert error.startswith(f"error: job {LONG_AGO} ended at 2")
    assert hint == (
        f"hint: `probingctl ps --ended --job {LONG_AGO}` shows how,"
        f" `probingctl diagnose --job {LONG_AGO}` what was found until then"
    )


@pytest.mark.parametrize(
    "command",
    [
        ("nccl", "--since", "2h", "--until", "90m"),
        ("balance", "--since", "2h", "--until", "30m"),
        ("events",),
        ("ps", "--ended"),
        ("logs",),
        ("diagnose",),
        ("diagnose", "--history"),
        ("nccl", "--since", "2h"),
    ],
)
def test_a_command_for_what_is_stored_answers(node: FakeNode, ctl: Run, command: tuple[str, ...]) -> None:
    code, out, _ = ctl(*command, "--job", "29508")
    assert (code, bool(out)) == (0, True)


@pytest.mark.parametrize("command", [("balance",), ("memory",), ("net",), ("nccl",), ("top", "--once")])
def test_values_of_a_job_that_has_just_ended_are_marked(node: FakeNode, ctl: Run, command: tuple[str, ...]) -> None:
    code, out, err = ctl(*command, "--job", "29507")
    assert (code, err) == (0, "")
    assert "ENDED " in out
    if command[0] in ("balance", "memory", "net"):
        assert "the run has ended: the values are the last that were seen" in out
    # AND those of the job that lives are not
    assert "ENDED" not in ctl(*command)[1].partition(f"job {LIVE}")[2].partition("\njob ")[0]


def test_memory_says_which_processes_have_ended(node: FakeNode, ctl: Run) -> None:
    (own,) = json.loads(ctl("memory", "--job", "29507", "-f", "json")[1])
    assert [(process["rank"], process["state"]) for process in own["processes"]] == [(0, "ended"), (1, "ended")]
    out = ctl("memory", "--job", "29507")[1]
    assert [line.split()[4] for line in out.splitlines() if "309 MiB" in line] == ["ended", "ended"]


def test_python_takes_what_the_option_takes(node: FakeNode) -> None:
    with Cluster(node.address) as cluster:
        for job in ("29508", LONG_AGO):
            with pytest.raises(NotFound, match="ended at 2"):
                cluster.stacks(job=job)
            with pytest.raises(NotFound, match="ended at 2"):
                cluster.variables(["loss"], job=job)
        settings = cluster.config("sampling.hz", "7", job="29509")
        assert (LIVE, "7") in [(setting["job"], setting["value"]) for setting in settings]
        assert cluster.config("sampling.hz", job="3000") == settings
        with pytest.raises(NotFound, match="there is no job nobody"):
            cluster.stacks(job="nobody")
        node.insert("process.processes", [process("alpha", 0, 4000 + n, job=f"{n}/llm") for n in (0, 1)])
        with pytest.raises(UsageError, match="llm fits several jobs: 0/llm, 1/llm"):
            cluster.stacks(job="llm")
        with pytest.raises(NotFound, match="there is no job nobody"):
            cluster.facts("nobody")


def test_a_name_that_is_the_end_of_another_means_itself(node: FakeNode, ctl: Run) -> None:
    node.insert("process.processes", [process("alpha", 0, 4000, job="29507"), process("alpha", 0, 4001, job="x29509")])
    assert [row["pid"] for row in json.loads(ctl("ps", "--job", "29507", "-f", "json")[1])] == [4000]
    code, _, err = ctl("ps", "--job", "29509")
    assert (code, err.splitlines()[0]) == (2, f"error: 29509 fits several jobs: {LIVE}, x29509")
