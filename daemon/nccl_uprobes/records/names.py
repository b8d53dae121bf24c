"""Names for the numbers in ``struct collective_record``, which are from gloo, NCCL and ``collectives.bpf.h``."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = (
    "BACKENDS",
    "DTYPES",
    "DTYPE_BYTES",
    "GLOO",
    "NCCL",
    "NCCL_RESULTS",
    "OPS",
    "REDOPS",
    "STATES",
    "STATE_ABANDONED",
    "STATE_FAILED",
    "TIMINGS",
    "codes",
)

# Values of enum operation_state and enum backend.
STATE_FAILED, STATE_ABANDONED = 4, 5
GLOO, NCCL = 1, 2

BACKENDS = ("gloo", "nccl")
# States by enum operation_state: 1, 2 and 7 are for open operations, 6 is for an operation whose end was not seen.
STATES = ("called", "started", "done", "failed", "abandoned", "unseen", "launched")
TIMINGS = ("exact", "sync", "enqueue_only", "watchdog", "graph", "blocking_wait")

OPS = (
    "broadcast",
    "all_reduce",
    "reduce",
    "all_gather",
    "gather",
    "scatter",
    "reduce_scatter",
    "all_to_all",
    "send",
    "recv",
    "barrier",
    "all_gather_v",
    "put_signal",
    "signal",
    "wait_signal",
    "collective_permute",
)
# c10d::OpType (torch/csrc/distributed/c10d/Work.hpp), to which torch only appends.
_GLOO_OPS = {
    0: "broadcast",
    1: "all_reduce",
    2: "all_reduce",
    3: "reduce",
    4: "all_gather",
    5: "all_gather",
    6: "all_gather",
    7: "gather",
    8: "scatter",
    9: "reduce_scatter",
    10: "all_to_all",
    11: "all_to_all",
    12: "send",
    13: "recv",
    14: "recv",
    15: "barrier",
    16: "reduce_scatter",
    18: "all_reduce",
    19: "reduce_scatter",
    20: "all_gather",
    # Not a number of c10d: our own number for XLA's CollectivePermute.
    64: "collective_permute",
}
# ncclFunc_t (NCCL src/include/nccl_common.h).
_NCCL_OPS = {
    0: "broadcast",
    1: "reduce",
    2: "all_gather",
    3: "reduce_scatter",
    4: "all_reduce",
    6: "send",
    7: "recv",
    8: "all_to_all",
    9: "scatter",
    10: "gather",
    11: "all_gather_v",
    12: "put_signal",
    13: "signal",
    14: "wait_signal",
}
# ncclResult_t (nccl.h) by number.
NCCL_RESULTS = (
    "ncclSuccess",
    "ncclUnhandledCudaError",
    "ncclSystemError",
    "ncclInternalError",
    "ncclInvalidArgument",
    "ncclInvalidUsage",
    "ncclRemoteError",
    "ncclInProgress",
    "ncclTimeout",
)

# c10::ScalarType (torch/headeronly/core/ScalarType.h) by number, with torch's itemsize.
_TORCH_DTYPES = (
    ("uint8", 1),
    ("int8", 1),
    ("int16", 2),
    ("int32", 4),
    ("int64", 8),
    ("float16", 2),
    ("float32", 4),
    ("float64", 8),
    ("complex32", 4),
    ("complex64", 8),
    ("complex128", 16),
    ("bool", 1),
    ("qint8", 1),
    ("quint8", 1),
    ("qint32", 4),
    ("bfloat16", 2),
    ("quint4x2", 1),
    ("quint2x4", 1),
    ("bits1x8", 1),
    ("bits2x4", 1),
    ("bits4x2", 1),
    ("bits8", 1),
    ("bits16", 2),
    ("float8_e5m2", 1),
    ("float8_e4m3fn", 1),
    ("float8_e5m2fnuz", 1),
    ("float8_e4m3fnuz", 1),
    ("uint16", 2),
    ("uint32", 4),
    ("uint64", 8),
    *((f"uint{bits}", 1) for bits in range(1, 8)),
    *((f"int{bits}", 1) for bits in range(1, 8)),
    ("float8_e8m0fnu", 1),
    ("float4_e2m1fn_x2", 1),
    ("bcomplex32", 4),
)
# ncclDataType_t (nccl.h), in torch's names.
_NCCL_DTYPES = (
    "int8",
    "uint8",
    "int32",
    "uint32",
    "int64",
    "uint64",
    "float16",
    "float32",
    "float64",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
)
DTYPES = tuple(name for name, _ in _TORCH_DTYPES)

REDOPS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum")
# ncclRedOp_t; numbers from 5 on belong to reductions that the job defined itself.
_NCCL_REDOPS = ("sum", "product", "max", "min", "avg")


def codes(field: str) -> npt.NDArray[np.int32]:
    """Returns an array for ``op``, ``dtype`` or ``redop``: entry backend * 256 + number is the name's index, or -1."""
    gloo, nccl, names = _NUMBERS[field]
    table = np.full(3 * 256, -1, np.int32)
    for backend, numbers in ((GLOO, gloo), (NCCL, nccl)):
        for number, name in numbers.items():
            table[backend * 256 + number] = names.index(name)
    return table


_NUMBERS: dict[str, tuple[dict[int, str], dict[int, str], tuple[str, ...]]] = {
    "op": (_GLOO_OPS, _NCCL_OPS, OPS),
    "dtype": (dict(enumerate(DTYPES)), dict(enumerate(_NCCL_DTYPES)), DTYPES),
    # c10d::ReduceOp::RedOpType (Types.hpp) has the order of REDOPS.
    "redop": (dict(enumerate(REDOPS)), dict(enumerate(_NCCL_REDOPS)), REDOPS),
}
# Sizes by index in DTYPES.
DTYPE_BYTES: npt.NDArray[np.int64] = np.array([size for _, size in _TORCH_DTYPES], np.int64)
