"""Tables of the probes that users write. They are known only at run time, are named ``user.NAME``, and have few types
of columns.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from probing.api.errors import FormatError
from probing.api.tables.comm import IDENTITY
from probing.api.tables.schema import I32, I64, NAME, U8, U16, U32, U64, Column, Table, Type, stored

__all__ = (
    "COLUMN_TYPES",
    "MAX_COLUMNS",
    "MAX_DOC",
    "SCHEMA",
    "USER_NAME",
    "user_table",
    "user_table_from",
    "user_table_to",
)

SCHEMA = "user"
USER_NAME = re.compile(r"[a-z][a-z0-9_]{0,40}")
"""What a probe, its table and its columns may be called."""
MAX_COLUMNS = 64
MAX_DOC = 400
COLUMN_TYPES: dict[str, Type] = {
    "u8": U8,
    "u16": U16,
    "u32": U32,
    "u64": U64,
    "i32": I32,
    "i64": I64,
    "text": NAME,
}
"""The types that a column may have, and how each is stored."""
_COMMON = (
    *IDENTITY,
    Column("tid", I32, "Thread that hit the probe."),
    Column("rank", I32, "Rank in the job; only for a trainer."),
)


def user_table(name: str, doc: str, columns: Iterable[tuple[str, str, str]]) -> Table:
    """Returns the table ``user.NAME``: the common columns, then ``columns`` (name, a key of COLUMN_TYPES, doc).

    Raises FormatError for an invalid name, type or size.
    """
    own = list(columns)
    if not USER_NAME.fullmatch(name):
        raise FormatError(
            f"{name[:80]!r} is not a valid name of a table", hint="use a-z, 0-9 and _, at most 41, a letter first"
        )
    if len(own) > MAX_COLUMNS or len(doc) > MAX_DOC:
        raise FormatError(f"user.{name} has more than {MAX_COLUMNS} columns or {MAX_DOC} characters of description")
    taken = {column.name for column in _COMMON}
    for column, kind, text in own:
        if not USER_NAME.fullmatch(column) or column in taken or kind not in COLUMN_TYPES or len(text) > MAX_DOC:
            raise FormatError(f"user.{name} cannot have a column {column[:80]!r} of type {kind[:20]!r}")
        taken.add(column)
    made = (*_COMMON, *(Column(column, COLUMN_TYPES[kind], text) for column, kind, text in own))
    return Table(f"{SCHEMA}.{name}", doc, made, stored(made), sort_by=("job", "rank", "ts"))


def user_table_to(table: Table) -> dict[str, Any]:
    """Returns as JSON a table that ``user_table`` made."""
    kinds = {kind: name for name, kind in COLUMN_TYPES.items()}
    columns = [[c.name, kinds[c.type], c.doc] for c in table.columns[len(_COMMON) :]]
    return {"name": table.name.partition(".")[2], "doc": table.doc, "columns": columns}


def user_table_from(value: Any) -> Table:
    """Returns a table from the JSON of ``user_table_to``. Raises FormatError for any other value."""
    try:
        if not isinstance(value, Mapping):
            raise TypeError("no object")
        columns = [(str(name), str(kind), str(doc)) for name, kind, doc in value["columns"]]
        return user_table(str(value["name"]), str(value["doc"]), columns)
    except (KeyError, TypeError, ValueError) as e:
        raise FormatError(f"a user's table is malformed: {type(e).__name__}: {e}") from e
