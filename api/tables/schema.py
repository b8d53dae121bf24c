"""Classes that define tables and views: stored columns (physical), shown columns (logical), and the description of each
column.

Stored and shown columns differ: a row stores, for example, ``ts`` and time differences to ``ts``, and a shown column
can be an SQL expression over stored columns. The query engine makes its views from these expressions, and
``probing.column_docs`` lists the descriptions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = (
    "BOOL",
    "F64",
    "I32",
    "I64",
    "NAME",
    "TEXT",
    "TIME",
    "U8",
    "U16",
    "U32",
    "U64",
    "Column",
    "Row",
    "Stored",
    "Table",
    "Type",
    "View",
    "stored",
    "view",
)

Row = dict[str, Any]
"""A row of a table or an answer: values by column; columns may be missing."""


class Type(NamedTuple):
    """The type of a column. ``make`` takes the module pyarrow and returns the Arrow type, so that code that only checks
    SQL need not import pyarrow."""

    sql: str
    make: Callable[[Any], pa.DataType]

    @property
    def arrow(self) -> pa.DataType:
        """The Arrow type in which the column is stored."""
        import pyarrow

        return self.make(pyarrow)


BOOL = Type("BOOLEAN", lambda pa: pa.bool_())
I32 = Type("INTEGER", lambda pa: pa.int32())
I64 = Type("BIGINT", lambda pa: pa.int64())
U8 = Type("UTINYINT", lambda pa: pa.uint8())
U16 = Type("USMALLINT", lambda pa: pa.uint16())
U32 = Type("UINTEGER", lambda pa: pa.uint32())
U64 = Type("UBIGINT", lambda pa: pa.uint64())
F64 = Type("DOUBLE", lambda pa: pa.float64())
TEXT = Type("VARCHAR", lambda pa: pa.string())
# For columns with few distinct values: dictionary-encoded when stored, plain text when shown.
NAME = Type("VARCHAR", lambda pa: pa.dictionary(pa.int32(), pa.string()))
# Times are always UTC. They have no zone, so that DuckDB reads them as TIMESTAMP_NS.
TIME = Type("TIMESTAMP_NS", lambda pa: pa.timestamp("ns"))
_PLAIN_COLUMN = re.compile(r"([a-z_]\w*\.)?[a-z_]\w*")


class Column(NamedTuple):
    """A shown (logical) column. ``sql`` computes its value from stored columns. If ``sql`` is None, the column is
    stored under the same name.
    """

    name: str
    type: Type
    doc: str
    sql: str | None = None

    @property
    def plain_type(self) -> pa.DataType:
        """The Arrow type in which the column is shown."""
        return (TEXT if self.type == NAME else self.type).arrow


class Stored(NamedTuple):
    """A stored (physical) column."""

    name: str
    type: Type


@dataclass(frozen=True)
class Table:
    """A table. ``storage`` is empty for a live table, whose rows are made for each query and have only shown
    columns.
    """

    name: str
    doc: str
    columns: tuple[Column, ...]
    storage: tuple[Stored, ...] = ()
    sort_by: tuple[str, ...] = ("ts",)

    @property
    def live(self) -> bool:
        return not self.storage

    @cached_property
    def physical(self) -> pa.Schema:
        """The Arrow schema of stored rows; for a live table, which stores no rows, the schema of shown rows."""
        import pyarrow

        return pyarrow.schema([(c.name, c.type.arrow) for c in self.storage]) if self.storage else self.logical

    @cached_property
    def logical(self) -> pa.Schema:
        """The Arrow schema of shown rows."""
        import pyarrow

        return pyarrow.schema([(c.name, c.plain_type) for c in self.columns])

    @property
    def select_list(self) -> str:
        """The SQL list of expressions that compute a shown row from a stored row."""
        return self.select_of(None)

    def select_of(self, names: Collection[str] | None) -> str:
        """Returns ``select_list`` with only the columns in ``names`` (lower case), or with only the first column if
        ``names`` contains no column of the table. If ``names`` is None, all columns are in the list.
        """
        wanted = [c for c in self.columns if names is None or c.name.lower() in names] or self.columns[:1]
        return ", ".join(f'({c.sql}) AS "{c.name}"' if c.sql else f'"{c.name}"' for c in wanted)


class View(NamedTuple):
    """A named SELECT over tables and other views. In a query, the SELECT takes the place of the view's name.

    ``columns`` is empty for a view whose columns only a database can determine. ``local``: the result over all nodes is
    the union of the results on each node, so each node can compute its own part. ``single``: each LEFT JOIN in the view
    finds at most one row, so a join whose columns are not used can be left out. ``problem``: why the view cannot be
    used; such a view has no ``sql``.
    """

    name: str
    doc: str
    columns: tuple[Column, ...]
    sql: str
    local: bool = False
    single: bool = False
    problem: str = ""


def view(name: str, doc: str, columns: tuple[Column, ...], source: str = "", *, local: bool = True) -> View:
    """Returns a view of ``columns``. ``source``: the text after the word FROM; if it is empty, the view has no rows.

    The ``sql`` of a column is an expression over ``source``; if it is None, the column is NULL. Expressions other than
    a column's name are cast, so that each column has its declared type. Each LEFT JOIN of ``source`` must find at most
    one row.
    """
    items = ", ".join(f'{_typed(column)} AS "{column.name}"' for column in columns)
    rows = f"FROM {source}" if source else "WHERE false"
    return View(name, doc, columns, f"SELECT {items} {rows}", local=local and bool(source), single=True)


def _typed(column: Column) -> str:
    if column.sql is not None and _PLAIN_COLUMN.fullmatch(column.sql):
        return column.sql
    return f"CAST({column.sql or 'NULL'} AS {column.type.sql})"


def stored(columns: tuple[Column, ...], *extra: Stored, without: tuple[str, ...] = ()) -> tuple[Stored, ...]:
    """Returns the stored columns of a table: all ``columns`` that have no expression and are not in ``without``, and
    the columns ``extra``, which the expressions of shown columns read.
    """
    own = [Stored(c.name, c.type) for c in columns if c.sql is None and c.name not in without]
    return (*own, *extra)
