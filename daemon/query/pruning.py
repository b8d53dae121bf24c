"""Which times of ``ts`` and which jobs a query can need of each table, so that segments of others are not even opened.

Only what surely narrows counts: a comparison of ``ts`` or ``job`` with constants that every row of the table must
pass, in the WHERE of the SELECT that names the table. Anything else leaves the table unbounded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlglot import exp

__all__ = ("EVER", "Range", "job_names", "time_ranges")

# DuckDB cuts a time to microseconds when an interval is added to it.
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
# Whether an expression is the column that is looked for.
_IsColumn = Callable[[exp.Expr], bool]
_ZONELESS = ("TIMESTAMP", "TIMESTAMPNTZ", "TIMESTAMP_NS", "DATE")


@dataclass(frozen=True)
class Range:
    """UTC ns, both ends included; None: open."""

    low: int | None = None
    high: int | None = None

    def holds(self, first: int, last: int) -> bool:
        """Whether some time between ``first`` and ``last`` lies in it."""
        return (self.low is None or last >= self.low) and (self.high is None or first <= self.high)

    def both(self, other: Range) -> Range:
        """What lies in both."""
        return Range(_pick(max, self.low, other.low), _pick(min, self.high, other.high))

    def either(self, other: Range) -> Range:
        """What spans both."""
        low = None if self.low is None or other.low is None else min(self.low, other.low)
        high = None if self.high is None or other.high is None else max(self.high, other.high)
        return Range(low, high)


EVER = Range()


def time_ranges(tables: Iterable[tuple[exp.Table, str]]) -> dict[str, Range]:
    """The range of each table; ``tables`` are all places where a query names one, with its name.

    ``now()`` and its kin have been rewritten already.
    """
    found: dict[str, Range] = {}
    for node, name in tables:
        here = _range_of(node)
        found[name] = found[name].either(here) if name in found else here
    return found


def job_names(tables: Iterable[tuple[exp.Table, str]]) -> dict[str, frozenset[str] | None]:
    """The jobs whose rows of each table are needed, for ``tables`` like those of ``time_ranges``; None: of any."""
    found: dict[str, frozenset[str] | None] = {}
    for node, name in tables:
        here, before = _jobs_of(node), found.get(name, frozenset())
        found[name] = None if here is None or before is None else here | before
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
    """What every row of ``table`` that the query needs must pass, each with what tells ``column`` of it there."""
    select = table.parent.parent if isinstance(table.parent, (exp.From, exp.Join)) else None
    if not isinstance(select, exp.Select) or table.args.get("sample") or table.args.get("joins"):
        return
    named = table.args.get("alias")
    if named is not None and named.args.get("columns"):
        # Its columns go by other names.
        return
    joins = select.args.get("joins") or []
    # Which row such a join takes depends on those that the WHERE drops afterwards.
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
    """UTC ns of a constant time; None when it is none, or not of a form that is surely understood."""
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
        return int(value.name) if isinstance(value, exp.Literal) and value.name.isdigit() else None
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
    if not isinstance(node, exp.Interval) or not isinstance(node.this, exp.Literal) or not node.this.name.isdigit():
        return None
    unit = _UNITS_NS.get(node.text("unit").upper().removesuffix("S"))
    return None if unit is None or len(node.this.name) > 12 else int(node.this.name) * unit


def _low(value: int | None) -> int | None:
    return None if value is None else value - SLACK_NS


def _high(value: int | None) -> int | None:
    return None if value is None else value + SLACK_NS


def _pick(choose: Callable[[int, int], int], one: int | None, two: int | None) -> int | None:
    if one is None or two is None:
        return one if two is None else two
    return choose(one, two)
