"""What ``nccl`` and ``top`` show of jobs that hung before the daemon came, died, stand still or are paused."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from client_fake_node import SECOND, FakeNode, communicator, inflight, operation, process, thread

from probing.api.errors import PeerError
from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.client.cluster import Cluster
from probing.client.collectives.silence import silent
from probing.client.diagnosis.endings import facts_of_exits
from probing.client.main import main

_TORCH = "/usr/lib/libtorch_cpu.so"
LATE = "the process had the library before it was probed"
Ask = Callable[..., str]


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Ask:
    def run(node: FakeNode, *words: str, warned: str = "") -> str:
        assert main(["-t", node.address, *words]) == 0
        out, err = capsys.readouterr()
        assert err == warned
        return out

    return run


def native(rank: int, *functions: str, tid: int = 7) -> pb.Thread:
    """A thread of C++ alone, innermost first."""
    frames = [pb.Frame(func=f, file=_TORCH, frame_type="Native") for f in functions]
    who = {"job": "j1", "run": "r1", "rank": rank, "pid": 1000 + rank, "tid": tid}
    return pb.Thread(**who, state="sleeping", complete=True, frames=frames)


def gap(node: str, pid: int | None, until: int, reason: str = LATE) -> dict[str, Any]:
    """A row of probing.losses: operations were not seen from the first second until ``until``."""
    return {
        "node": node,
        "ts": until,
        "source": "collectives",
        "table_name": "comm.ops",
        "stage": "attach",
        "reason": reason,
        "pid": pid,
        "ts_from": SECOND,
        "ts_to": until,
    }


def began(node: str, rank: int, ts: int) -> dict[str, Any]:
    who = process(node, rank, 1000 + rank)
    kept = ("node", "job", "run", "pid", "start_ns", "rank", "role")
    return {**{name: who[name] for name in kept}, "ts": ts, "event": "start"}


def at(ns: int) -> str:
    day, today = (time.strftime("%Y-%m-%d ", time.gmtime(s)) for s in (ns // SECOND, time.time()))
    return ("" if day == today else day) + time.strftime("%H:%M:%SZ", time.gmtime(ns // SECOND))


@pytest.fixture
def hung_before(tmp_path: Path) -> FakeNode:
    """Rank 0 was in an all_reduce before the daemon came, rank 1 reads; of rank 2 a gap of another process is known."""
    now = time.time_ns()
    node = FakeNode(
        tmp_path,
        "alpha",
        {
            "process.processes": [process("alpha", rank, 1000 + rank) for rank in range(3)],
            "process.events": [began("alpha", rank, now - 300 * SECOND) for rank in range(3)],
            "probing.losses": [
                gap("alpha", 1000, now - 60 * SECOND),
                gap("alpha", 1001, now - 60 * SECOND),
                gap("alpha", 1002, now - 900 * SECOND),
            ],
        },
    )
    ring = (
        "pthread_cond_wait",
        "gloo::transport::tcp::UnboundBuffer::waitRecv(int*)",
        "gloo::(anonymous namespace)::ring(gloo::detail::AllreduceOptionsImpl const&)",
        "gloo::(anonymous namespace)::allreduce(gloo::detail::AllreduceOptionsImpl const&)",
        "c10d::AsyncAllreduceWork::allreduce(std::vector<at::Tensor>&)",
    )
    node.threads = [
        thread(0, 1000, 1000, "MainThread", ("all_reduce", "/usr/lib/distributed_c10d.py", 2810)),
        native(0, *ring),
        thread(1, 1001, 1001, "MainThread", ("read_batch", "/home/user/train.py", 31)),
        native(2, "syscall", "ncclGroupEndInternal", "ncclGroupEnd", "at::native::all_reduce(int)", tid=1002),
    ]
    return node


def test_a_hang_from_before_the_daemon_is_named(hung_before: FakeNode, ask: Ask) -> None:
    with hung_before as node:
        losses = node.database("probing.losses")
        since = at(losses.execute("SELECT epoch_ns(max(ts_to)) FROM probing.losses").fetchall()[0][0])
        expected = [
            f"  rank 0: in gloo::allreduce (native stack; began before {since}), Python in all_reduce"
            " (distributed_c10d.py:2810)",
            "  rank 1: no collective on its stacks, Python in read_batch (train.py:31)",
            "  rank 2: in ncclGroupEnd (native stack)",
            f"  ranks 0-1: operations before {since} are not seen ({LATE})",
        ]
        lines = ask(node, "nccl").splitlines()
        assert lines[:2] == ["job j1  run r1", "  4 ranks: 0-2"]
        assert lines[2:6] == expected
        shown = ask(node, "top", "--once").splitlines()
        assert shown[0] == "job j1  run r1  3 of 4 ranks"
        assert [line for line in shown if line in expected] == expected
        (own,) = json.loads(ask(node, "nccl", "-f", "json"))
        assert (own["comm"], own["size"], own["members"]) == (None, 4, [0, 1, 2])
        assert [(r["rank"], r["waits_in"], r["began_unseen"], r["unseen_why"]) for r in own["silent"]] == [
            (0, "gloo::allreduce", True, LATE),
            (1, None, False, LATE),
            (2, "ncclGroupEnd", False, None),
        ]
        # Only these are asked, and by their pids.
        assert {tuple(asked.pids) for asked in node.stacks_asked if asked.native} == {(1000, 1001, 1002)}


def test_a_thread_that_runs_may_be_in_a_collective_all_the_same(hung_before: FakeNode, ask: Ask) -> None:
    with hung_before as node:
        node.threads[2].native_missing = "it runs"
        line = "  rank 1: no collective on its stacks (training thread: it runs), Python in read_batch (train.py:31)"
        assert line in ask(node, "top", "--once").splitlines()


def test_what_was_seen_after_the_gap_did_not_begin_before_it(hung_before: FakeNode, ask: Ask) -> None:
    with hung_before as node:
        node.insert("comm.ops", [operation("alpha", 0, 0, start_ns=1000 * SECOND)])
        assert "rank 0: in gloo::allreduce (native stack), Python in" in ask(node, "top", "--once")


def test_only_the_nodes_of_silent_ranks_are_asked_about_them(
    tmp_path: Path, hung_before: FakeNode, capsys: pytest.CaptureFixture[str]
) -> None:
    tables = {
        "process.processes": [process("beta", 3, 1003)],
        "comm.inflight": [inflight("beta", 3, 8, 999_000_000)],
        "comm.communicators": [communicator("beta", 3)],
    }
    with hung_before as alpha, FakeNode(tmp_path, "beta", tables) as beta:
        for command in (("nccl",), ("top", "--once")):
            assert main([*command, "--nodes", f"{alpha.address},{beta.address}"]) == 0
        shown = capsys.readouterr().out
        assert shown.count("rank 2: in ncclGroupEnd (native stack)") == 2
        losses = [[sql for sql in node.asked if "losses" in sql and "1002" in sql] for node in (alpha, beta)]
        assert [len(asked) for asked in losses] == [2, 0]
        assert not any(asked.native for asked in beta.stacks_asked)


def test_of_a_node_that_fell_silent_it_is_said_that_there_is_no_stack(hung_before: FakeNode) -> None:
    with hung_before as node, Cluster(node.address) as cluster:
        node.broken = dict.fromkeys(("probing.losses", "calls"), PeerError("no answer"))
        (row,) = silent(cluster, [process("alpha", 0, 1000)])
        assert (row["waits_in"], row["unseen_until"], row["reason"]) == (None, None, "no stack could be read")


def test_a_healthy_job_is_not_asked_and_shows_nothing_in_flight(tmp_path: Path, ask: Ask) -> None:
    now = time.time_ns()
    recent = [operation("alpha", rank, 7, ts=now, t_call=now, t_done_hi=now) for rank in range(4)]
    tables = {
        "process.processes": [process("alpha", rank, 1000 + rank) for rank in range(4)],
        "comm.ops": recent,
        "comm.inflight": [inflight("alpha", rank, 8, 999_000_000) for rank in range(4)],
        "comm.communicators": [communicator("alpha", rank) for rank in range(4)],
    }
    with FakeNode(tmp_path, "alpha", tables) as node:
        node.threads = [thread(rank, 1000 + rank, 1000 + rank, "MainThread") for rank in range(4)]
        text = ask(node, "nccl") + ask(node, "top", "--once")
        assert "IN FLIGHT a" not in text
        assert "WAITING" not in text
        (own,) = json.loads(ask(node, "nccl", "-f", "json"))
        assert len(own["inflight"]) == 4
        assert (own["ended"], own["first_failure"], own["silent"]) == (None, None, [])
        assert not any(asked.native for asked in node.stacks_asked)


def test_a_dead_job_says_who_failed_first(tmp_path: Path, ask: Ask) -> None:
    dead = [
        {**began("alpha", rank, operation("alpha", 0, 0)["ts"] + second * SECOND), "event": "exit", **how}
        for rank, second, how in ((3, 8, {"exit_code": 1}), (2, 5, {"signal": 9}), (0, 9, {"signal": 15}))
    ]
    oom = {**dead[1], "event": "oom_kill", "signal": None}
    broken = {"state": "failed", "error": "Connection closed by peer", "t_done_hi": None}
    failed = [operation("alpha", rank, 4, **broken) for rank in (0, 3)]
    with FakeNode(tmp_path, "alpha", {"process.events": [oom, *dead], "comm.ops": failed}) as node:
        how = f"rank 2 (pid 1002 on alpha) was killed by SIGKILL (OOM) at {at(dead[1]['ts'])}"
        lines = [f"  ENDED {at(dead[2]['ts'])}", f"  FAILED FIRST: {how}"]
        for command in (("nccl",), ("top", "--once")):
            shown = ask(node, *command).splitlines()
            assert [line for line in shown if line in lines] == lines
        assert "job j1  run r1  3 ranks (ended)" in shown
        assert "  FAILED all_reduce seq 4: ranks 0,3: Connection closed by peer" in ask(node, "nccl").splitlines()
        rows = json.loads(ask(node, "top", "--once", "-f", "json"))
        assert [(r["rank"], r["state"], r["how"], r["first"]) for r in rows] == [
            (0, "exited", "killed by SIGTERM", False),
            (2, "exited", "killed by SIGKILL (OOM)", True),
            (3, "exited", "exited with code 1", False),
        ]


def test_one_dead_rank_of_a_job_that_lives_is_in_its_table(tmp_path: Path, ask: Ask) -> None:
    tables = {
        "process.processes": [process("alpha", 0, 1000), process("alpha", 1, 1001, state="exited")],
        "process.events": [{**began("alpha", 1, operation("alpha", 0, 0)["ts"]), "event": "exit", "exit_code": 3}],
    }
    with FakeNode(tmp_path, "alpha", tables) as node:
        node.threads = [thread(0, 1000, 1000, "MainThread")]
        shown = ask(node, "top", "--once").splitlines()
    assert shown[0] == "job j1  run r1  1 of 4 ranks"
    assert not any(line.startswith("  ENDED") for line in shown)
    assert shown[-1].split()[:4] == ["1", "alpha", "1001", "exited"]
    assert shown[-1].endswith("exited with code 3")


def test_the_first_failure_is_the_first_however_long_ago(tmp_path: Path, ask: Ask) -> None:
    now = time.time_ns()
    ends = (1, now - 7000 * SECOND), (2, now - 61 * SECOND)
    dead = [{**began("alpha", rank, ts), "event": "exit", "exit_code": 1} for rank, ts in ends]
    tables = {"process.processes": [process("alpha", 0, 1000)], "process.events": dead}
    with FakeNode(tmp_path, "alpha", tables) as node:
        node.threads = [thread(0, 1000, 1000, "MainThread")]
        line = f"  FAILED FIRST: rank 1 (pid 1001 on alpha) exited with code 1 at {at(ends[0][1])}"
        for command in (("nccl", "--since", "2m"), ("top", "--once")):
            assert line in ask(node, *command)
        assert [row["first"] for row in json.loads(ask(node, "events", "--since", "2m", "-f", "json"))] == [False]


def test_no_first_failure_is_named_where_older_ends_are_left_out(tmp_path: Path, ask: Ask) -> None:
    now = time.time_ns()
    ends = (1, now - 60 * SECOND), (2, now - 50 * SECOND)
    dead = [{**began("alpha", rank, ts), "event": "exit", "exit_code": 1} for rank, ts in ends]
    loader = {
        **began("alpha", 3, now - 40 * SECOND),
        "rank": None,
        "role": "data_loader",
        "event": "exit",
        "signal": 15,
    }
    loaders = [{**loader, "pid": 5000 + number} for number in range(10_000 - 1)]
    with FakeNode(tmp_path, "alpha", {"process.events": [*dead, *loaders]}) as node:
        # The end of rank 2 is the oldest that is read.
        assert "FAILED FIRST" not in ask(node, "top", "--once")
        # Without its data loaders all ends of the job are read.
        with Cluster(node.address) as cluster:
            (facts,) = facts_of_exits(cluster, "j1")
        assert [rank.rank for rank in facts.ranks] == [1, 2]
        node.replace("process.events", [*dead, *loaders[:-2]])
        assert "FAILED FIRST: rank 1 " in ask(node, "top", "--once")


def test_a_job_that_stands_still_shows_how_long(tmp_path: Path, ask: Ask) -> None:
    now = time.time_ns()
    step = {
        "node": "alpha",
        "job": "j1",
        "run": "r1",
        "pid": 1000,
        "start_ns": 1000 * SECOND,
        "rank": 0,
        "step": 1497,
        "ts": now - 26 * SECOND,
        "t_start": now - 26 * SECOND,
        "t_end": now - 25 * SECOND,
        "duration_ns": SECOND,
    }
    tables = {
        "process.processes": [process("alpha", 0, 1000)],
        "train.steps": [step],
        "comm.ops": [operation("alpha", 0, seq, ts=now - 25 * SECOND) for seq in range(100)],
    }
    with FakeNode(tmp_path, "alpha", tables) as node:
        node.threads = [thread(0, 1000, 1000, "MainThread")]
        pace = ask(node, "top", "--once", "--window", "30s").splitlines()[1]
        assert pace.startswith("  no collective for 25.")
        assert ", step 1497, 25." in pace
        assert pace.endswith(" s ago")
        (row,) = json.loads(ask(node, "top", "--once", "-f", "json"))
        assert 25 * SECOND < row["step_age_ns"] < 85 * SECOND


def test_a_pause_is_at_the_top(tmp_path: Path, ask: Ask) -> None:
    with FakeNode(tmp_path, "alpha", {"process.processes": [process("alpha", 0, 1000)]}) as node:
        node.paused, node.threads = True, [thread(0, 1000, 1000, "MainThread")]
        line = "PAUSED on alpha since 2026-11-22 03:12:07Z by `probingctl pause`: nothing newer is seen"
        for command in (("ps",), ("nccl",), ("top", "--once")):
            assert ask(node, *command).splitlines()[0] == line
        assert "  PAUSED: the speed of the job is not seen" in ask(node, "top", "--once").splitlines()
        assert isinstance(json.loads(ask(node, "nccl", "-f", "json", warned=f"warning: {line}\n")), list)
