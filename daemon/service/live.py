"""Live tables that the service makes itself: the docs of all tables, the nodes that it knows, and the sources."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from probing.api.tables import TABLES
from probing.daemon.arrow import batch_of, ipc_bytes

__all__ = ("live_tables",)

Rows = list[dict[str, Any]]


def live_tables(
    node: str, now_ns: Callable[[], int], members: Callable[[], Rows], status: Callable[[], Mapping[str, Any]]
) -> dict[str, Callable[[], bytes]]:
    """Makers of Arrow IPC streams by table name. ``members`` gives rows of cluster.members, ``status`` the
    collector's status, whose ``sources`` become rows of probing.sources."""

    def maker(table: str, rows: Callable[[], Rows]) -> Callable[[], bytes]:
        def make() -> bytes:
            common = {"node": node, "ts": now_ns()}
            return ipc_bytes(batch_of(table, [{**row, **common} for row in rows()]))

        return make

    return {
        "probing.table_docs": maker("probing.table_docs", _table_docs),
        "probing.column_docs": maker("probing.column_docs", _column_docs),
        "probing.sources": maker("probing.sources", lambda: _sources(status())),
        "cluster.members": maker("cluster.members", members),
    }


def _table_docs() -> Rows:
    rows = []
    for table in TABLES.values():
        schema, _, name = table.name.partition(".")
        live = "yes" if table.live else "no"
        rows.append({"table_schema": schema, "table_name": name, "description": table.doc, "live": live})
    return rows


def _column_docs() -> Rows:
    rows = []
    for table in TABLES.values():
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
