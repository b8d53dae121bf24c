"""Finds the conditions that a row of a table must meet to matter to a query, and whether the query names whole rows."""

from __future__ import annotations

from collections.abc import Collection

from sqlglot import exp

__all__ = ("certain_of", "looks_at_many_rows", "names_whole_rows", "select_of")

_MANY_ROWS = (exp.AggFunc, exp.Window, exp.Explode, exp.Unnest)
# Functions that have no class in sqlglot. Their values depend only on their arguments and the time of the query.
_PURE = frozenset(
    {"current_localtimestamp", "epoch_ns", "epoch_us", "get_current_timestamp", "make_timestamp_ms"}
    | {"make_timestamp_ns", "now", "transaction_timestamp"}
)


def certain_of(table: exp.Table | exp.Subquery, known: Collection[str]) -> list[exp.Expr]:
    """Returns the conditions of WHERE that can be pushed down to ``table``, with unqualified column names.

    ``known`` are the names of the columns of ``table``, in lower case.
    """
    select, alone = select_of(table)
    where = select.args.get("where") if select is not None else None
    if where is None:
        return []
    alias = table.alias_or_name.lower()
    return [_without_qualifier(c.copy()) for c in _conjuncts(where.this) if _is_about(c, alias, known, alone)]


def select_of(table: exp.Table | exp.Subquery) -> tuple[exp.Select | None, bool]:
    """Returns the SELECT whose WHERE filters every row of ``table``, and whether the table is its only source.

    An outer join adds rows of NULLs, so a filter can be pushed down only to its preserved side. An ASOF join chooses
    among all rows of its right side, so a filter must not be pushed down to that side.
    """
    parent = table.parent
    select = parent.parent if isinstance(parent, (exp.From, exp.Join)) else None
    if not isinstance(select, exp.Select) or any(table.args.get(k) for k in ("sample", "pivots", "joins", "when")):
        return None, False
    alias = table.args.get("alias")
    if alias is not None and alias.args.get("columns"):
        # The table's columns have other names in this SELECT.
        return None, False
    joins = select.args.get("joins") or []
    sides = {(join.side.upper(), join.kind.upper(), join.method.upper()) for join in joins}
    inner = {("", "", ""), ("", "INNER", ""), ("", "CROSS", "")}
    asof = {("", "", "ASOF"), ("LEFT", "", "ASOF"), ("", "INNER", "ASOF"), ("LEFT", "OUTER", "ASOF")}
    keeps_first = inner | asof | {("LEFT", "", ""), ("LEFT", "OUTER", ""), ("", "SEMI", ""), ("", "ANTI", "")}
    if not sides <= (keeps_first if isinstance(parent, exp.From) else inner):
        return None, False
    return select, not joins and not select.args.get("laterals")


def looks_at_many_rows(node: exp.Expr) -> bool:
    """Returns whether a call in ``node`` may read other rows or return several rows. An unknown function counts
    as such a call.
    """
    return any(
        isinstance(part, _MANY_ROWS) or (isinstance(part, exp.Anonymous) and part.name.lower() not in _PURE)
        for part in node.walk()
    )


def names_whole_rows(root: exp.Query) -> bool:
    """Returns whether the query has ``*``, ``COLUMNS(...)`` or a table as a value, or renames a table's columns."""
    stars = [star for star in root.find_all(exp.Star) if not isinstance(star.parent, exp.Count)]
    if stars or root.find(exp.Columns, exp.Pivot, exp.PositionalColumn):
        return True
    sources = {source.alias_or_name.lower() for source in root.find_all(exp.Table, exp.Subquery, exp.CTE)}
    if any(len(column.parts) == 1 and column.name.lower() in sources for column in root.find_all(exp.Column)):
        return True
    renamed = any(alias.args.get("columns") for alias in root.find_all(exp.TableAlias))
    natural = any(join.method.upper() == "NATURAL" for join in root.find_all(exp.Join))
    return renamed or natural


def _conjuncts(condition: exp.Expr) -> list[exp.Expr]:
    while isinstance(condition, exp.Paren):
        condition = condition.this
    if isinstance(condition, exp.And):
        return [*_conjuncts(condition.left), *_conjuncts(condition.right)]
    return [condition]


def _is_about(conjunct: exp.Expr, alias: str, known: Collection[str], alone: bool) -> bool:
    found = list(conjunct.find_all(exp.Column))
    if not found or conjunct.find(exp.Query, exp.Rand, exp.Lambda, exp.Parameter, exp.Placeholder):
        return False
    if looks_at_many_rows(conjunct):
        return False
    return all(
        column.name.lower() in known
        and (column.table.lower() == alias if column.table else alone)
        and len(column.parts) <= 2
        for column in found
    )


def _without_qualifier(conjunct: exp.Expr) -> exp.Expr:
    for column in list(conjunct.find_all(exp.Column)):
        column.set("table", None)
    return conjunct
