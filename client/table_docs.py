"""Shows tables and columns as the nodes document them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from probing.api.errors import NotFound
from probing.api.text import sql_text
from probing.client.render.output import write_rows
from probing.client.render.table import Field
from probing.client.settings import Settings

if TYPE_CHECKING:
    from probing.client.cluster import Cluster

__all__ = ("write_docs",)

_TABLES = """
SELECT table_schema || '.' || table_name AS "table", any_value(live) AS live, any_value(description) AS description
FROM probing.table_docs GROUP BY table_schema, table_name ORDER BY table_schema, table_name
"""
_COLUMNS = """
SELECT column_name AS "column", any_value(type) AS type, any_value(description) AS description
FROM probing.column_docs WHERE table_schema || '.' || table_name = {name} GROUP BY column_name ORDER BY column_name
"""
_TABLE_FIELDS = (
    Field("TABLE", "table"),
    Field("LIVE", "live"),
    Field("HOLDS", "description", flex=True, wrap=True),
)
_COLUMN_FIELDS = (
    Field("COLUMN", "column"),
    Field("TYPE", "type"),
    Field("MEANS", "description", flex=True, wrap=True),
)


def write_docs(settings: Settings, cluster: Cluster, name: str | None) -> None:
    """Writes the list of tables, or the columns of table ``name``. Raises NotFound for an unknown table."""
    if name is None:
        write_rows(settings, cluster.query(_TABLES), _TABLE_FIELDS)
        return
    table = cluster.query(_COLUMNS.format(name=sql_text(name.lower())))
    if not table.num_rows:
        raise NotFound(f"there is no table {name}", hint="`probingctl tables` lists the tables")
    columns = [str(column) for column in table.column(0).to_pylist()]
    write_rows(settings, table.take(_by_definition(name.lower(), columns)), _COLUMN_FIELDS)


def _by_definition(name: str, columns: Sequence[str]) -> list[int]:
    """Returns the indices of the columns in the order of their definition, because a description may refer to the
    preceding column; unknown columns come last.
    """
    from probing.api.tables import TABLES

    known = {column.name: i for i, column in enumerate(TABLES[name].columns)} if name in TABLES else {}
    return sorted(range(len(columns)), key=lambda i: (known.get(columns[i], len(known)), i))
