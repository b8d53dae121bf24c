"""Rows as plain data, with one stable text or number for every Arrow type. docs/json.md describes it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from probing.client.text import escape_json

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ("dump_json", "dump_line", "plain", "rows_of")


def rows_of(table: pa.Table) -> list[dict[str, Any]]:
    """One dict a row, of JSON's types. Of columns with equal names the later ones get ``_1``, ``_2``..."""
    names = _unique(table.column_names)
    columns = [_column(column) for column in table.columns]
    return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]


def _unique(names: Sequence[str]) -> list[str]:
    seen: dict[str, int] = {}
    unique = []
    for name in names:
        number = seen.get(name, 0)
        seen[name] = number + 1
        unique.append(f"{name}_{number}" if number else name)
    return unique


def _column(column: pa.ChunkedArray[Any]) -> list[Any]:
    import pyarrow as pa

    if pa.types.is_timestamp(column.type) and column.type.tz is None:
        # Through text, because Python's datetime has no nanoseconds.
        texts = column.cast(pa.timestamp("ns")).cast(pa.string()).to_pylist()
        return [None if text is None else text.replace(" ", "T") + "Z" for text in texts]
    if pa.types.is_nested(column.type):
        column = column.cast(_microseconds(column.type))
    if pa.types.is_primitive(column.type) and not pa.types.is_temporal(column.type):
        return [plain(v) for v in column.to_pylist()] if pa.types.is_floating(column.type) else column.to_pylist()
    return [plain(value) for value in column.to_pylist()]


def _microseconds(kind: pa.DataType) -> pa.DataType:
    """``kind`` with times inside it in microseconds, which Python can hold."""
    import pyarrow as pa

    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", kind.tz)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.list_(_microseconds(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(f.name, _microseconds(f.type)) for f in kind])
    return kind


def plain(value: Any) -> Any:
    """``value`` as JSON's types: times as ISO 8601, intervals as ``P…``, whole decimals as numbers, bytes as hex."""
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
    """``value`` as JSON for people and programs, safe on a terminal."""
    return escape_json(json.dumps(value, ensure_ascii=False, indent=2)) + "\n"


def dump_line(rows: Iterable[Any]) -> Iterable[str]:
    """One JSON document a line."""
    for row in rows:
        yield escape_json(json.dumps(row, ensure_ascii=False, separators=(",", ":"))) + "\n"
