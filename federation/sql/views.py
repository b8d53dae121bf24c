"""Expands the views that a query names, before it is split, checked or run.

A view becomes a subquery in parentheses under its own name. Conditions on its rows are repeated inside the subquery, so
that time ranges still limit the rows that are read; joins whose columns the query does not name are left out.
``probe.SCHEMA.TABLE`` loses its catalog, and ``global.SCHEMA.TABLE`` becomes a subquery with Probing's columns for the
origin of a row: ``_host, _addr, _rank, _node_rank, _local_rank, _role``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from sqlglot import exp

from probing.api.errors import QueryRejected
from probing.api.tables.schema import View
from probing.api.tables.views import VIEWS
from probing.federation.sql.filters import certain_of, names_whole_rows, select_of
from probing.federation.sql.names import GLOBAL, LOCAL, names_user_views, wants_all_nodes
from probing.federation.sql.narrowing import narrow, narrow_all, plain_columns
from probing.federation.sql.view_lookup import (
    NamesOf,
    base_tables,
    is_local,
    known_columns,
    named_view,
    tree_of,
    views_from,
)

__all__ = ("base_tables", "expand", "known_columns", "names_user_views", "set_apart", "views_from", "wants_all_nodes")

MAX_DEPTH = 8
MAX_PLACES = 100
_Tree = TypeVar("_Tree", bound=exp.Expr)
_KEPT = ("joins", "laterals", "sample", "pivots")


def expand(root: _Tree, views: Mapping[str, View] = VIEWS, columns: NamesOf | None = None) -> _Tree:
    """Changes ``root``: each view in it becomes a subquery.

    ``columns`` returns the names of the columns of a table or view, empty for an unknown name. Raises QueryRejected for
    views that name each other too deeply or too often.
    """
    _Expansion(views, columns or known_columns(views)).run(root, 0)
    return root


def set_apart(root: exp.Query, views: Mapping[str, View], columns: NamesOf) -> dict[str, View]:
    """Changes ``root``: a view that each node can answer becomes a table; other views are expanded.

    Returns the views that became tables, by the names of the tables.
    """
    apart: dict[str, View] = {}
    _Expansion(views, columns, apart).run(root, 0)
    return apart


class _Expansion:
    """Expands one query, with limits for all its views together."""

    def __init__(self, views: Mapping[str, View], columns: NamesOf, apart: dict[str, View] | None = None) -> None:
        """Makes the expansion. ``apart`` collects the views that nodes can answer, which are not expanded."""
        self._views = views
        self._columns = columns
        self._apart = apart
        self._places = 0

    def run(self, root: exp.Expr, depth: int) -> None:
        words: set[str] | None = None
        replaced: set[tuple[str, str]] = set()
        for table in list(root.find_all(exp.Table)):
            view = named_view(table, self._views, self._columns)
            if view is not None and self._apart is not None and is_local(view, self._views):
                replaced.add((table.db.lower(), table.name.lower()))
                self._set_apart(table, view, self._apart)
            elif view is not None:
                if words is None:
                    words = _words(root)
                replaced.add((table.db.lower(), table.name.lower()))
                self._replace(table, view, words, depth)
            elif table.catalog.lower() == LOCAL:
                table.set("catalog", None)
        for column in root.find_all(exp.Column):
            if column.catalog.lower() in (LOCAL, GLOBAL):
                column.set("catalog", None)
            if (column.text("db").lower(), column.table.lower()) in replaced:
                column.set("db", None)

    def _set_apart(self, table: exp.Table, view: View, apart: dict[str, View]) -> None:
        # The schema gets a prefix, because DuckDB already has schemas such as information_schema.
        catalog = GLOBAL if table.catalog.lower() == GLOBAL else LOCAL
        schema = f"{catalog} {table.db.lower()}"
        apart[f"{schema}.{table.name.lower()}"] = view
        table.set("catalog", None)
        table.set("db", exp.to_identifier(schema, quoted=True))

    def _replace(self, table: exp.Table, view: View, words: set[str], depth: int) -> None:
        self._places += 1
        if depth >= MAX_DEPTH or self._places > MAX_PLACES:
            raise QueryRejected(
                f"the query names more than {MAX_PLACES} views, or views nested more than {MAX_DEPTH} deep",
                hint="name fewer views",
            )
        if view.problem:
            raise QueryRejected(f"{view.name} cannot be used: {view.problem}", hint="see the problems in probing.views")
        inner = tree_of(view.sql).copy()
        if isinstance(inner, exp.Select):
            if view.single and words:
                _leave_out(inner, words)
            outer, _ = select_of(table)
            if outer is not None and outer.args.get("where"):
                plain = plain_columns(inner, self._columns)
                if conditions := certain_of(table, plain):
                    narrow(inner, conditions, plain)
                    narrow_all(inner, self._columns)
        self.run(inner, depth + 1)
        alias = table.args.get("alias") or exp.TableAlias(this=exp.to_identifier(table.name, quoted=True))
        more = {key: value for key in _KEPT if (value := table.args.get(key))}
        table.replace(exp.Subquery(this=inner, alias=alias, **more))


def _words(root: exp.Expr) -> set[str]:
    """Returns every identifier of the query, in lower case; empty if the query names whole rows."""
    if isinstance(root, exp.Query) and names_whole_rows(root):
        return set()
    return {identifier.name.lower() for identifier in root.find_all(exp.Identifier)}


def _leave_out(select: exp.Select, words: set[str]) -> None:
    """Removes the columns of ``select`` that are not in ``words``, and left joins that are not used any more."""
    items = [item for item in select.expressions if item.alias_or_name.lower() in words]
    select.set("expressions", items or select.expressions[:1])
    joins = select.args.get("joins") or []
    used = {id(join): _qualifiers(join) for join in joins}
    shown = set().union(*map(_qualifiers, select.expressions), _qualifiers(select.args.get("where")))
    for join in reversed(joins):
        name = join.this.alias_or_name.lower()
        others = set().union(*(used[id(other)] for other in joins if other is not join))
        if join.side.upper() == "LEFT" and name not in shown and name not in others:
            joins.remove(join)
            del used[id(join)]


def _qualifiers(node: exp.Expr | None) -> set[str]:
    return {column.table.lower() for column in node.find_all(exp.Column)} if node is not None else set()
