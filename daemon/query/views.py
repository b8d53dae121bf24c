"""Our tables as views in a worker's DuckDB: the segments and the log's tail of a snapshot, and live rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import duckdb
import pyarrow as pa

from probing.api.errors import InternalError
from probing.api.tables import TABLES, Table

__all__ = ("Views", "quoted", "quoted_list")

MAX_KNOWN = 100_000
_COLUMNS = """
    SELECT file_name, string_agg(concat_ws(' ', name, type, converted_type, logical_type), ',' ORDER BY name)
    FROM parquet_schema({}) GROUP BY file_name
"""


class Views:
    """Makes views on ``connection`` before its configuration is locked.

    ``columns`` remembers from query to query which columns a segment has; segments never change. ``known`` are the
    tables that there are.
    """

    def __init__(
        self, connection: duckdb.DuckDBPyConnection, columns: dict[str, str], known: Mapping[str, Table] = TABLES
    ) -> None:
        self._connection = connection
        self._columns = columns
        self._known = known

    def stored(self, name: str, segments: Sequence[str], tail: pa.Table | None) -> None:
        """View ``name`` over Parquet files and decoded rows of the log; a column that a file lacks is NULL in it."""
        table = self._table(name)
        if table.live:
            raise InternalError(f"{name} is not a stored table")
        rows = table.physical.empty_table() if tail is None else tail
        if rows.schema != table.physical:
            raise InternalError(f"the log's rows of {name} have another schema")
        source = f'SELECT * FROM "{self._register(name, rows)}"'
        for group in self._same_columns(segments):
            source += f" UNION ALL BY NAME SELECT * FROM read_parquet({quoted_list(group)})"
        self._view(table, f"SELECT {table.select_list} FROM ({source})")

    def live(self, name: str, rows: pa.Table) -> None:
        """View ``name`` over rows in the table's logical schema, from another process."""
        table = self._table(name)
        if rows.schema != table.logical:
            raise InternalError(f"the rows of {name} have another schema")
        rows.validate(full=True)
        self._view(table, f'SELECT * FROM "{self._register(name, rows)}"')

    def _same_columns(self, segments: Sequence[str]) -> list[list[str]]:
        """``segments`` in groups with the same columns, so that DuckDB need not open all of them to know that."""
        if unseen := [path for path in segments if path not in self._columns]:
            if len(self._columns) + len(unseen) > MAX_KNOWN:
                self._columns.clear()
                unseen = list(segments)
            found = self._connection.execute(_COLUMNS.format(quoted_list(unseen))).fetchall()
            self._columns.update((str(path), str(columns)) for path, columns in found)
        groups: dict[str, list[str]] = {}
        for path in segments:
            groups.setdefault(self._columns[path], []).append(path)
        return list(groups.values())

    def _table(self, name: str) -> Table:
        try:
            return self._known[name]
        except KeyError:
            raise InternalError(f"there is no table {name[:80]}") from None

    def _register(self, name: str, rows: pa.Table) -> str:
        hidden = f"rows of {name}"
        self._connection.register(hidden, rows)
        return hidden

    def _view(self, table: Table, select: str) -> None:
        schema, _, name = table.name.partition(".")
        self._connection.execute(f'CREATE SCHEMA IF NOT EXISTS "{schema}"')
        self._connection.execute(f'CREATE VIEW "{schema}"."{name}" AS {select}')


def quoted(value: str) -> str:
    """A text as an SQL literal."""
    return "'" + value.replace("'", "''") + "'"


def quoted_list(values: Sequence[str]) -> str:
    return f"[{', '.join(map(quoted, values))}]"
