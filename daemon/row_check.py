"""Checks rows of a table that another process or node sent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from probing.api.errors import UsageError
from probing.api.tables import table_named
from probing.api.tables.schema import F64, TEXT, TIME, Row, Type

__all__ = ("checked_row",)

_MAX_NAME = 4096
# The maximum number of characters of a text, such as the stacks of a finding. The text must fit into the message that
# carries the finding, which has at most 1 MB.
_MAX_TEXT = 1 << 19


def checked_row(table: str, row: Any, without: frozenset[str]) -> Row:
    """Returns a copy of ``row`` after checking that it is a row of ``table``: its columns have the right types, times
    are int, and it has no column of ``without``.

    Raises UsageError if the check fails.
    """
    types = {column.name: column.type for column in table_named(table).storage if column.name not in without}
    if not isinstance(row, Mapping) or not row.keys() <= types.keys():
        raise UsageError(f"a row has a field that {table} lacks")
    for name, value in row.items():
        if value is not None and not _fits(value, types[name]):
            raise UsageError(f"the field {name} of a row of {table} has the wrong type")
    return dict(row)


def _fits(value: Any, kind: Type) -> bool:
    if kind == TIME:
        return type(value) is int and abs(value) < 1 << 63
    if kind == F64:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, str) and len(value) <= (_MAX_TEXT if kind == TEXT else _MAX_NAME)
