"""Tables of training steps, which are computed from the operations and optimizers of the ranks, and of labels."""

from __future__ import annotations

from probing.api.tables.comm import IDENTITY
from probing.api.tables.schema import F64, I32, I64, NAME, TEXT, TIME, Column, Table, stored

__all__ = ("LABELS", "STEPS")

_COLUMNS = (
    *IDENTITY,
    Column("rank", I32, "Rank in the job."),
    Column(
        "step",
        I64,
        "Number of the step: the job's own number if a variable holds it; else the number of steps seen"
        " before, from 0, which differs from the job's own number by a constant.",
    ),
    Column("t_start", TIME, "When the step began (the same as ts), UTC.", sql="ts"),
    Column("t_end", TIME, "When the step ended, UTC.", sql="make_timestamp_ns(epoch_ns(ts) + duration_ns)"),
    Column("duration_ns", I64, "Time from the begin to the end of the step, ns."),
    Column(
        "comm_ns",
        I64,
        "Time in the step in which a collective operation ran, ns; NULL if the operations' times are unknown.",
    ),
    Column(
        "wait_ns",
        I64,
        "Part of comm_ns in which the rank waited for a rank of its own node to call, ns; it may have waited"
        " longer for a rank of another node (views.op_lag compares all). NULL if unknown, and if the"
        " communicator has no other rank on the node.",
    ),
    Column("ops", I32, "Number of collective operations in the step."),
    Column("source", NAME, "How steps were recognized: collective_period, optimizer_frame, variable or span."),
    Column("confidence", F64, "How certain the steps are, from 0 to 1."),
    Column("why", TEXT, "Data from which the period of steps was computed."),
)

STEPS = Table(
    "train.steps",
    "Training steps of each rank, one row for each step that has ended. No rows if no period is found.",
    _COLUMNS,
    stored(_COLUMNS),
    sort_by=("job", "rank", "ts"),
)

_LABEL_COLUMNS = (
    *IDENTITY,
    Column("rank", I32, "Rank in the job."),
    Column("key", NAME, "Name of the label, such as phase."),
    Column("value", TEXT, "Value of the label from now on; NULL: the label was removed."),
    Column(
        "source",
        NAME,
        "Where the label comes from: opentelemetry (the process context in the memory of the rank), datagram (the"
        " socket for labels) or annotate (probingctl).",
    ),
    Column("uid", I64, "Uid of the process that sent the datagram; NULL for the other sources."),
)

LABELS = Table(
    "train.labels",
    "Labels of ranks, which jobs and administrators set: a row for each change.",
    _LABEL_COLUMNS,
    stored(_LABEL_COLUMNS),
    sort_by=("job", "rank", "ts"),
)
