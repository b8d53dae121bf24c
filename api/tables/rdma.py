"""Ports of RDMA devices, InfiniBand and RoCE, as the kernel counts them.

Counters: Documentation/ABI/stable/sysfs-class-infiniband of the kernel; hw_counters: what the mlx5 driver adds.
"""

from __future__ import annotations

from probing.api.tables.schema import F64, I32, I64, NAME, TEXT, TIME, Column, Table

__all__ = ("COUNTERS", "HW_COUNTERS", "PORTS")

COUNTERS = {
    "port_xmit_packets": "Packets sent.",
    "port_rcv_packets": "Packets received.",
    "port_xmit_discards": "Packets that were dropped instead of sent: the port was down or congested.",
    "port_xmit_wait": "Ticks in which there was something to send and no credit for it: congestion.",
    "port_rcv_errors": "Packets received with an error.",
    "symbol_error": "Minor link errors: a cable or transceiver that goes bad.",
    "link_error_recovery": "Times that the link recovered from errors by itself.",
    "link_downed": "Times that the link could not recover and went down.",
    "local_link_integrity_errors": "Times that local errors passed their threshold.",
    "excessive_buffer_overrun_errors": "Times that the receive buffer ran over.",
}
HW_COUNTERS = {
    "np_cnp_sent": "Congestion notifications sent: packets came in marked.",
    "np_ecn_marked_roce_packets": "RoCE packets that came in marked as congested.",
    "rp_cnp_handled": "Congestion notifications received and obeyed.",
    "out_of_sequence": "Packets that came out of sequence: some were lost on the way.",
    "packet_seq_err": "Times that the peer said that packets were missing.",
    "local_ack_timeout_err": "Times that an acknowledgment did not come in time.",
    "rnr_nak_retry_err": "Times that the peer was not ready for too long.",
    "out_of_buffer": "Packets dropped because no receive buffer was posted.",
    "roce_adp_retrans": "Adaptive retransmissions of RoCE.",
}

PORTS = Table(
    "rdma.ports",
    "Ports of this node's RDMA devices, with their counters since the driver was loaded (live). A counter that a"
    " device does not have is NULL.",
    (
        Column("node", NAME, "Name of the node."),
        Column("ts", TIME, "When it was read, UTC."),
        Column("hca", NAME, "The device, e.g. mlx5_0."),
        Column("port", I32, "Port of the device, from 1."),
        Column("link_layer", NAME, "InfiniBand or Ethernet (RoCE)."),
        Column("state", NAME, "Logical state: DOWN, INIT, ARMED, ACTIVE."),
        Column("phys_state", NAME, "Physical state: LinkUp, Polling, Disabled, LinkErrorRecovery, ..."),
        Column("rate_gbps", F64, "Rate that the link came up with, in 1e9 bits/s."),
        Column("rate", TEXT, "The same with width and kind, as the kernel words it."),
        Column("port_xmit_data_bytes", I64, "Bytes sent, headers included."),
        Column("port_rcv_data_bytes", I64, "Bytes received, headers included."),
        *(Column(name, I64, doc) for name, doc in {**COUNTERS, **HW_COUNTERS}.items()),
    ),
)
