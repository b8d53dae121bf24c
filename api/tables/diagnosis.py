"""The table of findings: faults of jobs that the daemon's rules reported."""

from __future__ import annotations

from probing.api.tables.schema import F64, NAME, TEXT, TIME, Column, Table, stored

__all__ = ("FINDINGS",)

_COLUMNS = (
    Column(
        "node", NAME, "Name of the node that stored the row; each node with ranks of the job stores a copy of the row."
    ),
    Column("ts", TIME, "When the row was written because the finding opened, changed or closed, UTC."),
    Column("job", NAME, "The job that the finding is about."),
    Column("run", NAME, "The run of the job."),
    Column("finding_id", NAME, "Id of the finding, the same on all nodes and after a restart of the daemon."),
    Column("verdict", NAME, "Kind of the finding: a verdict of docs/verdicts.md, e.g. not_joined or slow_rank."),
    Column("severity", NAME, "error (the job stands still, died or computes wrongly), warning, or note."),
    Column("state", NAME, "open or closed."),
    Column("confidence", F64, "How certain the finding is, from 0 to 1."),
    Column("sentence", TEXT, "The finding in one sentence."),
    Column("ranks", TEXT, "Ranks to blame, e.g. 1,3."),
    Column("nodes", TEXT, "Nodes of the ranks to blame, each once, e.g. a,b."),
    Column("victims", TEXT, "Ranks that wait for the ranks to blame, e.g. 0,2."),
    Column(
        "about",
        TEXT,
        "What distinguishes this finding from other findings with the same verdict, e.g. the communicator and seq.",
    ),
    Column("culprits", TEXT, "Ranks to blame, as JSON: list of {rank, node, pid, why, activity}."),
    Column("evidence", TEXT, "Evidence, as JSON: list of sentences."),
    Column("missing", TEXT, "What could not be found out, as JSON: list of sentences."),
    Column("refuted_by", TEXT, "What would refute the finding, as JSON: list of sentences."),
    Column("next_steps", TEXT, "What to do next, as JSON: list of sentences."),
    Column(
        "advice",
        NAME,
        "Advice: restart, restart_without (without the nodes in advice_nodes), do_not_restart or wait; NULL if there"
        " is no advice.",
    ),
    Column("advice_nodes", TEXT, "Nodes to leave out if the advice is restart_without, e.g. a,b."),
    Column("advice_reason", TEXT, "Reason for the advice, as a clause."),
    Column("ends", TIME, "When a time-out of the communication library will end the wait, UTC; NULL if unknown."),
    Column("ends_by", TEXT, "Which time-out will end the wait, e.g. gloo's time-out (30 min, the default)."),
    Column(
        "stacks",
        TEXT,
        "Stacks of the ranks to blame and of one victim, as JSON in the form of `stacks -f json`, with the field role.",
    ),
    Column("since", TIME, "When the state that the finding describes began, UTC; NULL if unknown."),
    Column("opened", TIME, "When the finding was opened, UTC."),
    Column("closed", TIME, "When the finding was closed, UTC; NULL while it is open."),
    Column("found_by", NAME, "Name of the node whose daemon made the finding: the coordinator of the job."),
)

FINDINGS = Table(
    "diagnosis.findings",
    "Faults of jobs, found by rules that run all the time; the newest row of each (job, run, finding_id) is valid.",
    _COLUMNS,
    stored(_COLUMNS),
    sort_by=("job", "finding_id", "ts"),
)
