"""Where the fields of gloo's classes lie that the programs read, a build of torch each.

The offsets are made from the headers of a torch wheel by ``make_layouts.py``. They are not trusted: the programs check
what they read (rank below size, sizes that give the number of elements, a string that can be one) and leave out what
does not fit.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields, replace

from probing.daemon.nccl_uprobes.layouts.nccl import NCCL_LAYOUTS, NcclLayout

__all__ = ("ABSENT", "GLOO_LAYOUTS", "NCCL_LAYOUTS", "UNKNOWN_BUILD", "GlooLayout", "NcclLayout", "gloo_layout_index")

ABSENT = 0xFFFF
_PRESENT = 1


@dataclass(frozen=True, slots=True)
class GlooLayout:
    """``struct gloo_layout`` of gloo.bpf.c without its first word: offsets in bytes, ABSENT where there is none.

    The fields of a group lie within 96 bytes from its rank on, those of a tensor within 112 from its sizes on.
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
        return struct.pack(f"<{1 + len(fields(self))}H", _PRESENT, *astuple(self))


# Operation, sequence number and times come from arguments: they are right for every build.
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
# Until then tensors had names, which took a word.
TORCH_2_9 = replace(TORCH_2_13, tensor_sizes=64, tensor_numel=160, tensor_dtype=168)
# By index, which the attach cookie carries; only ever added to, so that the cookies of pinned links stay true.
GLOO_LAYOUTS: tuple[GlooLayout, ...] = (UNKNOWN_BUILD, TORCH_2_13, TORCH_2_9)

# Functions that came with the options that 2.9 and later have, and one that went with the names of tensors.
_NAMED_TENSORS = "at4impl9has_namesE"
_MARKS = ("16ProcessGroupGloo5splitE", "16ProcessGroupGloo5mergeE")


def gloo_layout_index(symbols: Iterable[str]) -> int:
    """The index in GLOO_LAYOUTS for a libtorch_cpu.so that has functions of these mangled names."""
    found = list(symbols)
    if not all(any(mark in name for name in found) for mark in _MARKS):
        return GLOO_LAYOUTS.index(UNKNOWN_BUILD)
    named = any(_NAMED_TENSORS in name for name in found)
    return GLOO_LAYOUTS.index(TORCH_2_9 if named else TORCH_2_13)
