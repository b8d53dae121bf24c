"""Replaces ``$name`` in the syntax tree of a query by literals."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from probing.api.errors import QueryRejected, UsageError

if TYPE_CHECKING:
    from sqlglot import exp

__all__ = ("Typed", "bind", "parameter")

MAX_LIST = 10_000
_NAME = r"[A-Za-z_][A-Za-z0-9_]{0,63}"
_TYPE = r"[A-Za-z][A-Za-z0-9_ ]{0,40}(?:\(\d{1,4}(?:, ?\d{1,4})?\))?"
_GIVEN = re.compile(rf"({_NAME})(?::({_TYPE}))?=(.*)", re.DOTALL)
_INTEGER = re.compile(r"[+-]?\d{1,38}")
_FLOAT = re.compile(r"[+-]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][+-]?\d{1,4})?")
_WORDS: dict[str, bool | None] = {"true": True, "false": False, "null": None}
_HINT = "for example --param rank=3, --param job=4711, --param since:TIMESTAMP='2026-11-21 08:00'"


@dataclass(frozen=True, slots=True)
class Typed:
    """A value as text, and the DuckDB type to which it is cast."""

    text: str
    type: str


def parameter(text: str) -> tuple[str, Any]:
    """Returns name and value of ``name=value`` or ``name:type=value``.

    Without a type the value is read as an int, a float, true, false or null, else as text. Raises UsageError.
    """
    match = _GIVEN.fullmatch(text)
    if match is None:
        raise UsageError(f"--param {text} is not name=value", hint=_HINT)
    name, kind, value = match.groups()
    return name, Typed(value, kind) if kind else _guess(value)


def _guess(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if _INTEGER.fullmatch(text):
        return int(text)
    return float(text) if _FLOAT.fullmatch(text) else text


def bind(sql: str, values: Mapping[str, Any]) -> str:
    """Returns ``sql`` with a literal in place of each ``$name``; names are case-insensitive.

    A value is None, a bool, int, float, Decimal, str, date, datetime (without a zone it is UTC), timedelta, Typed or a
    list of these. Raises UsageError for a name without a value, an unused name, or a value of another type;
    QueryRejected for invalid SQL.
    """
    if not values and "$" not in sql and "?" not in sql:
        return sql
    root = _parse(sql)
    given = {name.removeprefix("$").lower(): value for name, value in values.items()}
    used = _replace(root, given)
    if unused := sorted(given.keys() - used):
        hint = "write $name in the SQL, and the SQL in single quotes for the shell"
        raise UsageError(f"the query has no ${unused[0]}", hint=hint)
    return root.sql(dialect="duckdb") if used else sql


def _parse(sql: str) -> exp.Expr:
    from sqlglot.errors import SqlglotError

    from probing.federation.sql.reading import statements

    try:
        found = statements(sql)
    except (SqlglotError, RecursionError) as e:
        from probing.federation.sql.dialect import first_line

        raise QueryRejected(f"the SQL cannot be parsed: {first_line(e)}") from None
    if len(found) != 1:
        raise QueryRejected("a query must be one SELECT")
    return found[0]


def _replace(root: exp.Expr, given: Mapping[str, Any]) -> set[str]:
    """Replaces the parameters in ``root`` by their values. Returns the names of the parameters."""
    from sqlglot import exp

    used: set[str] = set()
    for node in list(root.find_all(exp.Placeholder, exp.Parameter)):
        name = str(getattr(node.this, "name", node.this) or "").lower()
        if not re.fullmatch(_NAME, name):
            raise UsageError(
                "a parameter of the query has no name", hint="write $name in the SQL and give --param name=value"
            )
        if name not in given:
            raise UsageError(f"there is no value for ${name}", hint=f"give --param {name}=VALUE")
        if isinstance(node.parent, (exp.Column, exp.Table, exp.Dot)) or node.arg_key == "alias":
            raise UsageError(f"${name} is used where a name is required", hint="a parameter is a value, not a name")
        node.replace(_literal(name, given[name]))
        used.add(name)
    return used


def _literal(name: str, value: Any) -> exp.Expr:
    from sqlglot import exp

    if value is None or isinstance(value, bool):
        return exp.Null() if value is None else exp.Boolean(this=value)
    if isinstance(value, int):
        number = exp.Literal(this=str(abs(value)), is_string=False)
        # Parenthesized: a minus in front of a negative number would begin a comment.
        return exp.Paren(this=exp.Neg(this=number)) if value < 0 else number
    if isinstance(value, str):
        return exp.Literal.string(value)
    if isinstance(value, (list, tuple)) and len(value) <= MAX_LIST:
        return exp.Array(expressions=[_literal(name, entry) for entry in value])
    text, kind = _cast(name, value)
    return exp.Cast(this=exp.Literal.string(text), to=_type(name, kind))


def _cast(name: str, value: Any) -> tuple[str, str]:
    """Returns text and DuckDB type of a value that has no literal of its own."""
    if isinstance(value, Typed):
        return value.text, value.type
    if isinstance(value, float):
        return repr(value), "DOUBLE"
    if isinstance(value, Decimal) and value.is_finite():
        exponent = int(value.as_tuple().exponent)
        digits, scale = len(value.as_tuple().digits) + max(0, exponent), max(0, -exponent)
        return f"{value:f}", f"DECIMAL({min(38, max(digits, scale + 1))}, {min(scale, 37)})"
    if isinstance(value, datetime):
        moment = value.astimezone(timezone.utc).replace(tzinfo=None) if value.tzinfo else value
        return moment.isoformat(sep=" "), "TIMESTAMP"
    if isinstance(value, date):
        return value.isoformat(), "DATE"
    if isinstance(value, timedelta):
        return f"{round(value / timedelta(microseconds=1))} microseconds", "INTERVAL"
    raise UsageError(
        f"${name}: a {type(value).__name__} is not a value of SQL", hint="give a number, text, time or list"
    )


def _type(name: str, text: str) -> exp.DataType:
    from sqlglot import exp
    from sqlglot.errors import SqlglotError

    with suppress(SqlglotError, ValueError):
        if re.fullmatch(_TYPE, text):
            return exp.DataType.build(text, dialect="duckdb")
    hint = "for example BIGINT, DOUBLE, VARCHAR, TIMESTAMP, INTERVAL"
    raise UsageError(f"${name}: there is no type {text}", hint=hint)
