"""A 2 x 2 grid of gloo groups, as probingctl shows it: each group is a communicator of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e_support import JOBS, Daemon, end_process, start_process
from long import long
from ports import free_port
from waiting import until

STEPS = 20
# DESC_BYTES of collectives.bpf.h
DESCRIPTION_BYTES = 40
# Ranks -> what the job calls the group, what it is for, and how often each of its ranks calls it in a step.
GROUPS = {
    (0, 1): ("TENSOR_MODEL_PARALLEL_GROUP", "tp", 8),
    (2, 3): ("TENSOR_MODEL_PARALLEL_GROUP", "tp", 8),
    (0, 2): ("DATA_PARALLEL_GROUP", "dp", 1),
    (1, 3): ("DATA_PARALLEL_GROUP", "dp", 1),
    (0, 1, 2, 3): ("default_pg", "world", 1),
}


class Grid:
    """``made``: the number of steps that all ranks have made."""

    def __init__(self, folder: Path) -> None:
        port = free_port()
        self.made = 0
        self.job = f"n1/127.0.0.1:{port}"
        self.ranks = []
        for rank in range(4):
            env = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "4", "NAMED": "1"}
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            self.ranks.append(
                start_process(
                    sys.executable,
                    JOBS / "grid.py",
                    folder / f"rank{rank}",
                    env=env,
                    text=True,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                )
            )
        self.hear("ready")

    def hear(self, word: str) -> None:
        for rank in self.ranks:
            assert rank.stdout
            assert rank.stdout.readline().strip() == word

    def tell(self, ranks: list[int], command: str) -> None:
        for rank in ranks:
            stdin = self.ranks[rank].stdin
            assert stdin
            stdin.write(command + "\n")
            stdin.flush()

    def steps(self, count: int) -> None:
        self.tell([0, 1, 2, 3], f"steps {count}")
        self.hear("done")
        self.made += count


@pytest.fixture(scope="module")
def grid(shared_daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Grid]:
    """Four ranks; the last test kills one of them."""
    made = Grid(tmp_path_factory.mktemp("grid"))
    trained = {rank.pid for rank in made.ranks}
    until(
        lambda: {p["pid"] for p in shared_daemon.json("ps") if p["role"] == "trainer"} >= trained, what="four trainers"
    )
    yield made
    for rank in made.ranks:
        end_process(rank)


def communicators(daemon: Daemon, grid: Grid) -> dict[tuple[int, ...], dict[str, Any]]:
    return {tuple(own["members"]): own for own in daemon.json("nccl", "--job", grid.job)}


@long
def test_each_group_is_a_communicator(daemon: Daemon, grid: Grid) -> None:
    grid.steps(STEPS)
    total = sum(calls * grid.made * len(ranks) for ranks, (_, _, calls) in GROUPS.items())
    sql = f"SELECT count(*) AS n FROM comm.ops WHERE job = '{grid.job}'"
    until(lambda: daemon.rows(sql) == [{"n": total}], what="all operations")
    found = communicators(daemon, grid)
    assert set(found) == set(GROUPS)
    assert len({own["comm"] for own in found.values()}) == 5
    for ranks, (name, role, calls_of_a_step) in GROUPS.items():
        own, calls = found[ranks], calls_of_a_step * grid.made
        # As much of it as a record holds.
        assert own["name"] == name[:DESCRIPTION_BYTES]
        assert (own["backend"], own["size"], own["nodes"]) == ("gloo", len(ranks), 1)
        assert own["role"] == role
        assert own["role_why"]
        (op,) = own["ops"]
        assert (op["op"], op["calls"], op["not_done"]) == ("all_reduce", calls * len(ranks), 0)
        assert op["timed"] == op["calls"]
        assert [row["rank"] for row in own["ranks"]] == list(ranks)
        assert {row["calls"] for row in own["ranks"]} == {calls}
        assert own["totals"]["timing_sources"] == {"exact": op["calls"]}
        assert own["totals"]["busbw_gbps"] > 0


@long
def test_the_rank_that_is_missing_is_named(daemon: Daemon, grid: Grid) -> None:
    grid.steps(2)
    grid.tell([0, 1, 2], "steps 1")

    def waiting() -> dict[tuple[int, ...], Any]:
        return {ranks: own["inflight"] for ranks, own in communicators(daemon, grid).items() if own["inflight"]}

    # 0 and 1 get through their row; 2 waits for 3 in its own, 0 for 2 and 1 for 3 in their columns.
    until(lambda: set(waiting()) == {(2, 3), (0, 2), (1, 3)}, what="three ranks that wait")
    assert {ranks: [row["rank"] for row in rows] for ranks, rows in waiting().items()} == {
        (2, 3): [2],
        (0, 2): [0],
        (1, 3): [1],
    }
    # People see what has been in flight for a second.
    shown = "rank 2; not in it: 3"
    until(lambda: shown in daemon.ctl("nccl", "--job", grid.job).stdout, what=f"the text {shown!r}")
    grid.tell([3], "steps 1")
    grid.hear("done")
    grid.made += 1
    until(lambda: not waiting(), what="the end of all waits")


@long
def test_a_rank_that_dies_fails_the_operations_of_others(daemon: Daemon, grid: Grid) -> None:
    grid.steps(2)
    grid.tell([0, 1, 2], "steps 1")
    until(lambda: any(own["inflight"] for own in communicators(daemon, grid).values()), what="ranks that wait")
    grid.ranks[3].kill()

    def failed() -> list[dict[str, Any]]:
        return [row for own in communicators(daemon, grid).values() for row in own["failed"]]

    until(lambda: {row["rank"] for row in failed()} >= {1, 2}, what="failures on ranks 1 and 2")
    assert all(row["error"] and row["op"] == "all_reduce" for row in failed())
    assert "FAILED all_reduce seq" in daemon.ctl("nccl", "--job", grid.job).stdout
