"""An aggregate over many simulated nodes: times, memory, dead and slow nodes. ``[NODES [TREE_NODES]]``, 0 for none.

The nodes answer with prepared rows, so the asker and the connections take all of the time. If run by root, it first
measures the time of a real daemon's answer about operations that a gloo job has just made.
"""

from __future__ import annotations

import os
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

# The simulator is a part of the tests.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from ports import free_port
from running import BenchDaemon, job
from simulator.cast import Cast
from simulator.running import simulated
from waiting import until

from probing.client.cluster import Cluster
from probing.federation.execution.asking import Policy

HERE = Path(__file__).resolve().parent
ROUNDS = 7
SQL = "SELECT op, count(*) AS n, sum(bytes) AS bytes, max(duration_ns) AS longest FROM comm.ops GROUP BY op"
COUNT = "SELECT count(*) AS n FROM comm.ops"
DEADLINE_S = 5.0
OPERATIONS, QUERIES, PAUSE_S = 1000, 150, 0.06


def main() -> None:
    few, many = [*map(int, sys.argv[1:]), *(1000, 10_000)[len(sys.argv) - 1 :]][:2]
    print(f"load average before: {os.getloadavg()[0]:.1f}")
    if os.getuid() == 0:
        _own()
    if few:
        _direct(few)
    if many:
        _report(f"{many} nodes, by a tree", Cast(many, free_port(), processes=4), rounds=5, timeout=60)


def _own() -> None:
    """Prints the time of a real daemon's answer."""
    daemon = BenchDaemon()
    daemon.start()
    try:
        steps = (HERE / "timed_job.py", daemon.base / "steps", "64", "0.002")
        with job(*steps), Cluster(f"unix:{daemon.socket}") as cluster:
            until(lambda: cluster.query(COUNT).to_pylist()[0]["n"] >= OPERATIONS, poll_s=0.1)
        with Cluster(f"unix:{daemon.socket}") as cluster:
            times = []
            for _ in range(QUERIES):
                # In practice there are pauses between questions, in which the worker makes the next database.
                time.sleep(PAUSE_S)
                begun = time.perf_counter()
                cluster.query(SQL)
                times.append(time.perf_counter() - begun)
            rows = cluster.query(COUNT).to_pylist()[0]["n"]
    finally:
        daemon.close()
    half, nearly = (sorted(times)[QUERIES * share // 100] * 1e3 for share in (50, 99))
    print(f"a real daemon with {rows} operations: p50 {half:.1f} ms, p99 {nearly:.1f} ms", flush=True)


def _direct(few: int) -> None:
    _report(f"{few} nodes", Cast(few, free_port()))
    _report(
        f"{few} nodes, 1 of 10 silent, deadline {DEADLINE_S:g} s",
        Cast(few, free_port(), dead_of=10),
        rounds=3,
        timeout=DEADLINE_S,
    )
    slow = {"slow_of": 100, "slow_s": 2.0}
    _report(f"{few} nodes, 1 of 100 slow by 2 s", Cast(few, free_port(), **slow))
    _report(
        f"{few} nodes, 1 of 100 slow by 2 s, without hedges",
        Cast(few, free_port(), **slow),
        rounds=4,
        policy=Policy(hedges=0),
    )


def _report(
    what: str, cast: Cast, *, rounds: int = ROUNDS, timeout: float = 30.0, policy: Policy | None = None
) -> None:
    with simulated(cast) as simulation, Cluster(nodes=cast.addresses, timeout=timeout) as cluster:
        if policy is not None:
            cluster.policy = policy
        first = _timed(cluster, cast)
        simulation.figures()
        times = sorted(_timed(cluster, cast) for _ in range(rounds))
        outcome = cluster.outcomes[-1]
        own = simulation.figures()["p50_ms"]
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(
            f"{what}: first {first:.2f} s, then median {statistics.median(times):.2f} s"
            f" ({times[0]:.2f} to {times[-1]:.2f}), answered {len(outcome.answered)}, failed {len(outcome.failed)},"
            f" a node's own p50 {own:.1f} ms, peak of the asker {peak:.0f} MB",
            flush=True,
        )


def _timed(cluster: Cluster, cast: Cast) -> float:
    begun = time.monotonic()
    rows: list[dict[str, Any]] = cluster.query(SQL).to_pylist()
    took = time.monotonic() - begun
    answered = len(cluster.outcomes[-1].answered)
    if sum(row["n"] for row in rows) != cast.rows * answered:
        raise SystemExit(f"{sum(row['n'] for row in rows)} rows of {answered} nodes with {cast.rows} each")
    return took


if __name__ == "__main__":
    main()
