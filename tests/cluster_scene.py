"""A cluster of two nodes as rows of tables. What happened there is known, and answers of SQL are compared with it.

* ``4711.0`` trains on ranks 0 and 1 (node a) and 2 and 3 (node b). Rank 3 calls each operation 30 ms after the others,
  since its data loader waits for NFS; rank 2 is 5 ms late. It has steps of a second, ten of them a minute are recorded.
* ``b/127.0.0.1:29505`` has two ranks on node b. Rank 1 has been stopped for two minutes, rank 0 waits for it.
* ``4600.0`` had one rank on node a, which the kernel killed two hours ago for lack of memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import duckdb
import pyarrow as pa

from probing.api.tables import TABLES

__all__ = ("HUNG", "NODES", "NOW_NS", "SLOW", "Rows", "database", "databases", "rows_of_node")

SECOND = 10**9
MS = 10**6
MINUTE, HOUR = 60 * SECOND, 3600 * SECOND
GB = 10**9
# 11:30 UTC
NOW_NS = 1_795_001_400 * SECOND
SLOW, HUNG, ENDED = "4711.0", "b/127.0.0.1:29505", "4600.0"
NODES = {"a": "10.0.0.1", "b": "10.0.0.2"}
NODE_OF = {0: "a", 1: "a", 2: "b", 3: "b"}
LATE_MS = {0: 0, 1: 0, 2: 5, 3: 30}
Row = dict[str, Any]
Rows = dict[str, list[Row]]


def _who(job: str, rank: int) -> Row:
    run, first, node = {SLOW: ("r1", 100, NODE_OF[rank]), HUNG: ("r2", 200, "b"), ENDED: ("r0", 300, "a")}[job]
    return {"node": node, "job": job, "run": run, "pid": first + rank, "start_ns": 7 * SECOND, "rank": rank}


def _times() -> list[int]:
    """When the steps of the job that trains began: ten a minute in the last ten minutes, two an hour in the 20 hours
    before."""
    recent = [NOW_NS - minute * MINUTE + n * SECOND for minute in range(10, 0, -1) for n in range(10)]
    return [NOW_NS - hour * HOUR + n * SECOND for hour in range(20, 0, -1) for n in range(2)] + recent


def _training(rank: int) -> Rows:
    who, late = _who(SLOW, rank), LATE_MS[rank]
    found: Rows = {"comm.ops": [], "train.steps": [], "python.samples": []}
    for step, begin in enumerate(_times()):
        ended = begin + 100 * MS
        for n, (op, size) in enumerate((("all_reduce", 4_000_000), ("barrier", 0))):
            called = begin + n * 200 * MS + late * MS
            took = ended + n * 200 * MS - called
            found["comm.ops"].append(
                {
                    **who,
                    "ts": called,
                    "tid": who["pid"],
                    "comm": "0",
                    "comm_name": "default_pg",
                    "comm_rank": rank,
                    "comm_size": 4,
                    "backend": "gloo",
                    "seq": 2 * step + n,
                    "op": op,
                    "dtype": "float32" if size else None,
                    "count": size // 4,
                    "bytes": size,
                    "redop": "sum" if size else None,
                    "t_call": called,
                    "t_start": called,
                    "t_done_lo": called + took,
                    "t_done_hi": called + took,
                    "timing_source": "exact",
                    "state": "done",
                    "duration_ns": took,
                    "algbw_gbps": size / took,
                    "busbw_gbps": size / took * 1.5,
                }
            )
        wait = {0: 0, 1: 0, 2: 50, 3: 0}[rank]
        found["train.steps"].append(
            {
                **who,
                "ts": begin,
                "step": step,
                "t_start": begin,
                "t_end": begin + SECOND,
                "duration_ns": SECOND,
                "comm_ns": 2 * (100 - late) * MS,
                "wait_ns": wait * MS,
                "ops": 2,
                "source": "collective_period",
                "confidence": 0.95,
                "why": "2 operations repeat",
            }
        )
        waits = rank == 3
        found["python.samples"].append(
            {
                **who,
                "ts": begin + 500 * MS,
                "tid": who["pid"],
                "thread": "python",
                "stack_id": 2 if waits else 1,
                "trains": True,
                "on_cpu": not waits,
                "gil": not waits,
                "count": 10,
                "duration_ns": 600 * MS,
            }
        )
    return found


def _processes(job: str, ranks: range, state: str = "running") -> Iterator[Row]:
    for rank in ranks:
        yield {
            **_who(job, rank),
            "ts": NOW_NS,
            "local_rank": rank % 2,
            "world_size": len(ranks),
            "node_rank": 0 if job != SLOW else rank // 2,
            "rank_source": "environment",
            "ppid": 50,
            "uid": 1000 if job == SLOW else 1001,
            "owner": 1000 if job == SLOW else 1001,
            "role": "trainer",
            "state": "stopped" if job == HUNG and rank == 1 else state,
            "python": "3.11.7",
            "backends": "gloo",
            "command": "python train.py",
            "job_source": "slurm" if job != HUNG else "master",
        }


def _finding(job: str, node: str, ago_ns: int, state: str, **more: Any) -> Row:
    run = {SLOW: "r1", HUNG: "r2", ENDED: "r0"}[job]
    return {"job": job, "run": run, "node": node, "ts": NOW_NS - ago_ns, "state": state, "found_by": "a", **more}


def _findings(node: str) -> Iterator[Row]:
    def blamed(rank: int, where: str, pid: int, why: str) -> Row:
        culprit = {"rank": rank, "node": where, "pid": pid, "why": why, "activity": ""}
        return {"ranks": str(rank), "nodes": where, "culprits": json.dumps([culprit])}

    slow = {
        "finding_id": "f-slow",
        "verdict": "slow_rank",
        "severity": "warning",
        "confidence": 0.8,
        "sentence": "rank 3 is 30 ms late in each operation",
        "since": NOW_NS - 20 * HOUR,
        "opened": NOW_NS - 19 * HOUR,
        "evidence": json.dumps(["it is last in 100% of the operations", "its data loader waits in fetch_shard"]),
        "victims": "0,1,2",
        **blamed(3, "b", 103, "its data loader waits"),
    }
    # A finding is stored on each node of its job, whenever it changes.
    yield _finding(SLOW, node, 19 * HOUR, "open", **slow)
    yield _finding(SLOW, node, 1 * HOUR, "open", **slow)
    if node == "b":
        hung = {
            "finding_id": "f-hung",
            "verdict": "not_joined",
            "severity": "error",
            "confidence": 0.95,
            "sentence": "rank 1 holds up 1 rank: it is stopped by a signal",
            "since": NOW_NS - 120 * SECOND,
            "opened": NOW_NS - 110 * SECOND,
            "evidence": json.dumps(["it is stopped by a signal"]),
            "victims": "0",
            **blamed(1, "b", 201, "stopped"),
        }
        yield _finding(HUNG, node, 110 * SECOND, "open", **hung)
    else:
        died = {
            "finding_id": "f-died",
            "verdict": "rank_died",
            "severity": "error",
            "confidence": 0.99,
            "sentence": "rank 0 was killed for lack of memory",
            "since": NOW_NS - 2 * HOUR,
            "opened": NOW_NS - 2 * HOUR,
            "evidence": json.dumps(["the kernel killed it"]),
            **blamed(0, "a", 300, "killed by SIGKILL"),
        }
        yield _finding(ENDED, node, 2 * HOUR, "open", **died)
        yield _finding(ENDED, node, 2 * HOUR - 5 * MINUTE, "closed", closed=NOW_NS - 2 * HOUR + 5 * MINUTE, **died)


def _every_minute(minutes: int) -> Iterator[tuple[int, int]]:
    for ago in range(minutes, 0, -1):
        yield ago, NOW_NS - ago * MINUTE


def _of_machine(node: str) -> Rows:
    b = node == "b"
    found: Rows = {name: [] for name in ("host.memory", "host.disk", "host.pressure", "host.file_systems")}
    found |= {name: [] for name in ("gpu.utilization", "net.interfaces", "rdma.ports", "probing.cost")}
    total = 64 * GB
    for ago, ts in _every_minute(60):
        used = (20 if b else 30) * GB + (60 - ago) * GB // 10
        at = {"node": node, "ts": ts}
        memory = {"total_bytes": total, "used_bytes": used, "available_bytes": total - used, "swap_used_bytes": 0}
        found["host.memory"].append({**at, "scope": "node", **memory, "wall_ns": MINUTE, "oom_kills": 0})
        disk = {"device": "nvme0n1", "wall_ns": MINUTE, "reads": 100, "writes": 10, "read_bytes": GB, "write_bytes": GB}
        busy = {"busy_ns": (50 if b else 5) * SECOND, "util_pct": 83.3 if b else 8.3, "in_flight": 3}
        latency = {"read_latency_ns": 40e6 if b else 1e6, "write_latency_ns": 2e6}
        found["host.disk"].append({**at, "scope": "device", **disk, **busy, **latency})
        for resource, share in (("io", 40.0 if b else 1.0), ("cpu", 5.0), ("memory", 0.0)):
            pressure = {"resource": resource, "some_pct": share, "full_pct": share / 2, "some_avg10_pct": share}
            found["host.pressure"].append({**at, "scope": "node", **pressure, "wall_ns": MINUTE})
        for device in range(2):
            idle = b and device == 1
            gpu = {"backend": "cuda", "device_id": device, "uuid": f"GPU-{node}{device}", "name": "H100"}
            load = {"gpu_util_pct": 0.0 if idle else 90.0, "sm_active_pct": 0.0 if idle else 70.0}
            room = {
                "used_bytes": (1 if idle else 70) * GB,
                "total_bytes": 80 * GB,
                "free_bytes": (79 if idle else 10) * GB,
            }
            more = {"temperature_c": 85.0 if b else 60.0, "power_w": 600.0, "sm_clock_mhz": 1500.0, "wall_ns": MINUTE}
            heat = {"hw_thermal_ns": 30 * SECOND if b and device == 0 else 0, "sw_thermal_ns": 0, "ecc_uncorrected": 0}
            found["gpu.utilization"].append({**at, **gpu, **load, **room, **more, **heat, "energy_j": 600.0 * 60})
        link = {"interface": "eth0", "netns": 1, "kind": "physical", "operstate": "up", "speed_gbps": 100.0}
        rates = {"interval_ns": MINUTE, "rx_gbps": 5.0, "tx_gbps": 40.0 if b else 5.0, "addresses": NODES[node]}
        errors = {"rx_errors": 3 if b else 0, "rx_errors_new": 3 if b and ago == 30 else 0, "rx_dropped_new": 0}
        found["net.interfaces"].append({**at, **link, **rates, **errors, "rx_bytes": 1, "tx_bytes": 1})
        port = {"hca": "mlx5_0", "port": 1, "link_layer": "InfiniBand", "state": "ACTIVE", "rate_gbps": 400.0}
        waits = {"interval_ns": MINUTE, "sent_gbps": 90.0, "received_gbps": 80.0, "port_xmit_wait_new": 7 if b else 0}
        flaps = {"symbol_error_new": 1 if b and ago == 10 else 0, "link_downed_new": 0}
        found["rdma.ports"].append({**at, **port, **waits, **flaps})
        cost = {"process": "collector", "pid": 9, "cpu_ns": SECOND, "cpu_pct": 1.5, "rss_bytes": GB // 10}
        found["probing.cost"].append({**at, **cost})
        found["probing.cost"].append({**at, "process": "probes", "cpu_ns": SECOND // 10, "cpu_pct": 0.2, "hits": 4000})
    for mount, share in (("/", 0.5), ("/data", 0.97 if b else 0.4)):
        size = 1000 * GB
        room = {"size_bytes": size, "used_bytes": round(size * share), "available_bytes": round(size * (1 - share))}
        kind = {"mount_point": mount, "fs_type": "ext4", "source": "nvme0n1", "answers": True, "read_only": False}
        found["host.file_systems"].append(
            {"node": node, "ts": NOW_NS - MINUTE, "scope": "node", **kind, **room, "used_pct": 100 * share}
        )
    return found


def _of_ranks(node: str) -> Rows:
    found: Rows = {name: [] for name in ("process.memory", "cpu.utilization", "net.tcp", "net.paths", "net.sockets")}
    found |= {name: [] for name in ("host.disk", "gpu.processes", "cuda.syncs", "comm.progress", "python.backtrace")}
    found |= {"python.training_metrics": []}
    for rank in (rank for rank, where in NODE_OF.items() if where == node):
        who = _who(SLOW, rank)
        for ago, ts in _every_minute(60):
            at = {**who, "ts": ts, "role": "trainer"}
            grows = 50_000_000 * (60 - ago) if rank == 1 else 0
            found["process.memory"].append({**at, "rss_bytes": 5 * GB + grows, "anon_bytes": 4 * GB, "swap_bytes": 0})
            cpu = {"scope": "process", "wall_ns": MINUTE, "delta_total_ns": 30 * SECOND, "cpu_total_pct": 50.0}
            delay = {"run_delay_ns": 20 * SECOND if rank == 2 else 0, "delta_vol_ctxt": 10, "thread_count": 9}
            found["cpu.utilization"].append({**at, **cpu, **delay})
            reads = {"scope": "process", "wall_ns": MINUTE, "read_bytes": GB * (1 + rank), "io_delay_ns": rank * SECOND}
            found["host.disk"].append({**at, **reads})
            gpu = {"backend": "cuda", "device_id": rank % 2, "uuid": f"GPU-{node}{rank % 2}", "used_bytes": 60 * GB}
            found["gpu.processes"].append({**at, **gpu, "kind": "compute", "source": "nvml"})
            found["cuda.syncs"].append(
                {**who, "ts": ts, "tid": who["pid"], "op": "stream_synchronize", "duration_ns": (rank + 1) * MS}
            )
            other = "b" if node == "a" else "a"
            away = {"netns": 1, "local_address": NODES[node], "peer_address": NODES[other], "peer_local": False}
            sent = {
                "interval_ns": MINUTE,
                "sockets": 2,
                "bytes_sent": 10**9,
                "bytes_received": 10**9,
                "segs_out": 10**6,
            }
            lost = {
                "retrans": 500 if rank == 3 else 1,
                "rtt_ns": 9 * MS if rank == 3 else 100_000,
                "rtt_max_ns": 10 * MS,
            }
            found["net.tcp"].append({**at, **away, **sent, **lost, "timeouts": 0, "rwnd_limited_ns": rank * SECOND})
            here = {"netns": 1, "local_address": "127.0.0.1", "peer_address": "127.0.0.1", "peer_local": True}
            found["net.tcp"].append({**at, **here, **sent, "retrans": 0, "rtt_ns": 20_000, "peer_rank": rank ^ 1})
            if rank % 2 == 0:
                path = {name: away[name] for name in ("local_address", "peer_address")}
                of_job = {name: who[name] for name in ("node", "job", "run")}
                figures = {**sent, "retrans": 501 if node == "b" else 2, "rtt_ns": 4 * MS, "processes": 2}
                found["net.paths"].append({**of_job, "ts": ts, **path, **figures})
        progress = {"comm": "0", "comm_name": "default_pg", "comm_rank": rank, "comm_size": 4, "backend": "gloo"}
        done = {"seq": 279, "op": "barrier", "calls": 280, "last_call": NOW_NS - 50 * SECOND, "world_size": 4}
        found["comm.progress"].append({**who, "ts": NOW_NS, **progress, **done})
        found["python.training_metrics"] += [
            {**who, "ts": begin, "step": step, "loss": 3.0 - step / 100 if rank else 3.0}
            for step, begin in enumerate(_times())
        ]
        other_rank = rank + 2 if rank < 2 else rank - 2
        port = 40_000 + min(rank, other_rank)
        ports = {"local_port": port, "peer_port": 29500} if rank < 2 else {"local_port": 29500, "peer_port": port}
        there = {"local_address": NODES[node], "peer_address": NODES["b" if node == "a" else "a"]}
        socket = {**who, "ts": NOW_NS, "role": "trainer", "netns": 1, "state": "open", **there, **ports, "seen": NOW_NS}
        found["net.sockets"].append(socket)
        found["python.backtrace"] += [
            {**who, "ts": NOW_NS, "tid": who["pid"], "thread": "MainThread", "trains": True, "depth": depth, **frame}
            for depth, frame in enumerate(
                (
                    {"func": "fetch_shard" if rank == 3 else "forward", "file": "data.py", "lineno": 12},
                    {"func": "train", "file": "train.py", "lineno": 73},
                )
            )
        ]
    return found


def rows_of_node(node: str) -> Rows:
    """Returns what node ``a`` or ``b`` has."""
    found: Rows = {name: [] for name in TABLES}

    def add(more: Rows) -> None:
        for name, rows in more.items():
            found[name] += rows

    for rank, where in NODE_OF.items():
        if where == node:
            add(_training(rank))
    add(_of_machine(node))
    add(_of_ranks(node))
    found["diagnosis.findings"] += _findings(node)
    found["process.processes"] += [row for row in _processes(SLOW, range(4)) if row["node"] == node]
    found["python.stacks"] = [
        {
            "node": node,
            "ts": NOW_NS - HOUR,
            "stack_id": stack,
            "complete": True,
            "frames": [
                {"func": func, "file": file, "lineno": line},
                {"func": "train", "file": "train.py", "lineno": 73},
            ],
        }
        for stack, func, file, line in ((1, "forward", "model.py", 40), (2, "fetch_shard", "data.py", 12))
    ]
    found["comm.communicators"] = [
        {
            **{name: who[name] for name in ("node", "job", "run", "pid", "start_ns")},
            "ts": NOW_NS - 20 * HOUR,
            "comm": "0",
            "name": "default_pg",
            "backend": "gloo",
            "size": 4,
            "rank": who["rank"],
            "job_rank": who["rank"],
            "nodes": 2,
            "parallel_role": "data",
            "created": NOW_NS - 20 * HOUR,
        }
        for who in (_who(SLOW, rank) for rank, where in NODE_OF.items() if where == node)
    ]
    found["probing.sources"] = [
        {"node": node, "ts": NOW_NS, "source": source, "state": state, "rows": 1000, "lost": lost, "reason": reason}
        for source, state, lost, reason in (
            ("collectives", "running", 12 if node == "b" else 0, ""),
            ("gpu", "running", 0, ""),
            ("rdma", "degraded" if node == "b" else "running", 0, "no permission" if node == "b" else ""),
        )
    ]
    found["cluster.members"] = [
        {
            "node": node,
            "ts": NOW_NS,
            "member": member,
            "address": f"{address}:7000",
            "state": "healthy",
            "version": "0.1.0" if member == "a" else "0.0.9",
            "clock_offset_ns": 0 if member == node else 2 * MS,
            "rtt_ns": MS,
        }
        for member, address in NODES.items()
    ]
    found["probing.store"] = [
        {
            "node": node,
            "ts": NOW_NS,
            "kind": kind,
            "table_name": name,
            "files": 3,
            "bytes": size,
            "rows": 1,
            "oldest": 1,
        }
        for kind, name, size in (
            ("segments", "comm.ops", 5 * GB),
            ("segments", "train.steps", GB),
            ("log", None, 10**6),
        )
    ]
    settings = [("python.sample_hz", "19", "19"), ("logs.enabled", "true" if node == "a" else "false", "false")]
    found["probing.settings"] = [
        {"node": node, "ts": NOW_NS, "key": key, "value": value, "default": default, "doc": ""}
        for key, value, default in settings
    ]
    if node == "b":
        found["process.processes"] += _processes(HUNG, range(2))
        inflight = {"comm": "0", "comm_name": "default_pg", "comm_rank": 0, "comm_size": 2, "backend": "gloo", "seq": 9}
        state = {"op": "all_reduce", "state": "started", "age_ns": 120 * SECOND, "bytes": 64}
        found["comm.inflight"] = [{**_who(HUNG, 0), "ts": NOW_NS - 120 * SECOND, **inflight, **state}]
        found["process.logs"] = [
            {
                **_who(SLOW, 3),
                "ts": NOW_NS - 5 * MINUTE,
                "stream": "stderr",
                "kind": "error",
                "line": "OSError: nfs: server not responding",
            }
        ]
        found["process.kmsg"] = [
            {
                "node": "b",
                "ts": NOW_NS - 6 * MINUTE,
                "level": "err",
                "kind": "file_server",
                "message": "nfs: not responding",
            }
        ]
        found["gpu.events"] = [
            {"node": "b", "ts": NOW_NS - 3 * HOUR, "device_id": 0, "event": "xid", "xid": 63, "detail": "row remap"}
        ]
        gap = {"source": "collectives", "table_name": "comm.ops", "stage": "ring", "reason": "full", "count": 12}
        found["probing.losses"] = [
            {"node": "b", "ts": NOW_NS - HOUR, "ts_from": NOW_NS - HOUR - SECOND, "ts_to": NOW_NS - HOUR, **gap}
        ]
    else:
        died = _who(ENDED, 0)
        found["process.events"] = [
            {**died, "ts": NOW_NS - 3 * HOUR, "event": "start", "role": "trainer"},
            {**died, "ts": NOW_NS - 2 * HOUR, "event": "oom_kill", "role": "trainer"},
            {**died, "ts": NOW_NS - 2 * HOUR, "event": "exit", "role": "trainer", "signal": 9},
        ]
        found["process.kmsg"] = [
            {
                **died,
                "ts": NOW_NS - 2 * HOUR,
                "level": "err",
                "kind": "oom_kill",
                "message": "Out of memory: Killed process 300 (python)",
            }
        ]
    started = [_who(SLOW, rank) for rank, where in NODE_OF.items() if where == node]
    found["process.events"] = found["process.events"] + [
        {**who, "ts": NOW_NS - 20 * HOUR, "event": "start", "role": "trainer"} for who in started
    ]
    return found


def database(*nodes: Rows) -> duckdb.DuckDBPyConnection:
    """Returns a database with the rows of ``nodes`` together, in the schema that queries see."""
    db = duckdb.connect(config={"threads": "1", "python_enable_replacements": "false"})
    db.execute("SET TimeZone = 'UTC'")
    for name, table in TABLES.items():
        schema = table.logical
        rows = [{column: row.get(column) for column in schema.names} for own in nodes for row in own.get(name, ())]
        unknown = {key for own in nodes for row in own.get(name, ()) for key in row} - set(schema.names)
        assert not unknown, (name, unknown)
        db.execute(f'CREATE SCHEMA IF NOT EXISTS "{name.split(".")[0]}"')
        db.register("given", pa.Table.from_pylist(rows, schema=schema))
        db.execute(f"CREATE TABLE {name} AS SELECT * FROM given")
        db.unregister("given")
    return db


@contextmanager
def databases() -> Iterator[tuple[duckdb.DuckDBPyConnection, dict[str, duckdb.DuckDBPyConnection]]]:
    """The cluster as one database, and a database for each node."""
    rows = {node: rows_of_node(node) for node in NODES}
    each = {node: database(own) for node, own in rows.items()}
    whole = database(*rows.values())
    yield whole, each
    for db in (whole, *each.values()):
        db.close()
