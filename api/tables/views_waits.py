"""Views that show which rank the other ranks of a job wait for (by operation, hour and node), and which process is at
the other end of a connection.

If an operation ends on all ranks at the same time, the rank that calls last has the shortest duration. Each other rank
waited for that rank; the wait is the difference of their durations. Clocks of nodes are not compared. If the row of a
rank is missing, for example because its node was not asked, the operation does not show which rank was last.
"""

from __future__ import annotations

from probing.api.tables.net import SOCKETS
from probing.api.tables.schema import F64, I32, I64, NAME, TEXT, TIME, Column, view
from probing.api.tables.views_columns import chosen

__all__ = ("VIEWS",)

_ALONE = ", ".join(f"'{op}'" for op in ("send", "recv", "broadcast", "reduce", "gather", "scatter"))
_JOINT = (
    "state = 'done' AND duration_ns IS NOT NULL AND seq IS NOT NULL AND rank IS NOT NULL AND comm_size > 1"
    f" AND op NOT IN ({_ALONE}) AND ts > now() - INTERVAL {{}}"
)
_KEY = "job, run, comm, seq"
_WHOLE = "members = comm_size"


def _operations(interval: str) -> str:
    return (
        f"SELECT {_KEY}, min(ts) AS began, any_value(op) AS op, any_value(comm_name) AS comm_name,"
        " any_value(comm_size) AS comm_size, any_value(bytes) AS bytes, count(*) AS members,"
        " arg_min(rank, duration_ns) AS last_rank, arg_min(node, duration_ns) AS last_node,"
        " arg_max(rank, duration_ns) AS first_rank, max(duration_ns) - min(duration_ns) AS lag_ns,"
        " CAST(sum(duration_ns) - count(*) * min(duration_ns) AS BIGINT) AS wait_ns"
        f" FROM comm.ops WHERE {_JOINT.format(interval)} GROUP BY {_KEY}"
    )


def _ranks(interval: str) -> str:
    same = f"OVER (PARTITION BY {_KEY})"
    return (
        f"SELECT node, {_KEY}, ts, rank, comm_size, duration_ns, count(*) {same} AS members,"
        f" duration_ns - min(duration_ns) {same} AS wait_ns, arg_min(rank, duration_ns) {same} AS last_rank,"
        f" arg_min(node, duration_ns) {same} AS last_node FROM comm.ops WHERE {_JOINT.format(interval)}"
    )


def _if_whole(column: str) -> str:
    return f"CASE WHEN o.members = o.comm_size THEN o.{column} END"


_JOB = Column("job", NAME, "The job of the ranks.", sql="o.job")
_RUN = Column("run", NAME, "The run of the job.", sql="o.run")

OP_LAG = view(
    "views.op_lag",
    "The rank that called last, and how long the first rank waited for it: a row for each operation of the last hour"
    " that has several ranks and a known duration. Ask with --all-nodes: if the row of a rank is missing, no rank is"
    " named.",
    (
        Column("node", TEXT, "Node of the rank that called last.", sql=_if_whole("last_node")),
        Column("ts", TIME, "When the first rank called the operation, UTC, by the clock of its node.", sql="o.began"),
        _JOB,
        _RUN,
        Column("comm", NAME, "The communicator.", sql="o.comm"),
        Column("comm_name", NAME, "Name that the framework gives the communicator.", sql="o.comm_name"),
        Column("seq", I64, "Sequence number on the communicator.", sql="o.seq"),
        Column("op", NAME, "Operation, e.g. all_reduce.", sql="o.op"),
        Column("bytes", I64, "Bytes that each rank contributes.", sql="o.bytes"),
        Column("comm_size", I32, "Number of ranks of the communicator.", sql="o.comm_size"),
        Column("members", I64, "Number of ranks that have a row of the operation.", sql="o.members"),
        Column(
            "last_rank", I32, "Rank that called last; NULL if rows of ranks are missing.", sql=_if_whole("last_rank")
        ),
        Column("first_rank", I32, "Rank that called first and waited longest.", sql=_if_whole("first_rank")),
        Column("lag_ns", I64, "How much later the last rank called than the first, ns.", sql=_if_whole("lag_ns")),
        Column(
            "wait_ns", I64, "Sum of the times that all ranks waited for the last rank, ns.", sql=_if_whole("wait_ns")
        ),
    ),
    f"({_operations('1 HOUR')}) AS o",
    local=False,
)

_HOURS = (
    "SELECT node, job, run, CAST(date_trunc('hour', ts) AS TIMESTAMP_NS) AS ts, rank, last_rank, last_node,"
    " count(*) AS ops, CAST(sum(wait_ns) AS BIGINT) AS wait_ns"
    f" FROM ({_ranks('24 HOUR')}) AS r WHERE {_WHOLE} AND rank <> last_rank"
    " GROUP BY node, job, run, date_trunc('hour', ts), rank, last_rank, last_node"
)

WAITS_BY_HOUR = view(
    "views.waits_by_hour",
    "Which rank waits for which: a row for each hour of the last 24 hours, each rank, and each other rank that it"
    " waited for in operations. Ask with --all-nodes: an operation counts only if the rows of all its ranks are"
    " present.",
    (
        Column("node", NAME, "Node of the rank that waits.", sql="o.node"),
        Column("ts", TIME, "Start of the hour, UTC.", sql="o.ts"),
        _JOB,
        _RUN,
        Column("rank", I32, "Rank that waits.", sql="o.rank"),
        Column("waits_for", I32, "Rank that called last.", sql="o.last_rank"),
        Column("waits_for_node", NAME, "Node of the rank that called last.", sql="o.last_node"),
        Column("ops", I64, "Number of operations in which the rank of the column waits_for called last.", sql="o.ops"),
        Column("wait_ns", I64, "How long the rank waited in these operations, ns.", sql="o.wait_ns"),
    ),
    f"({_HOURS}) AS o",
    local=False,
)

_NODES = (
    "SELECT job, last_node AS node, count(*) AS last_ops, CAST(sum(wait_ns) AS BIGINT) AS wait_ns,"
    " avg(lag_ns) AS lag_ns, sum(count(*)) OVER (PARTITION BY job) AS ops"
    f" FROM ({_operations('24 HOUR')}) AS p WHERE {_WHOLE}"
    " GROUP BY job, last_node"
)

SLOW_NODES = view(
    "views.slow_nodes",
    "How long each job waited for ranks of each node in operations of the last 24 hours; a row for each job and node"
    " whose rank was last in any operation. Ask with --all-nodes: an operation counts only if the rows of all its ranks"
    " are present.",
    (
        Column("node", NAME, "Node whose ranks called last.", sql="o.node"),
        _JOB,
        Column("last_ops", I64, "Number of operations in which a rank of the node called last.", sql="o.last_ops"),
        Column(
            "last_share",
            F64,
            "Part of the job's operations in which a rank of the node called last, 0 to 1.",
            sql="o.last_ops / CAST(o.ops AS DOUBLE)",
        ),
        Column(
            "lag_ns",
            F64,
            "Mean time from the first to the last call of an operation, over the operations that last_ops counts, ns.",
            sql="o.lag_ns",
        ),
        Column("wait_ns", I64, "Sum of the times that all ranks waited for the node, ns.", sql="o.wait_ns"),
    ),
    f"({_NODES}) AS o",
    local=False,
)

_HERE = "(s.peer_address NOT LIKE '127.%' AND s.peer_address <> '::1')"
_OTHER_END = (
    "s.peer_address = p.local_address AND s.peer_port = p.local_port AND s.local_address = p.peer_address"
    f" AND s.local_port = p.peer_port AND ({_HERE} OR (s.node = p.node AND s.netns = p.netns))"
)
_OPEN = "(SELECT * FROM net.sockets WHERE state = 'open')"

CONNECTIONS = view(
    "views.connections",
    "The TCP connections of watched processes as of now (live), and the process at the other end if that process is"
    " watched too. Ask with --all-nodes for connections between nodes.",
    (
        *chosen(SOCKETS, "s", "node", "ts", "job", "run", "pid", "start_ns", "rank", "role"),
        *chosen(SOCKETS, "s", "local_address", "local_port", "peer_address", "peer_port"),
        Column(
            "peer_node",
            NAME,
            "Node of the process at the other end; NULL if that process is not watched.",
            sql="p.node",
        ),
        Column("peer_job", NAME, "Job of the process at the other end.", sql="p.job"),
        Column("peer_pid", I32, "Process id at the other end.", sql="p.pid"),
        Column("peer_rank", I32, "Rank of the process at the other end.", sql="p.rank"),
    ),
    f"{_OPEN} AS s LEFT JOIN {_OPEN} AS p ON {_OTHER_END}",
    local=False,
)

VIEWS = (OP_LAG, WAITS_BY_HOUR, SLOW_NODES, CONNECTIONS)
