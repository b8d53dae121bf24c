"""Plans any query: nodes send the columns that it names, and only rows that its simple filters keep."""

from __future__ import annotations

from sqlglot import exp

from probing.api.text import sql_name, sql_table
from probing.federation.planning.catalog import Catalog, Columns
from probing.federation.planning.shapes import Part
from probing.federation.sql.dialect import table_name, tables_in, to_sql
from probing.federation.sql.filters import certain_of, names_whole_rows
from probing.federation.sql.narrowing import narrow_all

__all__ = ("ship_parts",)


def ship_parts(root: exp.Query, catalog: Catalog) -> tuple[Part, ...]:
    """Returns one part for each stored table of ``root``, under the table's own name."""
    places: dict[str, list[exp.Table]] = {}
    narrowed = root.copy()
    narrow_all(narrowed, lambda name: [column for column, _ in catalog.columns.get(name, ())])
    for table in tables_in(narrowed):
        places.setdefault(table_name(table), []).append(table)
    everything = names_whole_rows(root)
    words = {identifier.name.lower() for identifier in root.find_all(exp.Identifier)}
    return tuple(_part(name, tables, catalog.columns[name], words, everything) for name, tables in places.items())


def _part(name: str, tables: list[exp.Table], columns: Columns, words: set[str], everything: bool) -> Part:
    # Any identifier of the query may be a column: one column too many is sound, one too few is not.
    wanted = columns if everything else tuple(c for c in columns if c[0].lower() in words)
    wanted = wanted or columns[:1]
    sql = f"SELECT {', '.join(sql_name(column) for column, _ in wanted)} FROM {sql_table(name)}"
    filters = [_filter(table, columns) for table in tables]
    found = [f for f in filters if f is not None]
    if len(found) == len(filters):
        sql += " WHERE " + " OR ".join(f"({to_sql(f)})" for f in dict.fromkeys(found))
    return Part(name, sql, wanted)


def _filter(table: exp.Table, columns: Columns) -> exp.Expr | None:
    """Returns the condition that every row of ``table`` must meet at this place; None for no condition."""
    kept = certain_of(table, {name.lower() for name, _ in columns})
    if not kept:
        return None
    return exp.and_(*kept, copy=False) if len(kept) > 1 else kept[0]
