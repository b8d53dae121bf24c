"""What the interpreters do."""

from __future__ import annotations

from probing.api.tables.comm import IDENTITY
from probing.api.tables.schema import BOOL, F64, I32, I64, NAME, TEXT, TIME, U64, Column, Table, Type, stored

__all__ = (
    "BACKTRACE",
    "FLIGHT_RECORD",
    "FRAMES",
    "SAMPLES",
    "STACKS",
    "TRACE_EVENT",
    "TRAINING_METRICS",
    "VARIABLES",
)

_RANK = Column("rank", I32, "Rank in the job, for a trainer.")
_TID = Column("tid", I32, "Thread id as the host sees it.")
_TRAINS = "Whether it is the thread that issues the collectives; the main thread, where none is known to"

# Innermost first.
FRAMES = Type(
    'STRUCT(func VARCHAR, "file" VARCHAR, lineno INTEGER)[]',
    lambda pa: pa.list_(pa.struct([("func", pa.string()), ("file", pa.string()), ("lineno", pa.int32())])),
)

BACKTRACE = Table(
    "python.backtrace",
    "Stacks of all threads of all training processes, read from outside when the query runs (live).",
    (
        *IDENTITY,
        _RANK,
        _TID,
        Column("thread", TEXT, "Name that Python's threading gave the thread, else the kernel's."),
        Column("trains", BOOL, _TRAINS),
        Column("state", NAME, "Kernel state of the thread: running, sleeping, blocked, stopped or zombie."),
        Column("gil", BOOL, "Whether the thread holds the interpreter lock; NULL when it cannot be known."),
        Column("complete", BOOL, "False when the stack changed while it was read, or was cut."),
        Column("depth", I32, "0 is the innermost frame."),
        Column("ip", U64, "Address of the instruction or code object."),
        Column("file", TEXT, "Source file of the code; of a native frame, the library."),
        Column("func", TEXT, "Qualified name of the function."),
        Column("lineno", I32, "Line that is being executed; NULL when the code has no line there."),
        Column("frame_type", NAME, "Python or Native."),
    ),
)

_SAMPLE_COLUMNS = (
    IDENTITY[0],
    Column("ts", TIME, "When the first was taken, or its wait began, UTC, rounded down to a sixteenth of a second."),
    *IDENTITY[2:],
    _RANK,
    _TID,
    Column("thread", TEXT, "The kernel's name of the thread."),
    Column("stack_id", U64, "The stack, in python.stacks; equal for equal stacks on all nodes."),
    Column("trains", BOOL, f"{_TRAINS}; NULL in rows of older versions."),
    Column("on_cpu", BOOL, "Whether the thread was running; false: it was blocked or waited for a CPU."),
    Column("gil", BOOL, "Whether the thread held the interpreter lock; NULL when it cannot be known."),
    Column("count", I64, "Samples that were equal within a second and are this row."),
    Column(
        "duration_ns",
        I64,
        "Time that they stand for, ns: on CPU the count over the rate, else the time off CPU, to 3 %.",
    ),
)

SAMPLES = Table(
    "python.samples",
    "What the threads of training processes did, sampled: a row for equal stacks of a thread within a second.",
    _SAMPLE_COLUMNS,
    stored(_SAMPLE_COLUMNS),
    sort_by=("job", "rank", "tid", "ts"),
)

_STACK_COLUMNS = (
    Column("node", NAME, "Name of the node that saw the stack."),
    Column("ts", TIME, "When it was written down, UTC: at first sight, and again each hour that it is seen."),
    Column("stack_id", U64, "64-bit hash of the frames."),
    Column("complete", BOOL, "False when outer frames are missing."),
    Column("frames", FRAMES, "The frames, innermost first: func, file, lineno (NULL when not known)."),
)

STACKS = Table(
    "python.stacks",
    "The stacks that python.samples names. One stack can have several rows, all with the same frames.",
    _STACK_COLUMNS,
    stored(_STACK_COLUMNS),
    # In the order in which they came up neighbours have most frames in common.
    sort_by=("ts", "stack_id"),
)

_VARIABLE_COLUMNS = (
    *IDENTITY,
    _RANK,
    _TID,
    Column("step", I64, "Training step, if a watched variable names it; NULL when not known."),
    Column("micro_step", I64, "The same as step; NULL when not known."),
    Column("func", TEXT, "Qualified name of the function, or name of the module, that holds the variable."),
    Column("name", TEXT, "The variable, as it was asked for."),
    Column("type", TEXT, "Name of its type."),
    Column("value", TEXT, "Its value as Python would write it, cut; NULL when it cannot be read, see reason."),
    Column("number", F64, "Its value, for a number or a scalar tensor; NULL for anything else."),
    Column("reason", TEXT, "Why the value is NULL."),
)

VARIABLES = Table(
    "python.variables",
    "Values of watched variables, read from outside; a row whenever a value has changed.",
    _VARIABLE_COLUMNS,
    stored(_VARIABLE_COLUMNS),
    sort_by=("job", "rank", "name", "ts"),
)

_METRIC_COLUMNS = (
    *IDENTITY,
    _RANK,
    Column("step", I64, "Training step, from the watched variable of that name or from probing.step."),
    Column("loss", F64, "Loss at that step, from the watched variable or probing.metric; NULL when it was not read."),
    Column("name", NAME, "Name of the metric that the job reported, step for the begin of a step; NULL for variables."),
    Column("value", F64, "Value of that metric."),
)

TRAINING_METRICS = Table(
    "python.training_metrics",
    "Step and loss of each rank, from watched variables of these names; metrics that jobs report by probing.metric.",
    _METRIC_COLUMNS,
    stored(_METRIC_COLUMNS),
    sort_by=("job", "rank", "ts"),
)

_TRACE_COLUMNS = (
    *IDENTITY,
    _RANK,
    Column("record_type", NAME, "span_start, span_end or event."),
    Column("trace_id", I64, "Id of the outermost span around it."),
    Column("span_id", I64, "Id of the span; of an event, of the span that it belongs to, 0 for none."),
    Column("parent_id", I64, "Id of the span around the span; NULL for an outermost span."),
    Column("name", TEXT, "Name of the span or event, at most 63 bytes."),
    Column("phase", NAME, "forward, backward or optimizer; NULL for other spans."),
    Column("time", I64, "When it was written, ns since 1970 by the clock of the job."),
    Column("thread_id", I64, "Thread that wrote it, as the kernel numbers threads."),
    Column("location", TEXT, "Place in the code, if the job gave one."),
    Column("attributes", TEXT, "Attributes of the span as JSON, cut after 255 bytes."),
    Column("event_attributes", TEXT, "Attributes of the event as JSON, cut after 255 bytes."),
)

TRACE_EVENT = Table(
    "python.trace_event",
    "Begins and ends of spans, and events, that jobs report by probing.span and probing.event.",
    _TRACE_COLUMNS,
    stored(_TRACE_COLUMNS),
    sort_by=("job", "rank", "ts"),
)

_FLIGHT_COLUMNS = (
    *IDENTITY,
    Column("rank", I32, "Rank in the job, from the dump or its name."),
    Column("world_size", I32, "Number of ranks of the job; NULL when not known."),
    Column("snapshot_id", U64, "Names the dump that the row is from."),
    Column("dump", TEXT, "Path of the dump, as the process sees it."),
    Column("version", TEXT, "Version of the dump's format."),
    Column("record_id", I64, "Number of the record, counted by the process."),
    Column("pg_id", I64, "Number of the process group."),
    Column("pg_name", TEXT, "Name of the process group."),
    Column("pg_desc", TEXT, "Description of the process group."),
    Column("collective_seq_id", I64, "Sequence number of the collective in its group."),
    Column("p2p_seq_id", I64, "Sequence number of the point-to-point operation in its group."),
    Column("op_id", I64, "Number of the operation in its group."),
    Column("profiling_name", TEXT, "Operation, as nccl:all_reduce."),
    Column("state", NAME, "scheduled, started or completed."),
    Column("input_sizes", TEXT, "Shapes of the inputs, as JSON."),
    Column("input_dtypes", TEXT, "Types of the inputs, as JSON."),
    Column("output_sizes", TEXT, "Shapes of the outputs, as JSON."),
    Column("output_dtypes", TEXT, "Types of the outputs, as JSON."),
    Column("time_created_ns", I64, "When it was enqueued, ns since 1970."),
    Column("time_discovered_started_ns", I64, "When it was found to have started; NULL when it was not."),
    Column("time_discovered_completed_ns", I64, "When it was found to be completed; NULL when it was not."),
    Column("duration_ns", I64, "Duration by CUDA events, ns; NULL unless the job has timing on."),
    Column("timeout_ms", I64, "Its time-out, ms."),
    Column("retired", BOOL, "Whether the watchdog is done with it."),
    Column("is_p2p", BOOL, "Whether it is a point-to-point operation."),
    Column("frames", TEXT, "Python frames of the call, as JSON [{name, filename, line}, ...]."),
    Column("top_frame", TEXT, "The innermost of them, as FILE:LINE NAME."),
)

FLIGHT_RECORD = Table(
    "python.torch_nccl_flight_record",
    "Records of PyTorch's NCCL flight recorder, from dumps that jobs write; a row for each record of each dump.",
    _FLIGHT_COLUMNS,
    stored(_FLIGHT_COLUMNS),
    sort_by=("job", "rank", "snapshot_id", "record_id"),
)
