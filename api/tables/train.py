"""Training steps, as concluded from the operations and optimizers of the ranks."""

from __future__ import annotations

from probing.api.tables.comm import IDENTITY
from probing.api.tables.schema import F64, I32, I64, NAME, TEXT, TIME, Column, Table, stored

__all__ = ("STEPS",)

_COLUMNS = (
    *IDENTITY,
    Column("rank", I32, "Rank in the job."),
    Column(
        "step",
        I64,
        "Number of the step. From a variable it is the job's own; else it counts the steps that were seen, from 0, and"
        " differs from the job's own by a constant.",
    ),
    Column("t_start", TIME, "When the step began (the same as ts), UTC.", "ts"),
    Column("t_end", TIME, "When it ended, UTC.", "make_timestamp_ns(epoch_ns(ts) + duration_ns)"),
    Column("duration_ns", I64, "From its begin to its end, ns."),
    Column("comm_ns", I64, "Time of it in which an operation ran, ns; NULL when the operations' times are not known."),
    Column(
        "wait_ns",
        I64,
        "Time of comm_ns in which the rank waited for another rank of its node to call, ns; it may have waited longer"
        " for a rank of another node (views.op_lag compares all). NULL when not known, and without another rank of the"
        " communicator on the node.",
    ),
    Column("ops", I32, "Collective operations in the step."),
    Column("source", NAME, "The evidence: collective_period, optimizer_frame, variable or span."),
    Column("confidence", F64, "How sure that is, from 0 to 1."),
    Column("why", TEXT, "What the period was concluded from."),
)

STEPS = Table(
    "train.steps",
    "Training steps of each rank, one row for each that has ended. Without a period there are no rows.",
    _COLUMNS,
    stored(_COLUMNS),
    sort_by=("job", "rank", "ts"),
)
