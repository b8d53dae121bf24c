"""Tables of the node: memory, disks, pressure, file systems, and control groups of the processes that train.

Sources: /proc/meminfo, vmstat, diskstats, PID/io (proc(5), Documentation/admin-guide/iostats.rst), pressure stall
information (accounting/psi.rst), files of control groups (admin-guide/cgroup-v2.rst, cgroup-v1/memory.rst), statvfs(3).
"""

from __future__ import annotations

from probing.api.tables.schema import BOOL, F64, I32, I64, NAME, TEXT, TIME, Column, Table, stored

__all__ = ("DISK", "FILE_SYSTEMS", "MEMORY", "PRESSURE")

_NODE = Column("node", NAME, "Name of the node: configured, else its host name.")
_TS = Column("ts", TIME, "When the values were read, UTC; the end of the interval.")
_JOB = Column(
    "job", NAME, "The job whose processes are in the group; NULL for the node, and if several jobs share the group."
)
_RUN = Column("run", NAME, "The run of the job.")
_WALL = Column("wall_ns", I64, "Length of the interval, ns; NULL for the first reading.")
_GROUP = Column("cgroup", TEXT, "Path of the control group; NULL for the node.")

_MEMORY = (
    _NODE,
    _TS,
    Column(
        "scope",
        NAME,
        "node, or cgroup: the control group of a training process, or the group above it that has the least memory left"
        " below its limit.",
    ),
    _JOB,
    _RUN,
    _GROUP,
    Column("processes", I32, "Number of watched processes in the group; NULL for the node."),
    Column("total_bytes", I64, "Memory of the node, or the limit of a group, bytes; NULL for a group without a limit."),
    Column(
        "used_bytes",
        I64,
        "Memory in use, bytes: on the node, all memory that is not available; in a group, all memory that is charged to"
        " the group, including caches.",
    ),
    Column(
        "available_bytes",
        I64,
        "Memory that processes can still get without swapping, bytes; in a group, up to the limit of the group.",
    ),
    Column("free_bytes", I64, "Unused memory, bytes; NULL for a group."),
    Column("anon_bytes", I64, "Memory of processes that is not backed by files, bytes."),
    Column("cached_bytes", I64, "Cached pages of files, including shared memory, bytes."),
    Column("shmem_bytes", I64, "Shared memory and tmpfs, including /dev/shm, bytes."),
    Column("dirty_bytes", I64, "Pages that wait to be written, bytes."),
    Column("writeback_bytes", I64, "Pages that are being written, bytes."),
    Column("slab_bytes", I64, "Memory that the kernel uses for its own objects, bytes; NULL for groups of version 1."),
    Column("committed_bytes", I64, "Memory that processes have committed (Committed_AS), bytes; NULL for a group."),
    Column(
        "high_bytes",
        I64,
        "Memory use above which the kernel throttles the group, bytes (memory.high, version 2); NULL without such a"
        " limit.",
    ),
    Column(
        "swap_total_bytes", I64, "Swap of the node, or the limit of a group, bytes; NULL for a group without a limit."
    ),
    Column("swap_used_bytes", I64, "Swap in use, bytes."),
    _WALL,
    Column("swap_in_bytes", I64, "Bytes read from swap in the interval; NULL for a group."),
    Column("swap_out_bytes", I64, "Bytes written to swap in the interval; NULL for a group."),
    Column(
        "major_faults",
        I64,
        "Number of page faults of all processes in the interval that waited for a disk; NULL for a group.",
    ),
    Column("limit_hits", I64, "How often the group reached its limit in the interval; NULL for the node."),
    Column(
        "oom_kills",
        I64,
        "Number of processes that the kernel killed in the interval for lack of memory; NULL if the kernel has no such"
        " counter.",
    ),
)
MEMORY = Table(
    "host.memory",
    "Memory of the node and of the control groups of the processes that train, every host.node_interval_s.",
    _MEMORY,
    stored(_MEMORY),
    sort_by=("scope", "cgroup", "ts"),
)

_DISK = (
    _NODE,
    _TS,
    Column("scope", NAME, "device (a disk with its partitions) or process (a process that trains)."),
    Column("device", NAME, "Name of the disk, e.g. nvme0n1, dm-0; NULL for a process."),
    Column("job", NAME, "The job of the process; NULL for a disk."),
    _RUN,
    Column("pid", I32, "Process id as seen on the host; NULL for a disk."),
    Column("start_ns", I64, "Start of the process, ns since boot; NULL for a disk."),
    Column("rank", I32, "Rank in the job; only for a trainer."),
    Column("role", NAME, "trainer, data_loader or launcher; NULL for a disk."),
    _WALL,
    Column("reads", I64, "Number of reads that ended in the interval: requests to a disk, or read calls of a process."),
    Column(
        "writes", I64, "Number of writes that ended in the interval: requests to a disk, or write calls of a process."
    ),
    Column(
        "read_bytes", I64, "Bytes read from storage in the interval; for a process, network file systems are included."
    ),
    Column(
        "write_bytes", I64, "Bytes written in the interval; for a process, the bytes that it handed to the page cache."
    ),
    Column(
        "call_read_bytes",
        I64,
        "Bytes that read calls of a process returned in the interval, also from caches and pipes; NULL for a disk.",
    ),
    Column("call_write_bytes", I64, "Bytes that write calls of a process accepted in the interval; NULL for a disk."),
    Column("read_ns", I64, "Sum of the times of all reads, including waits in queues, ns; only for a disk."),
    Column("write_ns", I64, "Sum of the times of all writes, including waits in queues, ns; only for a disk."),
    Column("flushes", I64, "Number of flushes in the interval; only for a disk, since Linux 5.5."),
    Column("flush_ns", I64, "Sum of the times of all flushes, ns; only for a disk, since Linux 5.5."),
    Column(
        "read_latency_ns",
        F64,
        "Mean time of a read, ns; NULL if no read ended in the interval.",
        sql="CASE WHEN reads > 0 THEN read_ns / reads END",
    ),
    Column(
        "write_latency_ns",
        F64,
        "Mean time of a write, ns; NULL if no write ended in the interval.",
        sql="CASE WHEN writes > 0 THEN write_ns / writes END",
    ),
    Column("busy_ns", I64, "Time in the interval in which the disk was busy, ns."),
    Column(
        "util_pct",
        F64,
        "Part of the interval in which the disk was busy, %.",
        sql="100.0 * busy_ns / wall_ns",
    ),
    Column(
        "queue_ns", I64, "Sum of the times of all requests, ns; divided by wall_ns, it is the mean length of the queue."
    ),
    Column("in_flight", I64, "Number of requests to the disk that have not ended."),
    Column(
        "io_delay_ns",
        I64,
        "Time in the interval for which the main thread of the process waited for a disk, ns; NULL for a"
        " disk, and if the kernel does not account for delays (kernel.task_delayacct).",
    ),
)
DISK = Table(
    "host.disk",
    "Activity of disks, and reads and writes of the processes that train, every host.node_interval_s.",
    _DISK,
    stored(_DISK),
    sort_by=("scope", "device", "job", "rank", "ts"),
)

_PRESSURE = (
    _NODE,
    _TS,
    Column("scope", NAME, "node, or cgroup: the control group of a training process (cgroup version 2 only)."),
    _JOB,
    _RUN,
    _GROUP,
    Column("resource", NAME, "What tasks waited for: cpu, memory, io or irq."),
    *(
        Column(f"{kind}_avg{seconds}_pct", F64, f"Part of the last {seconds} s in which {who} waited, %.")
        for kind, who in (("some", "one task or more"), ("full", "all tasks that could have run"))
        for seconds in (10, 60, 300)
    ),
    _WALL,
    Column("some_ns", I64, "Time in the interval in which at least one task waited, ns."),
    Column("full_ns", I64, "Time in the interval in which all tasks that could have run waited, ns."),
    Column(
        "some_pct", F64, "Part of the interval in which at least one task waited, %.", sql="100.0 * some_ns / wall_ns"
    ),
    Column(
        "full_pct",
        F64,
        "Part of the interval in which all tasks that could have run waited, %.",
        sql="100.0 * full_ns / wall_ns",
    ),
)
PRESSURE = Table(
    "host.pressure",
    "How much time the node and the control groups of the processes that train lose to waits for CPU,"
    " memory and IO, from the kernel's pressure stall information (PSI), every host.node_interval_s. No rows if the"
    " kernel has no PSI.",
    _PRESSURE,
    stored(_PRESSURE),
    sort_by=("scope", "cgroup", "resource", "ts"),
)

_FILE_SYSTEMS = (
    _NODE,
    _TS,
    Column(
        "scope",
        NAME,
        "node, or process: a training process that has its own /dev/shm, as in a container.",
    ),
    Column("job", NAME, "The job of the process; NULL for the node."),
    _RUN,
    Column("pid", I32, "Process id of the first process that sees the file system; NULL for the node."),
    Column("start_ns", I64, "Start of that process in ns since boot; NULL for the node."),
    Column("rank", I32, "Rank of that process; only for a trainer."),
    Column("mount_point", TEXT, "Where the file system is mounted: on the node, or in the process's own root."),
    Column("fs_type", NAME, "Type, e.g. ext4, tmpfs, nfs4, lustre."),
    Column("source", TEXT, "Device or server that is mounted."),
    Column(
        "answers",
        BOOL,
        "False if the file system is served by another host that did not answer; the numbers of the row are then NULL.",
    ),
    Column("read_only", BOOL, "Whether the file system is read-only."),
    Column("size_bytes", I64, "Size of the file system, bytes."),
    Column("used_bytes", I64, "Bytes in use."),
    Column("available_bytes", I64, "Bytes that processes without privileges can still use."),
    Column(
        "used_pct",
        F64,
        "Used part of the space that processes may use, %, as df shows it.",
        sql="CASE WHEN used_bytes + available_bytes > 0 THEN 100.0 * used_bytes / (used_bytes + available_bytes) END",
    ),
    Column("inodes", I64, "Number of files that the file system can hold; 0 if the number is not limited."),
    Column("inodes_used", I64, "Number of files that the file system holds."),
)
FILE_SYSTEMS = Table(
    "host.file_systems",
    "How full file systems are, including shared memory of containers, every 30 s.",
    _FILE_SYSTEMS,
    stored(_FILE_SYSTEMS),
    sort_by=("mount_point", "ts"),
)
