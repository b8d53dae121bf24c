"""Finds the lock of the pending calls of CPython 3.13 and later by a search of memory, since no symbol names the lock.

``struct _pending_calls`` (Include/internal/pycore_ceval_state.h of 3.13.0 to 3.15.2) lies in ``_PyRuntime``. Its fields
are the handling thread, a PyMutex, three numbers, a ring of 300 calls of three words each, and the indices of the first
call and of the next free entry. A call that was removed from the ring leaves zeros. Only the ring of the main thread
has a limit of 32 calls.
"""

from __future__ import annotations

import struct

from probing.api.errors import UnsupportedTarget
from probing.daemon.processes.memory import Memory

__all__ = ("find_pending_lock", "is_unlocked")

_RING, _CALL_BYTES, _MOST = 300, 24, 32
_HEAD = struct.Struct("<QB3xiii")
_ENDS = struct.Struct("<II")
_SIZE = _HEAD.size + _RING * _CALL_BYTES + _ENDS.size
_LIMITS = struct.pack("<ii", _MOST, 0)
_LIMITS_AT, _LOCK_AT = 16, 8
_MOST_BYTES = 1 << 20
_FREE_AND_LOCKED = range(4)


def find_pending_lock(memory: Memory, runtime: int, size: int) -> int:
    """Returns the address of the lock's byte. ``_PyRuntime`` is at ``runtime`` and has ``size`` bytes.

    Raises UnsupportedTarget.
    """
    data = memory.read_many([(runtime, min(size, _MOST_BYTES))])[0] or b""
    locks, at = [], -1
    while (at := data.find(_LIMITS, at + 1)) >= 0:
        start = at - _LIMITS_AT
        if start >= 0 and start % 8 == 0 and start + _SIZE <= len(data) and _is_ring(data[start : start + _SIZE]):
            locks.append(runtime + start + _LOCK_AT)
    if len(locks) != 1:
        raise UnsupportedTarget(
            "the evaluation loop is not one function, and the lock of the interpreter's pending calls was not found",
            hint="use `probingctl vars` or `stacks`, which put nothing into the process",
        )
    return locks[0]


def is_unlocked(memory: Memory, lock: int) -> bool:
    """Returns whether no thread holds the lock or waits for it."""
    return memory.read_many([(lock, 1)])[0] == b"\0"


def _is_ring(data: bytes) -> bool:
    _, lock, waiting, _, _ = _HEAD.unpack_from(data)
    first, last = _ENDS.unpack_from(data, _SIZE - _ENDS.size)
    if lock not in _FREE_AND_LOCKED or not 0 <= waiting <= _MOST or max(first, last) >= _RING:
        return False
    if (last - first) % _RING != waiting:
        return False
    calls = data[_HEAD.size : -_ENDS.size]
    used = {(first + number) % _RING for number in range(waiting)}
    empty = bytes(_CALL_BYTES)
    return all(calls[n * _CALL_BYTES : (n + 1) * _CALL_BYTES] == empty for n in range(_RING) if n not in used)
