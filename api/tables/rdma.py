"""Ports and queue pairs of RDMA devices, InfiniBand and RoCE, as the kernel counts and lists them."""

from __future__ import annotations

from probing.api.rdma_counters import COUNTERS, HW_COUNTERS, PACKETS
from probing.api.tables.comm import IDENTITY
from probing.api.tables.schema import F64, I32, I64, NAME, TEXT, TIME, Column, Table, stored

__all__ = ("PORTS", "QPS")

_EVENTS = {**COUNTERS, **HW_COUNTERS}
_SINCE_BEFORE = "NULL without a row before of the same life, and where the counter went back."

_PORT_COLUMNS = (
    Column("node", NAME, "Name of the node."),
    Column("ts", TIME, "When it was read, UTC."),
    Column("hca", NAME, "The device, e.g. mlx5_0."),
    Column("port", I32, "Port of the device, from 1."),
    Column("link_layer", NAME, "InfiniBand or Ethernet (RoCE)."),
    Column("state", NAME, "Logical state: DOWN, INIT, ARMED, ACTIVE."),
    Column("phys_state", NAME, "Physical state: LinkUp, Polling, Disabled, LinkErrorRecovery, ..."),
    Column("rate_gbps", F64, "Rate that the link came up with, in 1e9 bits/s."),
    Column("rate", TEXT, "The same with width and kind, as the kernel words it."),
    Column("netdev", NAME, "Network interface of the port; NULL where there is none."),
    Column("bus_id", NAME, "PCI address of the device, as 0000:17:00.0; NULL for one that is not on PCI."),
    Column("numa_node", I32, "NUMA node of the device; NULL where the machine has one only, or does not say."),
    Column("interval_ns", I64, f"Time since the row before, which the rates are of, ns. {_SINCE_BEFORE}"),
    Column("sent_gbps", F64, f"Traffic sent, in 1e9 bits/s. {_SINCE_BEFORE}"),
    Column("received_gbps", F64, f"Traffic received, in 1e9 bits/s. {_SINCE_BEFORE}"),
    Column("snd_pkts_rate", F64, f"Packets sent a second. {_SINCE_BEFORE}"),
    Column("rcv_pkts_rate", F64, f"Packets received a second. {_SINCE_BEFORE}"),
    Column("port_xmit_data_bytes", I64, "Bytes sent since the driver was loaded, headers included."),
    Column("port_rcv_data_bytes", I64, "Bytes received since the driver was loaded, headers included."),
    *(Column(name, I64, doc) for name, doc in {**PACKETS, **_EVENTS}.items()),
    *(Column(f"{name}_new", I64, f"By how much {name} rose since the row before. {_SINCE_BEFORE}") for name in _EVENTS),
)

PORTS = Table(
    "rdma.ports",
    "Ports of this node's RDMA devices every net.interval_s: state, traffic, and counters since the driver was loaded"
    " with their rise. A counter that a device does not have is NULL; old devices stop at the largest value of a"
    " counter of 8, 16 or 32 bits.",
    _PORT_COLUMNS,
    stored(_PORT_COLUMNS),
    sort_by=("hca", "port", "ts"),
)

QPS = Table(
    "rdma.qps",
    "Queue pairs that processes have on this node's RDMA devices, as they are now (live); those of the kernel itself"
    " are left out.",
    (
        *IDENTITY,
        Column("rank", I32, "Rank in the job, for a trainer."),
        Column("hca", NAME, "The device, e.g. mlx5_0."),
        Column("port", I32, "Port of the device; NULL before it is chosen."),
        Column("qpn", I64, "Number of the queue pair on its device."),
        Column("peer_qpn", I64, "Number of the queue pair at the peer's device; NULL where it is connectionless."),
        Column("peer_address", TEXT, "Address of the peer, of a pair made by the RDMA connection manager; else NULL."),
        Column("type", NAME, "RC, UC, UD, XRC_INI, XRC_TGT, DRIVER, ..."),
        Column("state", NAME, "RESET, INIT, RTR, RTS, SQD, SQE or ERR: ERR after a failure, or before its end."),
        Column("sq_psn", I64, "Sequence number of the next packet to send; stands still while nothing is sent."),
        Column("rq_psn", I64, "Sequence number of the next packet to receive."),
        Column("comm", TEXT, "Name of the process, where it is not one of a job."),
    ),
)
