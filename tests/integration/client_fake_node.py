"""A node for tests of the client: a real gRPC server whose SQL is answered by DuckDB over tables that a test gives."""

from __future__ import annotations

import atexit
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any

import duckdb
import grpc
import pyarrow as pa

from probing.api.errors import NotFound, ProbingError, UsageError
from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.api.proto.probing.v1.node_pb2_grpc import NodeServicer, add_NodeServicer_to_server
from probing.api.tables import TABLES
from probing.diagnosis.facts_file import encoded
from probing.diagnosis.preflight.facts import NodeFacts
from probing.federation.engine import engine_version
from probing.federation.sql.dialect import parse
from probing.federation.sql.errors import from_duckdb
from probing.federation.sql.states import with_states
from probing.federation.sql.times import fix_times

SECOND = 1_000_000_000
_SETTINGS = {"sampling.hz": "19", "sampling.off_cpu": "true", "variables.watch": "", "variables.interval_s": "1.0"}


def _begin() -> int:
    """One instant for all rows of a test, so that lags are what it says. Within the time that commands look back."""
    return _begin_of(os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0])


@lru_cache(maxsize=1)
def _begin_of(test: str) -> int:
    return time.time_ns() - 20 * SECOND


@cache
def _shared() -> duckdb.DuckDBPyConnection:
    """The instance of all nodes of this process: to open one takes longer than to make a node's tables."""
    made = duckdb.connect()
    atexit.register(made.close)
    return made


@cache
def _statement(name: str) -> str:
    """Returns the SQL that makes a table."""
    schema = name.split(".")[0]
    with duckdb.connect() as db:
        db.register("given", TABLES[name].logical.empty_table())
        db.execute(f"CREATE SCHEMA {schema}; CREATE TABLE {name} AS SELECT * FROM given")
        ((statement,),) = db.execute("SELECT sql FROM duckdb_tables()").fetchall()
    return f"CREATE SCHEMA IF NOT EXISTS {schema}; {statement}"


class _Tables:
    """The tables of one node, a database of its own. Each is made when it is first wanted."""

    _numbers = itertools.count()

    def __init__(self, rows: Mapping[str, list[dict[str, Any]]]) -> None:
        self._name = f"node_{next(self._numbers)}"
        self._rows = rows
        self._made: set[str] = set()
        self._lock = threading.Lock()
        with _shared().cursor() as cursor:
            cursor.execute(f"ATTACH ':memory:' AS {self._name}")

    def cursor(self, sql: str) -> duckdb.DuckDBPyConnection:
        """Returns a connection that has the tables named in ``sql``."""
        cursor = _shared().cursor()
        cursor.execute(f"USE {self._name}")
        text = sql.replace('"', "").lower()
        with self._lock:
            for name in TABLES.keys() - self._made:
                if name in text:
                    cursor.execute(_statement(name))
                    self._made.add(name)
                    if rows := self._rows.get(name):
                        insert(cursor, name, rows)
        return cursor

    def close(self) -> None:
        with _shared().cursor() as cursor:
            cursor.execute(f"DETACH DATABASE IF EXISTS {self._name}")


def insert(cursor: duckdb.DuckDBPyConnection, name: str, rows: list[dict[str, Any]]) -> None:
    """Adds rows to a table."""
    cursor.register("more", pa.Table.from_pylist(rows, schema=TABLES[name].logical))
    cursor.execute(f"INSERT INTO {name} SELECT * FROM more")
    cursor.unregister("more")


class FakeNode(NodeServicer):
    """Listens on ``unix:DIRECTORY/NAME.sock``, and on ``tcp``, HOST:PORT, if it is given.

    ``error`` is raised by every query, ``hold`` makes queries wait, ``garbage`` is answered as it is; ``meanwhile``
    is called before a query is answered. ``broken``: errors by the table that a query names; that of ``calls`` is
    raised by calls other than queries.
    """

    def __init__(
        self,
        directory: Path,
        name: str,
        tables: Mapping[str, list[dict[str, Any]]] | None = None,
        *,
        tcp: str = "",
    ) -> None:
        self.name = name
        self.address = f"unix:{directory / name}.sock"
        self.peers: list[pb.Peer] = []
        self.threads: list[pb.Thread] = []
        self.failures: list[pb.TargetFailure] = []
        self.warnings: list[str] = []
        self.error: ProbingError | None = None
        self.broken: Mapping[str, ProbingError] = {}
        self.hold: threading.Event | None = None
        self.garbage: list[pb.QueryReply] | None = None
        self.meanwhile: Callable[[], None] | None = None
        self.asked: list[str] = []
        self.requests: list[pb.QueryRequest] = []
        self.statements_known = True
        self.metadata: list[dict[str, Any]] = []
        self.engine = engine_version()
        self.paused = False
        # Status waits for it; is raised by it.
        self.hold_status: threading.Event | None = None
        self.refused: ProbingError | None = None
        self.facts: dict[str, list[bytes]] = {}
        self.hardware: bytes = b""
        self.values: list[pb.Value] = []
        self.evaluated: list[pb.Evaluated] = []
        self.preflight = NodeFacts(name)
        self.preflight_asked: list[pb.PreflightRequest] = []
        # Whether answers have the time of the node, the error of its clock, and the address that the node says to have.
        self.timed = False
        self.ahead_ns = 0
        self.listens = self.address
        self.jobs: set[str] = {"j1"}
        self.settings = dict(_SETTINGS)
        self.changes: dict[tuple[str, str, int], tuple[str, int, bool]] = {}
        self.configured: list[pb.ConfigRequest] = []
        # What a proposed limit of the store would delete; None: as an older node, it does not know proposals.
        self.effect: pb.Deletion | None = pb.Deletion()
        # What the limits of the store that hold will delete.
        self.waits: pb.Deletion | None = None
        self.stacks_asked: list[pb.StacksRequest] = []
        self.notices: list[str] = []
        # How many findings were stored (see ``count_findings``); None: an older node, which does not know the question.
        self.stored: int | None = None
        self._storing = threading.Condition()
        self.code_asked: list[pb.EvalRequest] = []
        self._tables = _Tables(tables or {})
        self._pool = ThreadPoolExecutor(4)
        self._server = grpc.server(self._pool, options=(("grpc.so_reuseport", 0),))
        add_NodeServicer_to_server(self, self._server)
        assert self._server.add_insecure_port(self.address)
        self.port = self._server.add_insecure_port(tcp) if tcp else 0
        self._server.start()

    def __enter__(self) -> FakeNode:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        if self.hold is not None:
            self.hold.set()
        self.count_findings(None)
        self._server.stop(0).wait(10)
        self._pool.shutdown()
        self._tables.close()

    def count_findings(self, stored: int | None) -> None:
        """Says that so many findings were stored, and answers the calls that wait for another one."""
        with self._storing:
            self.stored = stored
            self._storing.notify_all()

    def insert(self, name: str, rows: list[dict[str, Any]]) -> None:
        with self._tables.cursor(name) as cursor:
            insert(cursor, name, rows)

    def replace(self, name: str, rows: list[dict[str, Any]]) -> None:
        """Puts ``rows`` into the place of all rows of a table."""
        with self._tables.cursor(name) as cursor:
            cursor.execute(f"BEGIN; DELETE FROM {name}")
            insert(cursor, name, rows)
            cursor.execute("COMMIT")

    def database(self, name: str) -> duckdb.DuckDBPyConnection:
        """A cursor in the tables that ``name`` names."""
        return self._tables.cursor(name)

    def Query(self, request: pb.QueryRequest, context: grpc.ServicerContext) -> Iterator[pb.QueryReply]:
        self.asked.extend([statement.sql for statement in request.statements] or [request.sql])
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        if self.hold is not None:
            self.hold.wait(30)
        if self.meanwhile is not None:
            self.meanwhile()
        if self.garbage is not None:
            yield from self.garbage
            return
        if request.statements and self.statements_known:
            yield from self._statements(request)
            return
        try:
            if self.error is not None:
                raise self.error
            table = self._rows(request.sql)
        except ProbingError as e:
            self._abort(context, e)
        yield from _arrow(table)
        yield pb.QueryReply(end=self._end(table.num_rows))

    def _statements(self, request: pb.QueryRequest) -> Iterator[pb.QueryReply]:
        total = 0
        for statement in request.statements:
            try:
                if self.error is not None:
                    raise self.error
                table = self._rows(statement.sql)
            except ProbingError as e:
                error = pb.Error(kind=e.kind, message=e.message, hint=e.hint, code=e.code)
                yield pb.QueryReply(statement=pb.StatementEnd(name=statement.name, error=error))
                continue
            yield from _arrow(table)
            yield pb.QueryReply(statement=pb.StatementEnd(name=statement.name, rows=table.num_rows))
            total += table.num_rows
        yield pb.QueryReply(end=self._end(total))

    def _end(self, rows: int) -> pb.QueryEnd:
        now = time.time_ns() + self.ahead_ns if self.timed else 0
        return pb.QueryEnd(node=self.name, rows=rows, warnings=self.warnings, node_time_ns=now)

    def _rows(self, sql: str) -> pa.Table:
        text = with_states(fix_times(parse(sql), time.time_ns()))
        named = text.replace('"', "").lower()
        for table, error in self.broken.items():
            if table in named:
                raise error
        try:
            with self._tables.cursor(text) as cursor:
                return cursor.sql(text).to_arrow_table()
        except duckdb.Error as e:
            raise from_duckdb(e) from None

    def _check(self, context: grpc.ServicerContext) -> None:
        if (error := self.refused or self.broken.get("calls")) is not None:
            self._abort(context, error)

    def _abort(self, context: grpc.ServicerContext, error: ProbingError) -> None:
        sent = pb.Error(kind=error.kind, message=error.message, hint=error.hint, code=error.code)
        context.set_trailing_metadata((("probing-error-bin", sent.SerializeToString()),))
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, error.message)

    def Stacks(self, request: pb.StacksRequest, context: grpc.ServicerContext) -> pb.StacksReply:
        self._check(context)
        self.stacks_asked.append(request)
        pids = set(request.pids)
        chosen = [t for t in self.threads if (not pids or t.pid in pids) and (not request.job or t.job == request.job)]
        if not chosen and (pids or request.job) and not self.failures:
            self._abort(context, NotFound("no such process", hint="`probingctl ps` lists them"))
        return pb.StacksReply(node=self.name, threads=chosen, failures=self.failures)

    def Vars(self, request: pb.VarsRequest, context: grpc.ServicerContext) -> pb.VarsReply:
        self._check(context)
        pids, names = set(request.pids), set(request.names)
        chosen = [v for v in self.values if (not pids or v.pid in pids) and (not request.job or v.job == request.job)]
        if not chosen and (pids or request.job) and not self.failures:
            self._abort(context, NotFound("no such process", hint="`probingctl ps` lists them"))
        found = [v for v in chosen if v.variable.name in names]
        return pb.VarsReply(node=self.name, values=found, failures=self.failures)

    def Eval(self, request: pb.EvalRequest, context: grpc.ServicerContext) -> pb.EvalReply:
        self._check(context)
        self.code_asked.append(request)
        pids, rank = set(request.pids), request.rank if request.HasField("rank") else None
        chosen = [e for e in self.evaluated if (not pids or e.pid in pids) and rank in (None, e.rank)]
        chosen = [e for e in chosen if not request.job or e.job == request.job]
        if not chosen and not self.failures:
            self._abort(context, NotFound("no such process", hint="`probingctl ps` lists them"))
        return pb.EvalReply(node=self.name, results=chosen, failures=self.failures)

    def Facts(self, request: pb.FactsRequest, context: grpc.ServicerContext) -> Iterator[pb.FactsReply]:
        self._check(context)
        if request.job and request.job not in self.facts:
            self._abort(context, NotFound(f"there is no job '{request.job}'", hint="`probingctl ps` lists them"))
        yield pb.FactsReply(node=self.name)
        if request.hardware:
            yield pb.FactsReply(node=self.name, facts=[self.hardware])
            return
        for job, runs in self.facts.items():
            for run in runs if request.job in ("", job) else ():
                yield pb.FactsReply(node=self.name, facts=[run])

    def AwaitFinding(self, request: pb.AwaitFindingRequest, context: grpc.ServicerContext) -> pb.AwaitFindingReply:
        with self._storing:
            self._storing.wait_for(lambda: self.stored != request.stored, request.wait_ms / 1000)
        if self.stored is None:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "")
        return pb.AwaitFindingReply(node=self.name, stored=self.stored)

    def Preflight(self, request: pb.PreflightRequest, context: grpc.ServicerContext) -> pb.PreflightReply:
        self._check(context)
        self.preflight_asked.append(request)
        now = time.time_ns() + self.ahead_ns
        return pb.PreflightReply(
            node=self.name, facts=encoded(self.preflight), received_ns=now, node_time_ns=time.time_ns() + self.ahead_ns
        )

    def Config(self, request: pb.ConfigRequest, context: grpc.ServicerContext) -> pb.ConfigReply:
        self._check(context)
        self.configured.append(request)
        if request.key and request.key not in self.settings:
            self._abort(context, UsageError(f"there is no setting {request.key}", hint="`probingctl config` lists all"))
        if request.job and request.job not in self.jobs:
            self._abort(context, NotFound(f"there is no job {request.job}", hint="`probingctl ps` lists them"))
        scope = (request.key, request.job, request.pid)
        if request.HasField("value"):
            if request.key == "sampling.hz" and not request.value.isdigit():
                self._abort(context, UsageError(f"{request.value} is no number", hint="sampling.hz takes 0 to 999"))
            if request.key == "variables.interval_s" and (request.job or request.pid):
                self._abort(
                    context, UsageError(f"{request.key} can only be set for all processes", hint="leave --job out")
                )
            until = 2_000_000_000 * SECOND + 5 if request.for_ms else 0
            self.changes[scope] = (request.value, until, request.persist)
        if request.reset:
            self.changes.pop(scope, None)
        wanted = (("", 0), (request.job, request.pid)) if request.job or request.pid else None
        shown = [
            pb.Setting(
                key=key,
                value=value,
                default=self.settings[key],
                job=job,
                pid=pid,
                until_ns=until,
                persisted=kept,
                doc="what it means",
                deletes=self.waits if key.startswith("store.") else None,
            )
            for name, default in self.settings.items()
            if request.key in ("", name)
            for (key, job, pid), (value, until, kept) in {
                (name, "", 0): (default, 0, False),
                **{s: c for s, c in self.changes.items() if s[0] == name},
            }.items()
            if wanted is None or (job, pid) in wanted
        ]
        proposed = request.HasField("propose_value") or request.propose_reset
        return pb.ConfigReply(node=self.name, settings=shown, effect=self.effect if proposed else None)

    def Status(self, request: pb.StatusRequest, context: grpc.ServicerContext) -> pb.StatusReply:
        if self.hold_status is not None:
            self.hold_status.wait(30)
        self._check(context)
        return pb.StatusReply(
            node=self.name,
            version="0.1.0",
            instance="default",
            boot_id="b",
            processes=2,
            engine=self.engine,
            state="paused" if self.paused else "running",
            reason="paused since 2026-11-22 03:12:07Z by `probingctl pause`" if self.paused else "",
            started_ns=10 * SECOND,
            node_time_ns=400 * SECOND,
            store_bytes=123_456_789,
            notices=self.notices,
            sources=[
                pb.Source(name="nccl_uprobes", state="running", rows=12345, detail="libtorch_cpu.so"),
                pb.Source(name="host", state="degraded", reason="no /proc/pressure", lost=3),
            ],
        )

    def Peers(self, request: pb.PeersRequest, context: grpc.ServicerContext) -> pb.PeersReply:
        return pb.PeersReply(peers=self.peers)

    def Pause(self, request: pb.PauseRequest, context: grpc.ServicerContext) -> pb.PauseReply:
        self.paused = request.paused
        return pb.PauseReply(paused=self.paused)


def _arrow(table: pa.Table) -> Iterator[pb.QueryReply]:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    stream = sink.getvalue().to_pybytes()
    for start in range(0, len(stream), 1000):
        yield pb.QueryReply(arrow=stream[start : start + 1000])


def process(node: str, rank: int | None, pid: int, **more: Any) -> dict[str, Any]:
    """A row of process.processes."""
    role = "launcher" if rank is None else "trainer"
    return {
        "node": node,
        "ts": time.time_ns(),
        "job": "j1",
        "run": "r1",
        "pid": pid,
        "start_ns": pid * SECOND,
        "rank": rank,
        "local_rank": rank,
        "world_size": None if rank is None else 4,
        "ppid": 1,
        "uid": 0,
        "role": role,
        "state": "running",
        "python": "3.11.2",
        "backends": "" if rank is None else "gloo",
        "command": "python train.py --epochs 3",
        "rank_source": None if rank is None else "environment",
        "job_source": "torchelastic",
        **more,
    }


def operation(node: str, rank: int, seq: int, late_ns: int = 0, **more: Any) -> dict[str, Any]:
    """A row of comm.ops: an all_reduce of 4 ranks that took 2 ms, called ``late_ns`` after the others."""
    at = _begin() + seq * 100_000_000 + late_ns
    return {
        "node": node,
        "ts": at,
        "job": "j1",
        "run": "r1",
        "pid": 1000 + rank,
        "start_ns": SECOND,
        "tid": 1000 + rank,
        "rank": rank,
        "comm": "default_pg",
        "comm_name": "default_pg",
        "comm_rank": rank,
        "comm_size": 4,
        "backend": "gloo",
        "seq": seq,
        "op": "all_reduce",
        "dtype": "float32",
        "count": 250_000,
        "bytes": 1_000_000,
        "t_call": at,
        "t_start": at,
        "t_done_hi": at + 2_000_000,
        "timing_source": "exact",
        "state": "done",
        "duration_ns": 2_000_000,
        "algbw_gbps": 0.5,
        "busbw_gbps": 0.75,
        **more,
    }


def inflight(node: str, rank: int, seq: int, age_ns: int) -> dict[str, Any]:
    """A row of comm.inflight."""
    row = operation(node, rank, seq)
    kept = {name: value for name, value in row.items() if name in TABLES["comm.inflight"].logical.names}
    return {**kept, "state": "started", "age_ns": age_ns}


def communicator(node: str, rank: int) -> dict[str, Any]:
    """A row of comm.communicators."""
    return {
        "node": node,
        "ts": time.time_ns(),
        "job": "j1",
        "run": "r1",
        "pid": 1000 + rank,
        "start_ns": SECOND,
        "comm": "default_pg",
        "name": "default_pg",
        "backend": "gloo",
        "size": 4,
        "rank": rank,
        "job_rank": rank,
    }


def thread(rank: int, pid: int, tid: int, name: str, *frames: tuple[str, str, int | None], **more: Any) -> pb.Thread:
    return pb.Thread(
        job="j1",
        run="r1",
        rank=rank,
        pid=pid,
        tid=tid,
        thread=name,
        state="sleeping",
        complete=True,
        frames=[pb.Frame(func=f, file=p, lineno=n, frame_type="Python") for f, p, n in frames],
        **more,
    )


def variable(rank: int, name: str, kind: str, shown: str | None, **more: Any) -> pb.Value:
    """A value of ``main`` in the process of ``rank``; ``shown`` None with a ``reason``."""
    one = pb.Variable(name=name, type=kind, value=shown, **more)
    return pb.Value(job="j1", run="r1", rank=rank, pid=1000 + rank, tid=1000 + rank, func="main", variable=one)


def sample(node: str, rank: int | None, stack_id: int, count: int, **more: Any) -> dict[str, Any]:
    """A row of python.samples: ``count`` samples of 10 ms on the CPU, 20 s ago."""
    pid = 900 if rank is None else 1000 + rank
    return {
        "node": node,
        "ts": _begin(),
        "job": "j1",
        "run": "r1",
        "pid": pid,
        "start_ns": SECOND,
        "rank": rank,
        "tid": pid,
        "thread": "MainThread",
        "stack_id": stack_id,
        "on_cpu": True,
        "gil": True,
        "count": count,
        "duration_ns": count * 10_000_000,
        **more,
    }


def stack(node: str, stack_id: int, *frames: tuple[str, str, int | None], complete: bool = True) -> dict[str, Any]:
    """A row of python.stacks; ``frames`` innermost first."""
    shown = [{"func": func, "file": file, "lineno": lineno} for func, file, lineno in frames]
    return {"node": node, "ts": _begin(), "stack_id": stack_id, "complete": complete, "frames": shown}


_TRAIN, _TORCH = "/home/user/train.py", "/usr/lib/python3/dist-packages/torch/distributed/distributed_c10d.py"
_HIGH = (1 << 64) - 1
_STACKS: tuple[tuple[Any, ...], ...] = (
    (1, ("all_reduce", _TORCH, 2810), ("step", _TRAIN, 60), ("main", _TRAIN, 88)),
    (2, ("all_reduce", _TORCH, 2811), ("step", _TRAIN, 60), ("main", _TRAIN, 88)),
    (_HIGH, ("read_batch", _TRAIN, 31), ("main", _TRAIN, 87)),
)


def _samples(node: str, rank: int) -> list[dict[str, Any]]:
    """100 samples of each rank: 3 of 4 in all_reduce, but of rank 2 nine of ten in read_batch; and 5 s off the CPU."""
    reading = 90 if rank == 2 else 25
    return [
        sample(node, rank, 1, 100 - reading - 5),
        sample(node, rank, 2, 5),
        sample(node, rank, _HIGH, reading),
        sample(node, rank, 1, 3, on_cpu=False, duration_ns=5 * SECOND, thread="pin_memory"),
    ]


def hung_job(directory: Path) -> tuple[FakeNode, FakeNode]:
    """Two nodes with two ranks each; ranks 0, 1 and 3 wait in an all_reduce that rank 2 has not called."""
    ranks = {"alpha": (0, 1), "beta": (2, 3)}
    nodes = []
    for name, own in ranks.items():
        last = 50
        tables = {
            "process.processes": [process(name, r, 1000 + r) for r in own]
            + ([process(name, None, 900, command="torchrun train.py")] if name == "alpha" else []),
            "comm.ops": [operation(name, r, s, 40_000_000 if r == 2 else r * 1000) for r in own for s in range(last)],
            "comm.inflight": [inflight(name, r, last, 35 * SECOND + r) for r in own if r != 2],
            "comm.communicators": [communicator(name, r) for r in own],
            "python.samples": [row for r in own for row in _samples(name, r)],
            # Each node writes the same stack down, and again after an hour.
            "python.stacks": [stack(name, *entry) for entry in _STACKS * 2],
            "probing.table_docs": [
                {
                    "node": name,
                    "ts": 0,
                    "table_schema": t.name.split(".")[0],
                    "table_name": t.name.split(".")[1],
                    "description": t.doc,
                    "live": "yes" if t.live else "no",
                }
                for t in TABLES.values()
            ],
            "probing.column_docs": [
                {
                    "node": name,
                    "ts": 0,
                    "table_schema": t.name.split(".")[0],
                    "table_name": t.name.split(".")[1],
                    "column_name": c.name,
                    "type": str(c.plain_type),
                    "description": c.doc,
                }
                for t in TABLES.values()
                for c in t.columns
            ],
        }
        node = FakeNode(directory, name, tables)
        waiting = ("all_reduce", "/usr/lib/python3/dist-packages/torch/distributed/distributed_c10d.py", 2810)
        reading = ("read_batch", "/home/user/train.py", 31)
        for r in own:
            inner = reading if r == 2 else waiting
            node.threads.append(thread(r, 1000 + r, 1000 + r, "MainThread", inner, ("main", "/home/user/train.py", 88)))
        node.threads.append(thread(own[0], 1000 + own[0], 5000, "pin_memory", gil=False))
        nodes.append(node)
    first, second = nodes
    first.peers = [pb.Peer(node=n.name, address=n.address, state="healthy") for n in nodes]
    return first, second
