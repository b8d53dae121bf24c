"""The general way: bring the columns that a query names to the asker, as few rows of them as is plainly sound."""

from __future__ import annotations

from sqlglot import exp

from probing.federation.catalog import Catalog, Columns, quoted, quoted_column
from probing.federation.dialect import table_name, tables_in, to_sql
from probing.federation.shapes import Part

__all__ = ("ship_parts",)

_OPAQUE = (exp.Query, exp.AggFunc, exp.Window, exp.Anonymous, exp.Rand, exp.Lambda, exp.Parameter, exp.Placeholder)


def ship_parts(root: exp.Query, catalog: Catalog) -> tuple[Part, ...]:
    """One part for each stored table of ``root``, under the table's own name."""
    places: dict[str, list[exp.Table]] = {}
    for table in tables_in(root):
        places.setdefault(table_name(table), []).append(table)
    everything = _names_whole_rows(root)
    words = {identifier.name.lower() for identifier in root.find_all(exp.Identifier)}
    return tuple(_part(name, tables, catalog.columns[name], words, everything) for name, tables in places.items())


def _part(name: str, tables: list[exp.Table], columns: Columns, words: set[str], everything: bool) -> Part:
    # Any word of the query may be a column's name: taking too many columns is sound, one too few is not.
    wanted = columns if everything else tuple(c for c in columns if c[0].lower() in words)
    wanted = wanted or columns[:1]
    sql = f"SELECT {', '.join(quoted_column(column) for column, _ in wanted)} FROM {quoted(name)}"
    filters = [_filter(table, columns) for table in tables]
    found = [f for f in filters if f is not None]
    if len(found) == len(filters):
        sql += " WHERE " + " OR ".join(f"({to_sql(f)})" for f in dict.fromkeys(found))
    return Part(name, sql, wanted)


def _names_whole_rows(root: exp.Query) -> bool:
    """Whether the query has ``*``, ``COLUMNS(...)``, a table as a value, or renames a table's columns."""
    stars = [star for star in root.find_all(exp.Star) if not isinstance(star.parent, exp.Count)]
    if stars or root.find(exp.Columns, exp.Pivot, exp.PositionalColumn):
        return True
    sources = {source.alias_or_name.lower() for source in root.find_all(exp.Table, exp.Subquery, exp.CTE)}
    if any(len(column.parts) == 1 and column.name.lower() in sources for column in root.find_all(exp.Column)):
        return True
    renamed = any(alias.args.get("columns") for alias in root.find_all(exp.TableAlias))
    natural = any(join.method.upper() == "NATURAL" for join in root.find_all(exp.Join))
    return renamed or natural


def _filter(table: exp.Table, columns: Columns) -> exp.Expr | None:
    """What is certain of every row of ``table`` that matters at this place; None: nothing."""
    select, alone = _select_of(table)
    where = select.args.get("where") if select is not None else None
    if where is None:
        return None
    alias, known = table.alias_or_name.lower(), {name.lower() for name, _ in columns}
    kept = [c for c in _conjuncts(where.this) if _is_about(c, alias, known, alone)]
    if not kept:
        return None
    bare = [_without_qualifier(c.copy()) for c in kept]
    return exp.and_(*bare, copy=False) if len(bare) > 1 else bare[0]


def _select_of(table: exp.Table) -> tuple[exp.Select | None, bool]:
    """The SELECT whose WHERE tells of every row of ``table``, and whether the table is its only source.

    An outer join makes rows of NULLs for the other side, so a filter may only go to the side that is kept whole.
    """
    parent = table.parent
    select = parent.parent if isinstance(parent, (exp.From, exp.Join)) else None
    if not isinstance(select, exp.Select) or any(table.args.get(k) for k in ("sample", "pivots", "joins", "when")):
        return None, False
    joins = select.args.get("joins") or []
    sides = {(join.side.upper(), join.kind.upper(), join.method.upper()) for join in joins}
    inner = {("", "", ""), ("", "INNER", ""), ("", "CROSS", "")}
    keeps_first = inner | {("LEFT", "", ""), ("LEFT", "OUTER", ""), ("", "SEMI", ""), ("", "ANTI", "")}
    if not sides <= (keeps_first if isinstance(parent, exp.From) else inner):
        return None, False
    return select, not joins and not select.args.get("laterals")


def _conjuncts(condition: exp.Expr) -> list[exp.Expr]:
    while isinstance(condition, exp.Paren):
        condition = condition.this
    if isinstance(condition, exp.And):
        return [*_conjuncts(condition.left), *_conjuncts(condition.right)]
    return [condition]


def _is_about(conjunct: exp.Expr, alias: str, known: set[str], alone: bool) -> bool:
    found = list(conjunct.find_all(exp.Column))
    if not found or conjunct.find(*_OPAQUE):
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
