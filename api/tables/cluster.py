"""Tables of the cluster: its nodes, its groups of workers, and the workers."""

from __future__ import annotations

from probing.api.tables.schema import I32, I64, NAME, TEXT, TIME, Column, Table

__all__ = ("GROUPS", "MEMBERS", "WORKERS")

_NODE = (
    Column("node", NAME, "Name of the node that shows the row."),
    Column("ts", TIME, "When the row was made, UTC."),
)

MEMBERS = Table(
    "cluster.members",
    "The nodes that this daemon knows, including itself (live).",
    (
        *_NODE,
        Column("member", TEXT, "Name of the node; empty for a seed that has not answered."),
        Column("address", TEXT, "Address at which the node is asked."),
        Column("state", NAME, "healthy, suspect, failed, recovering, or unknown for a seed that has not answered."),
        Column("version", TEXT, "Version of the node's daemon; NULL if not yet known."),
        Column("since", TIME, "When the state began, as seen by this daemon, UTC."),
        Column(
            "incarnation",
            I64,
            "Number that the node increases when it starts, when its record changes, and when it refutes a claim of"
            " another node about it.",
        ),
        Column("labels", TEXT, "Labels of the node, e.g. rack=r7,rail=2, ordered by key."),
        Column("engine", TEXT, "Version of DuckDB on the node; NULL if not yet known."),
        Column("heard_ns", I64, "Time since the node last answered this daemon, ns; NULL if it was not asked."),
        Column("rtt_ns", I64, "Time between the last ping and its answer, ns; NULL if no ping was answered."),
        Column(
            "clock_offset_ns",
            I64,
            "Clock of the node minus this node's clock, ns; the error is at most half of rtt_ns. NULL if not measured.",
        ),
        Column(
            "problem",
            TEXT,
            "Problem of the node, such as another node with the same name, or a wrong clock; NULL if there is none.",
        ),
        Column(
            "proof",
            NAME,
            "How the node's name is proven to this daemon: certificate, key, or heard (a key that has not"
            " answered yet); NULL if the node's version has no keys.",
        ),
    ),
)

GROUPS = Table(
    "cluster.groups",
    "The groups of workers that this node knows (live). Each node of a group keeps a record of the group; the newest"
    " record is valid.",
    (
        *_NODE,
        Column("group_name", TEXT, "Name of the group. The job that its ranks form has the same name."),
        Column("owner", TEXT, "User who signed the group's specification; its ranks run as this user."),
        Column(
            "phase",
            NAME,
            "stopped, ending (before a start, until the older processes have ended), running, finished, failed.",
        ),
        Column("since", TIME, "When the phase began, by the clock of the node that changed it, UTC."),
        Column("reason", TEXT, "Who or what began the phase."),
        Column(
            "generation",
            I64,
            "Number of the group's current start: each start of all ranks is a new generation. A launcher ignores"
            " records of older generations.",
        ),
        Column("version", I64, "Version of the specification."),
        Column("restarts", I64, "Number of restarts that the group's policy made since the owner's last order."),
        Column("workers", I64, "Number of workers in the specification."),
        Column("world_size", I64, "Number of ranks of the present generation."),
        Column("master", TEXT, "Worker that has rank 0."),
        Column("address", TEXT, "MASTER_ADDR:MASTER_PORT of the present generation; NULL before the first start."),
        Column("excluded", TEXT, "Nodes that are left out, separated by commas; NULL if there are none."),
        Column(
            "waits_for",
            TEXT,
            "What the start of the group waits for, as far as this node knows; NULL if no start waits.",
        ),
        Column("restart", NAME, "When all ranks are started again: never, on_failure, always."),
        Column(
            "on_hang", NAME, "What the group does after a finding of a hang: report, restart, restart_without_node."
        ),
        Column("command", TEXT, "Command of the ranks."),
    ),
)

WORKERS = Table(
    "cluster.workers",
    "The workers of launchers on this node, and their ranks (live). A worker in several groups has several rows.",
    (
        *_NODE,
        Column("worker", TEXT, "Name of the worker, NODE-N."),
        Column("user", TEXT, "User of the launcher, as the kernel reports it."),
        Column("uid", I64, "User id of the launcher."),
        Column("state", NAME, "State of the launcher: healthy, suspect, failed."),
        Column("launcher_pid", I32, "Process of the launcher."),
        Column("version", TEXT, "Version of the launcher."),
        Column("joined", TIME, "When the launcher connected, UTC."),
        Column("heard_ns", I64, "Time since the last report of the launcher, ns."),
        Column("group_name", TEXT, "Group; NULL for a worker that no group has used."),
        Column("generation", I64, "The group's generation to which the rank belongs."),
        Column("rank", I64, "Rank of the worker in the group; NULL if the worker has no rank."),
        Column("rank_state", NAME, "idle, waiting, starting, running, ending, ended, refused, fenced."),
        Column("since", TIME, "When the state of the rank began, by the launcher's clock, UTC."),
        Column("pid", I32, "Process of the rank."),
        Column("start_ns", I64, "When the process started, ns since boot."),
        Column(
            "exit_code",
            I32,
            "Exit status of the rank's process; if a signal ended the process, the negative number of the signal. NULL"
            " while the process runs, or if unknown.",
        ),
        Column("reason", TEXT, "Why the rank is in this state."),
        Column("log", TEXT, "Path of the log file with the output of the rank, on the node."),
    ),
)
