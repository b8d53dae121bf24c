"""The list of all tables. The store, the query engine, the docs and the clients take the tables from this list."""

from __future__ import annotations

from probing.api.tables import (
    cluster,
    comm,
    cpu,
    cuda,
    diagnosis,
    gpu,
    host,
    net,
    probing,
    process,
    python,
    rdma,
    train,
)
from probing.api.tables.schema import Column, Table

__all__ = ("TABLES", "Column", "Table", "table_named")

TABLES: dict[str, Table] = {
    table.name: table
    for table in (
        comm.OPS,
        comm.INFLIGHT,
        comm.PROGRESS,
        comm.COMMUNICATORS,
        comm.RAS,
        train.LABELS,
        train.STEPS,
        cpu.UTILIZATION,
        cpu.TASKS,
        cuda.SYNCS,
        cuda.MEMORY,
        cuda.LAUNCHES,
        gpu.UTILIZATION,
        gpu.DEVICES,
        gpu.PROCESSES,
        gpu.EVENTS,
        gpu.LINKS,
        host.MEMORY,
        host.DISK,
        host.PRESSURE,
        host.FILE_SYSTEMS,
        process.PROCESSES,
        process.EVENTS,
        process.ENVS,
        process.LOGS,
        process.MEMORY,
        process.KMSG,
        python.BACKTRACE,
        python.SAMPLES,
        python.STACKS,
        python.VARIABLES,
        python.TORCH_MODULES,
        python.TRACE_EVENT,
        python.TRAINING_METRICS,
        python.FLIGHT_RECORD,
        net.INTERFACES,
        net.TCP,
        net.PATHS,
        net.SOCKETS,
        rdma.PORTS,
        rdma.QPS,
        diagnosis.FINDINGS,
        probing.SOURCES,
        probing.AUDIT,
        probing.LOSSES,
        probing.COST,
        probing.STORE,
        probing.TABLE_DOCS,
        probing.COLUMN_DOCS,
        probing.VIEWS,
        probing.SETTINGS,
        probing.CONFIG,
        probing.VERSIONS,
        cluster.MEMBERS,
        cluster.GROUPS,
        cluster.WORKERS,
    )
}


def table_named(name: str) -> Table:
    """Returns the table ``schema.name``. Raises KeyError if no table has this name."""
    return TABLES[name]
