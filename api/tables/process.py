"""Tables of the processes that train: identity, exit, environment, log lines and memory."""

from __future__ import annotations

from probing.api.tables.comm import IDENTITY
from probing.api.tables.schema import I32, I64, NAME, TEXT, TIME, Column, Table, stored

__all__ = ("ENVS", "EVENTS", "KMSG", "LOGS", "MEMORY", "PROCESSES")

_PROCESS_COLUMNS = (
    *IDENTITY,
    Column("rank", I32, "Rank in the job; NULL unless the role is trainer."),
    Column("local_rank", I32, "Rank on the node; NULL unless the role is trainer."),
    Column("world_size", I32, "Number of ranks of the job; NULL unless the role is trainer."),
    Column("node_rank", I32, "Index of the node in the job; NULL if the launcher does not set it."),
    Column(
        "rank_source",
        NAME,
        "Where the rank was found: environment (RANK and WORLD_SIZE of the process now), exec (these variables as they"
        " were when the process started), communicator (a communicator of all ranks of the job), scheduler (variables"
        " of Slurm or MPI), title, arguments, module (state of Python modules); NULL without a rank.",
    ),
    Column("train_tid", I32, "Thread that calls the collectives; NULL if it is the main thread or unknown."),
    Column("ppid", I32, "Parent process."),
    Column("uid", I32, "Uid of the process; NULL if the uid does not fit into 31 bits."),
    Column(
        "owner", I64, "Uid of the user who owns the job; for a rootless container, of the user who runs the container."
    ),
    Column("role", NAME, "trainer, launcher, data_loader or other."),
    Column("state", NAME, "running, stopped (SIGSTOP), blocked (uninterruptible), zombie or exited."),
    Column("python", NAME, "Version of CPython, e.g. 3.11.7; NULL if the process does not run CPython."),
    Column(
        "backends",
        TEXT,
        "Collective backends that were seen, comma separated, e.g. gloo,nccl; empty until one is seen.",
    ),
    Column("command", TEXT, "Command line, truncated; values of options that may be secret are removed."),
    Column("container", NAME, "Container id from the cgroup path; NULL outside of containers."),
    Column("pod", NAME, "Uid of the Kubernetes pod from the cgroup path; NULL outside of pods."),
    Column(
        "job_source", NAME, "Where the name of the job is from: slurm, kubernetes, torchelastic, ray, master or pid."
    ),
)

PROCESSES = Table(
    "process.processes",
    "Training processes and their helpers, such as data loaders and launchers: one row for each process, with its"
    " present state (live).",
    _PROCESS_COLUMNS,
)

_EVENT_COLUMNS = (
    *IDENTITY,
    Column("rank", I32, "Rank in the job; only for a trainer."),
    Column("event", NAME, "start, identified, exit or oom_kill."),
    Column("role", NAME, "trainer, launcher, data_loader or other."),
    Column("exit_code", I32, "Exit status of the process, for the event `exit`; NULL if a signal ended the process."),
    Column("signal", I32, "Signal that ended the process; NULL if none did."),
    Column("detail", TEXT, "For the event `identified`: all that the daemon knows about the process, as JSON."),
)

EVENTS = Table(
    "process.events",
    "Starts, exits and kills of training processes.",
    _EVENT_COLUMNS,
    stored(_EVENT_COLUMNS),
)

ENVS = Table(
    "process.envs",
    "Environment variables of training processes (live). Only variables on an allow-list are shown.",
    (
        *IDENTITY,
        Column("rank", I32, "Rank in the job; only for a trainer."),
        Column("name", TEXT, "Name of the variable."),
        Column(
            "value",
            TEXT,
            "Value of the variable when it was last read; for a variable that was removed, its last value.",
        ),
    ),
)

_LOG_COLUMNS = (
    *IDENTITY,
    Column("tid", I32, "Thread that wrote the line."),
    Column("rank", I32, "Rank in the job; only for a trainer."),
    Column("stream", NAME, "Stream of the line: stdout or stderr."),
    Column("kind", NAME, "Pattern of logs.patterns that the line matches."),
    Column("line", TEXT, "The line, truncated and redacted, with control characters escaped, e.g. `\\x07`."),
    Column("suppressed", I64, "Number of earlier lines of this kind that were left out because there were too many."),
)

LOGS = Table(
    "process.logs",
    "Lines of the trainers' stdout and stderr that match a pattern. The table has rows only if logs.enabled is set.",
    _LOG_COLUMNS,
    stored(_LOG_COLUMNS),
    sort_by=("job", "rank", "ts"),
)

_MEMORY_COLUMNS = (
    *IDENTITY,
    Column("rank", I32, "Rank in the job; only for a trainer."),
    Column("role", NAME, "trainer or data_loader."),
    Column("rss_bytes", I64, "Resident memory of the process, bytes (VmRSS); NULL if it could not be read."),
    Column(
        "swap_bytes", I64, "Memory of the process that is swapped out, bytes (VmSwap); NULL if it could not be read."
    ),
    Column("peak_rss_bytes", I64, "Peak resident memory of the process so far, bytes (VmHWM)."),
    Column(
        "anon_bytes", I64, "Resident memory that is not backed by files, bytes: what the process allocated (RssAnon)."
    ),
    Column("shmem_bytes", I64, "Resident shared memory, bytes (RssShmem), including memory shared with data loaders."),
)

MEMORY = Table(
    "process.memory",
    "Memory of trainers and data loaders, one row for each process every host.memory_interval_s.",
    _MEMORY_COLUMNS,
    stored(_MEMORY_COLUMNS),
    sort_by=("job", "rank", "pid", "ts"),
)

_KMSG_COLUMNS = (
    *IDENTITY,
    Column("rank", I32, "Rank of the process that the line names; only for a trainer."),
    Column("timestamp", TIME, "Time of the line, the same as ts, under Probing's name.", sql="ts"),
    Column(
        "facility",
        NAME,
        "kern for lines of the kernel; another facility for lines that programs wrote into the kernel's log.",
    ),
    Column("level", NAME, "emerg, alert, crit, err, warn, notice, info or debug."),
    Column("message", TEXT, "The line, truncated, with control characters escaped."),
    Column(
        "kind",
        NAME,
        "oom_kill, oom, xid, sxid, gpu, memory_error, machine_check, pcie_error, link_down, link_up,"
        " nic_error, disk_error, fs_error, file_server, hung_task, lockup, thermal, segfault,"
        " page_allocation, kernel_bug, other. Lines that programs wrote are always `other`.",
    ),
    Column(
        "device",
        NAME,
        "Device that the line names: a PCI address, an interface, a disk, a server; NULL if the line names none.",
    ),
    Column(
        "code",
        I32,
        "Number in the line: an Xid, an SXid, a port, a CPU or a count of errors; NULL if the line has no such number.",
    ),
    Column("process", TEXT, "Name of the process that the line names."),
    Column("suppressed", I64, "Number of earlier lines of this kind that were left out because there were too many."),
    Column("seq", I64, "Sequence number of the record since the boot."),
    Column("boot", NAME, "Id of the boot; seq restarts with each boot."),
)

KMSG = Table(
    "process.kmsg",
    "The kernel's log, classified. Lines that are older than the start of the daemon are included, except lines"
    " of the kind `other`. job, run, rank and start_ns describe the process that the line names, if it is"
    " watched. ts is exact to about a second.",
    _KMSG_COLUMNS,
    stored(_KMSG_COLUMNS),
)
