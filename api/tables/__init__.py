"""The tables: the one list that store, query, docs and clients are made from."""

from __future__ import annotations

from probing.api.tables import comm, cuda, probing, process, python, rdma, train
from probing.api.tables.schema import Column, Table

__all__ = ("TABLES", "Column", "Table", "table_named")

TABLES: dict[str, Table] = {
    table.name: table
    for table in (
        comm.OPS,
        comm.INFLIGHT,
        comm.COMMUNICATORS,
        comm.RAS,
        train.STEPS,
        cuda.SYNCS,
        cuda.MEMORY,
        cuda.LAUNCHES,
        process.PROCESSES,
        process.EVENTS,
        process.ENVS,
        process.LOGS,
        python.BACKTRACE,
        python.SAMPLES,
        python.STACKS,
        python.VARIABLES,
        python.TRAINING_METRICS,
        python.FLIGHT_RECORD,
        rdma.PORTS,
        probing.SOURCES,
        probing.LOSSES,
        probing.COST,
        probing.TABLE_DOCS,
        probing.COLUMN_DOCS,
        probing.VIEWS,
        probing.SETTINGS,
        probing.MEMBERS,
    )
}


def table_named(name: str) -> Table:
    """The table ``schema.name``. Raises KeyError."""
    return TABLES[name]
