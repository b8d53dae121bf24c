"""Names and descriptions of the counters of RDMA ports. They have their own module, so that code that reads the
counters need not import the tables.

Counters: Documentation/ABI/stable/sysfs-class-infiniband of the kernel; hw_counters: counters that drivers add (mlx5:
NVIDIA, "Understanding mlx5 Linux Counters and Status Parameters").
"""

from __future__ import annotations

__all__ = ("COUNTERS", "HW_COUNTERS", "PACKETS")

PACKETS = {
    "port_xmit_packets": "Packets sent.",
    "port_rcv_packets": "Packets received.",
}
COUNTERS = {
    "port_xmit_discards": "Packets that were dropped instead of sent: the port was down or congested.",
    "port_xmit_wait": "Ticks in which there was something to send and no credit for it: congestion.",
    "port_rcv_errors": "Packets received with an error.",
    "port_rcv_remote_physical_errors": "Packets received that a switch had marked as bad: an error further away.",
    "symbol_error": "Minor link errors: a sign that a cable or transceiver goes bad.",
    "link_error_recovery": "Times that the link recovered from errors by itself.",
    "link_downed": "Times that the link could not recover and went down.",
    "local_link_integrity_errors": "Times that local errors passed their threshold.",
    "excessive_buffer_overrun_errors": "Times that the receive buffer ran over.",
}
HW_COUNTERS = {
    "np_cnp_sent": "Congestion notifications sent in answer to packets that arrived with a mark of congestion.",
    "np_ecn_marked_roce_packets": "RoCE packets received with the ECN mark of congestion.",
    "rp_cnp_handled": "Congestion notifications received and obeyed.",
    "rp_cnp_ignored": "Congestion notifications received and ignored.",
    "out_of_sequence": "Packets that came out of sequence: some were lost on the way.",
    "packet_seq_err": "Times that the peer said that packets were missing.",
    "implied_nak_seq_err": "Times that an acknowledgment showed that an answer was lost.",
    "local_ack_timeout_err": "Times that an acknowledgment did not come in time.",
    "rnr_nak_retry_err": "Times that the peer said that it had posted no buffer to receive.",
    "out_of_buffer": "Packets dropped because no receive buffer was posted.",
    "roce_adp_retrans": "Adaptive retransmissions of RoCE.",
    "rx_icrc_encapsulated": "RoCE packets received with a bad checksum.",
}
