"""Views ``nccl.*`` with the columns that Probing's NCCL profiler plugin writes; here the values come from probes on
libnccl.
"""

from __future__ import annotations

from probing.api.tables import comm
from probing.api.tables.schema import I32, I64, NAME, TEXT, TIME, Column, view
from probing.api.tables.views_columns import chosen, identity, unknown

__all__ = ("VIEWS",)

_FUNCTIONS = {
    "all_reduce": "AllReduce",
    "all_gather": "AllGather",
    "reduce_scatter": "ReduceScatter",
    "all_to_all": "AlltoAll",
    "broadcast": "Broadcast",
    "reduce": "Reduce",
    "gather": "Gather",
    "scatter": "Scatter",
    "send": "Send",
    "recv": "Recv",
}
_COLL_FUNC = Column(
    "coll_func",
    TEXT,
    "Operation in NCCL's names: AllReduce, Send, ...",
    sql=f"CASE o.op {' '.join(f'WHEN {op!r} THEN {name!r}' for op, name in _FUNCTIONS.items())} ELSE o.op END",
)
_P2P = "o.op IN ('send', 'recv')"
_PARALLEL = unknown(I32, "only the job knows the ranks of its grid", "tp_rank", "pp_rank", "dp_rank")
_PLUGIN = "only a plugin inside NCCL can see this value"
_NOT_SEEN = "work of NCCL's proxy threads is not seen from outside; the view is empty"

COLL_PERF = view(
    "nccl.coll_perf",
    "Operations of NCCL, from comm.ops.",
    (
        *identity("o"),
        *chosen(comm.OPS, "o", "rank"),
        *_PARALLEL,
        *chosen(comm.OPS, "o", comm_hash="comm", n_ranks="comm_size"),
        _COLL_FUNC,
        *chosen(comm.OPS, "o", "seq"),
        Column("is_p2p", I32, "1 for send and recv, else 0.", sql=_P2P),
        *chosen(comm.OPS, "o", "peer", "count", "dtype", msg_size_bytes="bytes"),
        *unknown(TEXT, _PLUGIN, "algo", "proto"),
        *unknown(I32, _PLUGIN, "n_channels"),
        *chosen(comm.OPS, "o", exec_time_ns="duration_ns"),
        Column(
            "enqueue_time_ns",
            I64,
            "Time from the call to the launch, ns; NULL if the launch was not seen.",
            sql="epoch_ns(o.t_launch) - epoch_ns(o.ts)",
        ),
        *chosen(comm.OPS, "o", "timing_source", algobw_gbps="algbw_gbps"),
        *unknown(I64, "probing.losses has the gaps", "pool_events_dropped"),
    ),
    "comm.ops AS o WHERE o.backend = 'nccl'",
)

INFLIGHT_OPS = view(
    "nccl.inflight_ops",
    "Operations of NCCL that were called and have not finished, as of now, from comm.inflight.",
    (
        *identity("o"),
        *chosen(comm.INFLIGHT, "o", "rank", comm_hash="comm"),
        _COLL_FUNC,
        *chosen(comm.INFLIGHT, "o", "seq"),
        Column("kind", TEXT, "coll or p2p.", sql=f"CASE WHEN {_P2P} THEN 'p2p' ELSE 'coll' END"),
        *unknown(I32, _PLUGIN, "channel_id"),
        *chosen(comm.INFLIGHT, "o", "peer"),
        Column(
            "is_send",
            I32,
            "1 for send, 0 for recv, NULL for other operations.",
            sql=f"CASE WHEN {_P2P} THEN o.op = 'send' END",
        ),
        Column("start_ns", I64, "When the operation was called, ns since 1970.", sql="epoch_ns(o.ts)"),
        *chosen(comm.INFLIGHT, "o", "age_ns"),
    ),
    "comm.inflight AS o WHERE o.backend = 'nccl'",
)

PROXY_OPS = view(
    "nccl.proxy_ops",
    "Operations of NCCL's proxy threads: always empty, because these operations are not seen from outside.",
    (
        *unknown(NAME, _NOT_SEEN, "node"),
        *unknown(TIME, _NOT_SEEN, "ts"),
        *unknown(I32, _NOT_SEEN, "rank", "tp_rank", "pp_rank", "dp_rank"),
        *unknown(TEXT, _NOT_SEEN, "comm_hash", "coll_func"),
        *unknown(I64, _NOT_SEEN, "seq"),
        *unknown(I32, _NOT_SEEN, "channel_id", "peer", "is_send"),
        *unknown(I64, _NOT_SEEN, "n_steps", "trans_bytes", "send_gpu_wait_ns", "send_peer_wait_ns", "send_wait_ns"),
        *unknown(I64, _NOT_SEEN, "recv_wait_ns", "recv_flush_wait_ns"),
    ),
)

NET_QP = view(
    "nccl.net_qp",
    "Transfers of NCCL's network plugin: always empty, because these transfers are not seen from outside.",
    (
        *unknown(NAME, _NOT_SEEN, "node"),
        *unknown(TIME, _NOT_SEEN, "ts"),
        *unknown(I32, _NOT_SEEN, "rank", "device"),
        *unknown(I64, _NOT_SEEN, "qp_num", "wr_id"),
        *unknown(TEXT, _NOT_SEEN, "opcode"),
        *unknown(I64, _NOT_SEEN, "length", "duration_ns"),
    ),
)

_EVENTS = ("coll_events", "p2p_events", "proxy_op_events", "proxy_step_events", "kernel_ch_events", "net_events")
_POOLS = tuple(f"{pool}_{what}" for what in ("live", "cap") for pool in ("coll", "proxy", "step", "kch", "net"))

PROFILER_COUNTERS = view(
    "nccl.profiler_counters",
    "Whether rows of operations are missing, from the source `collectives` in probing.sources; one row for each node.",
    (
        Column("node", NAME, "Name of the node.", sql="s.node"),
        Column("ts", TIME, "When the row was made, UTC.", sql="s.ts"),
        *unknown(I32, "one source sees all ranks of the node", "rank"),
        *unknown(I64, "only the plugin counts its events; comm.ops has the operations", *_EVENTS),
        Column("rows_written", I64, "Number of rows of operations since the daemon started.", sql="s.rows"),
        *unknown(I64, "probingd has no such pools", "pool_exhausted", "write_errors", "filtered", *_POOLS),
        *unknown(I64, "probingd has no such ring", "ring_chunks_recycled"),
        Column("ring_rows_overwritten", I64, "Number of rows that were lost since the daemon started.", sql="s.lost"),
    ),
    "probing.sources AS s WHERE s.source = 'collectives'",
)

VIEWS = (COLL_PERF, INFLIGHT_OPS, PROXY_OPS, NET_QP, PROFILER_COUNTERS)
