"""Time from exec of the daemon to the first operation in an answer, beside a job that runs already."""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import grpc
from running import BenchDaemon, job
from statistics_of_blocks import table

from probing.api.proto.probing.v1 import node_pb2, node_pb2_grpc

HERE = Path(__file__).resolve().parent
SQL = "SELECT 1 AS one FROM comm.ops LIMIT 1"


def first_row(daemon: BenchDaemon, begin: float) -> float:
    """Seconds from ``begin`` until a query has a row."""
    with grpc.insecure_channel(f"unix:{daemon.socket}") as channel:
        stub = node_pb2_grpc.NodeStub(channel)
        while True:
            replies = stub.Query(node_pb2.QueryRequest(sql=SQL, timeout_ms=5000), timeout=5)
            if any(reply.end.rows for reply in replies if reply.HasField("end")):
                return time.monotonic() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    rows = []
    # A job on GPUs leaves the CPU idle while it waits for them; one on the CPU does not.
    for beside, pause in (("leaves the CPU idle for a while each step", "0.02"), ("uses all of the CPU", "0")):
        ready, event = measure(options.rounds, pause)
        for name, values in (("ready", ready), ("the first operation in an answer", event)):
            rows.append(
                {
                    "from exec of probingd to": name,
                    "beside a job that": beside,
                    "median": f"{statistics.median(values):.2f} s",
                    "worst": f"{max(values):.2f} s",
                    "rounds": options.rounds,
                }
            )
    print(table(rows))


def measure(rounds: int, pause: str) -> tuple[list[float], list[float]]:
    """Seconds to `ready` and to the first row, for each round."""
    ready: list[float] = []
    event: list[float] = []
    folder = Path(tempfile.mkdtemp(prefix="probingd-bench-"))
    with job(HERE / "timed_job.py", folder / "steps", "64", pause):
        while not (folder / "steps").exists() or not (folder / "steps").stat().st_size:
            time.sleep(0.1)
        for _ in range(rounds):
            daemon = BenchDaemon()
            begin = time.monotonic()
            ready.append(daemon.start())
            event.append(first_row(daemon, begin))
            daemon.close()
    return ready, event


if __name__ == "__main__":
    main()
