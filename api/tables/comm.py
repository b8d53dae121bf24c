"""Tables of collective operations and communicators."""

from __future__ import annotations

from probing.api.tables.schema import BOOL, F64, I32, I64, NAME, TEXT, TIME, U64, Column, Stored, Table, stored

__all__ = ("BUS_FACTOR", "COMMUNICATORS", "IDENTITY", "INFLIGHT", "MOVED_BYTES", "OPS", "PROGRESS", "RAS")

# Computes a time from its stored difference to t_call in ns. It uses epochs, because DuckDB's intervals are in us.
_AFTER_CALL = "make_timestamp_ns(epoch_ns(ts) + {})"
# An exact end is stored as its difference to t_call (`done_hi_ns`). An inexact end is stored as an interval: its end
# (`done_hi`) and its width (`done_within_ns`). `done_hi` is a time, because one wait, or one poll of a watchdog, often
# finds several operations finished: they share the same time, which compresses well. The unused columns are NULL. Rows
# of older versions store an inexact end as two differences (`done_lo_ns`, `done_hi_ns`).
_HI = "coalesce(done_hi_ns, epoch_ns(done_hi) - epoch_ns(ts))"
_BEFORE_DONE = "make_timestamp_ns(epoch_ns(done_hi) - done_within_ns)"
_WITHIN = "coalesce(done_within_ns, done_hi_ns - done_lo_ns)"
_LO = f"coalesce(done_lo_ns, {_HI} - done_within_ns)"
# The start of an operation on a CUDA stream is not seen, and its end lies in an interval. Its duration is the time from
# the launch to the middle of the interval, if the interval is at most a tenth of this duration; else NULL.
_MIDDLE = f"({_LO} + {_HI}) // 2 - coalesce(launch_ns_after, 0)"
_DURATION = (
    "CASE WHEN timing_source = 'exact' THEN done_hi_ns - start_ns_after"
    f" WHEN {_WITHIN} * 10 <= ({_MIDDLE}) THEN ({_MIDDLE}) END"
)
# Algorithm and bus bandwidth as nccl-tests defines them (doc/PERFORMANCE.md). ``bytes`` are the bytes that one rank
# contributes. For reduce_scatter, all_to_all and the root of scatter, that is the whole buffer, so only all_gather and
# gather are multiplied by comm_size.
MOVED_BYTES = "bytes * CASE WHEN op IN ('all_gather','gather') THEN comm_size ELSE 1 END"
"""SQL expression: the bytes that an operation of comm.ops moves. Divided by the duration, they give the algorithm
bandwidth."""
BUS_FACTOR = (
    "CASE WHEN op = 'all_reduce' THEN 2.0 * (comm_size - 1) / comm_size"
    " WHEN op IN ('all_gather','reduce_scatter','all_to_all','gather','scatter') THEN (comm_size - 1.0) / comm_size"
    " ELSE 1.0 END"
)
"""SQL expression: the bus bandwidth of an operation divided by its algorithm bandwidth."""
_ALGBW = f"CASE WHEN bytes > 0 AND ({_DURATION}) > 0 THEN ({MOVED_BYTES}) / ({_DURATION})::DOUBLE END"

IDENTITY = (
    Column("node", NAME, "Name of the node: configured, else its host name."),
    Column("ts", TIME, "Time of the event or reading that the row describes, UTC."),
    Column("job", NAME, "The job: the scheduler's id, the elastic run id, or MASTER_ADDR:MASTER_PORT."),
    Column(
        "run",
        NAME,
        "The run of the job: each requeue, elastic restart or new start of the same script is a new run.",
    ),
    Column("pid", I32, "Process id as seen on the host."),
    Column(
        "start_ns",
        I64,
        "Start of the process in ns since boot, exact to a clock tick; pid and start_ns together identify the process.",
    ),
)

_OPERATION = (
    Column("tid", I32, "Thread that made the call."),
    Column("rank", I32, "Rank in the job; NULL if the process is not a trainer or its rank is unknown."),
    Column(
        "comm",
        NAME,
        "Communicator; the text is the same on all ranks. NCCL: commHash as 16 hex digits. gloo: name of the"
        " process group.",
    ),
    Column("comm_name", NAME, "Name that the framework gives the communicator, e.g. default_pg."),
    Column("comm_rank", I32, "Rank within the communicator."),
    Column("comm_size", I32, "Number of ranks of the communicator."),
    Column("backend", NAME, "nccl or gloo."),
    Column(
        "seq",
        I64,
        "Sequence number on the communicator, the same on all ranks; (job, run, comm, seq) identifies an operation.",
    ),
    Column(
        "op",
        NAME,
        "Operation in torch's names: all_reduce, broadcast, all_gather, reduce_scatter, all_to_all, barrier, send, ...",
    ),
    Column(
        "dtype", NAME, "Element type in torch's names (float32, bfloat16, ...); NULL for an operation without data."
    ),
    Column("count", I64, "Number of elements that this rank contributes."),
    Column("bytes", I64, "Bytes that this rank contributes: the number of elements times their size; 0 for a barrier."),
    Column("redop", NAME, "Reduction (sum, avg, min, max, ...); NULL if there is none, or if it is unknown."),
    Column("root", I32, "Root rank, for operations that have a root."),
    Column("peer", I32, "Rank at the other end of send or recv."),
    Column("stream", U64, "CUDA stream handle; NULL for gloo."),
    Column("group_id", I64, "Number of the enclosing group call; NULL outside of groups."),
    Column("async_op", BOOL, "Whether the caller asked for an asynchronous operation; NULL if unknown."),
)

_OPS_COLUMNS = (
    *IDENTITY,
    *_OPERATION,
    Column("t_call", TIME, "When the call was made, UTC; the same as ts.", sql="ts"),
    Column(
        "t_launch",
        TIME,
        "When the kernel or task was launched, UTC; NULL if the launch was not seen.",
        sql=_AFTER_CALL.format("launch_ns_after"),
    ),
    Column(
        "t_start",
        TIME,
        "When the operation began to run, UTC; NULL if its start was not seen.",
        sql=_AFTER_CALL.format("start_ns_after"),
    ),
    Column(
        "t_done_lo",
        TIME,
        "Before this time the operation had certainly not finished, UTC.",
        sql=f"CASE WHEN timing_source = 'exact' THEN {_AFTER_CALL.format('done_hi_ns')}"
        f" ELSE coalesce({_AFTER_CALL.format('done_lo_ns')}, {_BEFORE_DONE}) END",
    ),
    Column(
        "t_done_hi",
        TIME,
        "At this time the operation had certainly finished, UTC.",
        sql=f"coalesce({_AFTER_CALL.format('done_hi_ns')}, done_hi)",
    ),
    Column(
        "timing_source",
        NAME,
        "How the end is known: exact; sync (a thread waited for the stream or event); watchdog (another thread, such as"
        " torch's watchdog, polled the event); blocking_wait (the calling thread polled the event); enqueue_only (the"
        " end is unknown); graph (the operation was captured into a CUDA graph, whose runs are not seen).",
    ),
    Column(
        "state",
        NAME,
        "done, failed, or abandoned (the process ended before the end was seen); NULL if ends cannot be seen.",
    ),
    Column("error", TEXT, "Error that the library reported, if state is failed."),
    Column(
        "step",
        I64,
        "Always NULL: operations are stored before their step is known; docs/query.md shows how to join steps.",
    ),
    Column(
        "duration_ns",
        I64,
        "Time from start to end, ns. On a CUDA stream, the time from the launch to the end, which includes waiting for"
        " the stream; NULL if the end is uncertain by more than a tenth of the duration.",
        sql=_DURATION,
    ),
    Column(
        "algbw_gbps",
        F64,
        "Algorithm bandwidth in 1e9 bytes/s, computed from duration_ns; waiting for other ranks is included.",
        sql=_ALGBW,
    ),
    Column(
        "busbw_gbps",
        F64,
        "Bus bandwidth in 1e9 bytes/s: algbw times the factor of nccl-tests.",
        sql=f"({_ALGBW}) * ({BUS_FACTOR})",
    ),
)

OPS = Table(
    "comm.ops",
    "Collective and point-to-point operations, one row for each, written when the operation ends.",
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
    "Operations that were called and have not finished, as of now (live).",
    (
        *IDENTITY,
        *_OPERATION,
        Column("state", NAME, "called, launched or started."),
        Column("age_ns", I64, "Time since the call, ns."),
    ),
)

PROGRESS = Table(
    "comm.progress",
    "The progress of each rank on each of its communicators, from the operations that have ended (live).",
    (
        *IDENTITY,
        Column("rank", I32, "Rank in the job; NULL if unknown."),
        Column("world_size", I32, "Number of ranks of the job; NULL if unknown."),
        Column("owner", I64, "Uid of the user who owns the job."),
        Column("comm", NAME, "Communicator; the text is the same on all ranks. NULL until an operation was seen."),
        Column("comm_name", NAME, "Name that the framework gives the communicator."),
        Column("comm_rank", I32, "Rank within the communicator."),
        Column("comm_size", I32, "Number of ranks of the communicator."),
        Column("backend", NAME, "nccl or gloo."),
        Column("seq", I64, "Sequence number of the newest operation that has ended; NULL if unknown."),
        Column("op", NAME, "Operation that was called last among the operations that have ended."),
        Column(
            "calls",
            I64,
            "Number of operations of the rank on the communicator that were seen since the daemon started.",
        ),
        Column("last_call", TIME, "Time of the call of the newest operation that has ended, UTC."),
        Column("last_done", TIME, "When an operation last ended, UTC; NULL if ends cannot be seen."),
        Column(
            "longest_gap_ns",
            I64,
            "Longest usual time between two successive calls of the process, ns: the second longest of the"
            " recent times, because the longest may be a single pause. The first 8 calls do not count, because pauses"
            " are normal at the start; NULL until the ninth call.",
        ),
        Column("phase", TEXT, "Value of the rank's label `phase`; NULL if the rank has no such label."),
        Column("phase_since", TIME, "When the label `phase` was set to this value, UTC."),
        Column("attached", TIME, "Operations before this time were not seen, UTC; NULL if all were seen."),
        Column(
            "ended",
            TIME,
            "When the process ended, UTC; NULL while the process runs. Rows of a process stay for 10 minutes after its"
            " end.",
        ),
        Column("exit_code", I32, "Exit code of the process; NULL if a signal ended it or the code is unknown."),
        Column("signal", I32, "Signal that ended the process."),
    ),
)

_COMMUNICATOR_COLUMNS = (
    *IDENTITY,
    Column("comm", NAME, "Communicator; the text is the same on all ranks."),
    Column("name", NAME, "Name that the framework gives the communicator."),
    Column("backend", NAME, "nccl or gloo."),
    Column("size", I32, "Number of ranks of the communicator."),
    Column("rank", I32, "Rank of this process within the communicator."),
    Column("job_rank", I32, "Rank of this process in the job."),
    Column("cuda_device", I32, "CUDA device that the communicator uses; NULL for gloo."),
    Column(
        "node_index",
        I32,
        "Index of this node among the communicator's nodes, as the library numbers them; NULL if unknown.",
    ),
    Column("nodes", I32, "Number of nodes of the communicator, as the library counts them; NULL if unknown."),
    Column("async_error", TEXT, "Asynchronous error that the library reports; NULL if there is none."),
    Column("aborted", BOOL, "Whether the communicator was aborted; NULL if unknown."),
    Column("created", TIME, "When the communicator was created, or first seen, UTC."),
    Column(
        "state",
        NAME,
        "active, finalized, destroyed, aborted, or failed (it could not be created). No row is added when a"
        " process ends.",
    ),
    Column(
        "made_by",
        NAME,
        "Call that created the communicator: init_rank, init_rank_config, init_rank_scalable, init_all,"
        " split, shrink, grow; NULL if it was created before the probes were attached.",
    ),
    Column("init_ns", I64, "Duration of the call that created the communicator, ns; NULL if it was not seen."),
    Column(
        "parent",
        NAME,
        "Communicator from which this communicator was split; NULL if there was no split, or it was not seen.",
    ),
    Column("color", I32, "Color of the split; NULL if there was no split."),
    Column("bus_id", TEXT, "PCI address of the communicator's GPU, e.g. 0000:17:00.0; NULL if unknown."),
    Column(
        "root_address", TEXT, "Address of the bootstrap root, HOST:PORT, from the unique id; NULL if it was not seen."
    ),
    Column(
        "identity",
        NAME,
        "Where comm, rank and size are from: struct (read from the library's struct), unique_id (computed"
        " from the call that created the communicator), derived (a name that probingd makes for a split whose hash"
        " cannot be read), none; NULL for gloo.",
    ),
    Column("parallel_role", NAME, "world, tp, pp, dp, ep or unknown."),
    Column("parallel_role_why", TEXT, "Why parallel_role was chosen."),
)

COMMUNICATORS = Table(
    "comm.communicators",
    "Communicators, one row for each of their ranks and each change; the newest row of (pid, start_ns, comm) is valid.",
    _COMMUNICATOR_COLUMNS,
    stored(_COMMUNICATOR_COLUMNS),
    sort_by=("job", "comm", "ts"),
)

_RAS_COUNTS = ("broadcast", "reduce", "all_gather", "reduce_scatter", "all_reduce")
_RAS_COLUMNS = (
    *IDENTITY,
    Column("comm", NAME, "Communicator: commHash as 16 hex digits."),
    Column("secondary_hash", NAME, "Second hash, from RAS, which distinguishes communicators with the same commHash."),
    Column("size", I32, "Number of ranks of the communicator."),
    Column("comm_rank", I32, "The rank that this row is about, as numbered within the communicator."),
    Column("host", TEXT, "Host of the rank, as RAS names it."),
    Column("rank_pid", I32, "Process id of the rank on its host, from RAS."),
    Column("cuda_device", I32, "CUDA device of the rank, in CUDA's numbering."),
    Column("nvml_device", I32, "CUDA device of the rank, in NVML's numbering."),
    Column("missing", BOOL, "Whether RAS could not reach the rank."),
    Column("unresponsive", BOOL, "Whether RAS reports a missing rank as unresponsive."),
    Column("considered_dead", BOOL, "Whether RAS reports a missing rank as dead."),
    Column("init_state", TEXT, "State of the rank's initialization, in RAS's words."),
    Column("async_error", TEXT, "Asynchronous error of the rank, in RAS's words; NULL if there is none."),
    Column("finalize_called", BOOL, "Whether the rank has called ncclCommFinalize."),
    Column("destroy_flag", BOOL, "Whether the rank's communicator is being destroyed."),
    Column("abort_flag", BOOL, "Whether the rank's communicator is being aborted."),
    *(
        Column(name, I64, f"Number of operations of the kind {name} that the rank has launched.")
        for name in _RAS_COUNTS
    ),
    Column("nccl_version", TEXT, "Version of the NCCL that answered."),
    Column("collection_ns", I64, "Time that RAS needed to ask all ranks, ns."),
    Column("timeouts", I32, "Number of peers that did not answer RAS in time."),
)

RAS = Table(
    "comm.ras",
    "The state of each rank of each communicator, from NCCL's RAS; pid is the process that answered.",
    _RAS_COLUMNS,
    stored(_RAS_COLUMNS),
    sort_by=("job", "comm", "comm_rank", "ts"),
)
