"""What the daemon found wrong with jobs."""

from __future__ import annotations

from probing.api.tables.schema import F64, NAME, TEXT, TIME, Column, Table, stored

__all__ = ("FINDINGS",)

_COLUMNS = (
    Column("node", NAME, "Name of the node that stored the row: each node that holds ranks of the job."),
    Column("ts", TIME, "When the row was written: the finding opened, changed or closed, UTC."),
    Column("job", NAME, "The job that it is about."),
    Column("run", NAME, "The incarnation of the job."),
    Column("finding_id", NAME, "Names the finding: the same on all nodes, and after a restart of the daemon."),
    Column("verdict", NAME, "A word of the vocabulary, as not_joined or slow_rank."),
    Column("severity", NAME, "error (the job stands still, died or computes wrongly), warning, or note."),
    Column("state", NAME, "open or closed."),
    Column("confidence", F64, "How sure the finding is, 0 to 1."),
    Column("sentence", TEXT, "The finding in one sentence."),
    Column("ranks", TEXT, "Ranks to blame, as 1,3."),
    Column("nodes", TEXT, "Their nodes, each once, as a,b."),
    Column("victims", TEXT, "Ranks that wait for them, as 0,2."),
    Column("about", TEXT, "What distinguishes it from other findings of its verdict, as the communicator and seq."),
    Column("culprits", TEXT, "JSON: list of {rank, node, pid, why, activity}."),
    Column("evidence", TEXT, "JSON: list of sentences."),
    Column("missing", TEXT, "JSON: list of what is not known."),
    Column("refuted_by", TEXT, "JSON: list of what would refute it."),
    Column("next_steps", TEXT, "JSON: list of what to do."),
    Column("advice", NAME, "restart, restart_without (one of the nodes), do_not_restart or wait; NULL: not known."),
    Column("advice_nodes", TEXT, "With restart_without: the nodes to leave out, as a,b."),
    Column("advice_reason", TEXT, "Why, a clause."),
    Column("ends", TIME, "When a time-out of the communication library ends the wait, UTC; NULL: not known."),
    Column("ends_by", TEXT, "What ends it then, as gloo's time-out (30 min, the default)."),
    Column("stacks", TEXT, "JSON: list of stacks of culprits and of a victim, as `stacks -f json` with a role."),
    Column("since", TIME, "Since when it is so, UTC; NULL when not known."),
    Column("opened", TIME, "When it was first found, UTC."),
    Column("closed", TIME, "When it was no longer so, UTC; NULL while it is open."),
    Column("found_by", NAME, "Name of the node whose daemon found it: the coordinator of the job."),
)

FINDINGS = Table(
    "diagnosis.findings",
    "What is wrong with jobs, by the rules that run all the time; the newest row of (job, run, finding_id) holds.",
    _COLUMNS,
    stored(_COLUMNS),
    sort_by=("job", "finding_id", "ts"),
)
