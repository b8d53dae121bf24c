"""Columns and joins that several views have."""

from __future__ import annotations

from probing.api.tables.comm import IDENTITY
from probing.api.tables.schema import I64, TEXT, Column, Table, Type

__all__ = ("MICRO", "ROLE", "chosen", "identity", "process_of", "step_of", "unknown")

MICRO = (
    Column("micro_step", I64, "Micro step; NULL: only the job knows how it accumulates gradients."),
    Column("micro_batches", I64, "Micro batches of a step; NULL: only the job knows."),
)
ROLE = Column("role", TEXT, "Parallel role that a job declares to Probing; empty: no job declares one here.", "''")

_CLOCK_JITTER_NS = 1_000


def identity(alias: str) -> tuple[Column, ...]:
    """Who and when, of the table that ``alias`` stands for."""
    return tuple(
        Column(column.name, column.type, column.doc, f"{alias}.{column.name}")
        for column in IDENTITY
        if column.name != "start_ns"
    )


def chosen(table: Table, alias: str, *names: str, **renamed: str) -> tuple[Column, ...]:
    """Columns ``names`` of ``table``, which ``alias`` stands for, and those ``renamed`` as NEW="old"."""
    docs = {column.name: column for column in table.columns}
    pairs = [*((name, name) for name in names), *renamed.items()]
    return tuple(Column(new, docs[old].type, docs[old].doc, f"{alias}.{old}") for new, old in pairs)


def unknown(kind: Type, why: str, *names: str) -> tuple[Column, ...]:
    """Columns that are NULL for the same reason."""
    return tuple(Column(name, kind, f"NULL: {why}.") for name in names)


def process_of(alias: str) -> str:
    """A join with the process of each row, as ``p``, while the node knows it."""
    return f"LEFT JOIN process.processes AS p ON {_same_process(alias, 'p')}"


def step_of(alias: str) -> str:
    """A join with the last step that began before each row, as ``s``."""
    # A step begins with an operation, and each drain turns the kernel's time into UTC by a pair of clocks of its own.
    began = f"epoch_ns({alias}.ts) + {_CLOCK_JITTER_NS} >= epoch_ns(s.ts)"
    return f"ASOF LEFT JOIN train.steps AS s ON {_same_process(alias, 's')} AND {began}"


def _same_process(one: str, other: str) -> str:
    return " AND ".join(f"{one}.{name} = {other}.{name}" for name in ("node", "pid", "start_ns"))
