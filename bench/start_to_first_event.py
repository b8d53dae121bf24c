"""Time from exec of the daemon to the first operation in an answer, beside a job that runs already."""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from pathlib import Path

import grpc
from running import BenchDaemon, cpu_ns, family, job
from statistics_of_blocks import table

from probing.api.proto.probing.v1 import node_pb2, node_pb2_grpc

HERE = Path(__file__).resolve().parent
SQL = "SELECT 1 AS one FROM comm.ops LIMIT 1"


def first_row(daemon: BenchDaemon, begin: float) -> float:
    """Returns the seconds from ``begin`` until a query has a row."""
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
    # A job on GPUs leaves the CPU idle while it waits for the GPUs; a job on the CPU does not.
    for beside, pause in (("leaves the CPU idle for a while each step", "0.02"), ("uses all of the CPU", "0")):
        ready, event = measure(options.rounds, pause)
        for name, values in (("ready", ready), ("the first operation in an answer", event)):
            seconds, cpu = zip(*values, strict=True)
            rows.append(
                {
                    "from exec of probingd to": name,
                    "beside a job that": beside,
                    "median": f"{statistics.median(seconds):.2f} s",
                    "worst": f"{max(seconds):.2f} s",
                    "CPU, median": f"{statistics.median(cpu):.2f} s",
                    "rounds": options.rounds,
                }
            )
    print(table(rows))


def measure(rounds: int, pause: str) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Returns the seconds to `ready` and to the first row, each with the CPU seconds of the daemon until then."""
    ready: list[tuple[float, float]] = []
    event: list[tuple[float, float]] = []
    folder = Path(tempfile.mkdtemp(prefix="probingd-bench-"))
    with job(HERE / "timed_job.py", folder / "steps", "64", pause):
        while not (folder / "steps").exists() or not (folder / "steps").stat().st_size:
            time.sleep(0.1)
        for _ in range(rounds):
            with contextlib.closing(BenchDaemon()) as daemon:
                begin = time.monotonic()
                ready.append((daemon.start(), _cpu_s(daemon)))
                event.append((first_row(daemon, begin), _cpu_s(daemon)))
    return ready, event


def _cpu_s(daemon: BenchDaemon) -> float:
    assert daemon.process is not None
    return cpu_ns(family(daemon.process.pid)) / 1e9


if __name__ == "__main__":
    main()
