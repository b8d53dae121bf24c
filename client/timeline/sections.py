"""The sections of a timeline: tables, and the columns that are read from them."""

from __future__ import annotations

from probing.client.timeline.selection import Section

__all__ = ("GPU", "GPU_FIGURES", "IN_FLIGHT", "NET", "NET_FIGURES", "OPS", "RANKS", "SAMPLES", "STEPS", "WHO")


def _same(*names: str) -> dict[str, str]:
    return {name: name for name in names}


WHO = _same("node", "run", "pid", "start_ns", "rank")
"""The columns that name a process."""
_OPERATION = {
    **WHO,
    "comm": "left(comm, 256)",
    "comm_name": "left(comm_name, 256)",
    **_same("comm_size", "backend", "seq", "op", "bytes", "ts", "state"),
}
OPS = Section(
    "comm.ops",
    {**_OPERATION, **_same("t_start", "t_done_lo", "t_done_hi", "timing_source"), "error": "left(error, 256)"},
)
RANKS = Section("process.processes", WHO, "rank IS NOT NULL")
IN_FLIGHT = Section("comm.inflight", _OPERATION)
STEPS = Section("train.steps", {**WHO, **_same("step", "t_start", "t_end", "comm_ns", "wait_ns")})
SAMPLES = Section(
    "python.samples",
    {
        **WHO,
        **_same("ts", "tid"),
        "thread": "left(thread, 64)",
        "stack_id": "stack_id",
        "trains": "coalesce(trains, tid = pid)",
        "on_cpu": "on_cpu",
        "samples": '"count"',
        "duration_ns": "duration_ns",
    },
)
GPU_FIGURES = {
    "gpu_util_pct": "%",
    "sm_active_pct": "%",
    "tensor_active_pct": "%",
    "power_w": "W",
    "used_bytes": "bytes",
    "pcie_rx_bytes_per_s": "bytes/s",
    "pcie_tx_bytes_per_s": "bytes/s",
    "nvlink_rx_bytes_per_s": "bytes/s",
    "nvlink_tx_bytes_per_s": "bytes/s",
}
"""Columns of gpu.utilization that are counters, with their units."""
GPU = Section(
    "gpu.utilization",
    {
        **_same("node", "ts"),
        "device": "concat('GPU ', device_id, CASE WHEN mig IS NULL THEN '' ELSE concat(' MIG ', mig) END)",
        **_same(*GPU_FIGURES),
    },
    of_nodes=True,
)
NET_FIGURES = {"rx_gbps": "Gb/s", "tx_gbps": "Gb/s"}
"""Columns of net.interfaces that are counters, with their units."""
NET = Section(
    "net.interfaces",
    {**_same("node", "ts"), "device": "left(interface, 64)", **_same(*NET_FIGURES)},
    "(job IS NULL OR job = {job}) AND (kind IS NULL OR kind <> 'loopback')",
    of_nodes=True,
)
