"""Layouts of torch builds: the offsets of the fields of gloo's classes that the BPF programs read.

``make_gloo.py`` computes the offsets from the headers of a torch wheel. The offsets are not trusted: the programs
check each value that they read (rank below size, a plausible string, sizes whose product is the number of elements) and
drop other values.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import NamedTuple

from probing.daemon.nccl_uprobes.layouts.nccl import NCCL_LAYOUTS, NcclLayout

__all__ = ("ABSENT", "GLOO_LAYOUTS", "NCCL_LAYOUTS", "UNKNOWN_BUILD", "GlooLayout", "NcclLayout", "gloo_layout_index")

ABSENT = 0xFFFF
_PRESENT = 1


class GlooLayout(NamedTuple):
    """The values of ``struct gloo_layout`` (gloo.bpf.c) without its first word: offsets in bytes, ABSENT for a missing
    field.

    The programs read 96 bytes of a process group, beginning with its rank, and 112 bytes of a tensor, beginning with
    its sizes.
    """

    backend_rank: int = ABSENT
    backend_size: int = ABSENT
    backend_uid: int = ABSENT
    backend_desc: int = ABSENT
    tensor_sizes: int = ABSENT
    tensor_numel: int = ABSENT
    tensor_dtype: int = ABSENT
    broadcast_root: int = ABSENT
    broadcast_async: int = ABSENT
    allreduce_redop: int = ABSENT
    allreduce_async: int = ABSENT
    reduce_redop: int = ABSENT
    reduce_root: int = ABSENT
    reduce_async: int = ABSENT
    allgather_async: int = ABSENT
    gather_root: int = ABSENT
    gather_async: int = ABSENT
    scatter_root: int = ABSENT
    scatter_async: int = ABSENT
    reduce_scatter_redop: int = ABSENT
    reduce_scatter_async: int = ABSENT
    alltoall_async: int = ABSENT
    barrier_async: int = ABSENT

    def pack(self) -> bytes:
        return struct.pack(f"<{1 + len(self)}H", _PRESENT, *self)


# Operation, sequence number and times are right for every build, because the programs need no offsets for them.
UNKNOWN_BUILD = GlooLayout()
TORCH_2_13 = GlooLayout(
    backend_rank=16,
    backend_size=20,
    backend_uid=32,
    backend_desc=64,
    tensor_sizes=56,
    tensor_numel=152,
    tensor_dtype=160,
    broadcast_root=0,
    broadcast_async=24,
    allreduce_redop=16,
    allreduce_async=40,
    reduce_redop=16,
    reduce_root=32,
    reduce_async=56,
    allgather_async=8,
    gather_root=0,
    gather_async=16,
    scatter_root=0,
    scatter_async=16,
    reduce_scatter_redop=16,
    reduce_scatter_async=40,
    alltoall_async=8,
    barrier_async=35,
)
# Before torch 2.13 tensors had names, which take 8 bytes.
TORCH_2_9 = TORCH_2_13._replace(tensor_sizes=64, tensor_numel=160, tensor_dtype=168)
# Only append: the indexes are in attach cookies, and the cookies of pinned links must stay right.
GLOO_LAYOUTS: tuple[GlooLayout, ...] = (UNKNOWN_BUILD, TORCH_2_13, TORCH_2_9)

# _NAMED_TENSORS: a function of the builds whose tensors have names. _MARKS: functions that exist since torch 2.9.
_NAMED_TENSORS = "at4impl9has_namesE"
_MARKS = ("16ProcessGroupGloo5splitE", "16ProcessGroupGloo5mergeE")


def gloo_layout_index(symbols: Iterable[str]) -> int:
    """Returns the index in GLOO_LAYOUTS for a libtorch_cpu.so with functions of these mangled names."""
    names = list(symbols)
    if not all(any(mark in name for name in names) for mark in _MARKS):
        return GLOO_LAYOUTS.index(UNKNOWN_BUILD)
    named = any(_NAMED_TENSORS in name for name in names)
    return GLOO_LAYOUTS.index(TORCH_2_9 if named else TORCH_2_13)
