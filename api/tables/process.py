"""Processes that train, their identity and their exit."""

from __future__ import annotations

from probing.api.tables.comm import IDENTITY
from probing.api.tables.schema import I32, I64, NAME, TEXT, Column, Table, stored

__all__ = ("ENVS", "EVENTS", "LOGS", "PROCESSES")

_PROCESS_COLUMNS = (
    *IDENTITY,
    Column("rank", I32, "Rank in the job; NULL unless the role is trainer."),
    Column("local_rank", I32, "Rank on the node; NULL unless the role is trainer."),
    Column("world_size", I32, "Ranks of the job; NULL unless the role is trainer."),
    Column("node_rank", I32, "Index of the node in the job; NULL if the launcher does not set it."),
    Column("ppid", I32, "Parent process."),
    Column("uid", I32, "User id of the process."),
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
        Column("value", TEXT, "Its value at the start of the process."),
    ),
)

_LOG_COLUMNS = (
    *IDENTITY,
    Column("tid", I32, "Thread that wrote the line."),
    Column("rank", I32, "Rank in the job, for a trainer."),
    Column("stream", NAME, "stdout or stderr."),
    Column("kind", NAME, "Which of the patterns of logs.patterns it matches."),
    Column("line", TEXT, "The line, cut and redacted, with control characters as question marks."),
    Column("suppressed", I64, "Lines of this kind before it that were left out, being too many."),
)

LOGS = Table(
    "process.logs",
    "Lines that trainers write to stdout and stderr and that match an allow-list; off unless logs.enabled is set.",
    _LOG_COLUMNS,
    stored(_LOG_COLUMNS),
    sort_by=("job", "rank", "ts"),
)
