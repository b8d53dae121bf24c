"""Makes live tables in the service: docs, users' views, settings, configuration, members and sources."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from probing.api.errors import PeerError
from probing.api.tables import TABLES, Column, Table
from probing.api.tables.schema import TEXT
from probing.api.tables.views import VIEWS
from probing.daemon.arrow import batch_of, ipc_bytes

__all__ = ("live_tables",)

Rows = Iterable[Mapping[str, object]]


def live_tables(
    node: str,
    now_ns: Callable[[], int],
    members: Callable[[], Rows],
    status: Callable[[], Mapping[str, Any]],
    users: Callable[[], Mapping[str, Table]] = dict,
    *,
    views: Callable[[], Rows] = list,
    settings: Callable[[], Rows] = list,
    config: Callable[[], Rows] = list,
    groups: Callable[[], Rows] = list,
    workers: Callable[[], Rows] = list,
) -> dict[str, Callable[[], bytes]]:
    """Returns functions that make Arrow IPC streams, by table name.

    ``members`` returns rows of cluster.members. ``status`` returns the collector's status, whose ``sources`` become
    rows of probing.sources. ``users`` returns the tables of users' probes. ``views``, ``settings`` and ``config``
    return rows of the tables with these names in ``probing``; ``groups`` and ``workers`` return rows of cluster.groups
    and cluster.workers.
    """

    def known() -> Iterable[Table]:
        try:
            return [*TABLES.values(), *users().values()]
        except PeerError:
            # Without the collector, the tables of users' probes are unknown.
            return TABLES.values()

    def maker(table: str, rows: Callable[[], Rows]) -> Callable[[], bytes]:
        def make() -> bytes:
            common = {"node": node, "ts": now_ns()}
            return ipc_bytes(batch_of(table, [{**row, **common} for row in rows()]))

        return make

    return {
        "probing.table_docs": maker("probing.table_docs", lambda: _table_docs(known(), views())),
        "probing.column_docs": maker("probing.column_docs", lambda: _column_docs(known(), views())),
        "probing.sources": maker("probing.sources", lambda: _sources(status())),
        "probing.views": maker("probing.views", views),
        "probing.settings": maker("probing.settings", settings),
        "probing.config": maker("probing.config", config),
        "cluster.members": maker("cluster.members", members),
        "cluster.groups": maker("cluster.groups", groups),
        "cluster.workers": maker("cluster.workers", workers),
    }


def _table_docs(tables: Iterable[Table], own_rows: Rows) -> Rows:
    # Imported late, here and below: the SQL parser takes 10 MB, and few nodes are asked for these tables.
    from probing.federation.sql.views import base_tables, views_from

    own = views_from(own_rows)
    rows = [_table_doc(table.name, table.doc, "yes" if table.live else "no") for table in tables]
    for view in (*VIEWS.values(), *own.values()):
        doc = f"Cannot be used: {view.problem}" if view.problem else view.doc
        reads = [] if view.problem else base_tables(view)
        rows.append({**_table_doc(view.name, doc, "view"), "notes": ", ".join(reads) or None})
    return rows


def _table_doc(name: str, doc: str, live: str) -> dict[str, str | None]:
    schema, _, table = name.partition(".")
    return {
        "table_schema": schema,
        "table_name": table,
        "description": doc,
        "live": live,
        "global_name": f"global.{name}",
    }


def _column_docs(tables: Iterable[Table], own_rows: Rows) -> Rows:
    from probing.federation.sql.views import known_columns, views_from

    own = views_from(own_rows)
    named: list[tuple[str, Iterable[Column]]] = [(table.name, table.columns) for table in tables]
    named += [(view.name, view.columns) for view in VIEWS.values()]
    rows = [_column_doc(name, column) for name, columns in named for column in columns]
    names = known_columns({**VIEWS, **own})
    # The types of these columns are unknown before the view runs in a database.
    return rows + [
        {**_column_doc(view, Column(name, TEXT, "Column of a user's view; probing.views has its SQL.")), "type": None}
        for view in own
        for name in names(view)
    ]


def _column_doc(table: str, column: Column) -> dict[str, str | None]:
    schema, _, name = table.partition(".")
    return {
        "table_schema": schema,
        "table_name": name,
        "column_name": column.name,
        "type": str(column.plain_type),
        "description": column.doc,
    }


def _sources(status: Mapping[str, Any]) -> Rows:
    fields = ("state", "reason", "rows", "lost", "detail")
    return [
        {"source": source.get("name"), **{field: source.get(field) for field in fields}}
        for source in status.get("sources", ())
    ]
