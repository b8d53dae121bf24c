"""Maps functions of libcudart to programs; names and kinds are the same as in ``cuda.bpf.c`` and
``cuda_memory.bpf.c``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from probing.api.errors import UnsupportedTarget
from probing.daemon.bpf.probe_points import point_of
from probing.daemon.bpf.probe_slots import SLOTS
from probing.daemon.elf.symbols import Symbol

__all__ = (
    "COMPLETION",
    "EVENT_SLOTS",
    "LAUNCHES",
    "MEMORY",
    "MEMORY_KINDS",
    "SYNC_OPS",
    "Group",
    "Place",
    "is_cudart",
    "placed",
    "slots",
)

_KIND_SHIFT, _PER_THREAD_SHIFT = 16, 24
# The suffix of functions for which stream 0 is the default stream of the thread (cuda_runtime_api.h,
# __CUDART_API_PTSZ).
_PER_THREAD = "_ptsz"
# enum cuda_call_kind
SYNC_OPS = {1: "stream_synchronize", 2: "event_synchronize", 3: "device_synchronize"}
# enum memory_kind
MEMORY_KINDS = {1: "device", 2: "async", 3: "managed", 4: "host"}


class _Function(NamedTuple):
    """A function with probes. ``entry`` and ``returned``: the programs at entry and return, or "". The programs get
    ``kind`` in the cookie.
    """

    name: str
    kind: int
    entry: str = ""
    returned: str = ""


class Group(NamedTuple):
    """Functions whose probes are attached and detached together. A library that lacks one of ``needed`` is refused."""

    name: str
    slots: range
    functions: tuple[_Function, ...]
    needed: tuple[str, ...] = ()

    @property
    def patterns(self) -> list[str]:
        return [name for function in self.functions for name in (function.name, function.name + _PER_THREAD)]


class Place(NamedTuple):
    """A link to make: ``program`` at file ``offsets``. Each offset has a cookie, and a cost, "cheap" or "dear"."""

    program: str
    on_return: bool
    offsets: list[int]
    cookies: list[int]
    costs: list[str]


# Functions are attached in this order: functions that end something come before functions that begin something, and
# return probes come first.
_COMPLETION = (
    _Function("cudaSetDevice", 8, "cuda_switch", "cuda_switched"),
    _Function("cudaStreamBeginCapture", 6, "cuda_switch", "cuda_switched"),
    _Function("cudaStreamBeginCaptureToGraph", 6, "cuda_switch", "cuda_switched"),
    _Function("cudaStreamEndCapture", 7, "cuda_switch", "cuda_switched"),
    _Function("cudaStreamDestroy", 0, "cuda_stream_destroy"),
    _Function("cudaEventDestroy", 0, "cuda_event_destroy"),
    _Function("cudaStreamSynchronize", 1, "cuda_stream_sync", "cuda_returned"),
    _Function("cudaEventSynchronize", 2, "cuda_event_sync", "cuda_returned"),
    _Function("cudaDeviceSynchronize", 3, "cuda_device_sync", "cuda_returned"),
    _Function("cudaEventQuery", 4, "cuda_event_query", "cuda_returned"),
    _Function("cudaStreamQuery", 5, "cuda_stream_query", "cuda_returned"),
    _Function("cudaEventRecord", 0, "cuda_event_record"),
    _Function("cudaEventRecordWithFlags", 0, "cuda_event_record"),
)
COMPLETION = Group(
    "completion",
    SLOTS.reserve("cuda completion", 128, len(_COMPLETION)),
    _COMPLETION,
    ("cudaStreamSynchronize", "cudaEventQuery", "cudaEventRecord"),
)
# The slots of the probes from which the programs learn which operations precede a CUDA event.
EVENT_SLOTS = [
    slot
    for slot, function in zip(COMPLETION.slots, COMPLETION.functions, strict=True)
    if function.entry in ("cuda_event_record", "cuda_event_destroy")
]
_MEMORY = (
    _Function("cudaFree", 0, "cuda_free"),
    _Function("cudaFreeAsync", 0, "cuda_free"),
    _Function("cudaFreeHost", 0, "cuda_free"),
    _Function("cudaMalloc", 1, "cuda_allocate", "cuda_allocated"),
    _Function("cudaMallocAsync", 2, "cuda_allocate", "cuda_allocated"),
    _Function("cudaMallocFromPoolAsync", 2, "cuda_allocate", "cuda_allocated"),
    _Function("cudaMallocManaged", 3, "cuda_allocate", "cuda_allocated"),
    _Function("cudaMallocHost", 4, "cuda_allocate", "cuda_allocated"),
    _Function("cudaHostAlloc", 4, "cuda_allocate", "cuda_allocated"),
)
MEMORY = Group(
    "memory",
    SLOTS.reserve("cuda memory", 144, len(_MEMORY)),
    _MEMORY,
    ("cudaMalloc", "cudaFree"),
)
_LAUNCHES = (
    _Function("cudaLaunchKernel", 9, "cuda_launch"),
    _Function("cudaLaunchKernelExC", 9, "cuda_launch"),
    _Function("cudaLaunchCooperativeKernel", 9, "cuda_launch"),
    _Function("cudaGraphLaunch", 10, "cuda_launch"),
)
LAUNCHES = Group(
    "launches",
    SLOTS.reserve("cuda launches", 160, len(_LAUNCHES)),
    _LAUNCHES,
    ("cudaLaunchKernel",),
)


def is_cudart(path: bytes) -> bool:
    """Returns whether a mapped file can be the CUDA runtime, by its name; wheels use other names."""
    name = path.rpartition(b"/")[2]
    return name.startswith((b"libcudart.so", b"libcudart-")) and b".so" in name


def slots(groups: Iterable[Group]) -> dict[int, str]:
    """Returns "PROGRAM FUNCTION" by slot: the function whose calls the slot counts, and the program at its entry."""
    return {
        slot: f"{function.entry} {function.name}"
        for group in groups
        for slot, function in zip(group.slots, group.functions, strict=True)
    }


def placed(group: Group, symbols: Iterable[Symbol]) -> list[Place]:
    """Returns the links of a group, in the order to make them; aliases of one address count once.

    Raises UnsupportedTarget if a needed function is missing.
    """
    found = {symbol.name: symbol for symbol in symbols if symbol.file_offset is not None}
    missing = [name for name in group.needed if name not in found]
    if missing:
        raise UnsupportedTarget(
            f"this libcudart has no function {missing[0]}", hint="CUDA calls are not seen; report the version of CUDA"
        )
    places: dict[tuple[str, bool], Place] = {}
    seen: set[int] = set()
    for slot, function in zip(group.slots, group.functions, strict=True):
        for suffix in ("", _PER_THREAD):
            symbol = found.get(function.name + suffix)
            if symbol is None or symbol.file_offset is None or symbol.address in seen:
                continue
            seen.add(symbol.address)
            point = point_of(symbol)
            cookie = slot | function.kind << _KIND_SHIFT | bool(suffix) << _PER_THREAD_SHIFT
            for program, on_return in ((function.returned, True), (function.entry, False)):
                if program:
                    place = places.setdefault((program, on_return), Place(program, on_return, [], [], []))
                    place.offsets.append(symbol.file_offset + point.offset)
                    place.cookies.append(cookie)
                    place.costs.append(point.cost)
    return list(places.values())
