"""Views ``python.*`` with the columns that Probing's hooks write inside a job; here the values are read from
outside.
"""

from __future__ import annotations

from probing.api.tables import comm, python, train
from probing.api.tables.schema import F64, I32, I64, TEXT, TIME, Column, view
from probing.api.tables.views_columns import MICRO, ROLE, chosen, identity, process_of, step_of, unknown

__all__ = ("VIEWS",)

_STEP = "CASE WHEN o.ts <= s.t_end THEN s.step END"
_STEP_DOC = "Step of train.steps in which the operation was called; NULL if no step that has ended covers the call."
_STEPS = tuple(Column(name, I64, _STEP_DOC, sql=_STEP) for name in ("local_step", "global_step"))
_STEPS_THEMSELVES = chosen(train.STEPS, "s", local_step="step", global_step="step")
_SIZE_DOC = "Number of ranks of the job; NULL once the node has forgotten the process."
_WORLD_SIZE = Column("world_size", I32, _SIZE_DOC, sql="p.world_size")
_MS_DOC = "The same as duration_ns of comm.ops, in ms; NULL if the end is not known."
_MS = Column("duration_ms", F64, _MS_DOC, sql="o.duration_ns / 1e6")
_NOT_READ = "tensors are not read from outside"

COMM_COLLECTIVE = view(
    "python.comm_collective",
    "Collective operations under Probing's names, from comm.ops: seen in the library, not in torch.distributed.",
    (
        *identity("o"),
        *MICRO,
        *_STEPS,
        *chosen(comm.OPS, "o", "rank"),
        _WORLD_SIZE,
        ROLE,
        *chosen(comm.OPS, "o", "op", group_rank="comm_rank", group_size="comm_size"),
        *unknown(
            TEXT,
            "the rows of one node do not show all ranks; comm.communicators of all nodes does",
            "participate_ranks",
        ),
        *unknown(TEXT, _NOT_READ, "tensor_shape"),
        *chosen(comm.OPS, "o", "bytes", tensor_dtype="dtype"),
        _MS,
        Column(
            "async_op",
            I32,
            "1 if the caller asked for an asynchronous operation, else 0; NULL if unknown.",
            sql="o.async_op::INT",
        ),
        *chosen(comm.OPS, "o", "comm", "backend", "seq", "timing_source", "state"),
    ),
    f"comm.ops AS o {step_of('o')} {process_of('o')} WHERE o.op NOT IN ('send', 'recv')",
)

_RANKS_OF_COMM = "numbered in the communicator; NULL except for send, recv and operations with a root."
NCCL_TRACE = view(
    "python.nccl_trace",
    "Operations with their ends, from comm.ops of all backends.",
    (
        *identity("o"),
        *chosen(comm.OPS, "o", "rank", operation="op"),
        Column(
            "src_rank",
            I32,
            f"Rank that sends the data, {_RANKS_OF_COMM}",
            sql="CASE WHEN o.op IN ('send', 'reduce', 'gather') THEN o.comm_rank WHEN o.op = 'recv' THEN o.peer"
            " WHEN o.op IN ('broadcast', 'scatter') THEN o.root END",
        ),
        Column(
            "dst_rank",
            I32,
            f"Rank that receives the data, {_RANKS_OF_COMM}",
            sql="CASE WHEN o.op IN ('recv', 'broadcast', 'scatter') THEN o.comm_rank WHEN o.op = 'send' THEN o.peer"
            " WHEN o.op IN ('reduce', 'gather') THEN o.root END",
        ),
        *chosen(comm.OPS, "o", bytes_transferred="bytes"),
        _MS,
        Column("step", I64, _STEP_DOC, sql=_STEP),
        *chosen(comm.OPS, "o", "comm", "backend", "seq", "timing_source", "state"),
    ),
    f"comm.ops AS o {step_of('o')}",
)

# The memory that a process holds over time: a running sum of the changes in the rows of its stacks.
_HELD = (
    "(SELECT node, pid, start_ns, ts, held, max(held) OVER (PARTITION BY node, pid, start_ns ORDER BY ts) AS peak"
    " FROM (SELECT node, pid, start_ns, ts, sum(change) OVER (PARTITION BY node, pid, start_ns ORDER BY ts) AS held"
    " FROM (SELECT node, pid, start_ns, ts, live_bytes - coalesce(lag(live_bytes) OVER"
    " (PARTITION BY node, pid, start_ns, kind, size_class, stack ORDER BY ts), 0) AS change"
    " FROM cuda.memory WHERE kind <> 'host')))"
)
_SAME = "s.node = {0}.node AND s.pid = {0}.pid AND s.start_ns = {0}.start_ns"
_HELD_BY_CUDA = (
    "that the process got from the CUDA runtime and holds at the end of the step, MiB. It is counted from the time when"
    " the daemon began to watch the process, and includes the allocator's caches, unlike torch's own figure. Without"
    " rows of cuda.memory, the value is the device memory that the driver reports for the process, which includes the"
    " CUDA context; NULL if both are missing"
)
# Memory that the driver reports, summed over the devices of a process. _USED: the last reading before the end of a
# step, unless that reading is more than 30 s older than the end.
_OF_DRIVER = (
    "(SELECT node, pid, start_ns, ts, sum(used_bytes) AS used FROM gpu.processes"
    " WHERE used_bytes IS NOT NULL AND start_ns IS NOT NULL GROUP BY node, pid, start_ns, ts)"
)
_USED = "CASE WHEN epoch_ns(s.t_end) - epoch_ns(g.ts) < 30000000000 THEN g.used END"


def _mb(name: str, sql: str, doc: str) -> Column:
    return Column(name, F64, doc, sql=f"({sql}) / 1048576.0")


TORCH_TRACE = view(
    "python.torch_trace",
    "Steps in the form of the rows that Probing's module hooks write: one row for each step and rank, always with the"
    " stage `post step`. Modules are not seen.",
    (
        *identity("s"),
        *MICRO,
        *_STEPS_THEMSELVES,
        *chosen(train.STEPS, "s", "step"),
        Column("seq", I64, "Number of the row within its step: always 0, because there is one row.", sql="0"),
        *unknown(TEXT, "no hook runs in the job; python.torch_modules has samples of modules", "module"),
        Column("stage", TEXT, "Always `post step`.", sql="'post step'"),
        _mb("allocated", f"coalesce(m.held, {_USED})", f"Memory {_HELD_BY_CUDA}."),
        _mb("max_allocated", "m.peak", "Largest value of allocated since the daemon began to watch the process, MiB."),
        _mb("cached", f"coalesce(m.held, {_USED})", "The same as allocated, which includes caches."),
        _mb("max_cached", "m.peak", "The same as max_allocated."),
        Column(
            "time_offset",
            F64,
            "Time from the start of the step to the row, s; the same as duration.",
            sql="s.duration_ns / 1e9",
        ),
        Column("duration", F64, "Time from the start to the end of the step, s.", sql="s.duration_ns / 1e9"),
        _mb("allocated_delta", "m.held - coalesce(b.held, 0)", "Growth of allocated in the step, MiB."),
        _mb("max_allocated_delta", "m.peak - coalesce(b.peak, 0)", "Growth of max_allocated in the step, MiB."),
        *chosen(train.STEPS, "s", "rank"),
        _WORLD_SIZE,
        ROLE,
        Column(
            "allocated_source",
            TEXT,
            "Where the value of allocated is from: cuda.memory or gpu.processes; NULL if unknown.",
            sql=f"CASE WHEN m.held IS NOT NULL THEN 'cuda.memory' WHEN ({_USED}) IS NOT NULL THEN 'gpu.processes' END",
        ),
    ),
    f"train.steps AS s ASOF LEFT JOIN {_HELD} AS m ON {_SAME.format('m')} AND s.t_end >= m.ts"
    f" ASOF LEFT JOIN {_HELD} AS b ON {_SAME.format('b')} AND s.ts >= b.ts"
    f" ASOF LEFT JOIN {_OF_DRIVER} AS g ON {_SAME.format('g')} AND s.t_end >= g.ts {process_of('s')}",
)

_NO_HOOK = "no hook runs inside the job, so no step is sampled or left out"
TORCH_STEP_TIMING = view(
    "python.torch_step_timing",
    "Duration of each step, from train.steps; Probing uses it to compare steps with and without its hooks.",
    (
        *identity("s"),
        *MICRO,
        *_STEPS_THEMSELVES,
        *chosen(train.STEPS, "s", "rank"),
        _WORLD_SIZE,
        ROLE,
        Column("step_duration_sec", F64, "Time from the start to the end of the step, s.", sql="s.duration_ns / 1e9"),
        Column(
            "is_shadow",
            I32,
            "Always 1: no step runs with Probing's hooks, because no hook runs inside a job.",
            sql="1",
        ),
        Column("sampled", I32, "Always 0: no step is sampled by hooks, because no hook runs inside a job.", sql="0"),
        *unknown(I32, _NO_HOOK, "shadow_normal", "shadow_baseline"),
        *unknown(F64, _NO_HOOK, "sample_rate"),
        *unknown(TEXT, _NO_HOOK, "sample_mode"),
        *chosen(train.STEPS, "s", "source", "confidence"),
    ),
    f"train.steps AS s {process_of('s')}",
)

_GROUP = ("node", "job", "run", "pid", "rank", "snapshot_id", "world_size", "pg_id", "pg_name", "pg_desc")


def _last(name: str, condition: str, doc: str) -> Column:
    return Column(name, I64, doc, sql=f"max(f.collective_seq_id) FILTER (NOT f.is_p2p{condition})")


TORCH_NCCL_PG_STATUS = view(
    "python.torch_nccl_pg_status",
    "How far each process group had come, from the records of each dump of PyTorch's NCCL flight recorder.",
    (
        *chosen(python.FLIGHT_RECORD, "f", *_GROUP),
        Column("ts", TIME, "When the last record of the dump was read, UTC.", sql="max(f.ts)"),
        *unknown(TEXT, "the dump does not name the other ranks", "ranks"),
        _last("last_enqueued_collective", "", "Largest sequence number of a collective that was enqueued."),
        _last(
            "last_started_collective",
            " AND f.state IN ('started', 'completed')",
            "Largest sequence number of a collective that has started.",
        ),
        _last(
            "last_completed_collective",
            " AND f.state = 'completed'",
            "Largest sequence number of a collective that has completed.",
        ),
    ),
    f"python.torch_nccl_flight_record AS f GROUP BY f.start_ns, {', '.join(f'f.{name}' for name in _GROUP)}",
)

TRACE_VARIABLES = view(
    "python.trace_variables",
    "Watched variables under the names of Probing's tracer, from python.variables.",
    (
        *identity("v"),
        *chosen(python.VARIABLES, "v", "rank", "step", function_name="func"),
        *unknown(TEXT, "python.variables does not store where the function is", "filename"),
        *unknown(I32, "python.variables does not store where the function is", "lineno"),
        *chosen(python.VARIABLES, "v", "value", variable_name="name", value_type="type"),
    ),
    "python.variables AS v",
)

VIEWS = (
    COMM_COLLECTIVE,
    NCCL_TRACE,
    TORCH_TRACE,
    TORCH_STEP_TIMING,
    TORCH_NCCL_PG_STATUS,
    TRACE_VARIABLES,
)
