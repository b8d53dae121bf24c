"""SQL formulas of algorithm and bus bandwidth over the columns of comm.ops, as nccl-tests defines them.

Source: doc/PERFORMANCE.md of nccl-tests. ``bytes`` is what one rank contributes: all of it for reduce_scatter,
all_to_all and the root of scatter, so only the gathers are multiplied. Imports nothing, so that commands start fast.
"""

from __future__ import annotations

__all__ = ("BUS_FACTOR", "MOVED_BYTES")

# Bytes to divide by the duration for the algorithm bandwidth.
MOVED_BYTES = "bytes * CASE WHEN op IN ('all_gather','gather') THEN comm_size ELSE 1 END"
# Bus bandwidth divided by algorithm bandwidth.
BUS_FACTOR = (
    "CASE WHEN op = 'all_reduce' THEN 2.0 * (comm_size - 1) / comm_size"
    " WHEN op IN ('all_gather','reduce_scatter','all_to_all','gather','scatter') THEN (comm_size - 1.0) / comm_size"
    " ELSE 1.0 END"
)
