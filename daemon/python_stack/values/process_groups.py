"""Reads rank, size and time-out of a torch process group from outside.

The Python object is an instance of pybind11, whose first word after the head points at the ``c10d::ProcessGroup``
(torch/csrc/distributed/c10d/ProcessGroup.hpp): an intrusive_ptr_target, a pointer to the store, rank and size. Measured
with torch 2.13; before 2.9 the target has a word more.

The time-out is a member of ``Backend::Options`` (Backend.hpp), to which a backend points; the group has its backends in
a std::unordered_map. Where they lie differs between versions, so that both are found by what must hold: the head of a
table of libstdc++, a backend of the same rank and size, and options whose next member is the backend's name.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import takewhile
from typing import NamedTuple

from probing.api.errors import CorruptTarget
from probing.daemon.processes.identity import MAX_WORLD
from probing.daemon.python_stack.values.objects import Objects
from probing.daemon.python_stack.walk.snapshot import word

__all__ = ("TimeOut", "process_group_text", "rank_and_size", "time_out")

_HELD = 16
_HEAD = 48
_STORES = (16, 24)
_LOWEST = 4096
# Bytes of a group and of a backend that are searched: a ProcessGroupNCCL is large.
_GROUP_BYTES, _BACKEND_BYTES = 512, 4096
_PIECE = 1024
_MOST_BACKENDS = 4
_OPTIONS_BYTES = 64
_BACKENDS = (b"gloo", b"nccl")
# 1.0, the load factor of a std::unordered_map that nobody changed.
_LOAD_FACTOR = 0x3F800000
_LONGEST_MS = 10**11


class TimeOut(NamedTuple):
    """``backend``: gloo or nccl."""

    backend: str
    ms: int


def process_group_text(objects: Objects, address: int) -> str:
    """Returns "ProcessGroup(rank=3, size=8, gloo, timeout=1800000 ms)" of the object at ``address``, without the latter
    two where they are not recognised. Raises like ``rank_and_size``."""
    rank, size = rank_and_size(objects, address)
    limit = time_out(objects, address, rank, size)
    more = f", {limit.backend}, timeout={limit.ms} ms" if limit is not None else ""
    return f"ProcessGroup(rank={rank}, size={size}{more})"


def rank_and_size(objects: Objects, address: int) -> tuple[int, int]:
    """Returns rank and size of the process group at ``address``. Raises CorruptTarget where none is recognised."""
    heap = objects.heap
    group = word(heap.read(address, _HELD + 8, counted=True), _HELD)
    if group >= _LOWEST and group % 8 == 0:
        heap.load([(group, _HEAD)])
        data = heap.read(group, _HEAD)
        for at in _STORES:
            store = word(data, at)
            rank, size = struct.unpack_from("<ii", data, at + 8)
            if 0 <= rank < size <= MAX_WORLD and store % 8 == 0 and (store >= _LOWEST or not store):
                return rank, size
    raise CorruptTarget("its process group cannot be made out: a version of torch that is not known")


def time_out(objects: Objects, address: int, rank: int, size: int) -> TimeOut | None:
    """Returns the time-out of the process group at ``address``; None where it has several, or none is recognised."""
    heap = objects.heap
    (data,) = heap.sample([(word(heap.peek(address, _HELD + 8), _HELD), _GROUP_BYTES)])
    if data is None:
        return None
    nodes = heap.sample([(node, 24) for node in _first_nodes(data)])
    backends = list(dict.fromkeys(word(node, 16) for node in nodes if node is not None))
    found = set()
    for backend in [at for at in backends if _may_point(at)][:_MOST_BACKENDS]:
        # Its end is not known, and what comes after it may be no memory.
        pieces = heap.sample([(backend + at, _PIECE) for at in range(0, _BACKEND_BYTES, _PIECE)])
        body = b"".join(piece or b"" for piece in takewhile(lambda piece: piece is not None, pieces))
        if body and any(struct.unpack_from("<ii", body, at) == (rank, size) for at in _STORES):
            pointers = dict.fromkeys(at for (at,) in struct.iter_unpack("<Q", body) if _may_point(at))
            options = heap.sample([(at, _OPTIONS_BYTES) for at in pointers])
            found |= {_limit(at, head) for at, head in zip(pointers, options, strict=True) if head is not None}
    found.discard(None)
    return found.pop() if len(found) == 1 else None


def _first_nodes(group: bytes) -> Iterator[int]:
    """Yields the first node of each std::unordered_map with elements (_Hashtable of libstdc++'s hashtable.h)."""
    for at in range(_HEAD, len(group) - 56, 8):
        _, buckets, first, count, factor = struct.unpack_from("<QQQQI", group, at)
        if factor == _LOAD_FACTOR and 0 < count <= buckets <= 1024 and _may_point(first):
            yield first


def _limit(at: int, head: bytes) -> TimeOut | None:
    """Returns the time-out of the options at ``at``: milliseconds, then a short std::string with the backend's name."""
    for begin in _STORES:
        ms, text, length = struct.unpack_from("<qQQ", head, begin)
        name = head[begin + 24 : begin + 24 + 4]
        if text == at + begin + 24 and length == len(name) and name in _BACKENDS and 0 < ms <= _LONGEST_MS:
            return TimeOut(name.decode(), ms)
    return None


def _may_point(address: int) -> bool:
    return _LOWEST <= address < 1 << 47 and address % 8 == 0
