"""``probingctl nccl`` over two nodes with known operations: states, failures, throughput where ends are known badly."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from client_fake_node import FakeNode, communicator, operation

from probing.client.collectives import text as nccl_text
from probing.client.main import main
from probing.client.times import interval

MS = 1_000_000
COMM = "00c0ffee00c0ffee"
NCCL = {"comm": COMM, "comm_name": "tp", "backend": "nccl", "stream": 7, "algbw_gbps": None, "busbw_gbps": None}


def on_stream(node: str, rank: int, seq: int, launch: int, done: int, **more: Any) -> dict[str, Any]:
    """An all_reduce of 1 MB on a CUDA stream, seen by the watchdog; times in ns after the first of all."""
    zero = operation(node, rank, 0)["ts"]
    return operation(
        node,
        rank,
        seq,
        **{
            **NCCL,
            "ts": zero + launch,
            "t_call": zero + launch,
            "t_launch": zero + launch,
            "t_start": None,
            "t_done_lo": zero + done - 100 * MS,
            "t_done_hi": zero + done,
            "timing_source": "watchdog",
            "duration_ns": None,
            **more,
        },
    )


def member(node: str, rank: int, **more: Any) -> dict[str, Any]:
    row = {**communicator(node, rank), "comm": COMM, "name": "tp", "backend": "nccl", "state": "active"}
    return {**row, "parallel_role": "unknown", **more}


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeNode]]:
    made = []
    for name, ranks in (("alpha", (0, 1)), ("beta", (2, 3))):
        # Three that overlap from 0 to 300 ms, and one of 200 ms after a pause: 4 MB in 500 ms.
        spans = [(0, 200), (50, 250), (100, 300), (1000, 1200)]
        ops = [on_stream(name, r, i, a * MS, b * MS) for r in ranks for i, (a, b) in enumerate(spans)]
        told = [member(name, r) for r in ranks]
        if name == "beta":
            broken = {"state": "failed", "error": "remote process has ended", "t_done_hi": None, "t_done_lo": None}
            ops += [on_stream(name, r, 4, 1300 * MS, 0, **broken) for r in ranks]
            role = {"parallel_role": "tp", "parallel_role_why": "spans one node", "state": "aborted", "aborted": True}
            told.append({**member(name, 3), **role, "ts": told[-1]["ts"] + 1})
        made.append(FakeNode(tmp_path, name, {"comm.ops": ops, "comm.communicators": told}))
    monkeypatch.setenv("PROBING_TARGET", made[0].address)
    yield made
    for node in made:
        node.stop()


@pytest.fixture
def ask(nodes: list[FakeNode], capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def run(*words: str) -> str:
        addresses = ",".join(node.address for node in nodes)
        assert main(["nccl", "--nodes", addresses, *words]) == 0
        out, err = capsys.readouterr()
        assert err == ""
        return out

    return run


def test_lags_between_nodes_say_how_far_clocks_may_differ(nodes: list[FakeNode], ask: Callable[..., str]) -> None:
    assert json.loads(ask("-f", "json"))[0]["clock_spread_ns"] is None
    assert "clocks of its nodes" not in ask()
    for node, ahead_ns in zip(nodes, (0, 50_000_000), strict=False):
        node.timed, node.ahead_ns = True, ahead_ns
    assert json.loads(ask("-f", "json"))[0]["clock_spread_ns"] >= 50_000_000
    assert "; clocks of its nodes may differ by " in ask()


def test_what_is_known_of_a_communicator(ask: Callable[..., str]) -> None:
    (own,) = json.loads(ask("-f", "json"))
    assert (own["comm"], own["name"], own["backend"], own["size"]) == (COMM, "tp", "nccl", 4)
    assert (own["members"], own["nodes"]) == ([0, 1, 2, 3], 2)
    # The newest row of each member holds.
    assert (own["state"], own["states"], own["aborted"]) == ("aborted", {"aborted": 1, "active": 3}, True)
    assert (own["role"], own["role_why"]) == ("tp", "spans one node")
    (op,) = own["ops"]
    assert (op["calls"], op["timed"], op["not_done"], op["avg_ns"], op["p99_ns"]) == (18, 0, 2, None, None)
    assert [(row["rank"], row["error"], row["calls"], row["last_seq"]) for row in own["failed"]] == [
        (3, "remote process has ended", 1, 4),
        (2, "remote process has ended", 1, 4),
    ]


def test_throughput_needs_no_durations(ask: Callable[..., str]) -> None:
    (own,) = json.loads(ask("-f", "json"))
    totals = own["totals"]
    assert (totals["calls"], totals["bytes"], totals["timed"]) == (18, 18_000_000, 0)
    assert totals["timing_sources"] == {"watchdog": 18}
    assert totals["busy_ns"] == 4 * 500 * MS
    assert totals["algbw_gbps"] == pytest.approx(4e6 / (500 * MS))
    assert totals["busbw_gbps"] == pytest.approx(1.5 * 4e6 / (500 * MS))


def test_text_says_why_there_are_no_durations(ask: Callable[..., str]) -> None:
    lines = ask().splitlines()
    assert lines[:3] == [
        f"job j1  comm {COMM} (tp)",
        "  nccl, 4 ranks on 2 nodes: 0-3, aborted on 1, active on 3",
        "  role tp: spans one node",
    ]
    assert "  FAILED all_reduce seq 4: ranks 2-3: remote process has ended" in lines
    assert "  total: 18 calls, 17.2 MiB; while any call ran: 8 MB/s, bus 12 MB/s" in lines
    assert "  timing: 18 watchdog polls, durations are known to 100 ms" in lines
    assert max(map(len, lines)) <= 104


def test_eighty_columns_are_enough(ask: Callable[..., str]) -> None:
    (own,) = json.loads(ask("-f", "json"))
    full = {"avg_ns": 1.5e9, "p50_ns": 1.5e9, "p99_ns": 2.5e9, "max_ns": 2.5e9, "timed": 18}
    for name in ("algbw_avg_gbps", "algbw_min_gbps", "busbw_avg_gbps", "busbw_min_gbps"):
        full[name] = 123.4
    own["ops"] = [{**own["ops"][0], **full, "op": "reduce_scatter", "calls": 12_345_678}]
    text = nccl_text.people([own], interval("5m"), 80)
    assert max(map(len, text.splitlines())) <= 80
    assert [line.split()[:2] for line in text.splitlines() if "reduce_scatter" in line][:2] == [
        ["reduce_scatter", "12,345,678"],
        ["reduce_scatter", "123"],
    ]


def test_rows_are_one_a_communicator_and_operation(ask: Callable[..., str]) -> None:
    head, row = ask("-f", "csv").splitlines()
    assert head.startswith("job,run,comm,name,backend,size,state,role,op,calls,")
    assert row.startswith(f"j1,r1,{COMM},tp,nccl,4,aborted,tp,all_reduce,18,")
