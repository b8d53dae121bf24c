"""Checks rows of a table that another process or node sent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from probing.api.errors import UsageError
from probing.api.tables import table_named

__all__ = ("checked_row",)

_MAX_NAME = 4096
# One finding with its stacks; the message that carries it has 1 MB at most.
_MAX_TEXT = 1 << 19


def checked_row(table: str, row: Any, without: frozenset[str]) -> dict[str, Any]:
    """Returns ``row`` if it is one of ``table`` with columns of the right types, times as int, and none of ``without``.

    Raises UsageError.
    """
    schema = table_named(table).physical
    if not isinstance(row, Mapping) or not row.keys() <= set(schema.names) - without:
        raise UsageError(f"a row has other fields than {table}")
    for name, value in row.items():
        if value is not None and not _fits(value, schema.field(name).type):
            raise UsageError(f"the field {name} of a row of {table} does not have its type")
    return dict(row)


def _fits(value: Any, kind: pa.DataType) -> bool:
    if pa.types.is_timestamp(kind):
        return type(value) is int and abs(value) < 1 << 63
    if pa.types.is_floating(kind):
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, str) and len(value) <= (_MAX_TEXT if pa.types.is_string(kind) else _MAX_NAME)
