"""Reads rank and size of a torch process group from outside.

The Python object is an instance of pybind11, whose first word after the head points at the ``c10d::ProcessGroup``
(torch/csrc/distributed/c10d/ProcessGroup.hpp): an intrusive_ptr_target, a pointer to the store, rank and size. Measured
with torch 2.13; before 2.9 the target has a word more.
"""

from __future__ import annotations

import struct

from probing.api.errors import CorruptTarget
from probing.daemon.processes.identity import MAX_WORLD
from probing.daemon.python_stack.values.objects import Objects
from probing.daemon.python_stack.walk.snapshot import word

__all__ = ("process_group_text", "rank_and_size")

_HELD = 16
_HEAD = 48
_STORES = (16, 24)
_LOWEST = 4096


def process_group_text(objects: Objects, address: int) -> str:
    """Returns "ProcessGroup(rank=3, size=8)" of the object at ``address``. Raises like ``rank_and_size``."""
    return "ProcessGroup(rank={}, size={})".format(*rank_and_size(objects, address))


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
