"""Tables of the network of a node: interfaces, TCP connections of processes, round trips to other hosts.

Sources for counters of interfaces: proc(5) /proc/net/dev and Documentation/networking/statistics.rst of the kernel. For
values of connections: struct tcp_info, include/uapi/linux/tcp.h.
"""

from __future__ import annotations

from probing.api.tables.comm import IDENTITY
from probing.api.tables.schema import BOOL, F64, I32, I64, NAME, TEXT, TIME, Column, Table, stored

__all__ = ("INTERFACES", "INTERFACE_COUNTERS", "INTERFACE_EVENTS", "PATHS", "SOCKETS", "TCP")

INTERFACE_COUNTERS = {
    "rx_bytes": "Bytes received.",
    "rx_packets": "Packets received.",
    "rx_errors": "Packets received with an error.",
    "rx_dropped": "Packets received and dropped: no memory, a full queue, or no receiver.",
    "rx_fifo_errors": "Packets lost because the card's buffer ran over.",
    "rx_frame_errors": "Packets received with a broken frame.",
    "multicast": "Multicast packets received.",
    "tx_bytes": "Bytes sent.",
    "tx_packets": "Packets sent.",
    "tx_errors": "Packets that could not be sent.",
    "tx_dropped": "Packets dropped instead of sent.",
    "tx_carrier_errors": "Times that the carrier was lost while sending.",
}
# Counters for which the increase since the previous row is shown as well.
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

_SINCE_BEFORE = "NULL without a previous row of the same interface, and if the counter decreased."
_NETNS = Column("netns", I64, "Network namespace: the inode of /proc/PID/ns/net.")
_OWN = "NULL outside of the node's network namespace."

_INTERFACE_COLUMNS = (
    Column("node", NAME, "Name of the node."),
    Column("ts", TIME, "When the values were read, UTC."),
    Column("interface", NAME, "Name of the interface, e.g. eth0."),
    _NETNS,
    Column("job", NAME, "The job in whose network namespace the interface is; NULL for the namespace of the node."),
    Column("kind", NAME, f"physical, virtual or loopback. {_OWN}"),
    Column("operstate", NAME, f"up, down, dormant, lowerlayerdown, unknown, ... {_OWN}"),
    Column("speed_gbps", F64, f"Speed of the link in 1e9 bits/s; NULL if it is down or has no speed. {_OWN}"),
    Column("mtu", I32, f"Size of the largest packet, bytes. {_OWN}"),
    Column(
        "addresses",
        TEXT,
        f"IP addresses, comma separated; NULL if the daemon has a network namespace of its own. {_OWN}",
    ),
    Column("interval_ns", I64, f"Time since the previous row, over which rates are computed, ns. {_SINCE_BEFORE}"),
    Column("rx_gbps", F64, f"Traffic received, in 1e9 bits/s. {_SINCE_BEFORE}"),
    Column("tx_gbps", F64, f"Traffic sent, in 1e9 bits/s. {_SINCE_BEFORE}"),
    Column("rx_packets_rate", F64, f"Number of packets received a second. {_SINCE_BEFORE}"),
    Column("tx_packets_rate", F64, f"Number of packets sent a second. {_SINCE_BEFORE}"),
    *(Column(name, I64, doc) for name, doc in INTERFACE_COUNTERS.items()),
    Column("carrier_changes", I64, f"How often the link went up or down. {_OWN}"),
    *(
        Column(f"{name}_new", I64, f"Increase of {name} since the previous row. {_SINCE_BEFORE}")
        for name in INTERFACE_EVENTS
    ),
)

INTERFACES = Table(
    "net.interfaces",
    "Network interfaces of the node and of the jobs' network namespaces, one row each every net.interval_s. Virtual"
    " interfaces, and interfaces of jobs, have rows only while they have traffic. Counters start when the interface is"
    " created.",
    _INTERFACE_COLUMNS,
    stored(_INTERFACE_COLUMNS),
    sort_by=("interface", "ts"),
)

_FIGURES = (
    Column("interval_ns", I64, "Time since the previous reading, ns: the interval of all values of the row."),
    Column("sockets", I32, "Number of connections."),
    Column("connecting", I32, "Number of connections whose first packet (SYN) was not answered yet."),
    Column("bytes_sent", I64, "Bytes sent in the interval, including retransmitted bytes."),
    Column("bytes_received", I64, "Bytes received in the interval."),
    Column("segs_out", I64, "Segments sent in the interval."),
    Column("segs_in", I64, "Segments received in the interval."),
    Column("retrans", I64, "Segments retransmitted in the interval."),
    Column("bytes_retrans", I64, "Bytes retransmitted in the interval."),
    Column("ecn_marked", I64, "Segments received in the interval with the ECN mark of congestion."),
    Column(
        "rtt_ns", I64, "Mean of the smoothed round-trip times of the connections, ns; NULL if no round trip is known."
    ),
    Column("rtt_max_ns", I64, "Longest smoothed round trip of a connection, ns."),
    Column("rtt_min_ns", I64, "Shortest recent round trip of a connection, ns."),
)

_TCP_COLUMNS = (
    *IDENTITY,
    Column("rank", I32, "Rank in the job; only for a trainer."),
    Column("role", NAME, "trainer, launcher, data_loader or other."),
    _NETNS,
    Column("local_address", NAME, "Address of this end."),
    Column("peer_address", NAME, "Address of the other end."),
    Column(
        "peer_local",
        BOOL,
        "Whether the other end is in the same network namespace, so that nothing is sent over a network.",
    ),
    Column(
        "peer_rank",
        I32,
        "Rank at the other end, if that process is in the same run and the same network namespace; views.connections"
        " also has ranks on other nodes.",
    ),
    *_FIGURES,
    Column(
        "timeouts", I32, "Number of connections that now wait for an acknowledgment after a retransmission timeout."
    ),
    Column(
        "longest_timeouts",
        I32,
        "Maximum number of successive retransmission timeouts that a connection has now; 0 if there are none.",
    ),
    Column("lost", I64, "Number of segments that are presumed lost now."),
    Column("unacked", I64, "Number of segments that are sent but not acknowledged yet."),
    Column("unread_bytes", I64, "Bytes that were received but that the process has not read yet."),
    Column("unsent_bytes", I64, "Bytes that the process wrote but that are not sent yet."),
    Column("cwnd_min", I32, "Smallest congestion window of a connection, segments."),
    Column("delivery_gbps", F64, "Highest delivery rate of a connection, in 1e9 bits/s; NULL if unknown."),
    Column(
        "busy_ns",
        I64,
        "Time in the interval in which connections had something to send, ns, as the sum over the connections.",
    ),
    Column(
        "rwnd_limited_ns",
        I64,
        "Part of busy_ns in which the receiver's window was full because the other end was slow, ns.",
    ),
    Column("sndbuf_limited_ns", I64, "Part of busy_ns in which the sender's buffer was full, ns."),
    Column("silent_ns", I64, "Time since any of the connections last received data, ns."),
)

TCP = Table(
    "net.tcp",
    "TCP connections of watched processes: one row for each process, pair of addresses and rank at the"
    " other end, every net.interval_s while there is traffic, else once a minute. When a connection is closed, its"
    " traffic since the previous reading is not seen. If the daemon lacks CAP_SYS_ADMIN to enter a"
    " container's network namespace, one row without addresses counts the segments of the whole namespace, under"
    " the pid of one process in it.",
    _TCP_COLUMNS,
    stored(_TCP_COLUMNS),
    sort_by=("job", "rank", "pid", "ts"),
)

_PATH_COLUMNS = (
    Column("node", NAME, "Name of the node."),
    Column("ts", TIME, "When the values were read, UTC."),
    Column("job", NAME, "The job to which the connections belong."),
    Column("run", NAME, "The run of the job."),
    Column("local_address", NAME, "Address of this end."),
    Column(
        "peer_address",
        NAME,
        "Address of the other host, as the column addresses of net.interfaces shows it on that host.",
    ),
    Column("processes", I32, "Number of processes of the job that are connected between these addresses."),
    *_FIGURES,
)

PATHS = Table(
    "net.paths",
    "Round trips and retransmits from this node to each other host, computed for each job from the rows of net.tcp"
    " whose connections leave the network namespace.",
    _PATH_COLUMNS,
    stored(_PATH_COLUMNS),
    sort_by=("job", "peer_address", "ts"),
)

SOCKETS = Table(
    "net.sockets",
    "TCP sockets of watched processes as of the last reading (live); they are read every net.tcp_interval_s. Closed"
    " sockets stay for ten minutes. The table has at most 4,096 open and 4,096 closed sockets. It shows to which"
    " process an address in an error message belongs.",
    (
        *IDENTITY,
        Column("rank", I32, "Rank in the job; only for a trainer."),
        Column("role", NAME, "trainer, launcher, data_loader or other."),
        _NETNS,
        Column("state", NAME, "open, listens or closed."),
        Column("local_address", NAME, "Address of this end."),
        Column("local_port", I32, "Port of this end."),
        Column("peer_address", NAME, "Address of the other end; NULL for a listening socket."),
        Column("peer_port", I32, "Port of the other end; NULL for a listening socket."),
        Column("seen", TIME, "When the socket was last seen open, UTC."),
    ),
)
