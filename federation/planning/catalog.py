"""Empty tables in DuckDB, with which a query is bound and typed before any node is asked."""

from __future__ import annotations

import difflib
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache

import duckdb
import pyarrow as pa

from probing.api.errors import NotFound
from probing.api.tables import TABLES
from probing.api.text import sql_name, sql_table
from probing.federation.sql.dialect import needs_helper, parse, table_name, tables_in
from probing.federation.sql.errors import from_duckdb
from probing.federation.sql.states import has_states, with_states

__all__ = (
    "Catalog",
    "Columns",
    "api_catalog",
    "api_schemas",
    "create_table",
    "open_database",
    "same_types",
)

Columns = tuple[tuple[str, str], ...]

_LOCKED = {
    "enable_external_access": "false",
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "python_enable_replacements": "false",
    "TimeZone": "UTC",
}


def open_database(
    *, memory_limit: str = "1GiB", threads: int = 2, spill: str = "", spill_limit: str = "0B"
) -> duckdb.DuckDBPyConnection:
    """Returns an empty database in memory with locked settings and without access to files or network.

    Beyond ``memory_limit`` the database spills up to ``spill_limit`` to the directory ``spill``, if one is given.
    """
    # TimeZone belongs to the icu extension, which not every build has; without it DuckDB has only UTC.
    config: dict[str, str | bool | int | float | list[str]] = {}
    config |= {k: v for k, v in _LOCKED.items() if k != "TimeZone"}
    config |= {"memory_limit": memory_limit, "threads": str(threads)}
    # Without this setting DuckDB uses .tmp in the directory in which the process was started.
    config |= {"temp_directory": spill}
    connection = duckdb.connect(":memory:", config=config)
    if connection.execute("SELECT 1 FROM duckdb_settings() WHERE name = 'TimeZone'").fetchone():
        connection.execute("SET TimeZone = 'UTC'")
    if spill:
        # By SET, because DuckDB 2.0 shows a limit that is set as configuration, but does not enforce it.
        connection.execute(f"SET max_temp_directory_size = '{spill_limit}'")
    connection.execute("SET lock_configuration = true")
    return connection


def create_table(connection: duckdb.DuckDBPyConnection, name: str, columns: Columns) -> None:
    """Creates the empty table ``name``, and its schema if it has one. ``columns``: its columns with their
    DuckDB types.
    """
    if "." in name:
        connection.execute(f"CREATE SCHEMA IF NOT EXISTS {sql_table(name.split('.')[0])}")
    body = ", ".join(f"{sql_name(column)} {kind}" for column, kind in columns)
    connection.execute(f"CREATE TABLE {sql_table(name)} ({body})")


def same_types(one: Columns, other: Columns) -> bool:
    return [kind for _, kind in one] == [kind for _, kind in other]


class Catalog:
    """Empty copies of tables, with which queries are bound. Hold ``lock`` during calls that belong together."""

    def __init__(self, schemas: Mapping[str, pa.Schema], uneven: Mapping[str, Collection[str]] | None = None) -> None:
        """Makes the catalog. ``schemas``: the tables as queries on a node see them, by ``schema.table``. ``uneven``:
        for each table, the columns that a node with the table may lack or have with another type.
        """
        self._schemas = schemas
        self.uneven = uneven or {}
        self._db = open_database(memory_limit="256MiB", threads=1)
        self.lock = threading.RLock()
        self.columns: dict[str, Columns] = {}

    @property
    def schemas(self) -> dict[str, list[str]]:
        """The names of the columns of each table."""
        return {name: schema.names for name, schema in self._schemas.items()}

    def close(self) -> None:
        self._db.close()

    def require(self, names: Iterable[str]) -> None:
        """Creates the tables ``names`` for ``describe`` and ``columns``. Raises NotFound for an unknown name."""
        for name in sorted(set(names) - set(self.columns)):
            self._add(self._schemas, name)

    def _add(self, schemas: Mapping[str, pa.Schema], name: str) -> None:
        if name not in schemas:
            near = difflib.get_close_matches(name, list(schemas), n=3, cutoff=0.5)
            meant = f"did you mean {' or '.join(near)}?" if near else ""
            if needs := needs_helper(name, meant):
                raise needs
            raise NotFound(f"there is no table {name}", hint=meant or "`probingctl tables` lists the tables")
        columns = self._describe_arrow(schemas[name].empty_table())
        create_table(self._db, name, columns)
        self.columns[name] = columns

    @contextmanager
    def beside(self, selects: Mapping[str, str]) -> Iterator[None]:
        """A context manager that creates an empty table with the columns of each SELECT in ``selects``, under its name,
        and drops the tables at the end.
        """
        made: list[str] = []
        try:
            for name, sql in selects.items():
                self.require(table_name(table) for table in tables_in(parse(sql)))
                self.columns[name] = self.describe(sql)
                create_table(self._db, name, self.columns[name])
                made.append(name)
            yield
        finally:
            for name in selects:
                self.columns.pop(name, None)
            for name in made:
                self._db.execute(f"DROP TABLE {sql_table(name)}")

    def describe(self, sql: str) -> Columns:
        """Returns names and DuckDB types of the columns of ``sql``. Raises QueryError if ``sql`` does not bind."""
        try:
            rows = self._db.execute(f"DESCRIBE {sql}").fetchall()
        except duckdb.Error as e:
            raise from_duckdb(e) from None
        return tuple((str(row[0]), str(row[1])) for row in rows)

    def describe_part(self, sql: str) -> Columns:
        """Returns the same as ``describe`` for the answer of a node to ``sql``, in which a state of an aggregate is a
        struct.
        """
        if not has_states(root := parse(sql)):
            return self.describe(sql)
        try:
            sent = self._db.sql(with_states(root)).to_arrow_table()
        except duckdb.Error as e:
            raise from_duckdb(e) from None
        return self._describe_arrow(sent)

    def _describe_arrow(self, table: pa.Table) -> Columns:
        self._db.register("arrow_schema", table)
        try:
            return self.describe("SELECT * FROM arrow_schema")
        finally:
            self._db.unregister("arrow_schema")

    def describe_over(self, name: str, columns: Columns, sql: str) -> Columns:
        """Returns the same as ``describe``, with a further table ``name`` of ``columns`` during the call."""
        create_table(self._db, name, columns)
        try:
            return self.describe(sql)
        finally:
            self._db.execute(f"DROP TABLE {sql_table(name)}")


@lru_cache(maxsize=1)
def api_catalog() -> Catalog:
    """Returns the catalog of probing.api's tables. It is made once for the process, because opening it takes longer
    than planning.
    """
    return Catalog(api_schemas())


def api_schemas() -> dict[str, pa.Schema]:
    """Returns the schemas of probing.api's tables as queries see them, by name."""
    return {name: table.logical for name, table in TABLES.items()}
