"""Two jobs on simulated nodes: one hangs with ranks on each node, and a small one on the last two nodes is healthy.

The rows of a table differ between nodes in little more than the numbers of ranks. So DuckDB answers for a few nodes,
and the others get these rows with other ranks.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.api.tables import TABLES
from probing.diagnosis.facts import Facts
from probing.diagnosis.facts_file import to_json
from simulator.answers import Answers, encoded
from simulator.cast import Cast

__all__ = ("EACH", "HEALTHY", "HUNG", "RUN", "JobNodes", "culprit_of")

EACH = 8
"""Ranks of the job that hangs on each node."""
HUNG, HEALTHY, RUN = "llm-70b", "resnet", "r1"
_HEALTHY_EACH = 4
_SECOND = 10**9
_LAST_SEQ = 50
_STEPS = 20
_GPU = "NVIDIA H100 80GB HBM3"
_TRAIN = "/home/user/train.py"
_C10D = "/usr/lib/python3/dist-packages/torch/distributed/distributed_c10d.py"
_RANKS = ("rank", "comm_rank")
# A column of a part of a SELECT that a node computes: "rank" AS k0, list(DISTINCT "rank") AS s1.
_RENAMED = re.compile(r'"(\w+)"\)? AS ([ks]\d+)\b')
_MOST_KEPT = 20_000
_SOURCES = 26


def culprit_of(count: int) -> int:
    """Returns the rank that all other ranks of ``count`` nodes wait for."""
    return count * EACH * 53 // 100 + 3


class JobNodes:
    """The rows, facts and stacks of the nodes of ``cast``, whose ``jobs_ns`` is the time of the hang. Belongs to one
    event loop."""

    def __init__(self, cast: Cast) -> None:
        self._cast = cast
        self._culprit = culprit_of(cast.count)
        self._answers: dict[tuple[bool, bool], Answers] = {}
        self._kept: OrderedDict[tuple[int, str], bytes] = OrderedDict()
        self._facts: dict[tuple[int, str], bytes] = {}

    async def rows(self, sql: str, number: int) -> tuple[bytes, int]:
        """Returns the Arrow stream of ``sql`` at the node ``number``, and its rows. Raises QueryError."""
        kind = self._is_culprit(number), self._has_healthy(number)
        if kind not in self._answers:
            self._answers[kind] = Answers(lambda db: self._fill(db, *kind), dialect=True)
        stream, rows = await self._answers[kind].rows(sql, number)
        if not _columns(sql, stream, *_RANKS):
            return stream, rows
        key = number, sql
        if key not in self._kept:
            self._kept[key] = encoded(self._with_ranks(stream, sql, number))
            if len(self._kept) > _MOST_KEPT:
                self._kept.popitem(last=False)
        return self._kept[key], rows

    def facts(self, job: str, number: int) -> list[bytes]:
        """Returns the facts of ``job``, or of all jobs, at a node, as JSON."""
        jobs = [HUNG, *([HEALTHY] if self._has_healthy(number) else [])]
        return [self._facts_of(name, number) for name in jobs if job in ("", name)]

    def hardware(self, number: int) -> bytes:
        """Returns the facts of a node about its hardware."""
        return self._facts_of("", number)

    def stacks(self, request: pb.StacksRequest, number: int) -> pb.StacksReply:
        """Returns the main threads of the chosen ranks of a node."""
        pids = set(request.pids)
        wanted = [
            (job, rank, pid)
            for job, rank, pid in self._ranks(number)
            if (not pids or pid in pids) and request.job in ("", job)
        ]
        return pb.StacksReply(node=Cast.name(number), threads=[self._thread(*one) for one in wanted])

    def status(self, number: int, now_ns: int) -> pb.StatusReply:
        """Returns the parts of a status that the page shows: sources, rows, and bytes of the store."""
        sources = [pb.Source(name=f"source{n}", state="running", rows=97 * n) for n in range(_SOURCES)]
        return pb.StatusReply(
            started_ns=now_ns - 3600 * _SECOND,
            sources=sources,
            store_bytes=1013 << 20,
            processes=EACH + _HEALTHY_EACH * self._has_healthy(number),
        )

    def _is_culprit(self, number: int) -> bool:
        return number == self._culprit // EACH

    def _has_healthy(self, number: int) -> bool:
        return number >= self._cast.count - 2

    def _ranks(self, number: int) -> Iterator[tuple[str, int, int]]:
        yield from ((HUNG, number * EACH + n, 1000 + n) for n in range(EACH))
        if self._has_healthy(number):
            first = (number - self._cast.count + 2) * _HEALTHY_EACH
            yield from ((HEALTHY, first + n, 2000 + n) for n in range(_HEALTHY_EACH))

    def _with_ranks(self, stream: bytes, sql: str, number: int) -> pa.Table:
        """Returns the rows of the first node of a kind with the ranks of the node ``number``."""
        table = pa.ipc.open_stream(stream).read_all()
        hung, healthy = number * EACH, (number - self._cast.count + 2) * _HEALTHY_EACH
        more: Any = pa.scalar(healthy if HEALTHY in sql and HUNG not in sql else hung)
        for job in _columns(sql, stream, "job"):
            more = pc.if_else(pc.equal(table[job], HUNG), pa.scalar(hung), pa.scalar(healthy))
        for name in _columns(sql, stream, *_RANKS):
            place, kind = table.column_names.index(name), table.schema.field(name).type
            lists = table[name].combine_chunks() if pa.types.is_list(kind) else None
            ranks = table[name] if lists is None else lists.values
            moved: Any = pc.add(ranks.cast(pa.int64()), more).cast(ranks.type)
            column = moved if lists is None else pa.ListArray.from_arrays(lists.offsets, moved)
            table = table.set_column(place, table.schema.field(name), column.cast(kind))
        return table

    def _fill(self, db: duckdb.DuckDBPyConnection, culprit: bool, healthy: bool) -> None:
        """Makes the rows of a node whose ranks count from 0."""
        for name, rows in self._rows(culprit, healthy).items():
            db.register("given", pa.Table.from_pylist(rows, schema=TABLES[name].logical))
            db.execute(f"INSERT INTO {name} SELECT * FROM given")
            db.unregister("given")

    def _rows(self, culprit: bool, healthy: bool) -> dict[str, list[dict[str, Any]]]:
        at, node = self._cast.jobs_ns, Cast.name(999_999)
        tables: dict[str, list[dict[str, Any]]] = {}

        def add(name: str, /, **row: Any) -> None:
            tables.setdefault(name, []).append({"node": node, "ts": at, **row})

        ranks = [(HUNG, n, 1000 + n, self._cast.count * EACH) for n in range(EACH)]
        ranks += [(HEALTHY, n, 2000 + n, 2 * _HEALTHY_EACH) for n in range(_HEALTHY_EACH * healthy)]
        for job, rank, pid, world in ranks:
            waits = job == HUNG and not (culprit and rank == self._culprit % EACH)
            who = {"job": job, "run": RUN, "pid": pid, "start_ns": pid * _SECOND, "rank": rank}
            comm = {"comm": "0", "comm_name": "default_pg", "comm_rank": rank, "comm_size": world, "backend": "nccl"}
            add(
                "process.processes",
                **who,
                local_rank=rank,
                world_size=world,
                uid=1000,
                role="trainer",
                state="running",
                python="3.11.2",
                command=f"python {_TRAIN} --config 70b.yaml",
            )
            last = _LAST_SEQ + waits
            called = at if job == HEALTHY else at - 35 * _SECOND
            add("comm.progress", **who, **comm, seq=last, calls=last, last_call=called, attached=at - 3600 * _SECOND)
            if waits:
                add("comm.inflight", **who, **comm, seq=last, op="all_reduce", state="started", age_ns=35 * _SECOND)
            for n in range(_STEPS):
                end = called - (_STEPS - n) * _SECOND
                add(
                    "train.steps",
                    **{**who, "ts": end},
                    step=n + 31,
                    t_start=end - _SECOND,
                    t_end=end,
                    duration_ns=_SECOND,
                )
                operation = {"seq": n + 31, "op": "all_reduce", "state": "done", "duration_ns": 10**7 + rank * 1013}
                add("comm.ops", **{**who, "ts": end}, **comm, **operation)
            for second in range(120):
                row = {**who, "ts": at - second * _SECOND, "role": "trainer", "scope": "process"}
                add("cpu.utilization", **row, cpu_total_pct=97.0, rss_kb=4 << 20, thread_count=31, wall_ns=_SECOND)
            add("process.memory", **who, role="trainer", rss_bytes=4 << 30)
            gpu = {"device_id": rank % EACH, "uuid": f"GPU-{rank % EACH}"}
            add("gpu.processes", **who, **gpu, role="trainer", used_bytes=60 << 30)
        self._add_gpus(add, at)
        self._add_rest(add, at)
        return tables

    def _add_gpus(self, add: Any, at: int) -> None:
        for device in range(EACH):
            gpu = {"device_id": device, "uuid": f"GPU-{device}", "name": _GPU, "total_bytes": 80 << 30}
            add("gpu.devices", **gpu, bus_id=f"0000:{device:02x}:00.0", numa_node=device // 4, state="ok")
            for second in range(120):
                add(
                    "gpu.utilization",
                    **gpu,
                    ts=at - second * _SECOND,
                    used_bytes=60 << 30,
                    gpu_util_pct=100.0,
                    power_w=400.0,
                )
            for peer in range(EACH):
                if peer != device:
                    link = {
                        "kind": "nvlink",
                        "link": peer,
                        "peer": f"GPU-{peer}",
                        "peer_kind": "gpu",
                        "state": "active",
                    }
                    add("gpu.links", device_id=device, uuid=f"GPU-{device}", **link)

    def _add_rest(self, add: Any, at: int) -> None:
        victims = ",".join(str(rank) for rank in range(513) if rank != self._culprit)
        add(
            "diagnosis.findings",
            job=HUNG,
            run=RUN,
            finding_id="f1",
            verdict="not_joined",
            severity="error",
            state="open",
            confidence=0.95,
            sentence=self.sentence,
            ranks=str(self._culprit),
            nodes=Cast.name(self._culprit // EACH),
            victims=victims,
            culprits="[]",
            evidence="[]",
            missing="[]",
            refuted_by="[]",
            next_steps="[]",
            stacks="[]",
            since=at - 35 * _SECOND,
            opened=at - 20 * _SECOND,
        )

        for table in TABLES:
            schema, _, name = table.partition(".")
            add("probing.table_docs", table_schema=schema, table_name=name, live="no")
        for member in range(self._cast.count):
            address = self._cast.address(member)
            add("cluster.members", member=Cast.name(member), address=address, state="healthy", version="0.1.0")

    @property
    def sentence(self) -> str:
        return f"rank {self._culprit} has not called all_reduce #51 on default_pg: it is in read_batch (train.py:31)"

    def _facts_of(self, job: str, number: int) -> bytes:
        if (number, job) not in self._facts:
            self._facts[number, job] = to_json(self._made_facts(job, number))
        return self._facts[number, job]

    def _made_facts(self, job: str, number: int) -> Facts:
        # The builders of the tests of diagnosis count from a time of their own.
        import diagnosis_cases as cases

        cases.NOW, name = self._cast.jobs_ns, Cast.name(number)
        if not job:
            return cases.facts(nodes=[cases.node(name)], comms=[])
        ranks = []
        for own, rank, pid in self._ranks(number):
            if own != job:
                continue
            done = cases.history(_LAST_SEQ, ago=0.2 if job == HEALTHY else 36)
            waits = () if job == HEALTHY or rank == self._culprit else (cases.op(_LAST_SEQ + 1, ago=35),)
            stack = cases.in_collective() if waits else cases.elsewhere("read_batch train.py:31")
            ranks.append(cases.rank(rank, *done, *waits, node=name, stack=stack, pid=pid))
        world = self._cast.count * EACH if job == HUNG else 2 * _HEALTHY_EACH
        comm = cases.comm("0", [rank.rank for rank in ranks], size=world)
        return cases.facts(*ranks, comms=[comm], job=job, run=RUN, world_size=world)

    def _thread(self, job: str, rank: int, pid: int) -> pb.Thread:
        inner = pb.Frame(func="all_reduce", file=_C10D, lineno=2810, frame_type="Python")
        if job == HEALTHY or rank == self._culprit:
            inner = pb.Frame(func="read_batch", file=_TRAIN, lineno=31, frame_type="Python")
        outer = pb.Frame(func="main", file=_TRAIN, lineno=88, frame_type="Python")
        own = {"job": job, "run": RUN, "rank": rank, "pid": pid, "tid": pid, "start_ns": pid * _SECOND}
        return pb.Thread(
            **own, thread="MainThread", state="sleeping", complete=True, trains=True, frames=[inner, outer]
        )


def _columns(sql: str, stream: bytes, *names: str) -> list[str]:
    """Returns the columns of an answer to ``sql`` that have the values of the columns ``names``."""
    present = pa.ipc.open_stream(stream).schema.names
    renamed = [given for name, given in _RENAMED.findall(sql) if name in names]
    return [name for name in present if name in names or name in renamed]
