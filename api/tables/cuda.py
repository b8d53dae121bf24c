"""What processes ask of the CUDA runtime."""

from __future__ import annotations

from probing.api.tables.comm import IDENTITY
from probing.api.tables.schema import I32, I64, NAME, TEXT, U64, Column, Table, Type, stored

__all__ = ("LAUNCHES", "MEMORY", "SYNCS")

_TEXTS = Type("VARCHAR[]", lambda pa: pa.list_(pa.string()))
_RANK = Column("rank", I32, "Rank in the job, for a trainer.")
_SYNC_COLUMNS = (
    *IDENTITY,
    Column("tid", I32, "Thread that waited."),
    _RANK,
    Column("op", NAME, "stream_synchronize, event_synchronize or device_synchronize."),
    Column("stream", U64, "Stream that was waited for; NULL for the device, or when it is not known."),
    Column("event", U64, "Event that was waited for; NULL when it was none."),
    Column("duration_ns", I64, "Time of the call, ns."),
    Column("error", TEXT, "What the call returned, as cudaError 700; NULL for success."),
)
SYNCS = Table(
    "cuda.syncs",
    "Calls in which a thread waited for the GPU; ts is when the call was made.",
    _SYNC_COLUMNS,
    stored(_SYNC_COLUMNS),
    sort_by=("job", "rank", "ts"),
)

_MEMORY_COLUMNS = (
    *IDENTITY,
    _RANK,
    Column("kind", NAME, "device, async, managed or host (pinned)."),
    Column("size_class", I64, "Sizes of these allocations: up to so many bytes, a power of two."),
    Column("stack", U64, "Hash of the frames; equal for equal stacks of a process."),
    Column("caller", TEXT, "Innermost frame outside of the CUDA runtime: library+0xoffset, or its function."),
    Column("frames", _TEXTS, "The frames, innermost first, as far as frame pointers lead."),
    Column("interval_ns", I64, "Time in which allocations, frees and bytes were counted, ns; it ends at ts."),
    Column("allocations", I64, "Allocations in the interval."),
    Column("frees", I64, "Of allocations of this row, those freed in the interval."),
    Column("bytes", I64, "Bytes allocated in the interval."),
    Column("live", I64, "Allocations that were made since they are watched, and not freed."),
    Column("live_bytes", I64, "Bytes of these."),
    Column("errors", I64, "Allocations that failed in the interval."),
)
MEMORY = Table(
    "cuda.memory",
    "Memory that was asked of the CUDA runtime, by stack and size: a row for each that has changed in an interval.",
    _MEMORY_COLUMNS,
    stored(_MEMORY_COLUMNS),
    sort_by=("job", "rank", "stack", "ts"),
)

_LAUNCH_COLUMNS = (
    *IDENTITY,
    _RANK,
    Column("kernels", I64, "Kernels launched in the second that ends at ts."),
    Column("graphs", I64, "CUDA graphs launched in it."),
)
LAUNCHES = Table(
    "cuda.launches",
    "Kernels that each process launches, a row a second; off unless cuda.launches is set.",
    _LAUNCH_COLUMNS,
    stored(_LAUNCH_COLUMNS),
    sort_by=("job", "rank", "ts"),
)
