"""The node itself: memory, disks, pressure, file systems; control groups of the processes that train.

Sources: /proc/meminfo, vmstat, diskstats, PID/io (proc(5), Documentation/admin-guide/iostats.rst), pressure stall
information (accounting/psi.rst), files of control groups (admin-guide/cgroup-v2.rst, cgroup-v1/memory.rst), statvfs(3).
"""

from __future__ import annotations

from probing.api.tables.schema import BOOL, F64, I32, I64, NAME, TEXT, TIME, Column, Table, stored

__all__ = ("DISK", "FILE_SYSTEMS", "MEMORY", "PRESSURE")

_NODE = Column("node", NAME, "Name of the node: configured, else its host name.")
_TS = Column("ts", TIME, "When it was read, UTC; the end of the interval.")
_JOB = Column(
    "job", NAME, "The job whose processes are in the group; NULL for the node, and where several jobs share it."
)
_RUN = Column("run", NAME, "The incarnation of that job.")
_WALL = Column("wall_ns", I64, "Length of the interval, ns; NULL at the first look.")
_GROUP = Column("cgroup", TEXT, "Path of the control group; NULL for the node.")

_MEMORY = (
    _NODE,
    _TS,
    Column(
        "scope", NAME, "node, or cgroup: of the groups around a process that trains the one whose limit is closest."
    ),
    _JOB,
    _RUN,
    _GROUP,
    Column("processes", I32, "Watched processes in the group; NULL for the node."),
    Column("total_bytes", I64, "Memory of the node; of a group its limit, NULL without one."),
    Column(
        "used_bytes",
        I64,
        "In use: of the node what is not available, of a group all that it is charged for, caches too.",
    ),
    Column("available_bytes", I64, "What processes can get without swapping; of a group the rest up to its limit."),
    Column("free_bytes", I64, "Used for nothing at all; of the node only."),
    Column("anon_bytes", I64, "Memory of processes that no file backs."),
    Column("cached_bytes", I64, "Pages of files, shared memory too."),
    Column("shmem_bytes", I64, "Shared memory and tmpfs, /dev/shm too."),
    Column("dirty_bytes", I64, "Pages that wait to be written."),
    Column("writeback_bytes", I64, "Pages that are being written."),
    Column("slab_bytes", I64, "Memory of the kernel's own objects; NULL for groups of version 1."),
    Column("committed_bytes", I64, "Memory that processes were promised; of the node only."),
    Column("high_bytes", I64, "Above this a group of version 2 is slowed down (memory.high); NULL without."),
    Column("swap_total_bytes", I64, "Swap of the node; of a group its limit, NULL without one."),
    Column("swap_used_bytes", I64, "Swap in use."),
    _WALL,
    Column("swap_in_bytes", I64, "Read from swap in the interval; of the node only."),
    Column("swap_out_bytes", I64, "Written to swap in the interval; of the node only."),
    Column(
        "major_faults", I64, "Page faults of all processes in the interval that waited for a disk; of the node only."
    ),
    Column("limit_hits", I64, "Times in the interval that the group reached its limit; NULL for the node."),
    Column("oom_kills", I64, "Processes that the kernel killed in the interval for lack of memory. NULL: not counted."),
)
MEMORY = Table(
    "host.memory",
    "Memory of the node and of the control groups of the processes that train, each host.node_interval_s.",
    _MEMORY,
    stored(_MEMORY),
    sort_by=("scope", "cgroup", "ts"),
)

_DISK = (
    _NODE,
    _TS,
    Column("scope", NAME, "device: a disk, its partitions included; process: a process that trains."),
    Column("device", NAME, "Name of the disk, e.g. nvme0n1, dm-0; NULL for a process."),
    Column("job", NAME, "The job of the process; NULL for a disk."),
    _RUN,
    Column("pid", I32, "Process id as the host sees it; NULL for a disk."),
    Column("start_ns", I64, "Start of the process, ns since boot; NULL for a disk."),
    Column("rank", I32, "Rank in the job, for a trainer."),
    Column("role", NAME, "trainer, data_loader or launcher; NULL for a disk."),
    _WALL,
    Column("reads", I64, "Reads that ended in the interval: requests to a disk, read calls of a process."),
    Column("writes", I64, "Writes that ended in the interval: requests to a disk, write calls of a process."),
    Column(
        "read_bytes", I64, "Bytes read in the interval from storage, those of network file systems too for a process."
    ),
    Column(
        "write_bytes", I64, "Bytes written in the interval, or handed to the page cache by a process, to be written."
    ),
    Column(
        "call_read_bytes",
        I64,
        "Bytes that read calls of a process returned, from caches and pipes too; NULL for a disk.",
    ),
    Column("call_write_bytes", I64, "Bytes that write calls of a process took; NULL for a disk."),
    Column("read_ns", I64, "Time of all reads together, waits in queues included; of a disk only."),
    Column("write_ns", I64, "Time of all writes together, waits in queues included; of a disk only."),
    Column("flushes", I64, "Flushes in the interval; of a disk only, since Linux 5.5."),
    Column("flush_ns", I64, "Time of all flushes together; of a disk only, since Linux 5.5."),
    Column(
        "read_latency_ns", F64, "Mean time of a read; NULL without one.", "CASE WHEN reads > 0 THEN read_ns / reads END"
    ),
    Column(
        "write_latency_ns",
        F64,
        "Mean time of a write; NULL without one.",
        "CASE WHEN writes > 0 THEN write_ns / writes END",
    ),
    Column("busy_ns", I64, "Time in which the disk had something to do."),
    Column(
        "util_pct", F64, "Part of the interval in which the disk had something to do, %.", "100.0 * busy_ns / wall_ns"
    ),
    Column("queue_ns", I64, "Time of all requests together; divided by wall_ns, the mean length of the queue."),
    Column("in_flight", I64, "Requests to the disk that have not ended."),
    Column(
        "io_delay_ns",
        I64,
        "Time in the interval for which the main thread of the process waited for a disk; NULL unless the kernel"
        " accounts for delays (kernel.task_delayacct), and for a disk.",
    ),
)
DISK = Table(
    "host.disk",
    "What disks did, and what the processes that train read and wrote, each host.node_interval_s.",
    _DISK,
    stored(_DISK),
    sort_by=("scope", "device", "job", "rank", "ts"),
)

_PRESSURE = (
    _NODE,
    _TS,
    Column("scope", NAME, "node, or cgroup: the group of a process that trains (version 2 only)."),
    _JOB,
    _RUN,
    _GROUP,
    Column("resource", NAME, "cpu, memory, io or irq: what tasks had to wait for."),
    *(
        Column(f"{kind}_avg{seconds}_pct", F64, f"Part of the last {seconds} s in which {who} waited, %.")
        for kind, who in (("some", "one task or more"), ("full", "all tasks that could have run"))
        for seconds in (10, 60, 300)
    ),
    _WALL,
    Column("some_ns", I64, "Time in the interval in which one task or more waited."),
    Column("full_ns", I64, "Time in the interval in which all tasks waited that could have run."),
    Column("some_pct", F64, "The same, % of the interval.", "100.0 * some_ns / wall_ns"),
    Column("full_pct", F64, "The same, % of the interval.", "100.0 * full_ns / wall_ns"),
)
PRESSURE = Table(
    "host.pressure",
    "How much time is lost to waits for CPU, memory and IO, as the kernel counts it (PSI), of the node and of the"
    " control groups of the processes that train, each host.node_interval_s. No rows where the kernel does not count.",
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
        "node; or process: /dev/shm of a process that trains where it is not the node's, as in a container.",
    ),
    Column("job", NAME, "The job of the process; NULL for the node."),
    _RUN,
    Column("pid", I32, "The first of the processes that see it; NULL for the node."),
    Column("start_ns", I64, "Start of that process, ns since boot; NULL for the node."),
    Column("rank", I32, "Rank of that process, for a trainer."),
    Column("mount_point", TEXT, "Where it is mounted: on the node, or in the process's own root."),
    Column("fs_type", NAME, "Type, e.g. ext4, tmpfs, nfs4, lustre."),
    Column("source", TEXT, "What is mounted: a device or a server."),
    Column("answers", BOOL, "False: a file system that is served by others did not answer; its numbers are NULL."),
    Column("read_only", BOOL, "It cannot be written."),
    Column("size_bytes", I64, "Size of the file system."),
    Column("used_bytes", I64, "Bytes in use."),
    Column("available_bytes", I64, "What is left for processes without rights."),
    Column(
        "used_pct",
        F64,
        "Used part of what processes may use, %, as df shows it.",
        "CASE WHEN used_bytes + available_bytes > 0 THEN 100.0 * used_bytes / (used_bytes + available_bytes) END",
    ),
    Column("inodes", I64, "How many files it can hold; 0: there is no limit."),
    Column("inodes_used", I64, "How many files it holds."),
)
FILE_SYSTEMS = Table(
    "host.file_systems",
    "How full file systems are: those of the node and shared memory of containers, each 30 s.",
    _FILE_SYSTEMS,
    stored(_FILE_SYSTEMS),
    sort_by=("mount_point", "ts"),
)
