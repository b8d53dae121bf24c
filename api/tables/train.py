"""Tables of labels and of training steps. Steps are found from operations, optimizers, variables or reports of jobs."""

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
        "Number of the step: the job's own number if a watched variable holds it or the job reports it. Otherwise the"
        " number of earlier steps that were seen, which differs from the job's own number by a constant.",
    ),
    Column("t_start", TIME, "When the step began (the same as ts), UTC.", sql="ts"),
    Column("t_end", TIME, "When the step ended, UTC.", sql="make_timestamp_ns(epoch_ns(ts) + duration_ns)"),
    Column("duration_ns", I64, "Time from the start to the end of the step, ns."),
    Column(
        "comm_ns",
        I64,
        "Time in the step in which a collective operation ran, ns; NULL if the operations' times are unknown.",
    ),
    Column(
        "wait_ns",
        I64,
        "Part of comm_ns in which this rank waited until another rank on its node called the operation, ns. It may have"
        " waited longer for a rank on another node: views.op_lag compares all ranks. NULL if unknown, or if the"
        " communicator has no other rank on the node.",
    ),
    Column("ops", I32, "Number of collective operations in the step."),
    Column(
        "source",
        NAME,
        "How the step was recognized: collective_period (the rank's operations repeat), optimizer_frame, variable or"
        " span.",
    ),
    Column("confidence", F64, "How certain the step is, from 0 to 1."),
    Column("why", TEXT, "Data from which the step was computed."),
)

STEPS = Table(
    "train.steps",
    "Training steps of each rank, one row for each step that has ended. A rank whose steps cannot be recognized"
    " has no rows.",
    _COLUMNS,
    stored(_COLUMNS),
    sort_by=("job", "rank", "ts"),
)

_LABEL_COLUMNS = (
    *IDENTITY,
    Column("rank", I32, "Rank in the job."),
    Column("key", NAME, "Name of the label, such as phase."),
    Column("value", TEXT, "Value of the label from ts on; NULL if the label was removed."),
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
