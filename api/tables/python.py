"""Tables of Python interpreters: stacks, samples, variables and flight-recorder dumps."""

from __future__ import annotations

from probing.api.tables.comm import IDENTITY
from probing.api.tables.schema import BOOL, F64, I32, I64, NAME, TEXT, TIME, U64, Column, Table, Type, stored

__all__ = (
    "BACKTRACE",
    "FLIGHT_RECORD",
    "FRAMES",
    "SAMPLES",
    "STACKS",
    "TORCH_MODULES",
    "TRACE_EVENT",
    "TRAINING_METRICS",
    "VARIABLES",
)

_RANK = Column("rank", I32, "Rank in the job; only for a trainer.")
_TID = Column("tid", I32, "Thread id as seen on the host.")
_TRAINS = "Whether the thread calls the collectives; if no such thread is known, whether it is the main thread"

# The frames of a stack are ordered from the innermost.
FRAMES = Type(
    'STRUCT(func VARCHAR, "file" VARCHAR, lineno INTEGER)[]',
    lambda pa: pa.list_(pa.struct([("func", pa.string()), ("file", pa.string()), ("lineno", pa.int32())])),
)

BACKTRACE = Table(
    "python.backtrace",
    "Stacks of all threads of all processes that train, read from outside when the query runs (live).",
    (
        *IDENTITY,
        _RANK,
        _TID,
        Column("thread", TEXT, "Name of the thread in Python's threading, else in the kernel."),
        Column("trains", BOOL, _TRAINS),
        Column("state", NAME, "Kernel state of the thread: running, sleeping, blocked, stopped or zombie."),
        Column("gil", BOOL, "Whether the thread holds the interpreter lock (GIL); NULL if unknown."),
        Column("complete", BOOL, "False if the stack changed while it was read, or was cut."),
        Column("depth", I32, "Depth of the frame; 0 is the innermost one."),
        Column("ip", U64, "Address of the instruction (native frame) or code object (Python frame)."),
        Column("file", TEXT, "Source file of the code; for a native frame the library."),
        Column("func", TEXT, "Qualified name of the function."),
        Column("lineno", I32, "Line that is being executed; NULL if the code has no line there."),
        Column("frame_type", NAME, "Kind of the frame: Python or Native."),
    ),
)

_SAMPLE_COLUMNS = (
    IDENTITY[0],
    Column("ts", TIME, "When the first sample was taken or the wait began, UTC, rounded down to 1/16 s."),
    *IDENTITY[2:],
    _RANK,
    _TID,
    Column("thread", TEXT, "Name of the thread in the kernel."),
    Column("stack_id", U64, "Id of the stack in python.stacks; the same for equal stacks on all nodes."),
    Column("trains", BOOL, f"{_TRAINS}; NULL in rows of older versions."),
    Column("on_cpu", BOOL, "Whether the thread was running; false if it was blocked or waited for a CPU."),
    Column("gil", BOOL, "Whether the thread held the interpreter lock (GIL); NULL if unknown."),
    Column("count", I64, "Number of equal samples within a second that this row stands for."),
    Column(
        "duration_ns",
        I64,
        "Time that the samples stand for, ns: on the CPU their number divided by the rate; off the CPU the"
        " time of the wait, exact to 3 %.",
    ),
)

SAMPLES = Table(
    "python.samples",
    "Samples of what the threads of processes that train did: one row for equal stacks of a thread within a second.",
    _SAMPLE_COLUMNS,
    stored(_SAMPLE_COLUMNS),
    sort_by=("job", "rank", "tid", "ts"),
)

_STACK_COLUMNS = (
    Column("node", NAME, "Name of the node that saw the stack."),
    Column(
        "ts", TIME, "When the stack was stored, UTC: when it is first seen, and again in each hour in which it is seen."
    ),
    Column("stack_id", U64, "Id of the stack: 64-bit hash of its frames."),
    Column("complete", BOOL, "False if outer frames are missing."),
    Column("frames", FRAMES, "Frames of the stack, innermost first: func, file, lineno (NULL if unknown)."),
)

STACKS = Table(
    "python.stacks",
    "The stacks whose ids python.samples has. A stack can have several rows, all with the same frames.",
    _STACK_COLUMNS,
    stored(_STACK_COLUMNS),
    # Stacks that were first seen one after the other share most frames.
    sort_by=("ts", "stack_id"),
)

_VARIABLE_COLUMNS = (
    *IDENTITY,
    _RANK,
    _TID,
    Column("step", I64, "Training step, if a watched variable is named step; NULL if unknown."),
    Column("micro_step", I64, "The same as step, under Probing's name; NULL if unknown."),
    Column("func", TEXT, "Name of the function or the module that holds the variable."),
    Column("name", TEXT, "Name of the variable, as it was asked for."),
    Column("type", TEXT, "Name of the value's type."),
    Column("value", TEXT, "Value as Python would print it, cut; NULL if it cannot be read (see reason)."),
    Column("number", F64, "Value, if it is a number or a scalar tensor; else NULL."),
    Column("reason", TEXT, "Why the value is NULL."),
)

VARIABLES = Table(
    "python.variables",
    "Values of watched variables, read from outside; one row each time a value has changed.",
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

_MODULE_COLUMNS = (
    IDENTITY[0],
    Column("ts", TIME, "Begin of the window in which the samples were taken, UTC."),
    *IDENTITY[2:],
    _RANK,
    Column(
        "model",
        NAME,
        "Class of the outermost module: several models of a process are told apart by it. Wrappers such as"
        " DistributedDataParallel do not count as the outermost module. NULL if module is NULL.",
    ),
    Column(
        "module",
        NAME,
        "Name of the module in its model, as named_modules() of torch has it, such as model.layers.3.mlp; of the"
        " outermost module the class. NULL: no module was on the stack, as in an optimizer, a data loader or the"
        " backward pass, which runs in threads of C++; or, in stage forward, the module is one of those beyond the 512"
        " of a process that have rows of their own.",
    ),
    Column("class", NAME, "Class of the module; NULL if module is NULL."),
    Column(
        "stage",
        NAME,
        "backward while the thread runs or awaits the backward pass, else forward while a module runs, else other.",
    ),
    Column("samples", I64, "Number of samples in which the module was the innermost module on the stack."),
    Column("samples_below", I64, "Number of samples in which the module was on the stack, as innermost or not."),
    Column(
        "interval_ns",
        I64,
        "Time that a sample stands for, ns: the length of the window divided by the number of all its samples.",
    ),
    Column(
        "window_ns", I64, "Length of the window, ns: 10 s and the time to the next sample; less if the process ended."
    ),
    Column("t_end", TIME, "End of the window, UTC.", sql="make_timestamp_ns(epoch_ns(ts) + window_ns)"),
)

TORCH_MODULES = Table(
    "python.torch_modules",
    "Samples of the torch modules that the thread that trains runs, read from outside: one row for each module and"
    " stage of a window of 10 s; no rows unless sampling.torch_modules is set.",
    _MODULE_COLUMNS,
    stored(_MODULE_COLUMNS),
    sort_by=("job", "rank", "ts"),
)

_TRACE_COLUMNS = (
    *IDENTITY,
    _RANK,
    Column("record_type", NAME, "span_start, span_end or event."),
    Column("trace_id", I64, "Id of the outermost span around the span or event."),
    Column("span_id", I64, "Id of the span; for an event, of the span that it belongs to, 0 if there is none."),
    Column("parent_id", I64, "Id of the span around the span; NULL for an outermost span."),
    Column("name", TEXT, "Name of the span or event, at most 63 bytes."),
    Column("phase", NAME, "forward, backward or optimizer; NULL for other spans."),
    Column("time", I64, "When the job wrote the record, ns since 1970 by the clock of the job."),
    Column("thread_id", I64, "Thread that wrote the record, as the kernel numbers threads."),
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
    Column("rank", I32, "Rank in the job, from the content or the name of the dump."),
    Column("world_size", I32, "Number of ranks of the job; NULL if unknown."),
    Column("snapshot_id", U64, "Id of the dump that the row is from."),
    Column("dump", TEXT, "Path of the dump as seen by the process."),
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
    Column("time_created_ns", I64, "When the operation was enqueued, ns since 1970."),
    Column("time_discovered_started_ns", I64, "When the operation was seen to have started; NULL if it was not."),
    Column("time_discovered_completed_ns", I64, "When the operation was seen to be completed; NULL if it was not."),
    Column("duration_ns", I64, "Duration by CUDA events, ns; NULL unless the job measures it."),
    Column("timeout_ms", I64, "Time-out of the operation, ms."),
    Column("retired", BOOL, "Whether the watchdog has finished with the operation."),
    Column("is_p2p", BOOL, "Whether the operation is point-to-point."),
    Column("frames", TEXT, "Python frames of the call, as JSON [{name, filename, line}, ...]."),
    Column("top_frame", TEXT, "Innermost Python frame of the call, as FILE:LINE NAME."),
)

FLIGHT_RECORD = Table(
    "python.torch_nccl_flight_record",
    "Records of PyTorch's NCCL flight recorder, from dumps that jobs write; one row for each record of each dump.",
    _FLIGHT_COLUMNS,
    stored(_FLIGHT_COLUMNS),
    sort_by=("job", "rank", "snapshot_id", "record_id"),
)
