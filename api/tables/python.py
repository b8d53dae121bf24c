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
_TRAINS = "Whether this is the thread that calls the collectives or, if that thread is unknown, the main thread"

# The frames of a stack are ordered from the innermost to the outermost frame.
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
        Column("thread", TEXT, "Name that Python's module threading gives the thread, else its name in the kernel."),
        Column("trains", BOOL, _TRAINS),
        Column("state", NAME, "Kernel state of the thread: running, sleeping, blocked, stopped or zombie."),
        Column("gil", BOOL, "Whether the thread holds the interpreter lock (GIL); NULL if unknown."),
        Column("complete", BOOL, "False if the stack changed while it was read, or was truncated."),
        Column("depth", I32, "Depth of the frame; 0 is the innermost one."),
        Column("ip", U64, "Address of the instruction (native frame) or code object (Python frame)."),
        Column("file", TEXT, "Source file of the code; for a native frame, the library."),
        Column("func", TEXT, "Qualified name of the function."),
        Column("lineno", I32, "Number of the line that is being executed; NULL if the instruction belongs to no line."),
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
    Column("count", I64, "Number of samples that this row combines: equal samples of the thread within a second."),
    Column(
        "duration_ns",
        I64,
        "Time that the samples stand for, ns: on the CPU, the number of samples divided by the sampling rate; off the"
        " CPU, the duration of the wait, with an error of at most 3 %.",
    ),
)

SAMPLES = Table(
    "python.samples",
    "Stack samples of the threads of training processes; equal stacks of a thread within a second share a row.",
    _SAMPLE_COLUMNS,
    stored(_SAMPLE_COLUMNS),
    sort_by=("job", "rank", "tid", "ts"),
)

_STACK_COLUMNS = (
    Column("node", NAME, "Name of the node that saw the stack."),
    Column(
        "ts",
        TIME,
        "When the stack was stored, UTC. A stack is stored when it is first seen, and again in each later hour in which"
        " it is seen.",
    ),
    Column("stack_id", U64, "Id of the stack: 64-bit hash of its frames."),
    Column("complete", BOOL, "False if outer frames are missing."),
    Column("frames", FRAMES, "Frames of the stack, innermost first: func, file, lineno (NULL if unknown)."),
)

STACKS = Table(
    "python.stacks",
    "The stacks to which stack_id in python.samples refers. A stack can have several rows, all with the same frames.",
    _STACK_COLUMNS,
    stored(_STACK_COLUMNS),
    # Stacks that were first seen at about the same time share most frames, so neighboring rows compress well.
    sort_by=("ts", "stack_id"),
)

_VARIABLE_COLUMNS = (
    *IDENTITY,
    _RANK,
    _TID,
    Column(
        "step",
        I64,
        "Training step, from a watched variable named `step`, `global_step`, `iteration`, `iter` or `it`; NULL if"
        " unknown.",
    ),
    Column("micro_step", I64, "The same as step, under Probing's name; NULL if unknown."),
    Column("func", TEXT, "Name of the function or the module that holds the variable."),
    Column("name", TEXT, "Name of the variable, as it was requested."),
    Column("type", TEXT, "Name of the value's type."),
    Column("value", TEXT, "Value as Python would print it, truncated; NULL if the value cannot be read (see reason)."),
    Column("number", F64, "Value as a number, if it is a number or a scalar tensor; else NULL."),
    Column("reason", TEXT, "Why the value is NULL."),
)

VARIABLES = Table(
    "python.variables",
    "Values of watched variables, read from outside; one row for each change that was seen.",
    _VARIABLE_COLUMNS,
    stored(_VARIABLE_COLUMNS),
    sort_by=("job", "rank", "name", "ts"),
)

_METRIC_COLUMNS = (
    *IDENTITY,
    _RANK,
    Column("step", I64, "Training step, from a watched variable (see python.variables) or from probing.step."),
    Column(
        "loss",
        F64,
        "Loss at that step, from a watched variable named `loss` or `train_loss`, or from the metric `loss` of"
        " probing.metric; NULL if unknown.",
    ),
    Column(
        "name",
        NAME,
        "Name of the metric that the job reported; `step` in the row that marks the start of a step; NULL in rows from"
        " watched variables.",
    ),
    Column("value", F64, "Value of the metric in the column name."),
)

TRAINING_METRICS = Table(
    "python.training_metrics",
    "Step and loss of each rank, from watched variables, and the steps and metrics that jobs report by probing.step"
    " and probing.metric.",
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
        "Class of the outermost module, which tells several models of a process apart. Wrappers such as"
        " DistributedDataParallel do not count as the outermost module. NULL if module is NULL.",
    ),
    Column(
        "module",
        NAME,
        "Name of the module in its model, as torch's named_modules() returns it, such as model.layers.3.mlp; for the"
        " outermost module, the class. NULL if no module was on the stack, as in an optimizer, a data loader or the"
        " backward pass, which runs in C++ threads. Only the 512 modules that ran most in a process and window have"
        " rows of their own; the samples of all other modules are in the row whose module is NULL and whose stage is"
        " forward.",
    ),
    Column("class", NAME, "Class of the module; NULL if module is NULL."),
    Column(
        "stage",
        NAME,
        "`backward` while the thread runs or awaits the backward pass, else `forward` while a module runs, else"
        " `other`.",
    ),
    Column("samples", I64, "Number of samples in which the module was the innermost module on the stack."),
    Column("samples_below", I64, "Number of samples in which the module was anywhere on the stack."),
    Column(
        "interval_ns",
        I64,
        "Time that a sample stands for, ns: the length of the window divided by the number of samples in the window.",
    ),
    Column(
        "window_ns", I64, "Length of the window, ns: 10 s plus the time to the next sample; less if the process ended."
    ),
    Column("t_end", TIME, "End of the window, UTC.", sql="make_timestamp_ns(epoch_ns(ts) + window_ns)"),
)

TORCH_MODULES = Table(
    "python.torch_modules",
    "Samples of the torch modules that run in the thread that trains, read from outside: one row for each module and"
    " stage in each window of 10 s. The table has rows only if sampling.torch_modules is set.",
    _MODULE_COLUMNS,
    stored(_MODULE_COLUMNS),
    sort_by=("job", "rank", "ts"),
)

_TRACE_COLUMNS = (
    *IDENTITY,
    _RANK,
    Column("record_type", NAME, "span_start, span_end or event."),
    Column("trace_id", I64, "Id of the outermost span around the span or event."),
    Column("span_id", I64, "Id of the span; for an event, the id of the span around it, or 0 if there is none."),
    Column("parent_id", I64, "Id of the span around the span; NULL for an outermost span."),
    Column("name", TEXT, "Name of the span or event, at most 63 bytes."),
    Column("phase", NAME, "forward, backward or optimizer; NULL for other spans."),
    Column("time", I64, "When the job wrote the record, ns since 1970 by the clock of the job."),
    Column("thread_id", I64, "Kernel thread id of the thread that wrote the record."),
    Column("location", TEXT, "Code location that the job gave; NULL if it gave none."),
    Column("attributes", TEXT, "Attributes of the span as JSON, truncated to 255 bytes."),
    Column("event_attributes", TEXT, "Attributes of the event as JSON, truncated to 255 bytes."),
)

TRACE_EVENT = Table(
    "python.trace_event",
    "Starts and ends of spans, and events, as jobs report them by probing.span and probing.event.",
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
    Column("record_id", I64, "Number of the record, from a counter of the process."),
    Column("pg_id", I64, "Number of the process group."),
    Column("pg_name", TEXT, "Name of the process group."),
    Column("pg_desc", TEXT, "Description of the process group."),
    Column("collective_seq_id", I64, "Sequence number of the collective in its group."),
    Column("p2p_seq_id", I64, "Sequence number of the point-to-point operation in its group."),
    Column("op_id", I64, "Number of the operation in its group."),
    Column("profiling_name", TEXT, "Operation, e.g. nccl:all_reduce."),
    Column("state", NAME, "scheduled, started or completed."),
    Column("input_sizes", TEXT, "Shapes of the inputs, as JSON."),
    Column("input_dtypes", TEXT, "Types of the inputs, as JSON."),
    Column("output_sizes", TEXT, "Shapes of the outputs, as JSON."),
    Column("output_dtypes", TEXT, "Types of the outputs, as JSON."),
    Column("time_created_ns", I64, "When the operation was enqueued, ns since 1970."),
    Column(
        "time_discovered_started_ns", I64, "When PyTorch noticed that the operation had started; NULL if it has not."
    ),
    Column(
        "time_discovered_completed_ns",
        I64,
        "When PyTorch noticed that the operation had completed; NULL if it has not.",
    ),
    Column("duration_ns", I64, "Duration as measured by CUDA events, ns; NULL if the job does not measure it."),
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
