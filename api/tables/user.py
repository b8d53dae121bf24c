"""Tables that are known only at run time: ``user.NAME`` of a user's probe, and ``python.NAME``, which jobs write."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict

from probing.api.errors import FormatError
from probing.api.tables.comm import IDENTITY
from probing.api.tables.schema import F64, I32, I64, NAME, TEXT, U8, U16, U32, U64, Column, Stored, Table, Type, stored

__all__ = (
    "COLUMN_TYPES",
    "JOB_SCHEMA",
    "JOB_TYPES",
    "MAX_COLUMNS",
    "MAX_DOC",
    "MAX_JOB_COLUMNS",
    "SCHEMA",
    "USER_NAME",
    "UserTable",
    "job_columns",
    "job_table",
    "user_table",
    "user_table_from",
    "user_table_to",
)

SCHEMA = "user"
USER_NAME = re.compile(r"[a-z][a-z0-9_]{0,40}")
"""The pattern of the names of probes, their tables and their columns."""
MAX_COLUMNS = 64
MAX_JOB_COLUMNS = 2 * MAX_COLUMNS
"""The maximum number of columns of a table that jobs write. A job writes at most MAX_COLUMNS of them; jobs of several
users share the table."""
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
            f"{name[:80]!r} is not a valid name of a table",
            hint="a name starts with a-z, continues with a-z, 0-9 or _, and has at most 41 characters",
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


JOB_SCHEMA = "python"
JOB_TYPES: dict[str, Type] = {"i64": I64, "f64": F64, "text": TEXT}
"""The types of values in columns of jobs' tables, from the narrowest to the widest."""
_JOB_COMMON = (
    *IDENTITY,
    Column("rank", I32, "Rank in the job; only for a trainer."),
    Column("timestamp", I64, "Time that the job gave the row, else when the row was written, us since 1970."),
)
_JOB_DOC = "Rows that jobs wrote to their own table, with probing.ExternalTable."


def job_table(name: str, columns: Mapping[str, Sequence[str]]) -> Table:
    """Returns the table ``python.NAME``: the common columns, then ``columns`` (name of a column: types of its values).

    Values of a column's first type are stored under the column's name, values of each further type under
    ``COLUMN__TYPE``, so that a new type leaves stored rows unchanged. The shown column has the widest type. Raises
    FormatError for an invalid name or type.
    """
    if not USER_NAME.fullmatch(name):
        raise FormatError(
            f"{name[:80]!r} is not a valid name of a table",
            hint="a name starts with a-z, continues with a-z, 0-9 or _, and has at most 41 characters",
        )
    if len(columns) > MAX_JOB_COLUMNS:
        raise FormatError(f"{JOB_SCHEMA}.{name} has more than {MAX_JOB_COLUMNS} columns")
    shown, storage = list(_JOB_COMMON), list(stored(_JOB_COMMON))
    for column, kinds in columns.items():
        right = USER_NAME.fullmatch(column) and "__" not in column and column not in {c.name for c in _JOB_COMMON}
        if not right or not kinds or not set(kinds) <= set(JOB_TYPES) or len(set(kinds)) < len(kinds):
            raise FormatError(f"{JOB_SCHEMA}.{name} cannot have a column {column[:80]!r}")
        widest = JOB_TYPES[max(kinds, key=list(JOB_TYPES).index)]
        places = [column, *(f"{column}__{kind}" for kind in kinds[1:])]
        storage += [Stored(place, JOB_TYPES[kind]) for place, kind in zip(places, kinds, strict=True)]
        parts = ", ".join(f'CAST("{place}" AS {widest.sql})' for place in places)
        shown.append(Column(column, widest, "", None if len(kinds) == 1 else f"coalesce({parts})"))
    return Table(f"{JOB_SCHEMA}.{name}", _JOB_DOC, tuple(shown), tuple(storage), sort_by=("job", "rank", "ts"))


def job_columns(table: Table) -> dict[str, list[str]]:
    """Returns the value of the argument ``columns`` with which ``job_table`` made ``table``."""
    kinds = {kind: name for name, kind in JOB_TYPES.items()}
    columns: dict[str, list[str]] = {}
    for place in table.storage[len(_JOB_COMMON) :]:
        columns.setdefault(place.name.partition("__")[0], []).append(kinds[place.type])
    return columns


class UserTable(TypedDict):
    """The JSON form of a table that ``user_table`` or ``job_table`` made. Each column is (name, type, description).

    For a table of jobs, ``name`` includes the schema, and the types of a column are joined by +.
    """

    name: str
    doc: str
    columns: list[tuple[str, str, str]]


def user_table_to(table: Table) -> UserTable:
    """Returns the JSON form of ``table``, which ``user_table`` or ``job_table`` made."""
    if table.name.startswith(f"{JOB_SCHEMA}."):
        of_job = [(name, "+".join(kinds), "") for name, kinds in job_columns(table).items()]
        return {"name": table.name, "doc": table.doc, "columns": of_job}
    kinds = {kind: name for name, kind in COLUMN_TYPES.items()}
    columns = [(c.name, kinds[c.type], c.doc) for c in table.columns[len(_COMMON) :]]
    return {"name": table.name.partition(".")[2], "doc": table.doc, "columns": columns}


def user_table_from(value: Any) -> Table:
    """Returns the table whose JSON form (``user_table_to``) is ``value``. Raises FormatError for any other value."""
    try:
        if not isinstance(value, Mapping):
            raise TypeError("not an object")
        columns = [(str(name), str(kind), str(doc)) for name, kind, doc in value["columns"]]
        schema, _, name = str(value["name"]).rpartition(".")
        if schema == JOB_SCHEMA:
            return job_table(name, {column: kinds.split("+") for column, kinds, _ in columns})
        return user_table(str(value["name"]), str(value["doc"]), columns)
    except (KeyError, TypeError, ValueError) as e:
        raise FormatError(f"a user's table is malformed: {type(e).__name__}: {e}") from e
