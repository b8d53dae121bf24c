"""Reads another process's memory in batches, without stopping it.

``process_vm_readv`` takes up to 1024 remote ranges in one call, and stops at the first range that faults. This range is
returned as None, and another call reads the ranges after it.
"""

from __future__ import annotations

import ctypes
import errno
import os
from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate, chain
from typing import Protocol

from probing.api.errors import CorruptTarget, PrivilegeError, ProcessGone, TargetError
from probing.daemon.processes.liveness import running_thread

__all__ = ("PAGE", "FakeMemory", "Memory", "ProcessMemory", "Range")

PAGE = 4096
IOV_MAX = 1024
# User addresses end here or below on all supported platforms.
_TOP = 1 << 56
_MAX_RANGE = 1 << 20
# The maximum bytes of one call. For a moment the reader holds three copies of them.
_BATCH_BYTES = 8 << 20

Range = tuple[int, int]


class Memory(Protocol):
    """Reads memory of a process. ``calls`` and ``bytes_read`` count all reads so far."""

    calls: int
    bytes_read: int

    def read_many(self, ranges: Sequence[Range]) -> list[bytes | None]:
        """Returns the bytes of each range (address, size), or None for a range that cannot be read as a whole.

        Raises ProcessGone, PrivilegeError, or CorruptTarget when the reads exceed the bounds.
        """


class ProcessMemory:
    """The memory of process ``pid``, which keeps running. ``max_calls`` and ``max_bytes`` limit the total of all reads
    through this object.
    """

    def __init__(self, pid: int, *, max_calls: int = 10_000, max_bytes: int = 64 << 20) -> None:
        self.pid = pid
        self.calls = 0
        self.bytes_read = 0
        self._tid = pid
        self._max_calls = max_calls
        self._max_bytes = max_bytes

    def read_many(self, ranges: Sequence[Range]) -> list[bytes | None]:
        if (flat := _flat(ranges)) is not None:
            return self._read_all(flat)
        wanted = [i for i, r in enumerate(ranges) if _plausible(r)]
        found = self._read_all(array("Q", chain.from_iterable(ranges[i] for i in wanted)))
        result: list[bytes | None] = [None] * len(ranges)
        for i, data in zip(wanted, found, strict=True):
            result[i] = data
        return result

    def _read_all(self, flat: array[int]) -> list[bytes | None]:
        """Returns the same as ``read_many``. ``flat``: address, size, address, size, and so on, of plausible ranges."""
        total = sum(flat[1::2])
        if self.bytes_read + total > self._max_bytes:
            raise CorruptTarget(f"process {self.pid}: a request would read more than {self._max_bytes} bytes")
        result: list[bytes | None] = []
        while 2 * len(result) < len(flat):
            result += self._read_batch(flat[2 * len(result) : 2 * (len(result) + IOV_MAX)])
        return result

    def _read_batch(self, remote: array[int]) -> list[bytes | None]:
        """Returns the bytes of the first ranges, as many as fit into one call. A range that faults ends the result with
        None.
        """
        if self.calls >= self._max_calls:
            raise CorruptTarget(f"process {self.pid}: a request took more than {self._max_calls} reads")
        self.calls += 1
        ends = list(accumulate(remote[1::2]))
        ends = ends[: max(1, bisect_right(ends, _BATCH_BYTES))]
        buffer = ctypes.create_string_buffer(ends[-1])
        local = array("Q", (ctypes.addressof(buffer), ends[-1]))
        count = self._copy(local, remote, len(ends))
        self.bytes_read += count
        data = buffer.raw
        whole = bisect_right(ends, count)
        found: list[bytes | None] = [data[start:end] for start, end in zip((0, *ends), ends[:whole], strict=False)]
        return found if whole == len(ends) else [*found, None]

    def _copy(self, local: array[int], remote: array[int], ranges: int) -> int:
        """Copies ``ranges`` and returns the number of bytes before the first fault."""
        while True:
            count: int = _readv(self._tid, local.buffer_info()[0], 1, remote.buffer_info()[0], ranges, 0)
            if count >= 0:
                return count
            code = ctypes.get_errno()
            # A thread that has ended has no memory, and the main thread may end first. Another thread is tried.
            tid = running_thread(self.pid) if code == errno.ESRCH else None
            if tid in (None, self._tid):
                return _failed(self.pid, code)
            self._tid = tid


class FakeMemory:
    """Memory made of segments {address: bytes}, for tests. Addresses outside the segments cannot be read."""

    def __init__(self, segments: Mapping[int, bytes], *, max_calls: int = 10_000) -> None:
        self.segments = dict(segments)
        self.calls = 0
        self.bytes_read = 0
        self._max_calls = max_calls

    def read_many(self, ranges: Sequence[Range]) -> list[bytes | None]:
        if self.calls >= self._max_calls:
            raise CorruptTarget(f"a request took more than {self._max_calls} reads")
        self.calls += 1
        return [self._read(*r) if _plausible(r) else None for r in ranges]

    def _read(self, address: int, size: int) -> bytes | None:
        for start, data in self.segments.items():
            if start <= address and address + size <= start + len(data):
                self.bytes_read += size
                return data[address - start : address - start + size]
        return None


def _flat(ranges: Sequence[Range]) -> array[int] | None:
    """Returns address, size, address, size, and so on, in one array; None if a range may be implausible."""
    try:
        flat = array("Q", chain.from_iterable(ranges))
    except OverflowError:
        return None
    addresses, sizes = flat[::2], flat[1::2]
    right = min(addresses, default=PAGE) >= PAGE and max(addresses, default=0) < _TOP - _MAX_RANGE
    right = right and min(sizes, default=1) > 0 and max(sizes, default=1) <= _MAX_RANGE
    return flat if right else None


def _plausible(wanted: Range) -> bool:
    address, size = wanted
    return 0 < size <= _MAX_RANGE and PAGE <= address < _TOP - size


def _failed(pid: int, code: int) -> int:
    if code == errno.EFAULT:
        return 0
    if code == errno.ESRCH:
        raise ProcessGone(f"process {pid} exited while it was read")
    if code == errno.EPERM:
        raise PrivilegeError(
            f"no permission to read the memory of process {pid}",
            hint="reading a process needs CAP_SYS_PTRACE, and kernel.yama.ptrace_scope below 3",
        )
    raise TargetError(f"the memory of process {pid} cannot be read: {os.strerror(code)}")


_libc = ctypes.CDLL(None, use_errno=True)
_readv = _libc.process_vm_readv
_readv.restype = ctypes.c_ssize_t
_readv.argtypes = (
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_ulong,
)
