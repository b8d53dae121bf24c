"""``balance`` of a job on two nodes whose clocks differ."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from client_fake_node import SECOND, FakeNode, communicator, operation, process, sample, stack

from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.client.commands import balance

Run = Callable[..., tuple[int, str, str]]
MS = 1_000_000
STEPS = 47
_AHEAD = {"alpha": 0, "beta": 5 * SECOND}
_LOADER = ("__next__", "/usr/lib/python3/dist-packages/torch/utils/data/dataloader.py", 700)
_MAIN = ("main", "/home/user/train.py", 88)


def step(node: str, rank: int, number: int, begin: int) -> dict[str, Any]:
    at = begin + number * 100 * MS
    who = {"node": node, "job": "j1", "run": "r1", "pid": 1000 + rank, "start_ns": SECOND, "rank": rank}
    times = {"ts": at, "t_start": at, "t_end": at + 100 * MS, "duration_ns": 100 * MS}
    seen = {"comm_ns": (10 if rank == 2 else 60) * MS, "ops": 1, "source": "collective_period", "confidence": 1.0}
    return {**who, **times, **seen, "step": number}


def all_reduce(node: str, rank: int, seq: int, begin: int) -> dict[str, Any]:
    """It ends with the step; rank 2 calls it 50 ms after the others."""
    took = (10 if rank == 2 else 60) * MS
    at = begin + (seq + 1) * 100 * MS - took
    return operation(node, rank, seq, ts=at, t_call=at, t_start=at, t_done_hi=at + took, duration_ns=took)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeNode]]:
    """Four ranks; rank 2 computes twice as long; rank 3 spends a fifth of its time in the data loader."""
    nodes = []
    for name, own in (("alpha", (0, 1)), ("beta", (2, 3))):
        begin = time.time_ns() - 20 * SECOND + _AHEAD[name]
        samples = [
            row
            for r in own
            for row in (
                sample(name, r, 1, 80 if r == 3 else 100, ts=begin + SECOND),
                sample(name, r, 2, 20 if r == 3 else 0, ts=begin + SECOND),
                # Another thread.
                sample(name, r, 2, 100, ts=begin + SECOND, tid=5),
            )
        ]
        nodes.append(
            FakeNode(
                tmp_path,
                name,
                {
                    "process.processes": [process(name, r, 1000 + r) for r in own],
                    "train.steps": [step(name, r, n, begin) for r in own for n in range(STEPS)],
                    "comm.ops": [all_reduce(name, r, n, begin) for r in own for n in range(STEPS)],
                    "comm.communicators": [{**communicator(name, r), "parallel_role": "world"} for r in own],
                    "python.samples": samples,
                    "python.stacks": [stack(name, 1, _MAIN), stack(name, 2, _LOADER, _MAIN)],
                },
            )
        )
    nodes[0].peers = [pb.Peer(node=n.name, address=n.address, state="healthy") for n in nodes]
    monkeypatch.setenv("PROBING_TARGET", nodes[0].address)
    yield nodes
    for node in nodes:
        node.stop()


def test_shares_of_each_rank(ctl: Run, cluster: list[FakeNode]) -> None:
    code, out, err = ctl("balance", "--all-nodes", "--job", "j1", "-f", "json")
    assert (code, err) == (0, "")
    (job,) = json.loads(out)
    shares = {
        r["rank"]: [round(r[name], 3) for name in ("compute", "communication", "wait", "io")] for r in job["ranks"]
    }
    assert shares == {0: [0.4, 0.1, 0.5, 0], 1: [0.4, 0.1, 0.5, 0], 2: [0.9, 0.1, 0, 0], 3: [0.2, 0.1, 0.5, 0.2]}
    assert [(r["steps"], r["waits_for"], r["last_share"]) for r in job["ranks"][1:3]] == [(47, 2, 0.0), (47, None, 1.0)]
    assert [(r["role"], r["ranks"], r["last"]) for r in job["roles"]] == [("world", [0, 1, 2, 3], 2)]
    assert job["uneven"] == pytest.approx(4.5)


def test_people_read_who_waits_for_whom(ctl: Run, cluster: list[FakeNode]) -> None:
    _, out, _ = ctl("balance", "--all-nodes")
    lines = out.splitlines()
    # The nodes' clocks differ by 5 s: beta's steps are the newer ones.
    assert lines[1].startswith("  no step has ended for 1")
    assert lines[1].endswith(" s: the shares are those of earlier steps")
    del lines[1]
    assert lines[:3] == [
        "job j1  run r1  47 steps",
        "  work is uneven: rank 2 computes 90 ms a step, rank 3 computes 20 ms: 4.5 times",
        "  ranks 0-1,3 wait for rank 2, up to 50% of the step; it arrives last in 100% of the operations",
    ]
    assert [line.split() for line in lines[3:5]] == [
        ["RANK", "NODE", "PID", "STEP", "COMPUTE", "COMM", "WAIT", "IO", "LAST", "WAITS", "FOR"],
        ["0", "alpha", "1000", "100", "ms", "40%", "10%", "50%", "0%", "0%", "2"],
    ]


def test_a_wait_for_a_rank_that_was_not_asked_for_is_not_known(ctl: Run, cluster: list[FakeNode]) -> None:
    code, out, _ = ctl("balance", "--job", "j1", "-f", "json")
    assert code == 0
    (job,) = json.loads(out)
    assert [(r["wait"], r["communication"], r["waits_for"]) for r in job["ranks"]] == [(None, 0.6, None)] * 2
    assert job["roles"] == []


def test_samples_that_are_left_out_are_said(ctl: Run, cluster: list[FakeNode], monkeypatch: pytest.MonkeyPatch) -> None:
    assert ctl("balance", "--all-nodes")[2] == ""
    monkeypatch.setattr(balance, "_MOST_SAMPLES", 2)
    warning = (
        "warning: IO counts only the 2 most frequent stacks of ranks: "
        "ask for one job, or for a shorter time with --since\n"
    )
    assert ctl("balance", "--all-nodes")[::2] == (0, warning)


def test_a_job_without_steps(ctl: Run, cluster: list[FakeNode]) -> None:
    code, out, _ = ctl("balance", "--job", "j1", "--since", "1ms")
    assert (code, out[:25]) == (0, "(no step ended in the las")
    assert "Steps are recognised after 10 s of repetition." in out
    code, _, err = ctl("balance", "--job", "nobody")
    assert (code, err.splitlines()[0]) == (1, "error: there is no job nobody")


def test_work_is_not_called_even_while_a_node_does_not_answer(ctl: Run, cluster: list[FakeNode]) -> None:
    # Rank 2, which computes longer, is on the node that does not answer.
    cluster[1].stop()
    _, out, err = ctl("balance", "--all-nodes", "--job", "j1")
    assert "work is even: the ranks differ by 0% at most on the nodes that answered\n" in out
    assert "is missing" in err


def test_a_stall_is_said_above_the_shares(ctl: Run, cluster: list[FakeNode]) -> None:
    sentence = "rank 2 (node beta, pid 1002) is stopped by a signal"
    now = time.time_ns()
    open_ = {"finding_id": "a", "verdict": "not_joined", "severity": "error", "state": "open", "confidence": 0.9}
    who = {"node": "alpha", "job": "j1", "run": "r1", "ranks": "2", "victims": "0", "opened": now}
    cluster[0].insert("diagnosis.findings", [{**open_, **who, "ts": now, "sentence": sentence}])
    for words in (("balance",), ("balance", "--since", "1s")):
        out = ctl(*words, "--all-nodes")[1]
        assert f"Z: {sentence}\n" in out, out
    # What is so now is no part of an interval that lies in the past.
    assert sentence not in ctl("balance", "--all-nodes", "--since", "60s", "--until", "1ms")[1]
