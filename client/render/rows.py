"""Converts Arrow tables to rows of JSON's types, in the notation that docs/json.md describes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from probing.api.tables.schema import Row
from probing.api.text import escape_json, utc

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = (
    "Record",
    "Row",
    "columns_of",
    "dump_json",
    "dump_line",
    "dump_value",
    "names_of",
    "plain",
    "rows_of",
    "storable",
    "storable_schema",
)

Record = Mapping[str, Any]
"""A row that is only read: a Row, or a dict of the types in messages.py."""

# A column with at most this many timestamps is formatted in Python, because importing pyarrow.compute takes longer.
_FEW = 1000


def rows_of(table: pa.Table) -> list[Row]:
    """Returns a dict for each row; a repeated column name gets the suffix ``_1``, ``_2``..."""
    names = names_of(table.column_names)
    return [dict(zip(names, values, strict=True)) for values in zip(*columns_of(table), strict=True)]


def columns_of(table: pa.Table) -> list[list[Any]]:
    """Returns the values of each column, in JSON's types."""
    return [_column(column) for column in table.columns]


def names_of(names: Sequence[str]) -> list[str]:
    """Returns ``names`` made unique: a repeated name gets the suffix ``_1``, ``_2``..."""
    seen: dict[str, int] = {}
    unique: list[str] = []
    for name in names:
        number = seen.get(name, 0)
        candidate = f"{name}_{number}" if number else name
        while candidate in seen and number:
            number += 1
            candidate = f"{name}_{number}"
        seen[name] = number + 1
        seen.setdefault(candidate, 1)
        unique.append(candidate)
    return unique


def storable_schema(schema: pa.Schema) -> pa.Schema:
    """Returns ``schema`` in a form that Parquet can store: unique names, and text in place of types that Parquet lacks
    (intervals, unions, NULL).
    """
    import pyarrow as pa

    kinds = [pa.string() if _lacking(kind) else kind for kind in schema.types]
    return pa.schema(list(zip(names_of(schema.names), kinds, strict=True)))


def storable(table: pa.Table) -> pa.Table:
    """Returns ``table`` with the schema of ``storable_schema``; values of types that Parquet lacks become JSON."""
    for i, field in enumerate(storable_schema(table.schema)):
        if _lacking(table.schema.field(i).type):
            table = table.set_column(i, field, _as_text(table.column(i)))
    return table.rename_columns(names_of(table.column_names))


def _lacking(kind: pa.DataType) -> bool:
    import pyarrow as pa

    if pa.types.is_interval(kind) or pa.types.is_union(kind) or pa.types.is_null(kind):
        return True
    return any(_lacking(kind.field(i).type) for i in range(kind.num_fields))


def _column(column: pa.ChunkedArray[Any]) -> list[Any]:
    import pyarrow as pa

    kind = column.type
    if pa.types.is_timestamp(kind):
        # A time with a zone is stored as UTC; the zone says only how the time is shown.
        return _times(column if kind.tz is None else column.cast(pa.timestamp(kind.unit)))
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_string(kind):
        return column.to_pylist()
    coarse = _microseconds(kind)
    if coarse != kind:
        column = column.cast(coarse, safe=False)
    try:
        return [plain(value) for value in column.to_pylist()]
    except (OverflowError, ValueError):
        # Python's calendar ends with the year 9999. Values are converted one by one, so that only later times become
        # None.
        return [_scalar(value) for chunk in column.chunks for value in chunk]


def _as_text(column: pa.ChunkedArray[Any]) -> pa.ChunkedArray[Any]:
    import pyarrow as pa

    texts = [v if v is None or isinstance(v, str) else dump_value(v) for v in _column(column)]
    return pa.chunked_array([pa.array(texts, pa.string())])


def _times(column: pa.ChunkedArray[Any]) -> list[Any]:
    """Returns times as ISO 8601; None for times beyond the calendar. Arrow formats long columns, because Python's
    datetime has no nanoseconds.
    """
    import pyarrow as pa

    if column.type.unit == "ns" and len(column) <= _FEW:
        numbers = [number for chunk in column.chunks for number in chunk.view(pa.int64()).to_pylist()]
        return [None if number is None else utc(number) for number in numbers]
    try:
        texts = column.cast(pa.timestamp("ns")).cast(pa.string()).to_pylist()
    except pa.ArrowInvalid:
        texts = [_scalar(value) for chunk in column.chunks for value in chunk]
    return [None if text is None else text.replace(" ", "T").removesuffix("Z") + "Z" for text in texts]


def _scalar(value: pa.Scalar[Any]) -> Any:
    try:
        return plain(value.as_py())
    except (OverflowError, ValueError):
        return None


def _microseconds(kind: Any) -> Any:
    """Returns the type ``kind`` with times in microseconds, the resolution of Python's datetime."""
    import pyarrow as pa

    if pa.types.is_timestamp(kind):
        return pa.timestamp("us")
    if pa.types.is_time64(kind):
        return pa.time64("us")
    if pa.types.is_duration(kind):
        return pa.duration("us")
    if pa.types.is_map(kind):
        return pa.map_(_microseconds(kind.key_type), _microseconds(kind.item_type))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(_microseconds(kind.value_type), kind.list_size)
    if pa.types.is_large_list(kind):
        return pa.large_list(_microseconds(kind.value_type))
    if pa.types.is_list(kind):
        return pa.list_(_microseconds(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(f.name, _microseconds(f.type)) for f in kind])
    return kind


def plain(value: Any) -> Any:
    """Returns ``value`` in JSON's types: ISO 8601 times, ``P…`` intervals, numbers for decimals, bytes in hex."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, datetime):
        return value.isoformat() + ("Z" if value.tzinfo is None else "")
    if isinstance(value, (date, time)):
        return value.isoformat()
    if isinstance(value, timedelta):
        return _interval(0, 0, round(value / timedelta(microseconds=1)) * 1000)
    if isinstance(value, (bytes, bytearray)):
        return bytes(value).hex()
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if all(hasattr(value, part) for part in ("months", "days", "nanoseconds")):
        return _interval(value.months, value.days, value.nanoseconds)
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return str(value)


def _interval(months: int, days: int, nanoseconds: int) -> str:
    sign = "-" if nanoseconds < 0 else ""
    seconds, fraction = divmod(abs(nanoseconds), 1_000_000_000)
    second = f"{sign}{seconds}" + (f".{fraction:09d}".rstrip("0") if fraction else "")
    return "P" + (f"{months}M" if months else "") + (f"{days}D" if days else "") + f"T{second}S"


def dump_json(value: Any) -> str:
    """Returns ``value`` as indented JSON that is safe on a terminal."""
    return escape_json(json.dumps(value, ensure_ascii=False, indent=2)) + "\n"


def dump_value(value: Any) -> str:
    """Returns ``value`` as JSON on one line."""
    return escape_json(json.dumps(value, ensure_ascii=False, separators=(",", ":")))


def dump_line(rows: Iterable[Any]) -> Iterable[str]:
    """Yields each row as a line of JSON."""
    for row in rows:
        yield dump_value(row) + "\n"
