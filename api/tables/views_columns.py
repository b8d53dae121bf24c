"""Columns and joins that several views share."""

from __future__ import annotations

from probing.api.tables.comm import IDENTITY
from probing.api.tables.schema import I64, TEXT, Column, Table, Type

__all__ = ("MICRO", "ROLE", "chosen", "identity", "process_of", "step_of", "unknown")

MICRO = (
    Column("micro_step", I64, "Micro step. Always NULL: only the job knows how it accumulates gradients."),
    Column("micro_batches", I64, "Number of micro batches in a step. Always NULL: only the job knows this number."),
)
ROLE = Column(
    "role",
    TEXT,
    "Parallel role that a job declares to Probing; always empty, because jobs declare no role to probingd.",
    sql="''",
)

_CLOCK_JITTER_NS = 1_000


def identity(alias: str) -> tuple[Column, ...]:
    """Returns the columns of IDENTITY except start_ns, read from the table with the SQL alias ``alias``."""
    return tuple(
        Column(column.name, column.type, column.doc, sql=f"{alias}.{column.name}")
        for column in IDENTITY
        if column.name != "start_ns"
    )


def chosen(table: Table, alias: str, *names: str, **renamed: str) -> tuple[Column, ...]:
    """Returns columns of ``table`` (SQL alias ``alias``): the columns ``names``, and the columns that ``renamed``
    (NEW="old") gives new names."""
    docs = {column.name: column for column in table.columns}
    pairs = [*((name, name) for name in names), *renamed.items()]
    return tuple(Column(new, docs[old].type, docs[old].doc, sql=f"{alias}.{old}") for new, old in pairs)


def unknown(kind: Type, why: str, *names: str) -> tuple[Column, ...]:
    """Returns columns that are always NULL, all for the reason ``why``."""
    return tuple(Column(name, kind, f"NULL: {why}.") for name in names)


def process_of(alias: str) -> str:
    """Returns an SQL join that adds the process of each row of ``alias`` as ``p``, if the node knows the process."""
    return f"LEFT JOIN process.processes AS p ON {_same_process(alias, 'p')}"


def step_of(alias: str) -> str:
    """Returns an SQL join that adds, as ``s``, the last step that began before each row of ``alias``."""
    # A step begins with an operation, but the two rows may have slightly different times: each drain converts the
    # kernel's time to UTC with its own clock readings.
    began = f"epoch_ns({alias}.ts) + {_CLOCK_JITTER_NS} >= epoch_ns(s.ts)"
    return f"ASOF LEFT JOIN train.steps AS s ON {_same_process(alias, 's')} AND {began}"


def _same_process(one: str, other: str) -> str:
    return " AND ".join(f"{one}.{name} = {other}.{name}" for name in ("node", "pid", "start_ns"))
