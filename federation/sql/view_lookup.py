"""Finds the views that a query names, their columns, and columns that do not exist, before a database binds them."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import lru_cache
from typing import Any

from sqlglot import exp

from probing.api.errors import QueryRejected
from probing.api.tables import TABLES
from probing.api.tables.schema import View
from probing.api.tables.user import USER_NAME
from probing.api.tables.views import VIEWS
from probing.api.text import sql_name, sql_table
from probing.federation.sql.dialect import parse, table_name
from probing.federation.sql.filters import looks_at_many_rows
from probing.federation.sql.names import GLOBAL, LOCAL, USER_VIEWS

__all__ = (
    "REDUCING",
    "NamesOf",
    "base_tables",
    "is_local",
    "known_columns",
    "named_view",
    "require_columns",
    "tree_of",
    "views_from",
)

MAX_USER_VIEWS = 64
NamesOf = Callable[[str], Collection[str]]
"""A function that returns the names of the columns of a table or view; empty for an unknown name."""
REDUCING = ("group", "having", "qualify", "distinct", "limit", "offset", "sample", "laterals", "pivots")
"""Clauses with which a SELECT need not return exactly one row for each row of its source."""
# Table functions. The column that such a function returns has the name of the function.
_SERIES = ("generate_series", "range", "unnest")
_SAME_PROCESS = ("node", "pid", "start_ns")


def base_tables(view: View) -> list[str]:
    """Returns the names of the tables and views that ``view`` reads, sorted."""
    return sorted({f"{table.db}.{table.name}" for table in tree_of(view.sql).find_all(exp.Table) if table.db})


def views_from(rows: Iterable[Mapping[str, Any]]) -> dict[str, View]:
    """Returns the users' views in rows of probing.views; if nodes have different views with
    the same name, the first is used.
    """
    found: dict[str, View] = {}
    for row in rows:
        name, sql = f"{USER_VIEWS}.{row['name']}", row["sql"]
        if USER_NAME.fullmatch(str(row["name"])) and name not in found and len(found) < MAX_USER_VIEWS:
            doc, problem = str(row.get("doc") or ""), str(row.get("problem") or "")
            found[name] = View(name, doc, (), str(sql or ""), problem=problem if sql is None else "")
    return found


def known_columns(views: Mapping[str, View] = VIEWS, more: Mapping[str, Collection[str]] | None = None) -> NamesOf:
    """Returns a function that looks up the columns of our tables, of ``views`` and of ``more`` tables."""

    def names(table: str) -> Collection[str]:
        if more and table in more:
            return more[table]
        if table in TABLES:
            return [column.name for column in TABLES[table].columns]
        return _shown(views[table], names) if table in views else ()

    return names


def named_view(table: exp.Table, views: Mapping[str, View], columns: NamesOf) -> View | None:
    """Returns the view that ``table`` names: one of ``views``, or the view for global.SCHEMA.TABLE."""
    if not isinstance(table.this, exp.Identifier) or not table.db or table.catalog.lower() not in ("", LOCAL, GLOBAL):
        return None
    name = f"{table.db}.{table.name}".lower()
    if table.catalog.lower() != GLOBAL:
        return views.get(name)
    names = columns(name)
    return _tagged(name, names, name not in views or is_local(views[name], views)) if names else None


def is_local(view: View, views: Mapping[str, View]) -> bool:
    """Returns whether the rows of ``view`` over all nodes are the union of its rows on each node."""
    if view.local or view.columns or view.problem:
        return view.local
    tree = tree_of(view.sql)
    source = _only_source(tree)
    if source is None or looks_at_many_rows(tree) or tree.find(exp.Rand):
        return False
    return table_name(source) not in views or is_local(views[table_name(source)], views)


@lru_cache(maxsize=512)
def tree_of(sql: str) -> exp.Query:
    """Returns the tree of a view's SQL without comments. The tree is cached: copy it before you change it."""
    tree = parse(sql)
    for node in tree.walk():
        node.comments = None
    return tree


def _shown(view: View, columns: NamesOf) -> Collection[str]:
    """Returns the columns of ``view``; empty if only a database can determine them."""
    if view.columns or view.problem:
        return [column.name for column in view.columns]
    tree = tree_of(view.sql)
    if not tree.is_star:
        return [name for name in tree.named_selects if name]
    source = _only_source(tree)
    found: list[str] = []
    for item in tree.expressions:
        if not isinstance(item, exp.Star):
            found.append(item.alias_or_name)
        elif source is None or any(item.args.values()):
            return ()
        else:
            found.extend(columns(table_name(source)))
    return found


def _only_source(tree: exp.Query) -> exp.Table | None:
    """Returns the only table that ``tree`` reads, if it is a SELECT with at most one row for each row of the table."""
    if not isinstance(tree, exp.Select) or any(tree.args.get(key) for key in ("joins", "order", "with_", *REDUCING)):
        return None
    source = tree.args["from_"].this if tree.args.get("from_") else None
    if not isinstance(source, exp.Table) or not source.db or source.args.get("joins"):
        return None
    renamed = any(alias.args.get("columns") for alias in tree.find_all(exp.TableAlias))
    return None if renamed or sum(1 for _ in tree.find_all(exp.Query)) > 1 else source


def _tagged(name: str, names: Collection[str], local: bool) -> View:
    # The table gets columns that say where each row comes from.
    has = {column.lower() for column in names}
    process = has.issuperset(_SAME_PROCESS)

    def of_process(column: str) -> str:
        return f"t.{column}" if column in has else f"p.{column}" if process else "CAST(NULL AS INTEGER)"

    node = "node" in has
    tags = {
        "_host": "t.node" if node else "CAST(NULL AS VARCHAR)",
        "_addr": "m.address" if node else "CAST(NULL AS VARCHAR)",
        "_rank": of_process("rank"),
        "_node_rank": of_process("node_rank"),
        "_local_rank": of_process("local_rank"),
        "_role": "CAST('' AS VARCHAR)",
    }
    items = [f"t.{column} AS {column}" for column in map(sql_name, names)]
    items += [f"{sql} AS {tag}" for tag, sql in tags.items()]
    source = f"{sql_table(name)} AS t"
    if any("p." in sql for sql in tags.values()):
        same = " AND ".join(f"t.{column} = p.{column}" for column in _SAME_PROCESS)
        source += f" LEFT JOIN process.processes AS p ON {same}"
    if node:
        source += " LEFT JOIN cluster.members AS m ON t.node = m.node AND t.node = m.member"
    return View(f"{GLOBAL} {name}", "", (), f"SELECT {', '.join(items)} FROM {source}", local=local, single=True)


def require_columns(root: exp.Query, columns: NamesOf) -> None:
    """Raises QueryRejected for a column that certainly does not exist. ``columns``: see ``NamesOf``.

    If something else in the query could have the name, the database decides.
    """
    known: set[str] = set(_SERIES)
    # Columns by qualifier; None if they are unknown.
    sources: dict[str, set[str] | None] = {}
    for table in root.find_all(exp.Table):
        own = {name.lower() for name in columns(table_name(table))} if table.db else set()
        if table.db and not own:
            return
        alias = table.alias_or_name.lower()
        before = sources.get(alias, set())
        renamed = table.args.get("alias") is not None and table.args["alias"].args.get("columns")
        sources[alias] = own | before if own and before is not None and not renamed else None
        known |= own
    for inner in (*root.find_all(exp.Subquery), *root.find_all(exp.CTE)):
        sources[inner.alias_or_name.lower()] = None
    known |= sources.keys() | _names_made(root)
    for column in root.find_all(exp.Column):
        name, qualifier = column.name.lower(), column.table.lower()
        own_columns = sources.get(qualifier) if qualifier else known
        if isinstance(column.this, exp.Identifier) and own_columns and name not in own_columns:
            raise _unknown(column, own_columns)


def _names_made(root: exp.Query) -> set[str]:
    """Returns the names that the query itself gives to values, rows and tables, in lower case."""
    made = [alias.alias for alias in root.find_all(exp.Alias, exp.TableAlias, exp.CTE)]
    made += [name.name for alias in root.find_all(exp.TableAlias) for name in alias.args.get("columns") or ()]
    made += [name.name for several in root.find_all(exp.Aliases) for name in several.aliases]
    made += [name.name for function in root.find_all(exp.Lambda) for name in function.expressions]
    return {name.lower() for name in made}


def _unknown(column: exp.Column, known: Collection[str]) -> QueryRejected:
    near = difflib.get_close_matches(column.name.lower(), known, 2)
    hint = f"did you mean {' or '.join(near)}?" if near else "`probingctl tables TABLE` shows the columns"
    return QueryRejected(f"there is no column {column.sql(dialect='duckdb')[:80]}", hint=hint)
