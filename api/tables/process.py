"""Processes that train, their identity and their exit."""

from __future__ import annotations

from probing.api.tables.comm import IDENTITY
from probing.api.tables.schema import I32, I64, NAME, TEXT, TIME, Column, Table, stored

__all__ = ("ENVS", "EVENTS", "KMSG", "LOGS", "MEMORY", "PROCESSES")

_PROCESS_COLUMNS = (
    *IDENTITY,
    Column("rank", I32, "Rank in the job; NULL unless the role is trainer."),
    Column("local_rank", I32, "Rank on the node; NULL unless the role is trainer."),
    Column("world_size", I32, "Ranks of the job; NULL unless the role is trainer."),
    Column("node_rank", I32, "Index of the node in the job; NULL if the launcher does not set it."),
    Column(
        "rank_source",
        NAME,
        "Where the rank is from: environment (RANK and WORLD_SIZE as the process has them), exec (as it had them at its"
        " start), communicator (the one that spans the job), scheduler (variables of Slurm or MPI), title, arguments,"
        " module (state of Python modules); NULL without a rank.",
    ),
    Column("train_tid", I32, "The thread that issues the collectives; NULL: the main thread, or none is known."),
    Column("ppid", I32, "Parent process."),
    Column("uid", I32, "User id of the process."),
    Column("owner", I64, "User id of the user whose job it is: of a rootless container, the user who runs it."),
    Column("role", NAME, "trainer, launcher, data_loader or other."),
    Column("state", NAME, "running, stopped (SIGSTOP), blocked (uninterruptible), zombie or exited."),
    Column("python", NAME, "CPython version, e.g. 3.11.7; NULL when the process runs none."),
    Column(
        "backends", TEXT, "Collective backends seen, comma separated, e.g. gloo,nccl; empty when none was seen yet."
    ),
    Column("command", TEXT, "Command line, cut and with values of secret-looking options left out."),
    Column("container", NAME, "Container id from the cgroup path; NULL outside containers."),
    Column("pod", NAME, "Kubernetes pod uid from the cgroup path; NULL outside pods."),
    Column(
        "job_source", NAME, "What the job's name was taken from: slurm, kubernetes, torchelastic, ray, master or pid."
    ),
)

PROCESSES = Table(
    "process.processes",
    "Training processes and their helpers: the newest row of each process, with its state as it is now (live).",
    _PROCESS_COLUMNS,
)

_EVENT_COLUMNS = (
    *IDENTITY,
    Column("rank", I32, "Rank in the job, for a trainer."),
    Column("event", NAME, "start, identified, exit or oom_kill."),
    Column("role", NAME, "trainer, launcher, data_loader or other."),
    Column("exit_code", I32, "Exit status of an exit; NULL when a signal ended it."),
    Column("signal", I32, "Signal that ended it; NULL when none did."),
    Column("detail", TEXT, "For identified: everything the daemon knows of the process, as JSON."),
)

EVENTS = Table(
    "process.events",
    "Starts, exits and kills of training processes.",
    _EVENT_COLUMNS,
    stored(_EVENT_COLUMNS),
)

ENVS = Table(
    "process.envs",
    "Environment variables of training processes, an allow-list only (live).",
    (
        *IDENTITY,
        Column("rank", I32, "Rank in the job, for a trainer."),
        Column("name", TEXT, "Name of the variable."),
        Column("value", TEXT, "Its value at the last look; of a variable that was removed, the value before."),
    ),
)

_LOG_COLUMNS = (
    *IDENTITY,
    Column("tid", I32, "Thread that wrote the line."),
    Column("rank", I32, "Rank in the job, for a trainer."),
    Column("stream", NAME, "stdout or stderr."),
    Column("kind", NAME, "Which of the patterns of logs.patterns it matches."),
    Column("line", TEXT, "The line, cut and redacted, with control characters escaped, as `\\x07`."),
    Column("suppressed", I64, "Lines of this kind before it that were left out, being too many."),
)

LOGS = Table(
    "process.logs",
    "Lines that trainers write to stdout and stderr and that match an allow-list; off unless logs.enabled is set.",
    _LOG_COLUMNS,
    stored(_LOG_COLUMNS),
    sort_by=("job", "rank", "ts"),
)

_MEMORY_COLUMNS = (
    *IDENTITY,
    Column("rank", I32, "Rank in the job, for a trainer."),
    Column("role", NAME, "trainer or data_loader."),
    Column("rss_bytes", I64, "Resident memory of the process (VmRSS); NULL when it could not be read."),
    Column("swap_bytes", I64, "Its memory that is swapped out (VmSwap); NULL when it could not be read."),
    Column("peak_rss_bytes", I64, "The most that was resident so far (VmHWM)."),
    Column("anon_bytes", I64, "Resident memory that no file backs: what it allocated (RssAnon)."),
    Column("shmem_bytes", I64, "Resident shared memory, that of its data loaders too (RssShmem)."),
)

MEMORY = Table(
    "process.memory",
    "Memory of trainers and data loaders, a row a process every host.memory_interval_s.",
    _MEMORY_COLUMNS,
    stored(_MEMORY_COLUMNS),
    sort_by=("job", "rank", "pid", "ts"),
)

_KMSG_COLUMNS = (
    *IDENTITY,
    Column("rank", I32, "Rank in the job of the process that is named, for a trainer."),
    Column("timestamp", TIME, "The same as ts, under Probing's name.", "ts"),
    Column("facility", NAME, "kern; another one for what programs wrote into the kernel's log."),
    Column("level", NAME, "emerg, alert, crit, err, warn, notice, info or debug."),
    Column("message", TEXT, "The line, cut, with control characters as escapes."),
    Column(
        "kind",
        NAME,
        "oom_kill, oom, xid, sxid, gpu, memory_error, machine_check, pcie_error, link_down, link_up, nic_error,"
        " disk_error, fs_error, file_server, hung_task, lockup, thermal, segfault, page_allocation, kernel_bug, other."
        " Lines that programs wrote are other.",
    ),
    Column("device", NAME, "What it is about: a PCI address, an interface, a disk, a server; NULL when it names none."),
    Column("code", I32, "Number of an XID, an SXid, a port, a CPU or a count of errors; NULL when there is none."),
    Column("process", TEXT, "Name of the process that the line names."),
    Column("suppressed", I64, "Lines of this kind before it that were left out, being too many."),
    Column("seq", I64, "Number of the record since the boot."),
    Column("boot", NAME, "Id of the boot: numbers begin anew with each."),
)

KMSG = Table(
    "process.kmsg",
    "The kernel's log, classified. Lines from before the start of the daemon are there where they are of a kind, not"
    " other. job, run, rank and start_ns are those of the process that the line names, if it is watched; ts is known to"
    " a second or so.",
    _KMSG_COLUMNS,
    stored(_KMSG_COLUMNS),
)
