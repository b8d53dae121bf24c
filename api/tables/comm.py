"""Collective operations and communicators."""

from __future__ import annotations

from probing.api.tables.schema import BOOL, F64, I32, I64, NAME, TEXT, TIME, U64, Column, Stored, Table, stored

__all__ = ("BUS_FACTOR", "COMMUNICATORS", "IDENTITY", "INFLIGHT", "MOVED_BYTES", "OPS", "PROGRESS", "RAS")

# The absolute time of a stored difference to t_call in ns. Epochs, because DuckDB's intervals are microseconds.
_AFTER_CALL = "make_timestamp_ns(epoch_ns(ts) + {})"
# An exact end is stored as its difference to t_call (`done_hi_ns`). Another end is stored as the time itself
# (`done_hi`), which all operations that one wait or one look of a watchdog found finished share, so that it compresses
# well, and as the width of the interval (`done_within_ns`). The columns of the other form are NULL. Old rows have both
# differences.
_HI = "coalesce(done_hi_ns, epoch_ns(done_hi) - epoch_ns(ts))"
_BEFORE_DONE = "make_timestamp_ns(epoch_ns(done_hi) - done_within_ns)"
_WITHIN = "coalesce(done_within_ns, done_hi_ns - done_lo_ns)"
_LO = f"coalesce(done_lo_ns, {_HI} - done_within_ns)"
# An operation on a CUDA stream has no visible start, and its end lies in an interval. Its duration is taken from the
# launch to the middle of the interval, if the interval is at most a tenth of it.
_MIDDLE = f"({_LO} + {_HI}) // 2 - coalesce(launch_ns_after, 0)"
_DURATION = (
    "CASE WHEN timing_source = 'exact' THEN done_hi_ns - start_ns_after"
    f" WHEN {_WITHIN} * 10 <= ({_MIDDLE}) THEN ({_MIDDLE}) END"
)
# Algorithm and bus bandwidth as nccl-tests defines them (doc/PERFORMANCE.md). ``bytes`` is what one rank contributes:
# all of it for reduce_scatter, all_to_all and the root of scatter, so only the gathers are multiplied.
MOVED_BYTES = "bytes * CASE WHEN op IN ('all_gather','gather') THEN comm_size ELSE 1 END"
"""The bytes of an operation of comm.ops, which divided by its duration are the algorithm bandwidth."""
BUS_FACTOR = (
    "CASE WHEN op = 'all_reduce' THEN 2.0 * (comm_size - 1) / comm_size"
    " WHEN op IN ('all_gather','reduce_scatter','all_to_all','gather','scatter') THEN (comm_size - 1.0) / comm_size"
    " ELSE 1.0 END"
)
"""Bus bandwidth divided by algorithm bandwidth."""
_ALGBW = f"CASE WHEN bytes > 0 AND ({_DURATION}) > 0 THEN ({MOVED_BYTES}) / ({_DURATION})::DOUBLE END"

IDENTITY = (
    Column("node", NAME, "Name of the node: configured, else its host name."),
    Column("ts", TIME, "When the row happened, UTC."),
    Column("job", NAME, "The job: scheduler id, elastic run id, or MASTER_ADDR:MASTER_PORT."),
    Column(
        "run",
        NAME,
        "The incarnation of the job: a requeue, an elastic restart or the same script again is another run.",
    ),
    Column("pid", I32, "Process id as the host sees it."),
    Column(
        "start_ns",
        I64,
        "Start of the process in ns since boot, in steps of a clock tick; with pid it names a process for ever.",
    ),
)

_OPERATION = (
    Column("tid", I32, "Thread that made the call."),
    Column("rank", I32, "Rank in the job; NULL when the process is no trainer or its rank is unknown."),
    Column(
        "comm",
        NAME,
        "Communicator, the same text on all ranks. NCCL: commHash as 16 hex digits. gloo: process-group name.",
    ),
    Column("comm_name", NAME, "What the framework calls the communicator, e.g. default_pg."),
    Column("comm_rank", I32, "Rank within the communicator."),
    Column("comm_size", I32, "Number of ranks of the communicator."),
    Column("backend", NAME, "nccl or gloo."),
    Column(
        "seq",
        I64,
        "Sequence number on the communicator, equal on all ranks; operations are joined on (job, run, comm, seq).",
    ),
    Column(
        "op",
        NAME,
        "Operation in torch's names: all_reduce, broadcast, all_gather, reduce_scatter, all_to_all, barrier, send, ...",
    ),
    Column("dtype", NAME, "Element type in torch's names (float32, bfloat16, ...); NULL without data."),
    Column("count", I64, "Elements that this rank contributes."),
    Column("bytes", I64, "Bytes that this rank contributes: count times the element's size; 0 for a barrier."),
    Column("redop", NAME, "Reduction (sum, avg, min, max, ...); NULL where there is none or it is not known."),
    Column("root", I32, "Root rank of a rooted collective."),
    Column("peer", I32, "Peer rank of send or recv."),
    Column("stream", U64, "CUDA stream handle; NULL for gloo."),
    Column("group_id", I64, "Number of the enclosing group call; NULL outside one."),
    Column("async_op", BOOL, "Whether the caller asked not to wait; NULL when it cannot be known."),
)

_OPS_COLUMNS = (
    *IDENTITY,
    *_OPERATION,
    Column("t_call", TIME, "When the call was made (the same as ts), UTC.", "ts"),
    Column(
        "t_launch",
        TIME,
        "When the kernel or task was launched, UTC; NULL when not seen.",
        _AFTER_CALL.format("launch_ns_after"),
    ),
    Column(
        "t_start", TIME, "When the work began to run, UTC; NULL when not seen.", _AFTER_CALL.format("start_ns_after")
    ),
    Column(
        "t_done_lo",
        TIME,
        "The work was certainly not finished before this time, UTC.",
        f"CASE WHEN timing_source = 'exact' THEN {_AFTER_CALL.format('done_hi_ns')}"
        f" ELSE coalesce({_AFTER_CALL.format('done_lo_ns')}, {_BEFORE_DONE}) END",
    ),
    Column(
        "t_done_hi",
        TIME,
        "The work was certainly finished at this time, UTC.",
        f"coalesce({_AFTER_CALL.format('done_hi_ns')}, done_hi)",
    ),
    Column(
        "timing_source",
        NAME,
        "How completion is known: exact; sync (somebody waited for its stream or event); watchdog (a thread polls its"
        " event) or blocking_wait (its own does); enqueue_only (not at all); graph (captured into a CUDA graph, whose"
        " runs are not seen).",
    ),
    Column(
        "state",
        NAME,
        "done, failed, or abandoned (its end was missed, as the process ended); NULL if the end cannot be seen.",
    ),
    Column("error", TEXT, "What the library reported, for state failed."),
    Column("step", I64, "NULL: an operation is stored before its step is known; a recipe of docs/query.md joins them."),
    Column(
        "duration_ns",
        I64,
        "From start to completion, ns; of an operation on a CUDA stream from its launch, waiting for the stream"
        " included, and NULL where completion is known to less than a tenth of it.",
        _DURATION,
    ),
    Column(
        "algbw_gbps",
        F64,
        "Algorithm bandwidth in 1e9 bytes/s, from duration_ns; includes waiting for other ranks.",
        _ALGBW,
    ),
    Column(
        "busbw_gbps",
        F64,
        "Bus bandwidth in 1e9 bytes/s: algbw times the factor of nccl-tests.",
        f"({_ALGBW}) * ({BUS_FACTOR})",
    ),
)

OPS = Table(
    "comm.ops",
    "Collective and point-to-point operations, one row for each, written when it is closed.",
    _OPS_COLUMNS,
    stored(
        _OPS_COLUMNS,
        Stored("launch_ns_after", I64),
        Stored("start_ns_after", I64),
        Stored("done_lo_ns", I64),
        Stored("done_hi_ns", I64),
        Stored("done_hi", TIME),
        Stored("done_within_ns", I64),
    ),
    sort_by=("job", "comm", "rank", "ts"),
)

INFLIGHT = Table(
    "comm.inflight",
    "Operations that were called and are not finished, as they are now (live).",
    (
        *IDENTITY,
        *_OPERATION,
        Column("state", NAME, "called, launched or started."),
        Column("age_ns", I64, "Time since the call, ns."),
    ),
)

PROGRESS = Table(
    "comm.progress",
    "How far each rank has come on each of its communicators, by the operations that have ended (live).",
    (
        *IDENTITY,
        Column("rank", I32, "Rank in the job; NULL when it is unknown."),
        Column("world_size", I32, "Ranks of the job; NULL when it is unknown."),
        Column("owner", I64, "User id of the user whose job it is."),
        Column("comm", NAME, "Communicator, the same text on all ranks; NULL while no operation was seen."),
        Column("comm_name", NAME, "What the framework calls the communicator."),
        Column("comm_rank", I32, "Rank within the communicator."),
        Column("comm_size", I32, "Number of ranks of the communicator."),
        Column("backend", NAME, "nccl or gloo."),
        Column("seq", I64, "Highest sequence number of an operation that has ended; NULL when not known."),
        Column("op", NAME, "The operation that was called last, of those that have ended."),
        Column("calls", I64, "Operations that were seen since the daemon started."),
        Column("last_call", TIME, "When the last of them was called, UTC."),
        Column("last_done", TIME, "When one of them last ended, UTC; NULL where ends cannot be seen."),
        Column(
            "longest_gap_ns",
            I64,
            "The longest usual time between two successive calls of the process, ns: the second longest of late, as"
            " one long pause is not usual. A start has pauses of its own: the first 8 calls do not count. NULL before"
            " the ninth.",
        ),
        Column("attached", TIME, "Operations before were not seen, UTC; NULL: all were."),
        Column("ended", TIME, "When the process ended, UTC; its rows stay for 10 minutes. NULL: it lives."),
        Column("exit_code", I32, "Its exit code; NULL after a signal, or when it is not known."),
        Column("signal", I32, "The signal that killed it."),
    ),
)

_COMMUNICATOR_COLUMNS = (
    *IDENTITY,
    Column("comm", NAME, "Communicator, the same text on all ranks."),
    Column("name", NAME, "What the framework calls it."),
    Column("backend", NAME, "nccl or gloo."),
    Column("size", I32, "Number of ranks."),
    Column("rank", I32, "Rank of this process within it."),
    Column("job_rank", I32, "Rank of this process in the job."),
    Column("cuda_device", I32, "CUDA device that it uses; NULL for gloo."),
    Column(
        "node_index",
        I32,
        "Index of this node among the communicator's nodes, as the library counts; NULL when not known.",
    ),
    Column("nodes", I32, "Number of nodes it spans, as the library knows; NULL when not known."),
    Column("async_error", TEXT, "Asynchronous error that the library holds; NULL when there is none."),
    Column("aborted", BOOL, "Whether it was aborted; NULL when it cannot be known."),
    Column("created", TIME, "When it was created, or else first seen, UTC."),
    Column(
        "state",
        NAME,
        "active, finalized, destroyed, aborted, or failed (it could not be made); a process that ended adds no row.",
    ),
    Column(
        "made_by",
        NAME,
        "Call that made it: init_rank, init_rank_config, init_rank_scalable, init_all, split, shrink, grow; NULL when"
        " it was made before the probes were attached.",
    ),
    Column("init_ns", I64, "Time that call took, ns; NULL when it was not seen."),
    Column("parent", NAME, "Communicator that it was split from; NULL when there is none or it was not seen."),
    Column("color", I32, "Color of the split; NULL when there was none."),
    Column("bus_id", TEXT, "PCI address of its GPU, as 0000:17:00.0; NULL when not known."),
    Column("root_address", TEXT, "Address of the bootstrap root, HOST:PORT, from the unique id; NULL when not seen."),
    Column(
        "identity",
        NAME,
        "Origin of comm, rank and size: struct (read from the library's own), unique_id (computed from the call"
        " that made it), derived (our own name of a split whose hash cannot be read), none; NULL for gloo.",
    ),
    Column("parallel_role", NAME, "world, tp, pp, dp, ep or unknown."),
    Column("parallel_role_why", TEXT, "The evidence for parallel_role."),
)

COMMUNICATORS = Table(
    "comm.communicators",
    "Communicators as each of their ranks has them; the newest row of (pid, start_ns, comm) holds.",
    _COMMUNICATOR_COLUMNS,
    stored(_COMMUNICATOR_COLUMNS),
    sort_by=("job", "comm", "ts"),
)

_RAS_COUNTS = ("broadcast", "reduce", "all_gather", "reduce_scatter", "all_reduce")
_RAS_COLUMNS = (
    *IDENTITY,
    Column("comm", NAME, "Communicator: commHash as 16 hex digits."),
    Column("secondary_hash", NAME, "Second hash, which distinguishes communicators of equal hash, as RAS gives it."),
    Column("size", I32, "Number of ranks of the communicator."),
    Column("comm_rank", I32, "The rank that this row is about, within the communicator."),
    Column("host", TEXT, "Its host, as RAS names it."),
    Column("rank_pid", I32, "Its process id on that host, as RAS gives it."),
    Column("cuda_device", I32, "Its CUDA device."),
    Column("nvml_device", I32, "The same as NVML counts."),
    Column("missing", BOOL, "Whether RAS could not reach the rank."),
    Column("unresponsive", BOOL, "Whether RAS calls a missing rank unresponsive."),
    Column("considered_dead", BOOL, "Whether RAS considers a missing rank dead."),
    Column("init_state", TEXT, "State of its initialization, as RAS words it."),
    Column("async_error", TEXT, "Its asynchronous error, as RAS words it; NULL when there is none."),
    Column("finalize_called", BOOL, "Whether it has called ncclCommFinalize."),
    Column("destroy_flag", BOOL, "Whether it is being destroyed."),
    Column("abort_flag", BOOL, "Whether it is being aborted."),
    *(Column(name, I64, f"Operations of this kind that it has launched: {name}.") for name in _RAS_COUNTS),
    Column("nccl_version", TEXT, "Version of NCCL that answered."),
    Column("collection_ns", I64, "Time that RAS took to ask all ranks, ns."),
    Column("timeouts", I32, "Peers that did not answer RAS in time."),
)

RAS = Table(
    "comm.ras",
    "The state of each rank of each communicator as NCCL's own RAS reports it; pid is the process that answered.",
    _RAS_COLUMNS,
    stored(_RAS_COLUMNS),
    sort_by=("job", "comm", "comm_rank", "ts"),
)
