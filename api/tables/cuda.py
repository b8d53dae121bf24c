"""Tables of processes' calls to the CUDA runtime."""

from __future__ import annotations

from probing.api.tables.comm import IDENTITY
from probing.api.tables.schema import I32, I64, NAME, TEXT, U64, Column, Table, Type, stored

__all__ = ("LAUNCHES", "MEMORY", "SYNCS")

_TEXTS = Type("VARCHAR[]", lambda pa: pa.list_(pa.string()))
_RANK = Column("rank", I32, "Rank in the job; only for a trainer.")
_SYNC_COLUMNS = (
    *IDENTITY,
    Column("tid", I32, "Thread that waited."),
    _RANK,
    Column("op", NAME, "The call: stream_synchronize, event_synchronize or device_synchronize."),
    Column(
        "stream",
        U64,
        "Stream for which the thread waited; NULL if it waited for the device, or if the stream is unknown.",
    ),
    Column("event", U64, "Event for which the thread waited; NULL if it did not wait for an event."),
    Column("duration_ns", I64, "Duration of the call, ns."),
    Column("error", TEXT, "Error that the call returned, e.g. cudaError 700; NULL for success."),
)
SYNCS = Table(
    "cuda.syncs",
    "Calls in which a thread waited for the GPU; ts is the start of the call.",
    _SYNC_COLUMNS,
    stored(_SYNC_COLUMNS),
    sort_by=("job", "rank", "ts"),
)

_MEMORY_COLUMNS = (
    *IDENTITY,
    _RANK,
    Column("kind", NAME, "Kind of memory: device, async, managed or host (pinned)."),
    Column("size_class", I64, "Upper limit of the sizes of the row's allocations, bytes; a power of two."),
    Column("stack", U64, "Hash of the stack's frames; equal for equal stacks of a process."),
    Column(
        "caller", TEXT, "Innermost frame outside of the CUDA runtime: library+0xoffset, or the name of the function."
    ),
    Column("frames", _TEXTS, "Frames of the stack, innermost first, as far as frame pointers lead."),
    Column(
        "interval_ns",
        I64,
        "Length of the interval in which allocations, frees and bytes were counted, ns; it ends at ts.",
    ),
    Column("allocations", I64, "Number of allocations in the interval."),
    Column("frees", I64, "Number of this row's allocations that were freed in the interval."),
    Column("bytes", I64, "Number of bytes allocated in the interval."),
    Column("live", I64, "Number of allocations that were made since counting began and have not been freed."),
    Column("live_bytes", I64, "Size of the allocations that are counted in live, bytes."),
    Column("errors", I64, "Number of allocations that failed in the interval."),
)
MEMORY = Table(
    "cuda.memory",
    "Memory that the CUDA runtime allocated. After each interval, each stack, kind and size class whose numbers changed"
    " gets a row.",
    _MEMORY_COLUMNS,
    stored(_MEMORY_COLUMNS),
    sort_by=("job", "rank", "stack", "ts"),
)

_LAUNCH_COLUMNS = (
    *IDENTITY,
    _RANK,
    Column("kernels", I64, "Number of kernels launched in the second that ends at ts."),
    Column("graphs", I64, "Number of CUDA graphs launched in the second that ends at ts."),
)
LAUNCHES = Table(
    "cuda.launches",
    "Numbers of kernels and graphs that each process launches, one row a second. The table has rows only if"
    " cuda.launches is set.",
    _LAUNCH_COLUMNS,
    stored(_LAUNCH_COLUMNS),
    sort_by=("job", "rank", "ts"),
)
