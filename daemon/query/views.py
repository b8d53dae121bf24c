"""Creates our tables as views in a worker's DuckDB, over the segments and log of a snapshot and over live rows."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import duckdb
import pyarrow as pa

from probing.api.errors import InternalError
from probing.api.tables import TABLES, Table
from probing.api.text import sql_text

__all__ = ("Views", "quoted_list")


class Views:
    """Creates views on ``connection`` before its configuration is locked. ``known``: all tables by name."""

    def __init__(self, connection: duckdb.DuckDBPyConnection, known: Mapping[str, Table] = TABLES) -> None:
        self._connection = connection
        self._known = known

    def stored(
        self, name: str, segments: Sequence[str], tail: pa.Table | None, columns: Collection[str] | None = None
    ) -> None:
        """Creates view ``name`` over Parquet files and rows of the log; a column that a file lacks is NULL.

        The view has the ``columns`` of these names, or all.
        """
        table = self._table(name)
        if table.live:
            raise InternalError(f"{name} is not a stored table")
        rows = table.physical.empty_table() if tail is None else tail
        if rows.schema != table.physical:
            raise InternalError(f"the log's rows of {name} have another schema")
        hidden = self._register(name, rows)
        sources = []
        if segments:
            # Given the columns, DuckDB opens no file before the query runs.
            sources.append(f"SELECT * FROM read_parquet({quoted_list(segments)}, schema = {self._columns(hidden)})")
        if rows.num_rows or not segments:
            sources.append(f'SELECT * FROM "{hidden}"')
        self._view(table, f"SELECT {table.select_of(columns)} FROM ({' UNION ALL '.join(sources)})")

    def live(self, name: str, rows: pa.Table) -> None:
        """Creates view ``name`` over rows in the table's logical schema, from another process."""
        table = self._table(name)
        if rows.schema != table.logical:
            raise InternalError(f"the rows of {name} have another schema")
        rows.validate(full=True)
        self._view(table, f'SELECT * FROM "{self._register(name, rows)}"')

    def _columns(self, hidden: str) -> str:
        """Returns the columns of a relation for read_parquet: matched by name, NULL where a file lacks one."""
        rows = self._connection.table(f'"{hidden}"')
        columns = zip(map(sql_text, rows.columns), map(str, rows.types), strict=True)
        fields = (f"{name}: {{name: {name}, type: {sql_text(kind)}, default_value: NULL}}" for name, kind in columns)
        return f"MAP {{{', '.join(fields)}}}"

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


def quoted_list(values: Sequence[str]) -> str:
    return f"[{', '.join(map(sql_text, values))}]"
