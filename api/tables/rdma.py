"""Tables of ports and queue pairs of RDMA devices (InfiniBand and RoCE), from the kernel's counters and lists."""

from __future__ import annotations

from probing.api.rdma_counters import COUNTERS, HW_COUNTERS, PACKETS
from probing.api.tables.comm import IDENTITY
from probing.api.tables.schema import F64, I32, I64, NAME, TEXT, TIME, Column, Table, stored

__all__ = ("PORTS", "QPS")

_EVENTS = {**COUNTERS, **HW_COUNTERS}
_SINCE_BEFORE = "NULL without a previous row of the same port, and if the counter decreased."

_PORT_COLUMNS = (
    Column("node", NAME, "Name of the node."),
    Column("ts", TIME, "When the values were read, UTC."),
    Column("hca", NAME, "Name of the RDMA device, e.g. mlx5_0."),
    Column("port", I32, "Number of the device's port, from 1."),
    Column("link_layer", NAME, "InfiniBand or Ethernet (RoCE)."),
    Column("state", NAME, "Logical state: DOWN, INIT, ARMED, ACTIVE."),
    Column("phys_state", NAME, "Physical state: LinkUp, Polling, Disabled, LinkErrorRecovery, ..."),
    Column("rate_gbps", F64, "Rate that the link negotiated, in 1e9 bits/s."),
    Column("rate", TEXT, "Rate, width and kind of the link, in the kernel's words."),
    Column("netdev", NAME, "Network interface of the port; NULL if there is none."),
    Column("bus_id", NAME, "PCI address of the device, e.g. 0000:17:00.0; NULL for a device that is not on PCI."),
    Column("numa_node", I32, "NUMA node of the device; NULL if the machine has only one NUMA node, or does not say."),
    Column("interval_ns", I64, f"Time since the previous row, over which rates are computed, ns. {_SINCE_BEFORE}"),
    Column("sent_gbps", F64, f"Traffic sent, in 1e9 bits/s. {_SINCE_BEFORE}"),
    Column("received_gbps", F64, f"Traffic received, in 1e9 bits/s. {_SINCE_BEFORE}"),
    Column("snd_pkts_rate", F64, f"Number of packets sent a second. {_SINCE_BEFORE}"),
    Column("rcv_pkts_rate", F64, f"Number of packets received a second. {_SINCE_BEFORE}"),
    Column("port_xmit_data_bytes", I64, "Bytes sent since the driver was loaded, including headers."),
    Column("port_rcv_data_bytes", I64, "Bytes received since the driver was loaded, including headers."),
    *(Column(name, I64, doc) for name, doc in {**PACKETS, **_EVENTS}.items()),
    *(Column(f"{name}_new", I64, f"Increase of {name} since the previous row. {_SINCE_BEFORE}") for name in _EVENTS),
)

PORTS = Table(
    "rdma.ports",
    "Ports of this node's RDMA devices every net.interval_s: state, traffic, counters since the driver"
    " was loaded, and their increase since the previous row. A counter that a device does not have is"
    " NULL; counters of old devices have 8, 16 or 32 bits and stop at their largest value.",
    _PORT_COLUMNS,
    stored(_PORT_COLUMNS),
    sort_by=("hca", "port", "ts"),
)

QPS = Table(
    "rdma.qps",
    "Queue pairs that processes have on this node's RDMA devices, as of now (live); queue pairs of the"
    " kernel are left out.",
    (
        *IDENTITY,
        Column("rank", I32, "Rank in the job; only for a trainer."),
        Column("hca", NAME, "Name of the RDMA device, e.g. mlx5_0."),
        Column("port", I32, "Port of the device; NULL until the queue pair has a port."),
        Column("qpn", I64, "Number of the queue pair on its device."),
        Column(
            "peer_qpn", I64, "Number of the queue pair on the other end's device; NULL for connectionless queue pairs."
        ),
        Column(
            "peer_address",
            TEXT,
            "Address of the other end, if the RDMA connection manager made the queue pair; else NULL.",
        ),
        Column("type", NAME, "RC, UC, UD, XRC_INI, XRC_TGT, DRIVER, ..."),
        Column(
            "state",
            NAME,
            "RESET, INIT, RTR, RTS, SQD, SQE or ERR; ERR after a failure, or shortly before the queue pair is removed.",
        ),
        Column("sq_psn", I64, "Sequence number of the next packet to send; it does not change while nothing is sent."),
        Column("rq_psn", I64, "Sequence number of the next packet to receive."),
        Column("comm", TEXT, "Name of the process, if the process belongs to no job."),
    ),
)
