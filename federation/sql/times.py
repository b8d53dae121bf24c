"""Replaces now() in a query by one instant for all nodes, and compares ``ts`` without time zones.

If X is a column or now(), which are UTC by definition, ``X AT TIME ZONE 'Z'`` is the local time in Z. If X is a
constant, the expression is the instant (UTC) at which clocks in Z show X, as in SQL.

``ts`` is TIMESTAMP_NS, UTC, without a zone; DuckDB 2.0 does not compare it with the zoned type that ``now()``,
``to_timestamp`` and ``AT TIME ZONE`` have. Nodes rewrite their queries in the same way, and so must the client, which
binds the query and runs its last step.
"""

from __future__ import annotations

from datetime import datetime, timezone
from typing import TypeVar

from sqlglot import exp

from probing.federation.sql.dialect import expression

__all__ = ("fix_times",)

_Tree = TypeVar("_Tree", bound=exp.Expr)

_NOW = frozenset({"now", "get_current_timestamp", "transaction_timestamp", "current_localtimestamp"})
_TIME_OF_DAY = frozenset({"get_current_time", "current_localtime"})


def fix_times(root: _Tree, now_ns: int) -> _Tree:
    """Returns ``root`` with ``now_ns`` (UTC ns) in place of now() and its synonyms, and without zoned times."""
    when = datetime.fromtimestamp(now_ns // 1_000_000_000, tz=timezone.utc)
    day, clock, fraction = f"{when:%Y-%m-%d}", f"{when:%H:%M:%S}", f"{now_ns % 1_000_000_000:09d}"
    ages = [n for n in root.find_all(exp.Anonymous) if n.name.lower() == "age" and len(n.expressions) == 1]
    # Inner nodes come first, because the nodes around them are copied.
    for zoned in [zoned for zoned in root.find_all(exp.AtTimeZone) if _is_utc(zoned.this)][::-1]:
        # The session's zone is UTC: the cast reads a time without a zone as UTC, and keeps a time with a zone.
        zoned.set("this", exp.cast(zoned.this, "TIMESTAMPTZ", dialect="duckdb"))
    for node in list(root.walk())[::-1]:
        if _means_now(node):
            node.replace(expression(f"CAST('{day} {clock}.{fraction}' AS TIMESTAMP_NS)"))
        elif isinstance(node, exp.CurrentDate):
            node.replace(expression(f"CAST('{day}' AS DATE)"))
        elif _means_time_of_day(node):
            node.replace(expression(f"CAST('{clock}.{fraction[:6]}' AS TIME)"))
        elif _has_zone(node) and not _under_at_time_zone(node):
            # The session's zone is UTC: the cast removes the zone and keeps the instant.
            node.replace(exp.cast(node.copy(), "TIMESTAMP", dialect="duckdb"))
    for age in ages:
        # age with one argument counts from the last midnight.
        age.set("expressions", [expression(f"CAST('{day}' AS TIMESTAMP)"), age.expressions[0]])
    return root


def _means_now(node: exp.Expr) -> bool:
    if isinstance(node, (exp.CurrentTimestamp, exp.Localtimestamp)):
        return True
    return isinstance(node, exp.Anonymous) and node.name.lower() in _NOW


def _means_time_of_day(node: exp.Expr) -> bool:
    if isinstance(node, (exp.CurrentTime, exp.Localtime)):
        return True
    return isinstance(node, exp.Anonymous) and node.name.lower() in _TIME_OF_DAY


def _has_zone(node: exp.Expr) -> bool:
    if isinstance(node, exp.UnixToTime):
        return node.args.get("scale") is None
    if isinstance(node, exp.Cast):
        return bool(node.to.this == exp.DataType.Type.TIMESTAMPTZ)
    return isinstance(node, exp.AtTimeZone)


def _is_utc(node: exp.Expr) -> bool:
    """Returns whether ``node`` depends on a column or on the present time."""
    return any(isinstance(part, exp.Column) or _means_now(part) for part in node.walk())


def _under_at_time_zone(node: exp.Expr) -> bool:
    """Returns whether ``node`` is the operand of AT TIME ZONE, where the zone matters."""
    parent = node.parent
    while isinstance(parent, exp.Paren):
        parent = parent.parent
    return isinstance(parent, exp.AtTimeZone)
