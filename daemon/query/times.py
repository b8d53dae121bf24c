"""Times in a query, brought to the type of ``ts``: TIMESTAMP_NS, UTC, without a zone.

DuckDB 2.0 refuses to compare TIMESTAMP_NS with TIMESTAMP WITH TIME ZONE, which is what ``now()``, ``to_timestamp`` and
``AT TIME ZONE`` give, so ``ts > now() - interval 5 minute`` would not bind.
"""

from __future__ import annotations

from sqlglot import exp

__all__ = ("rewrite_times",)

_NOW = frozenset(("now", "get_current_timestamp", "transaction_timestamp", "current_localtimestamp"))
_TIME_OF_DAY = frozenset(("get_current_time", "current_localtime"))


def rewrite_times(root: exp.Expr, now_ns: int) -> exp.Expr:
    """The tree with one instant ``now_ns`` (UTC ns) for all that means now, and without zoned times."""
    for node in list(root.walk()):
        if _is_now(node):
            root = _replace(root, node, _instant(now_ns))
        elif isinstance(node, exp.CurrentDate):
            root = _replace(root, node, _cast(_instant(now_ns), "DATE"))
        elif _is_time_of_day(node):
            root = _replace(root, node, _cast(_instant(now_ns), "TIME"))
        elif _has_zone(node) and not _feeds_at_time_zone(node):
            # The session's zone is UTC: the cast takes the zone away and keeps the instant.
            root = _replace(root, node, _cast(node.copy(), "TIMESTAMP"))
    return root


def _replace(root: exp.Expr, node: exp.Expr, new: exp.Expr) -> exp.Expr:
    if node is root:
        return new
    node.replace(new)
    return root


def _instant(now_ns: int) -> exp.Expr:
    return exp.Anonymous(this="make_timestamp_ns", expressions=[exp.Literal.number(now_ns)])


def _cast(value: exp.Expr, kind: str) -> exp.Expr:
    return exp.Cast(this=value, to=exp.DataType.build(kind, dialect="duckdb"))


def _is_now(node: exp.Expr) -> bool:
    if isinstance(node, (exp.CurrentTimestamp, exp.Localtimestamp)):
        return True
    return isinstance(node, exp.Anonymous) and node.name.lower() in _NOW


def _is_time_of_day(node: exp.Expr) -> bool:
    if isinstance(node, (exp.CurrentTime, exp.Localtime)):
        return True
    return isinstance(node, exp.Anonymous) and node.name.lower() in _TIME_OF_DAY


def _has_zone(node: exp.Expr) -> bool:
    if isinstance(node, exp.UnixToTime):
        return node.args.get("scale") is None
    if isinstance(node, exp.Cast):
        return bool(node.to.this == exp.DataType.Type.TIMESTAMPTZ)
    return isinstance(node, exp.AtTimeZone)


def _feeds_at_time_zone(node: exp.Expr) -> bool:
    """Whether AT TIME ZONE works on it: there the zone matters."""
    parent = node.parent
    while isinstance(parent, exp.Paren):
        parent = parent.parent
    return isinstance(parent, exp.AtTimeZone)
