"""Calls of NVML that fill an array, decoded by struct.

pynvml asks twice, first for the size, and makes an object of each entry: several times the cost of the call.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pynvml

__all__ = ("Array", "layout", "process_list", "process_samples")

_INSUFFICIENT_SIZE = 7
FIRST, MOST = 64, 4_096


def layout(kind: type[ctypes.Structure], *names: str) -> struct.Struct:
    """Returns what unpacks the members ``names`` of one ``kind``, in their order; numbers are unsigned."""
    text, at = "=", 0
    for name, member in ((field[0], field[1]) for field in kind._fields_ if field[0] in names):
        begin, size = getattr(kind, name).offset, ctypes.sizeof(member)
        code = "d" if member is ctypes.c_double else {2: "H", 4: "I", 8: "Q"}[size]
        text += f"{begin - at}x{code}"
        at = begin + size
    return struct.Struct(f"{text}{ctypes.sizeof(kind) - at}x")


class Array:
    """Room for entries of ``kind``, which grows up to MOST as the driver wants, and stays."""

    def __init__(self, kind: type[ctypes.Structure], *names: str) -> None:
        self._kind, self._layout = kind, layout(kind, *names)
        self._entries: Any = (kind * FIRST)()
        self._count = ctypes.c_uint()

    def filled(self, call: Callable[[Any, Any], int]) -> Iterator[tuple[Any, ...]]:
        """Returns the entries that ``call(entries, pointer to the count)`` gives. Raises NVMLError for its code."""
        while True:
            self._count.value = len(self._entries)
            code = call(self._entries, ctypes.byref(self._count))
            room = len(self._entries)
            if code != _INSUFFICIENT_SIZE or room >= MOST:
                break
            self._entries = (self._kind * min(MOST, max(2 * room, self._count.value + FIRST)))()
        if code:
            raise pynvml.NVMLError(code)
        count = min(room, self._count.value)
        return self._layout.iter_unpack(ctypes.string_at(self._entries, self._layout.size * count))


_LISTED = Array(pynvml.c_nvmlProcessInfo_v3_t, "pid", "usedGpuMemory")
_SAMPLED = Array(pynvml.c_nvmlProcessUtilizationSample_t, "pid", "timeStamp", "smUtil", "memUtil", "encUtil", "decUtil")


def process_list(name: str) -> Callable[[Any], Iterator[tuple[int, int]]]:
    """Returns a function of a device: (pid, used bytes) of its processes by the function ``name`` of NVML."""

    def read(handle: Any) -> Any:
        function = getattr(pynvml.nvmlLib, name)
        return _LISTED.filled(lambda entries, count: function(handle, count, entries))

    return read


def process_samples(handle: Any, since_us: int) -> Any:
    """Yields (pid, time in us, SM, memory, encoder, decoder in per cent) of samples after ``since_us``."""
    function, since = pynvml.nvmlLib.nvmlDeviceGetProcessUtilization, ctypes.c_ulonglong(since_us)
    return _SAMPLED.filled(lambda entries, count: function(handle, entries, count, since))
