"""A worker's DuckDB, which is kept from one request to the next; the views of our tables, and the conversion of
DuckDB's errors.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

import duckdb
import pyarrow as pa

from probing.api.errors import InternalError, ProbingError, QueryError, QueryMemory, QueryTimeout
from probing.api.tables import TABLES, Table
from probing.api.text import sql_text

__all__ = (
    "Instance",
    "Views",
    "explain",
)


class Views:
    """Creates views on ``connection`` before its configuration is locked. ``known``: all tables, by name."""

    def __init__(self, connection: duckdb.DuckDBPyConnection, known: Mapping[str, Table] = TABLES) -> None:
        self._connection = connection
        self._known = known

    def stored(
        self, name: str, segments: Sequence[str], tail: pa.Table | None, columns: Collection[str] | None = None
    ) -> None:
        """Creates view ``name`` over Parquet files and rows of the log; a column that a file lacks is NULL.

        ``columns``: the names of the view's columns; None: all columns.
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
            # If the columns are given, DuckDB opens no file before the query runs.
            sources.append(f"SELECT * FROM read_parquet({_quoted_list(segments)}, schema = {self._columns(hidden)})")
        if rows.num_rows or not segments:
            sources.append(f'SELECT * FROM "{hidden}"')
        self._view(table, f"SELECT {table.select_of(columns)} FROM ({' UNION ALL '.join(sources)})")

    def live(self, name: str, rows: pa.Table) -> None:
        """Creates view ``name`` over ``rows``, which have the table's logical schema and come from another process."""
        table = self._table(name)
        if rows.schema != table.logical:
            raise InternalError(f"the rows of {name} have another schema")
        rows.validate(full=True)
        self._view(table, f'SELECT * FROM "{self._register(name, rows)}"')

    def _columns(self, hidden: str) -> str:
        """Returns the schema for read_parquet: columns are matched by name; a column that a file lacks is NULL."""
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


def _quoted_list(values: Sequence[str]) -> str:
    return f"[{', '.join(map(sql_text, values))}]"


class Instance:
    """The DuckDB of a worker, which gives each request a connection without tables. Serves one request at a time.

    A locked connection cannot change settings, and opens files only in folders of this or an earlier request.
    """

    def __init__(self, memory_bytes: int, threads: int) -> None:
        self._memory_bytes = memory_bytes
        self._threads = threads
        self._folders: frozenset[str] = frozenset()
        self._kept: duckdb.DuckDBPyConnection | None = None

    def prepare(self) -> duckdb.DuckDBPyConnection:
        """Returns the kept DuckDB; makes it if there is none. Call this before a request arrives, so that the request
        need not wait.
        """
        if self._kept is None:
            made = self.unlocked()
            self.lock(made, self._folders)
            self._kept = made
        return self._kept

    def connect(self, folders: Collection[str]) -> duckdb.DuckDBPyConnection:
        """Returns a locked connection to the kept DuckDB that may open files in ``folders``."""
        if not self._folders.issuperset(folders):
            self._folders |= frozenset(folders)
            self.discard()
        return self.prepare().cursor()

    def unlocked(self) -> duckdb.DuckDBPyConnection:
        """Returns the only connection to a new DuckDB, which loads no extension and sees no Python variable."""
        connection = duckdb.connect(
            ":memory:",
            config={
                "threads": str(self._threads),
                "async_threads": str(self._threads),
                "memory_limit": f"{self._memory_bytes // 1_000_000}MB",
                "temp_directory": "",
                "autoinstall_known_extensions": "false",
                "autoload_known_extensions": "false",
                "python_enable_replacements": "false",
                # The cache would keep its memory from one request to the next.
                "enable_external_file_cache": "false",
            },
        )
        connection.execute("SET GLOBAL TimeZone = 'UTC'")
        return connection

    def lock(self, connection: duckdb.DuckDBPyConnection, folders: Collection[str]) -> None:
        """Locks ``connection``: from now on it opens files only in ``folders``, and cannot change settings."""
        if folders:
            connection.execute(f"SET allowed_directories = {_quoted_list(sorted(folders))}")
        connection.execute("SET enable_external_access = false")
        connection.execute("SET lock_configuration = true")

    def release(self, connection: duckdb.DuckDBPyConnection, schemas: Collection[str]) -> None:
        """Drops ``schemas`` and closes ``connection``; after an error the next request gets a new DuckDB."""
        try:
            for schema in schemas:
                connection.execute(f'DROP SCHEMA IF EXISTS "{schema}" CASCADE')
        except duckdb.Error:
            self.discard()
        connection.close()

    def discard(self) -> None:
        """Closes the kept DuckDB, which an error may have left in any state."""
        kept, self._kept = self._kept, None
        if kept is not None:
            kept.close()


_KIND = re.compile(r"^\s*([A-Z][A-Za-z -]+?) Error: ")
_CANDIDATES = re.compile(r'(?:Candidate bindings|Did you mean):?\s*((?:"[^"]{1,100}"(?:, )?)+)')
_PATH = re.compile(r"(?:/[^\s/'\",:]+){2,}")
_NO_MEMORY = re.compile(r"malloc of size|\b[Aa]llocation failure|bad_alloc|bad allocation")
_ZONE_HINT = "ts and t_* are UTC without a zone: write ts > TIMESTAMP '2026-01-31 12:00:00'"


def explain(error: BaseException) -> ProbingError:
    """Returns the error to show for an error of DuckDB or Arrow in a running query."""
    text = str(error)
    match = _KIND.match(text)
    kind = match[1] if match else ""
    if isinstance(error, MemoryError) or kind == "Out of Memory" or _NO_MEMORY.search(text):
        return QueryMemory("the query needs more memory than a worker has")
    if kind in ("INTERRUPT", "Interrupt"):
        return QueryTimeout("the query was interrupted")
    if kind in ("IO", "Permission", "HTTP"):
        return QueryError("a file of the store could not be read", hint="`probingd verify` checks the state directory")
    message = _first_line(text[match.end() :] if match else text)
    return QueryError(message, hint=_hint(text, kind))


def _first_line(text: str) -> str:
    line = next((part for part in text.splitlines() if part.strip()), "the query failed")
    return _PATH.sub("a file", " ".join(line.split()))[:300]


def _hint(text: str, kind: str) -> str:
    if "WITH TIME ZONE" in text and "TIMESTAMP" in text:
        return _ZONE_HINT
    if match := _CANDIDATES.search(text):
        return f"did you mean {' or '.join(match[1].split(', ')[:3])}?"
    if "No function matches" in text:
        return "the arguments have other types than the function takes: add a cast, as in x::BIGINT"
    if kind == "Conversion":
        return "TRY_CAST gives NULL where a value cannot be converted"
    if kind in ("Binder", "Catalog"):
        return "SELECT * FROM probing.column_docs lists the columns"
    return ""
