"""The network of a node: interfaces, TCP connections of processes, round trips to other hosts.

Counters of interfaces: proc(5) /proc/net/dev and Documentation/networking/statistics.rst of the kernel. Figures of
connections: struct tcp_info, include/uapi/linux/tcp.h.
"""

from __future__ import annotations

from probing.api.tables.comm import IDENTITY
from probing.api.tables.schema import BOOL, F64, I32, I64, NAME, TEXT, TIME, Column, Table, stored

__all__ = ("INTERFACES", "INTERFACE_COUNTERS", "INTERFACE_EVENTS", "PATHS", "SOCKETS", "TCP")

INTERFACE_COUNTERS = {
    "rx_bytes": "Bytes received.",
    "rx_packets": "Packets received.",
    "rx_errors": "Packets received with an error.",
    "rx_dropped": "Packets received and dropped: no memory, no room, or nobody who wants them.",
    "rx_fifo_errors": "Packets lost as the card's buffer ran over.",
    "rx_frame_errors": "Packets received with a broken frame.",
    "multicast": "Multicast packets received.",
    "tx_bytes": "Bytes sent.",
    "tx_packets": "Packets sent.",
    "tx_errors": "Packets that could not be sent.",
    "tx_dropped": "Packets dropped instead of sent.",
    "tx_carrier_errors": "Times that the carrier was lost while sending.",
}
# Counters whose rise is shown, too.
INTERFACE_EVENTS = (
    "rx_errors",
    "rx_dropped",
    "rx_fifo_errors",
    "rx_frame_errors",
    "tx_errors",
    "tx_dropped",
    "tx_carrier_errors",
    "carrier_changes",
)

_SINCE_BEFORE = "NULL without a row before of the same life, and where the counter went back."
_NETNS = Column("netns", I64, "Network namespace: the inode of /proc/PID/ns/net.")
_OWN = "NULL in other namespaces than the node's."

_INTERFACE_COLUMNS = (
    Column("node", NAME, "Name of the node."),
    Column("ts", TIME, "When it was read, UTC."),
    Column("interface", NAME, "Name of the interface, e.g. eth0."),
    _NETNS,
    Column("job", NAME, "The job in whose network namespace it is; NULL in that of the node."),
    Column("kind", NAME, f"physical, virtual or loopback. {_OWN}"),
    Column("operstate", NAME, f"up, down, dormant, lowerlayerdown, unknown, ... {_OWN}"),
    Column("speed_gbps", F64, f"Speed of the link in 1e9 bits/s; NULL where it is down or has none. {_OWN}"),
    Column("mtu", I32, f"Largest packet, bytes. {_OWN}"),
    Column(
        "addresses",
        TEXT,
        f"IP addresses, comma separated; NULL where the daemon has a network namespace of its own. {_OWN}",
    ),
    Column("interval_ns", I64, f"Time since the row before, which the rates are of, ns. {_SINCE_BEFORE}"),
    Column("rx_gbps", F64, f"Traffic received, in 1e9 bits/s. {_SINCE_BEFORE}"),
    Column("tx_gbps", F64, f"Traffic sent, in 1e9 bits/s. {_SINCE_BEFORE}"),
    Column("rx_packets_rate", F64, f"Packets received a second. {_SINCE_BEFORE}"),
    Column("tx_packets_rate", F64, f"Packets sent a second. {_SINCE_BEFORE}"),
    *(Column(name, I64, doc) for name, doc in INTERFACE_COUNTERS.items()),
    Column("carrier_changes", I64, f"Times that the link went up or down. {_OWN}"),
    *(
        Column(f"{name}_new", I64, f"By how much {name} rose since the row before. {_SINCE_BEFORE}")
        for name in INTERFACE_EVENTS
    ),
)

INTERFACES = Table(
    "net.interfaces",
    "Network interfaces of the node and of the jobs' network namespaces every net.interval_s; a virtual one or one of a"
    " job only while it has traffic. Counters are since the interface was made.",
    _INTERFACE_COLUMNS,
    stored(_INTERFACE_COLUMNS),
    sort_by=("interface", "ts"),
)

_FIGURES = (
    Column("interval_ns", I64, "Time since the reading before, which all figures of this interval are of, ns."),
    Column("sockets", I32, "Connections."),
    Column("connecting", I32, "Connections that are being made, and not answered yet."),
    Column("bytes_sent", I64, "Bytes sent in the interval, retransmitted ones included."),
    Column("bytes_received", I64, "Bytes received in the interval."),
    Column("segs_out", I64, "Segments sent in the interval."),
    Column("segs_in", I64, "Segments received in the interval."),
    Column("retrans", I64, "Segments sent again in the interval."),
    Column("bytes_retrans", I64, "Bytes sent again in the interval."),
    Column("ecn_marked", I64, "Segments that arrived marked as congested (ECN) in the interval."),
    Column("rtt_ns", I64, "Smoothed round trip, ns: the mean of the connections; NULL while none is known."),
    Column("rtt_max_ns", I64, "The longest smoothed round trip of a connection, ns."),
    Column("rtt_min_ns", I64, "The shortest round trip that a connection saw lately, ns."),
)

_TCP_COLUMNS = (
    *IDENTITY,
    Column("rank", I32, "Rank in the job, for a trainer."),
    Column("role", NAME, "trainer, launcher, data_loader or other."),
    _NETNS,
    Column("local_address", NAME, "Address of this end."),
    Column("peer_address", NAME, "Address of the other end."),
    Column("peer_local", BOOL, "Whether the other end is in the same network namespace: nothing goes over a wire."),
    Column(
        "peer_rank",
        I32,
        "Rank at the other end, where that is of the same run and in the same network namespace; views.connections has"
        " those of other nodes, too.",
    ),
    *_FIGURES,
    Column("timeouts", I32, "Connections that wait for an answer after a retransmission by time-out, now."),
    Column("longest_timeouts", I32, "The most time-outs in a row of a connection, now: 0 while all is answered."),
    Column("lost", I64, "Segments under way that are taken for lost, now."),
    Column("unacked", I64, "Segments sent and not acknowledged, now."),
    Column("unread_bytes", I64, "Bytes received that the process has not read, now."),
    Column("unsent_bytes", I64, "Bytes that the process wrote and that are not sent yet, now."),
    Column("cwnd_min", I32, "The smallest congestion window of a connection, segments."),
    Column("delivery_gbps", F64, "The highest rate at which a connection delivered, in 1e9 bits/s; NULL if unknown."),
    Column("busy_ns", I64, "Time in which connections had something to send, in the interval, ns; a sum over all."),
    Column("rwnd_limited_ns", I64, "Part of busy_ns in which the receiver's window was full: the peer is slow, ns."),
    Column("sndbuf_limited_ns", I64, "Part of busy_ns in which the sender's buffer was full, ns."),
    Column("silent_ns", I64, "Time since a connection last received data, ns: the least of all."),
)

TCP = Table(
    "net.tcp",
    "TCP connections of watched processes, a row for each process, pair of addresses and rank at the other end every"
    " net.interval_s while"
    " anything goes on, else once a minute. What a connection did in the interval in which it was closed is not seen."
    " Where the daemon lacks CAP_SYS_ADMIN to enter a container's network namespace, one row without addresses has the"
    " segments of the whole namespace, under one of its processes.",
    _TCP_COLUMNS,
    stored(_TCP_COLUMNS),
    sort_by=("job", "rank", "pid", "ts"),
)

_PATH_COLUMNS = (
    Column("node", NAME, "Name of the node."),
    Column("ts", TIME, "When it was read, UTC."),
    Column("job", NAME, "The job whose connections these are."),
    Column("run", NAME, "The incarnation of the job."),
    Column("local_address", NAME, "Address of this end."),
    Column("peer_address", NAME, "Address of the other host; net.interfaces of its node has the same address."),
    Column("processes", I32, "Processes of the job that are connected on this path."),
    *_FIGURES,
)

PATHS = Table(
    "net.paths",
    "Round trips and retransmits from this node to each other host, by the TCP connections of each job: the sum of its"
    " rows of net.tcp that leave the network namespace.",
    _PATH_COLUMNS,
    stored(_PATH_COLUMNS),
    sort_by=("job", "peer_address", "ts"),
)

SOCKETS = Table(
    "net.sockets",
    "TCP sockets of watched processes as of the last reading (live), every net.tcp_interval_s, and for ten minutes"
    " those that have closed: at most 4,096 of each. An error names its peer by an address; this is whose it is.",
    (
        *IDENTITY,
        Column("rank", I32, "Rank in the job, for a trainer."),
        Column("role", NAME, "trainer, launcher, data_loader or other."),
        _NETNS,
        Column("state", NAME, "open, listens or closed."),
        Column("local_address", NAME, "Address of this end."),
        Column("local_port", I32, "Port of this end."),
        Column("peer_address", NAME, "Address of the other end; NULL for a socket that listens."),
        Column("peer_port", I32, "Port of the other end; NULL for a socket that listens."),
        Column("seen", TIME, "When it was last seen open, UTC."),
    ),
)
