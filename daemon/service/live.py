"""Live tables that the service makes itself: the docs of all tables, the nodes that it knows, and the sources."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from probing.api.errors import PeerError
from probing.api.tables import TABLES, Table
from probing.daemon.arrow import batch_of, ipc_bytes
from probing.daemon.service.rdma import read_ports

__all__ = ("live_tables",)

Rows = list[dict[str, Any]]


def live_tables(
    node: str,
    now_ns: Callable[[], int],
    members: Callable[[], Rows],
    status: Callable[[], Mapping[str, Any]],
    users: Callable[[], Mapping[str, Table]] = dict,
) -> dict[str, Callable[[], bytes]]:
    """Makers of Arrow IPC streams by table name. ``members`` gives rows of cluster.members, ``status`` the
    collector's status, whose ``sources`` become rows of probing.sources, ``users`` the tables of users' probes."""

    def known() -> Iterable[Table]:
        try:
            return [*TABLES.values(), *users().values()]
        except PeerError:
            # Without the collector nothing can be asked of these.
            return TABLES.values()

    def maker(table: str, rows: Callable[[], Rows]) -> Callable[[], bytes]:
        def make() -> bytes:
            common = {"node": node, "ts": now_ns()}
            return ipc_bytes(batch_of(table, [{**row, **common} for row in rows()]))

        return make

    return {
        "probing.table_docs": maker("probing.table_docs", lambda: _table_docs(known())),
        "probing.column_docs": maker("probing.column_docs", lambda: _column_docs(known())),
        "probing.sources": maker("probing.sources", lambda: _sources(status())),
        "cluster.members": maker("cluster.members", members),
        "rdma.ports": maker("rdma.ports", read_ports),
    }


def _table_docs(tables: Iterable[Table]) -> Rows:
    rows = []
    for table in tables:
        schema, _, name = table.name.partition(".")
        live = "yes" if table.live else "no"
        rows.append({"table_schema": schema, "table_name": name, "description": table.doc, "live": live})
    return rows


def _column_docs(tables: Iterable[Table]) -> Rows:
    rows = []
    for table in tables:
        schema, _, name = table.name.partition(".")
        for column in table.columns:
            kind = str(table.logical.field(column.name).type)
            rows.append(
                {
                    "table_schema": schema, "table_name": name, "column_name": column.name, "type": kind,
                    "description": column.doc,
                }
            )  # fmt: skip
    return rows


def _sources(status: Mapping[str, Any]) -> Rows:
    fields = ("state", "reason", "rows", "lost", "detail")
    return [
        {"source": source.get("name"), **{field: source.get(field) for field in fields}}
        for source in status.get("sources", ())
    ]
