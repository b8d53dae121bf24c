"""Makes batches of net.tcp and net.paths from figures of connections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from probing.api.tables.net import PATHS, TCP
from probing.daemon.columns import batch, flags, named, numbers, texts, times
from probing.daemon.source import Identity

__all__ = ("Columns", "path_batch", "tcp_batch")

Columns = dict[str, "npt.NDArray[Any]"]
_COUNTS = (
    "sockets",
    "connecting",
    "bytes_sent",
    "bytes_received",
    "segs_out",
    "segs_in",
    "retrans",
    "bytes_retrans",
    "ecn_marked",
)
_NOW = ("timeouts", "longest_timeouts", "lost", "unacked", "unread_bytes", "unsent_bytes", "cwnd_min")
_OF_32_BITS = ("sockets", "connecting", "timeouts", "longest_timeouts", "cwnd_min")
_US = 1_000


def tcp_batch(
    node: str, ts_ns: int, who: Sequence[Identity], at: Columns, addresses: Sequence[str], figures: Columns
) -> pa.RecordBatch:
    """Returns rows of net.tcp.

    ``at`` has the columns process (index in ``who``), local and peer (indices in ``addresses``), peer_local, peer_rank,
    netns and interval; ``figures`` the other columns.
    """
    process = at["process"]
    columns = _common(node, ts_ns, at, addresses, figures)
    columns |= {
        "job": texts([one.job for one in who], process),
        "run": texts([one.run for one in who], process),
        "role": texts([one.role for one in who], process),
        "pid": numbers(np.array([one.pid for one in who], np.int32)[process]),
        "start_ns": numbers(np.array([one.start_ns for one in who], np.int64)[process]),
        "rank": _optional(np.array([-1 if one.rank is None else one.rank for one in who], np.int32)[process]),
        "netns": numbers(at["netns"]),
        "peer_local": flags(at["peer_local"]),
        "peer_rank": _optional(at["peer_rank"].astype(np.int32)),
        **{name: numbers(_narrow(name, figures[name])) for name in _NOW},
        "delivery_gbps": numbers(figures["delivery_rate"] * 8e-9, figures["delivery_rate"] <= 0),
        "busy_ns": numbers(figures["busy"] * _US),
        "rwnd_limited_ns": numbers(figures["rwnd_limited"] * _US),
        "sndbuf_limited_ns": numbers(figures["sndbuf_limited"] * _US),
        "silent_ns": _optional(figures["silent"]),
    }
    return batch(TCP.name, columns)


def path_batch(
    node: str, ts_ns: int, runs: Sequence[tuple[str, str]], at: Columns, addresses: Sequence[str], figures: Columns
) -> pa.RecordBatch:
    """Returns rows of net.paths.

    ``at`` has the columns run (index in ``runs``, which are (job, run)), local and peer (indices in ``addresses``),
    interval and processes; ``figures`` the other columns.
    """
    columns = _common(node, ts_ns, at, addresses, figures)
    columns |= {
        "job": texts([job for job, _ in runs], at["run"]),
        "run": texts([run for _, run in runs], at["run"]),
        "processes": numbers(at["processes"]),
    }
    return batch(PATHS.name, columns)


def _common(
    node: str, ts_ns: int, at: Columns, addresses: Sequence[str], figures: Mapping[str, npt.NDArray[Any]]
) -> dict[str, pa.Array[Any]]:
    count = len(at["local"])
    return {
        "node": named(np.zeros(count, np.int32), (node,)),
        "ts": times(np.full(count, ts_ns, np.int64)),
        "local_address": texts(addresses, at["local"]),
        "peer_address": texts(addresses, at["peer"]),
        "interval_ns": numbers(at["interval"]),
        **{name: numbers(_narrow(name, figures[name])) for name in _COUNTS},
        **{f"{name}_ns": _optional(figures[name]) for name in ("rtt", "rtt_max", "rtt_min")},
    }


def _narrow(name: str, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Returns ``values`` in the type of the column ``name``, because numpy makes this cast in 1 us, and Arrow in 25
    us.
    """
    return values.astype(np.int32) if name in _OF_32_BITS else values


def _optional(values: npt.NDArray[Any]) -> pa.Array[Any]:
    return numbers(values, values < 0)
