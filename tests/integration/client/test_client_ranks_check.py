"""``ranks check`` of jobs on two nodes, and of a list of workers."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from client_fake_node import SECOND, FakeNode, process

from probing.api.errors import QueryRejected
from probing.api.proto.probing.v1 import node_pb2 as pb

Run = Callable[..., tuple[int, str, str]]


def env(node: str, rank: int, **values: str) -> list[dict[str, Any]]:
    who = process(node, rank, 1000 + rank)
    kept = {name: who[name] for name in ("node", "ts", "job", "run", "pid", "start_ns", "rank")}
    return [{**kept, "name": name, "value": value} for name, value in values.items()]


def step(node: str, rank: int, number: int, now: int) -> dict[str, Any]:
    who = process(node, rank, 1000 + rank)
    kept = {name: who[name] for name in ("node", "job", "run", "pid", "start_ns", "rank")}
    times = {"ts": now, "t_start": now, "t_end": now + SECOND, "duration_ns": SECOND}
    return {**kept, **times, "step": number, "ops": 1, "source": "collective_period", "confidence": 1.0}


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[FakeNode, FakeNode]]:
    """Four ranks on two nodes; rank 3 calls itself LOCAL_RANK 0 and has another master port."""
    nodes = []
    for name, own in (("alpha", (0, 1)), ("beta", (2, 3))):
        trainers = [process(name, r, 1000 + r, local_rank=0 if r == 3 else r % 2) for r in own]
        port = {3: "29501"}
        envs = [row for r in own for row in env(name, r, MASTER_ADDR="alpha", MASTER_PORT=port.get(r, "29500"))]
        nodes.append(FakeNode(tmp_path, name, {"process.processes": trainers, "process.envs": envs}))
    first, second = nodes
    first.peers = [pb.Peer(node=n.name, address=n.address, state="healthy") for n in nodes]
    monkeypatch.setenv("PROBING_TARGET", first.address)
    yield first, second
    for node in nodes:
        node.stop()


def test_violations_of_a_job(ctl: Run, cluster: tuple[FakeNode, FakeNode]) -> None:
    code, out, err = ctl("ranks", "check", "--all-nodes")
    assert (code, err) == (3, "")
    assert out.splitlines() == [
        "job j1  run r1  4 ranks (0-3): 2 violations",
        "  LOCAL_RANK 0 occurs 2 times on beta: pid 1002 on beta, pid 1003 on beta",
        "  MASTER_ADDR:MASTER_PORT differs: alpha:29500 on ranks 0-2; alpha:29501 on rank 3",
    ]
    _, out, _ = ctl("ranks", "check", "--all-nodes", "-f", "json")
    (job,) = json.loads(out)
    assert (job["job"], job["ranks"], job["world_size"], job["ok"]) == ("j1", [0, 1, 2, 3], 4, False)
    assert [(v["rule"], v["ranks"]) for v in job["violations"]] == [("local_rank", [2, 3]), ("master", [0, 1, 2, 3])]


def test_one_node_has_not_seen_the_ranks_of_others(ctl: Run, cluster: tuple[FakeNode, FakeNode]) -> None:
    code, out, _ = ctl("ranks", "check", "--job", "j1")
    assert (code, out) == (0, "job j1  run r1  2 ranks of 4 (0-1): in order\n")
    cluster[0].insert("process.envs", env("alpha", 0, LOCAL_WORLD_SIZE="4") + env("alpha", 1, LOCAL_WORLD_SIZE="4"))
    code, out, _ = ctl("ranks", "check", "--job", "j1")
    assert (code, out.splitlines()[1]) == (3, "  RANK 2-3 of 4 have no process")


def test_ranks_of_nodes_that_were_not_asked_are_not_missing(ctl: Run, cluster: tuple[FakeNode, FakeNode]) -> None:
    alpha, beta = cluster
    beta.replace("process.processes", [process("beta", 2, 1002, local_rank=0)])
    members = [{"node": "alpha", "ts": 1, "member": n.name, "address": n.address} for n in cluster]
    alpha.insert("cluster.members", members)
    for some in (("--where", "node=alpha"), ("--nodes", alpha.address)):
        code, out, err = ctl("ranks", "check", *some)
        assert (code, out, err) == (0, "job j1  run r1  2 ranks of 4 (0-1): in order\n", "")
    for every in ("--all-nodes", f"--nodes={alpha.address},{beta.address}"):
        code, out, _ = ctl("ranks", "check", every)
        assert (code, out.splitlines()[1]) == (3, "  RANK 3 of 4 has no process")
    # A token that is limited to jobs does not see the nodes.
    beta.broken = {"cluster.members": QueryRejected("the token is limited to jobs")}
    assert ctl("ranks", "check", "--nodes", beta.address)[::2] == (0, "")


def test_a_node_that_does_not_answer_leaves_it_undecided(ctl: Run, cluster: tuple[FakeNode, FakeNode]) -> None:
    cluster[1].stop()
    code, out, err = ctl("ranks", "check", "--all-nodes")
    assert (code, out) == (4, "job j1  run r1  2 ranks of 4 (0-1): in order on the nodes that answered\n")
    assert err.startswith(f"warning: node {cluster[1].address} is missing: ")


def test_steps_of_one_node_must_be_in_accord(ctl: Run, cluster: tuple[FakeNode, FakeNode]) -> None:
    now = time.time_ns() - 5 * SECOND
    cluster[0].insert("train.steps", [step("alpha", 0, 97, now), step("alpha", 1, 89, now)])
    # Another node counts from the first step that it saw.
    cluster[1].insert("train.steps", [step("beta", 2, 13, now)])
    code, out, _ = ctl("ranks", "check", "--all-nodes")
    assert code == 3
    assert out.splitlines()[-1] == "  steps differ by more than 1: step 89 on rank 1; step 97 on rank 0"


def test_a_job_against_a_list_of_workers(ctl: Run, cluster: tuple[FakeNode, FakeNode]) -> None:
    words = ("ranks", "check", "--all-nodes", "--job", "j1", "--master", "beta-0", "--workers")
    code, out, _ = ctl(*words, "alpha-0,alpha-1,beta-0,beta-1")
    assert code == 3
    assert "  RANK 0 (pid 1000 on alpha) has node alpha instead of beta, which the launcher gives beta-0" in out


def test_a_list_of_workers_needs_no_daemon(ctl: Run, tmp_path: Path) -> None:
    (tmp_path / "workers").write_text("gn6-0\ngn6-1  # the master\ngn7-0\ngn7-1\n")
    words = ("-t", "unix:/nowhere", "ranks", "check", "--master", "gn6-1", "--workers", str(tmp_path / "workers"))
    code, out, _ = ctl(*words)
    assert code == 0
    assert [line.split() for line in out.splitlines()] == [
        ["WORKER", "RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER"],
        ["gn6-0", "0", "0", "0", "4", "gn6:29500"],
        ["gn6-1", "1", "1", "0", "4", "gn6:29500"],
        ["gn7-0", "2", "0", "1", "4", "gn6:29500"],
        ["gn7-1", "3", "1", "1", "4", "gn6:29500"],
    ]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--workers", "a-0"), "--workers and --master must be given together"),
        (("--master", "a"), "--workers and --master"),
        (("--workers", "a-0,a-0", "--master", "a"), "a-0 occurs twice"),
        (("--workers", "/nowhere/workers", "--master", "a"), "/nowhere/workers is not a worker"),
    ],
)
def test_a_wrong_list_of_workers(ctl: Run, words: tuple[str, ...], problem: str) -> None:
    code, _, err = ctl("ranks", "check", *words)
    assert code == 2
    assert problem in err


def test_an_unknown_job(ctl: Run, cluster: tuple[FakeNode, FakeNode]) -> None:
    code, _, err = ctl("ranks", "check", "--job", "nobody")
    assert (code, err.splitlines()[0]) == (1, "error: there is no job nobody")
