"""Defines tables and views: stored columns (physical), shown columns (logical), and a description of every column.

Stored and shown columns differ: a row stores ``t_call`` and differences to it, and a logical column is an SQL
expression over stored columns. The query engine builds its views from these, and ``probing.column_docs`` lists the
descriptions.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import pyarrow as pa

__all__ = ("BOOL", "F64", "I32", "I64", "NAME", "TEXT", "TIME", "U64", "Column", "Table", "View", "stored", "view")

BOOL = pa.bool_()
I32 = pa.int32()
I64 = pa.int64()
U64 = pa.uint64()
F64 = pa.float64()
TEXT = pa.string()
# Few distinct values: dictionary-encoded where stored, plain text where shown.
NAME = pa.dictionary(pa.int32(), pa.string())
# UTC by definition; without a zone, so that DuckDB reads it as TIMESTAMP_NS.
TIME = pa.timestamp("ns")
_SQL_TYPES = {
    BOOL: "BOOLEAN",
    I32: "INTEGER",
    I64: "BIGINT",
    U64: "UBIGINT",
    F64: "DOUBLE",
    TEXT: "VARCHAR",
    NAME: "VARCHAR",
    TIME: "TIMESTAMP_NS",
}
_PLAIN_COLUMN = re.compile(r"([a-z_]\w*\.)?[a-z_]\w*")


class Column(NamedTuple):
    """A logical column. ``sql`` computes it from stored columns; None: it is stored under its name."""

    name: str
    type: pa.DataType
    doc: str
    sql: str | None = None

    @property
    def plain_type(self) -> pa.DataType:
        """The type as shown."""
        return self.type.value_type if isinstance(self.type, pa.DictionaryType) else self.type


@dataclass(frozen=True)
class Table:
    """``storage`` is empty for a live table, whose rows are made for each query, in the logical schema."""

    name: str
    doc: str
    columns: tuple[Column, ...]
    storage: tuple[pa.Field[Any], ...] = ()
    sort_by: tuple[str, ...] = ("ts",)

    @property
    def live(self) -> bool:
        return not self.storage

    @cached_property
    def physical(self) -> pa.Schema:
        """The Arrow schema of stored rows; for a live table, which stores none, the logical one."""
        return pa.schema(list(self.storage)) if self.storage else self.logical

    @cached_property
    def logical(self) -> pa.Schema:
        """The Arrow schema of rows as shown."""
        return pa.schema([pa.field(c.name, c.plain_type) for c in self.columns])

    @property
    def select_list(self) -> str:
        """The SQL that turns a stored row into a shown one."""
        return self.select_of(None)

    def select_of(self, names: Collection[str] | None) -> str:
        """Returns ``select_list`` of the columns in ``names`` (lower case), of all for None, and of one at least."""
        wanted = [c for c in self.columns if names is None or c.name.lower() in names] or self.columns[:1]
        return ", ".join(f'({c.sql}) AS "{c.name}"' if c.sql else f'"{c.name}"' for c in wanted)


class View(NamedTuple):
    """A named SELECT over tables and other views, which replaces the name in a query.

    ``columns`` may be empty if only a database can derive them. ``local``: its result over all nodes is the union of
    its results on each node, so that each node can compute its own. ``single``: each LEFT JOIN in it finds at most one
    row, so a join whose columns are not used can be left out. ``problem``: why it cannot be used, without ``sql``.
    """

    name: str
    doc: str
    columns: tuple[Column, ...]
    sql: str
    local: bool = False
    single: bool = False
    problem: str = ""


def view(name: str, doc: str, columns: tuple[Column, ...], source: str = "", *, local: bool = True) -> View:
    """A view of ``columns``; ``source`` is its FROM clause without the word. Without a source it has no rows.

    The ``sql`` of a column is an expression over ``source``; None: it is NULL. Expressions that name more than a
    column are cast, so that each column has its type. Each LEFT JOIN of ``source`` must find at most one row.
    """
    items = ", ".join(f'{_typed(column)} AS "{column.name}"' for column in columns)
    rows = f"FROM {source}" if source else "WHERE false"
    return View(name, doc, columns, f"SELECT {items} {rows}", local=local and bool(source), single=True)


def _typed(column: Column) -> str:
    if column.sql is not None and _PLAIN_COLUMN.fullmatch(column.sql):
        return column.sql
    return f"CAST({column.sql or 'NULL'} AS {_SQL_TYPES[column.type]})"


def stored(
    columns: tuple[Column, ...], *extra: pa.Field[Any], without: tuple[str, ...] = ()
) -> tuple[pa.Field[Any], ...]:
    """The storage of a table: its columns without an expression, and ``extra`` fields that only expressions read."""
    own = [pa.field(c.name, c.type) for c in columns if c.sql is None and c.name not in without]
    return (*own, *extra)
