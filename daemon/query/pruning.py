"""Finds, for each table, the times and jobs that a query can need. The store prunes segments by these times and jobs
(store/needs.py).

A table is pruned only by comparisons of ``ts`` or ``job`` with constants, and only by comparisons that every row must
pass: the comparisons in the WHERE of the SELECT that names the table. All other conditions are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timedelta

from sqlglot import exp

from probing.daemon.store.needs import EVER, Need, Range

__all__ = ("SLACK_NS", "needs_of")

# Each range is widened by this time at both ends, ns, because DuckDB truncates a time to microseconds when it adds an
# interval.
SLACK_NS = 1_000_000
_TEXT = re.compile(r"(\d{4}-\d\d-\d\d)(?:[ T](\d\d:\d\d)(?::(\d\d)(?:\.(\d{1,9}))?)?)?")
_UNITS_NS = {
    "MICROSECOND": 10**3,
    "MILLISECOND": 10**6,
    "SECOND": 10**9,
    "MINUTE": 60 * 10**9,
    "HOUR": 3600 * 10**9,
    "DAY": 86_400 * 10**9,
    "WEEK": 7 * 86_400 * 10**9,
}
# A function that returns whether an expression is the column ``ts``, or the column ``job``, of the table.
_IsColumn = Callable[[exp.Expr], bool]
_ZONELESS = ("TIMESTAMP", "TIMESTAMPNTZ", "TIMESTAMP_NS", "DATE")


def needs_of(tables: Iterable[tuple[exp.Table, str]]) -> dict[str, Need]:
    """Returns the rows needed from each table. ``tables``: each node of a query's tree that names a table, with the
    table's name.

    ``now()`` and the like must have been replaced by constants.
    """
    found: dict[str, Need] = {}
    for node, name in tables:
        here = Need(_range_of(node), _jobs_of(node))
        found[name] = found[name].either(here) if name in found else here
    return found


def _range_of(table: exp.Table) -> Range:
    result = EVER
    for condition, is_ts in _conditions(table, "ts"):
        result = result.both(_range_of_condition(condition, is_ts))
    return result


def _jobs_of(table: exp.Table) -> frozenset[str] | None:
    result: frozenset[str] | None = None
    for condition, is_job in _conditions(table, "job"):
        here = _jobs_of_condition(condition, is_job)
        if here is not None:
            result = here if result is None else result & here
    return result


def _conditions(table: exp.Table, column: str) -> Iterator[tuple[exp.Expr, _IsColumn]]:
    """Yields the conditions that every needed row of ``table`` passes, each with a test for ``column``."""
    select = table.parent.parent if isinstance(table.parent, (exp.From, exp.Join)) else None
    if not isinstance(select, exp.Select) or table.args.get("sample") or table.args.get("joins"):
        return
    named = table.args.get("alias")
    if named is not None and named.args.get("columns"):
        # The alias renames the columns, so their original names mean nothing in the conditions.
        return
    joins = select.args.get("joins") or []
    # These joins choose rows before the WHERE drops any, so a dropped row can change the result.
    if any(join.args.get("method") or join.args.get("kind") in ("ASOF", "POSITIONAL") for join in joins):
        return
    where = select.args.get("where")
    alone = not joins and not select.args.get("laterals") and column not in _aliases(select)
    alias = table.alias_or_name.lower()

    def is_column(node: exp.Expr) -> bool:
        if not isinstance(node, exp.Column) or node.name.lower() != column or node.args.get("db"):
            return False
        return node.table.lower() == alias if node.table else alone

    for condition in _conjuncts(where.this) if where else ():
        yield condition, is_column


def _aliases(select: exp.Select) -> set[str]:
    return {e.alias.lower() for e in select.expressions if isinstance(e, exp.Alias)}


def _conjuncts(condition: exp.Expr) -> Iterator[exp.Expr]:
    pending = [condition]
    while pending:
        node = pending.pop()
        if isinstance(node, exp.Paren):
            pending.append(node.this)
        elif isinstance(node, exp.And):
            pending += [node.this, node.expression]
        else:
            yield node


def _range_of_condition(node: exp.Expr, is_ts: _IsColumn) -> Range:
    if isinstance(node, exp.Between) and is_ts(node.this) and not node.args.get("symmetric"):
        return Range(_low(_constant(node.args["low"])), _high(_constant(node.args["high"])))
    if not isinstance(node, (exp.GT, exp.GTE, exp.LT, exp.LTE, exp.EQ)):
        return EVER
    if is_ts(node.this):
        value, above = _constant(node.expression), isinstance(node, (exp.GT, exp.GTE))
    elif is_ts(node.expression):
        value, above = _constant(node.this), isinstance(node, (exp.LT, exp.LTE))
    else:
        return EVER
    if isinstance(node, exp.EQ):
        return Range(_low(value), _high(value))
    return Range(low=_low(value)) if above else Range(high=_high(value))


def _jobs_of_condition(node: exp.Expr, is_job: _IsColumn) -> frozenset[str] | None:
    if isinstance(node, exp.EQ):
        named = node.expression if is_job(node.this) else node.this if is_job(node.expression) else None
        values = [named] if named is not None else []
    elif isinstance(node, exp.In) and is_job(node.this) and not (node.args.get("query") or node.args.get("unnest")):
        values = node.expressions
    else:
        return None
    if not values or not all(isinstance(value, exp.Literal) and value.is_string for value in values):
        return None
    return frozenset(value.name for value in values)


def _constant(node: exp.Expr) -> int | None:
    """Returns a constant time as UTC ns; None for any other expression, and for forms whose meaning is not certain."""
    if isinstance(node, exp.Paren):
        return _constant(node.this)
    if isinstance(node, (exp.Add, exp.Sub)):
        start, step = _constant(node.this), _interval(node.expression)
        if start is None or step is None:
            return None
        return start + step if isinstance(node, exp.Add) else start - step
    if isinstance(node, exp.Cast):
        kind = node.to.this.name
        value = _text(node.this) if kind in _ZONELESS else None
        return value // _UNITS_NS["DAY"] * _UNITS_NS["DAY"] if value is not None and kind == "DATE" else value
    if isinstance(node, exp.Anonymous) and node.name.lower() == "make_timestamp_ns" and len(node.expressions) == 1:
        value = node.expressions[0]
        return int(value.name) if isinstance(value, exp.Literal) and value.name.isdecimal() else None
    return _text(node)


def _text(node: exp.Expr) -> int | None:
    match = _TEXT.fullmatch(node.name) if isinstance(node, exp.Literal) and node.is_string else None
    if not match:
        return None
    day, minute, second, fraction = match.groups()
    try:
        time = datetime.fromisoformat(f"{day} {minute or '00:00'}:{second or '00'}")
    except ValueError:
        return None
    seconds = (time - datetime(1970, 1, 1)) // timedelta(seconds=1)
    return seconds * 10**9 + int((fraction or "").ljust(9, "0"))


def _interval(node: exp.Expr) -> int | None:
    if not isinstance(node, exp.Interval) or not isinstance(node.this, exp.Literal) or not node.this.name.isdecimal():
        return None
    unit = _UNITS_NS.get(node.text("unit").upper().removesuffix("S"))
    return None if unit is None or len(node.this.name) > 12 else int(node.this.name) * unit


def _low(value: int | None) -> int | None:
    return None if value is None else value - SLACK_NS


def _high(value: int | None) -> int | None:
    return None if value is None else value + SLACK_NS
