"""Queries through the engine, a warm worker and gRPC, in turn with DuckDB alone over the same files."""

from __future__ import annotations

import argparse
import contextlib
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import duckdb
import grpc
from query_rows import DAYS, START_NS, WORST_ROW_BYTES, job_at, write_store
from statistics_of_blocks import table

from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.api.proto.probing.v1.node_pb2_grpc import NodeStub
from probing.api.tables import TABLES
from probing.daemon.collector.control import ControlServer, Requests
from probing.daemon.config import CONTROL
from probing.daemon.query.engine import Engine
from probing.daemon.query.pool import GATE, WorkerPool
from probing.daemon.service.collector_client import CollectorClient
from probing.daemon.store import Store
from probing.daemon.store.limits import StoreLimits

HOUR_NS = 3_600_000_000_000
THREADS = 2
SEGMENT_BYTES = 64 << 20


def between(first_hour: int, hours: int) -> str:
    low = START_NS + first_hour * HOUR_NS
    return f"ts BETWEEN make_timestamp_ns({low}) AND make_timestamp_ns({low + hours * HOUR_NS})"


# The job that begins at noon of the third day and lasts 6 hours.
JOB = f"job = '{job_at(2 * (2 * 4 + 2))}'"
QUERIES = {
    "SELECT 1": "SELECT 1 AS one",
    "count(*)": "SELECT count(*) FROM comm.ops",
    "scan": "SELECT avg(duration_ns), max(bytes), count(DISTINCT rank) FROM comm.ops",
    "group by": "SELECT job, op, rank, count(*) n, avg(duration_ns) a, max(busbw_gbps) b FROM comm.ops GROUP BY ALL",
    "top n": "SELECT ts, job, rank, op, duration_ns FROM comm.ops ORDER BY duration_ns DESC, ts LIMIT 10",
    "join": "SELECT a.op, count(*) n, max(abs(b.duration_ns - a.duration_ns)) d FROM comm.ops a JOIN comm.ops b "
    f"USING (job, comm, seq, op) WHERE a.rank = 0 AND b.rank = 1 AND a.{between(60, 1)} "
    f"AND b.{between(60, 1)} GROUP BY 1",
    "1 hour of a job": f"SELECT rank, op, count(*) n, max(duration_ns) m FROM comm.ops WHERE {JOB} AND "
    f"{between(61, 1)} GROUP BY ALL",
    "1 day of a job": f"SELECT rank, op, count(*) n, max(duration_ns) m FROM comm.ops WHERE {JOB} AND "
    f"{between(48, 24)} GROUP BY ALL",
    "1 day, a rank": f"SELECT op, count(*) n, max(duration_ns) m FROM comm.ops WHERE {JOB} AND rank = 3 AND "
    f"{between(48, 24)} GROUP BY ALL",
    "1 hour, all jobs": f"SELECT job, count(*) n, max(duration_ns) m FROM comm.ops WHERE {between(61, 1)} GROUP BY 1",
}


class Listener:
    """Starts a worker for each connection to ``path``, as the supervisor does."""

    def __init__(self, path: Path, state: Path) -> None:
        self._argv = [sys.executable, "-m", "probing.daemon.confined.sql_worker", f"--state_dir={state}"]
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._server.bind(str(path))
        self._server.listen(16)
        self.children: list[subprocess.Popen[bytes]] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._server.accept()
                with client:
                    self.children.append(subprocess.Popen(self._argv, stdin=client, cwd="/"))

    def close(self) -> None:
        self._server.close()
        for child in self.children:
            child.kill()
            child.wait(10)


class Node:
    """A node's query side: store and control socket in this process, workers and service in processes of their own."""

    def __init__(self, root: Path, state: Path) -> None:
        runtime = root / "s.sock.d"
        (runtime / CONTROL).mkdir(parents=True)
        # No segment may be dropped or merged during the measurement.
        limits = StoreLimits(max_bytes=1 << 50, max_age_s=1e9, keep_free_bytes=0)
        self.store = Store.open(state, node="bench", limits=limits, background=False)
        unused: Any = SimpleNamespace()
        requests = Requests(self.store, unused, unused, {}, str, dict, bool)
        handlers = {name: requests.handlers()[name] for name in ("snapshot", "release")}
        self.control = ControlServer(runtime / CONTROL / "collector.sock", handlers, frozenset())
        self.control.start()
        self.listener = Listener(runtime / "sql.sock", state)
        argv = [sys.executable, "-m", "probing.daemon.service", f"--socket={root}/s.sock", "--node_name=bench"]
        self.service = subprocess.Popen(argv, cwd="/", stderr=subprocess.DEVNULL)
        self.collector = CollectorClient(str(runtime / CONTROL / "collector.sock"))
        self.pool = WorkerPool(str(runtime / "sql.sock"))
        self.gate = WorkerPool(str(runtime / "sql.sock"), GATE)
        self.engine = Engine(self.collector, self.pool, self.gate)
        options = [("grpc.max_receive_message_length", -1)]
        self.channel = grpc.insecure_channel(f"unix:{root}/s.sock", options=options)
        grpc.channel_ready_future(self.channel).result(30)
        self.stub = NodeStub(self.channel)

    def by_engine(self, sql: str) -> None:
        for _ in self.engine.run(sql, timeout=600, max_bytes=1 << 30):
            pass

    def by_grpc(self, sql: str) -> None:
        for _ in self.stub.Query(pb.QueryRequest(sql=sql), timeout=600):
            pass

    def close(self) -> None:
        self.channel.close()
        self.service.terminate()
        self.service.wait(30)
        self.pool.close()
        self.gate.close()
        self.collector.close()
        self.listener.close()
        self.control.stop()
        self.store.close()


def duckdb_alone(paths: list[str], sql: str) -> None:
    """Runs ``sql`` in a fresh connection, with the select list of the table over its files."""
    with duckdb.connect(config={"threads": str(THREADS)}) as connection:
        connection.execute("SET TimeZone = 'UTC'")
        connection.execute("CREATE SCHEMA comm")
        columns, files = TABLES["comm.ops"].select_list, ", ".join(f"'{path}'" for path in paths)
        connection.execute(f"CREATE VIEW comm.ops AS SELECT {columns} FROM read_parquet([{files}])")
        connection.sql(sql).to_arrow_table()


def measured(ways: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Returns the milliseconds of each way, measured in turn after a round that does not count."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            begin = time.perf_counter()
            way()
            if number:
                found[name].append((time.perf_counter() - begin) * 1000)
    return found


@contextlib.contextmanager
def folder(kept: Path | None) -> Iterator[Path]:
    """Yields a folder for the store: ``kept``, or a new folder that is removed afterwards."""
    made = Path(tempfile.mkdtemp(prefix="probingd-bench-"))
    made.chmod(0o755)
    try:
        yield kept or made / "state"
    finally:
        shutil.rmtree(made)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=4_000_000)
    parser.add_argument("--segments", type=int, default=28)
    parser.add_argument(
        "--bytes", type=float, default=0, help="approximate size of the store; overrides rows and segments"
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default="", help="part of the name of a query")
    parser.add_argument("--state", type=Path, help="folder of the store, which is kept; a store in it is used again")
    options = parser.parse_args()
    rows, segments, noise = options.rows, options.segments, bool(options.bytes)
    if options.bytes:
        rows, segments = int(options.bytes / WORST_ROW_BYTES), max(DAYS, int(options.bytes / SEGMENT_BYTES))
    with folder(options.state) as state:
        if not (state / "manifest").exists():
            state.mkdir(parents=True, exist_ok=True)
            write_store(state, rows, segments, noise, lambda text: print(text, file=sys.stderr, flush=True))
        run_queries(state, options)


def run_queries(state: Path, options: argparse.Namespace) -> None:
    paths = sorted(str(path) for path in state.glob("comm.ops/*/*.parquet"))
    size = sum(Path(path).stat().st_size for path in paths)
    root = Path(tempfile.mkdtemp(prefix="probingd-bench-"))
    node = Node(root, state)
    lines = []
    try:
        for name, sql in QUERIES.items():
            if options.only not in name:
                continue
            ways = {
                "alone": lambda sql=sql: duckdb_alone(paths, sql),
                "engine": lambda sql=sql: node.by_engine(sql),
                "grpc": lambda sql=sql: node.by_grpc(sql),
            }
            found = {way: statistics.median(times) for way, times in measured(ways, options.rounds).items()}
            alone, engine, rpc = (found[way] for way in ("alone", "engine", "grpc"))
            lines.append(
                {
                    "query": name,
                    "DuckDB alone, ms": f"{alone:.1f}",
                    "engine, ms": f"{engine:.1f}",
                    "gRPC, ms": f"{rpc:.1f}",
                    "gRPC / alone": f"{rpc / alone:.2f}",
                    "more, ms": f"{rpc - alone:+.1f}",
                    "within 1.3 x + 30 ms": "yes" if rpc <= alone * 1.3 + 30 else "no",
                }
            )
    finally:
        node.close()
        shutil.rmtree(root)
    print(f"{len(paths)} segments, {size / 1e6:.0f} MB\n\n{table(lines)}")


if __name__ == "__main__":
    main()
