"""Pushes conditions on the rows of a subquery, CTE or view down into its SELECT, nearer to the source of the rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from sqlglot import exp

from probing.federation.sql.dialect import table_name
from probing.federation.sql.filters import certain_of, looks_at_many_rows, select_of
from probing.federation.sql.view_lookup import REDUCING, NamesOf

__all__ = ("narrow", "narrow_all", "plain_columns")


def narrow_all(root: exp.Query, columns: NamesOf) -> None:
    """Pushes conditions on subqueries, and on CTEs that are read once, down into their SELECTs. ``columns``: see
    ``NamesOf`` in view_lookup.
    """
    ctes = {cte.alias_or_name.lower(): cte.this for cte in root.find_all(exp.CTE)}
    once = Counter(cte.alias_or_name.lower() for cte in root.find_all(exp.CTE))
    read = Counter(table.name.lower() for table in root.find_all(exp.Table) if len(table.parts) == 1)
    if any(clause.args.get("recursive") for clause in root.find_all(exp.With)):
        ctes = {}
    places: list[exp.Subquery | exp.Table] = [*root.find_all(exp.Subquery), *root.find_all(exp.Table)]
    for place in places:
        inner = place.this
        if isinstance(place, exp.Table):
            name = place.name.lower()
            inner = ctes.get(name) if len(place.parts) == 1 and once[name] == read[name] == 1 else None
        if isinstance(inner, exp.Select) and select_of(place)[0] is not None:
            plain = plain_columns(inner, columns)
            narrow(inner, certain_of(place, plain), plain)


def plain_columns(select: exp.Select, columns: NamesOf) -> dict[str, exp.Column]:
    """Returns the columns of ``select`` that are unchanged columns of its first source, by lower-case name.

    If ``select`` groups rows, only keys of GROUP BY and PARTITION BY are returned, which are equal in all rows of a
    group.
    """
    source = select.args["from_"].this if select.args.get("from_") else None
    if not isinstance(source, (exp.Table, exp.Subquery)) or select_of(source)[0] is None:
        return {}
    keys = _common_keys(select)
    alone, own = not select.args.get("joins"), source.alias_or_name.lower()
    # Another qualifier may name a table of the outer query, because DuckDB allows such references without LATERAL.
    mine = (own, "") if alone else (own,)
    found: dict[str, exp.Column] = {}
    for item in select.expressions:
        shown = item.this if isinstance(item, exp.Alias) else item
        if isinstance(shown, exp.Star) and alone and not any(shown.args.values()):
            for name in columns(table_name(source)) if isinstance(source, exp.Table) else ():
                found[name.lower()] = exp.column(name, table=source.alias_or_name, quoted=True)
        elif isinstance(shown, exp.Column) and not shown.is_star and shown.table.lower() in mine:
            found[item.alias_or_name.lower()] = shown
        else:
            found.pop(item.alias_or_name.lower(), None)
    return found if keys is None else {name: column for name, column in found.items() if _key(column) in keys}


def _common_keys(select: exp.Select) -> set[str] | None:
    """Returns the keys common to all groups and windows of ``select``, as texts; None without groups and windows."""
    if any(select.args.get(key) for key in REDUCING if key not in ("group", "having", "qualify")):
        return set()
    found: list[set[str]] = []
    group = select.args.get("group")
    if group is not None:
        if any(value for key, value in group.args.items() if key != "expressions"):
            return set()
        found.append({_key(key) for key in group.expressions if isinstance(key, exp.Column)})
    clauses = [*select.expressions, *filter(None, map(select.args.get, ("having", "qualify", "order")))]
    partitions = [window.args.get("partition_by") or () for each in clauses for window in each.find_all(exp.Window)]
    found += [{_key(key) for key in keys if isinstance(key, exp.Column)} for keys in partitions]
    if not found:
        return set() if any(map(looks_at_many_rows, clauses)) else None
    if any(clause.find(exp.Explode, exp.Unnest) for clause in clauses):
        return set()
    return set.intersection(*found)


def _key(column: exp.Column) -> str:
    return ".".join(part.name.lower() for part in column.parts)


def narrow(select: exp.Select, conditions: list[exp.Expr], plain: Mapping[str, exp.Column]) -> None:
    """Moves ``conditions`` on the columns of ``select`` to its first source, before the rows are joined."""
    if not conditions:
        return
    source = select.args["from_"].this
    for condition in conditions:
        for column in list(condition.find_all(exp.Column)):
            meant = plain[column.name.lower()].copy()
            meant.set("table", exp.to_identifier(source.alias_or_name, quoted=True))
            column.replace(meant)
    if any(join.method.upper() == "ASOF" for join in select.args.get("joins") or []):
        # With an ASOF join, range pruning would not see which rows of the left side matter, so a subquery filters them.
        alias = source.alias_or_name
        bare = source.copy()
        bare.set("alias", exp.TableAlias(this=exp.to_identifier(alias, quoted=True)))
        inner = exp.select("*").from_(bare, copy=False).where(*conditions, copy=False)
        source.replace(exp.Subquery(this=inner, alias=exp.TableAlias(this=exp.to_identifier(alias, quoted=True))))
    else:
        select.where(*conditions, copy=False)
