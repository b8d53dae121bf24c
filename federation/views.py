"""Views, put into a query where it names them, before it is split, checked or run.

A view becomes a subquery in parentheses under its own name. What the query says for certain of its rows is said inside
it as well, so that time ranges go on to narrow what is read, and joins whose columns the query does not name are left
out. ``probe.SCHEMA.TABLE`` loses its catalog, and ``global.SCHEMA.TABLE`` becomes a subquery with Probing's columns of
where a row comes from: ``_host, _addr, _rank, _node_rank, _local_rank, _role``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import lru_cache
from typing import Any, TypeVar

from sqlglot import exp

from probing.api.errors import QueryRejected
from probing.api.tables import TABLES
from probing.api.tables.schema import View
from probing.api.tables.views import VIEWS
from probing.federation.dialect import parse
from probing.federation.filters import certain_of, looks_at_many_rows, names_whole_rows, select_of
from probing.federation.names import GLOBAL, LOCAL, USER_VIEWS, names_user_views, wants_all_nodes

__all__ = ("base_tables", "expand", "known_columns", "names_user_views", "set_apart", "views_from", "wants_all_nodes")

MAX_DEPTH = 8
MAX_PLACES = 200
MAX_USER_VIEWS = 64
_Tree = TypeVar("_Tree", bound=exp.Expr)
_Columns = Callable[[str], Collection[str]]
_KEPT = ("joins", "laterals", "sample", "pivots")
_REDUCING = ("group", "having", "qualify", "distinct", "limit", "offset", "sample", "laterals", "pivots")
_SAME_PROCESS = ("node", "pid", "start_ns")


def expand(root: _Tree, views: Mapping[str, View] = VIEWS, columns: _Columns | None = None) -> _Tree:
    """``root`` with a subquery for every view that it names; its own tree is changed.

    ``columns`` gives the names of a table's or view's columns, none for one that it does not know.
    Raises QueryRejected for views that name each other too deeply or too often.
    """
    _Expansion(views, columns or known_columns(views)).run(root, 0)
    return root


def set_apart(root: exp.Query, views: Mapping[str, View], columns: _Columns) -> dict[str, View]:
    """Makes a view that each node can answer for a table of ``root``, by the name that it has in what is returned.

    Other views are put in. The tree of ``root`` is changed.
    """
    apart: dict[str, View] = {}
    _Expansion(views, columns, apart).run(root, 0)
    return apart


def known_columns(views: Mapping[str, View] = VIEWS, more: Mapping[str, Collection[str]] | None = None) -> _Columns:
    """The names of columns of our tables, of ``views`` and of ``more`` tables."""

    def names(table: str) -> Collection[str]:
        if more and table in more:
            return more[table]
        if table in TABLES:
            return [column.name for column in TABLES[table].columns]
        return _shown(views[table], names) if table in views else ()

    return names


def _shown(view: View, columns: _Columns) -> Collection[str]:
    """The names of the columns of ``view``; none when only a database can tell."""
    if view.columns or view.problem:
        return [column.name for column in view.columns]
    tree = _tree(view.sql)
    if not tree.is_star:
        return [name for name in tree.named_selects if name]
    source = _only_source(tree)
    if source is None or len(tree.expressions) > 1 or any(tree.expressions[0].args.values()):
        return ()
    return columns(_name(source))


def _named_view(table: exp.Table, views: Mapping[str, View], columns: _Columns) -> View | None:
    # One of `views`, or the one that stands for global.SCHEMA.TABLE.
    if not isinstance(table.this, exp.Identifier) or not table.db or table.catalog.lower() not in ("", LOCAL, GLOBAL):
        return None
    name = _name(table)
    if table.catalog.lower() != GLOBAL:
        return views.get(name)
    names = columns(name)
    return _tagged(name, names, name not in views or _is_local(views[name], views)) if names else None


def base_tables(view: View) -> list[str]:
    """The names of the tables and views that ``view`` reads, sorted."""
    return sorted({f"{table.db}.{table.name}" for table in _tree(view.sql).find_all(exp.Table) if table.db})


def views_from(rows: Iterable[Mapping[str, Any]]) -> dict[str, View]:
    """The views of users that rows of probing.views tell; of several nodes' views of one name the first."""
    found: dict[str, View] = {}
    for row in rows:
        name, sql = f"{USER_VIEWS}.{row['name']}", row["sql"]
        if name not in found and len(found) < MAX_USER_VIEWS:
            doc, problem = str(row.get("doc") or ""), str(row.get("problem") or "")
            found[name] = View(name, doc, (), str(sql or ""), problem=problem if sql is None else "")
    return found


def _tagged(name: str, names: Collection[str], local: bool) -> View:
    # The table `name` with columns for where its rows come from.
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
    schema, _, table = name.partition(".")
    items = [f't."{column}" AS "{column}"' for column in names] + [f"{sql} AS {tag}" for tag, sql in tags.items()]
    source = f'"{schema}"."{table}" AS t'
    if any("p." in sql for sql in tags.values()):
        same = " AND ".join(f"t.{column} = p.{column}" for column in _SAME_PROCESS)
        source += f" LEFT JOIN process.processes AS p ON {same}"
    if node:
        source += " LEFT JOIN cluster.members AS m ON t.node = m.node AND t.node = m.member"
    return View(f"{GLOBAL} {name}", "", (), f"SELECT {', '.join(items)} FROM {source}", local=local, single=True)


class _Expansion:
    """One query's views, with bounds on all of them together."""

    def __init__(
        self, views: Mapping[str, View], columns: _Columns, apart: dict[str, View] | None = None
    ) -> None:
        """``apart`` collects the views that nodes can answer for, which then stay."""
        self._views = views
        self._columns = columns
        self._apart = apart
        self._places = 0

    def run(self, root: exp.Expr, depth: int) -> None:
        words: set[str] | None = None
        replaced: set[tuple[str, str]] = set()
        for table in list(root.find_all(exp.Table)):
            view = _named_view(table, self._views, self._columns)
            if view is not None and self._apart is not None and _is_local(view, self._views):
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
        # A schema of its own: some, like information_schema, are taken in a database.
        catalog = GLOBAL if table.catalog.lower() == GLOBAL else LOCAL
        schema = f"{catalog} {table.db.lower()}"
        apart[f"{schema}.{table.name.lower()}"] = view
        table.set("catalog", None)
        table.set("db", exp.to_identifier(schema, quoted=True))

    def _replace(self, table: exp.Table, view: View, words: set[str], depth: int) -> None:
        self._places += 1
        if depth >= MAX_DEPTH or self._places > MAX_PLACES:
            raise QueryRejected(
                f"the views that the query names are more than {MAX_DEPTH} deep or {MAX_PLACES}", hint="name fewer"
            )
        if view.problem:
            raise QueryRejected(f"{view.name} cannot be used: {view.problem}", hint="probing.views tells it of each")
        inner = _tree(view.sql).copy()
        if isinstance(inner, exp.Select):
            if view.single and words:
                _leave_out(inner, words)
            plain = self._plain_columns(inner)
            _narrow(inner, certain_of(table, plain), plain)
        self.run(inner, depth + 1)
        alias = table.args.get("alias") or exp.TableAlias(this=exp.to_identifier(table.name, quoted=True))
        more = {key: value for key in _KEPT if (value := table.args.get(key))}
        table.replace(exp.Subquery(this=inner, alias=alias, **more))

    def _plain_columns(self, select: exp.Select) -> dict[str, exp.Column]:
        """Those of what ``select`` shows that are columns of its first source as they are, by lower-case name."""
        source = select.args["from_"].this if select.args.get("from_") else None
        if not isinstance(source, exp.Table) or any(select.args.get(key) for key in _REDUCING):
            return {}
        if any(map(looks_at_many_rows, select.expressions)) or select_of(source)[0] is None:
            return {}
        alone, own = not select.args.get("joins"), source.alias_or_name.lower()
        found: dict[str, exp.Column] = {}
        for item in select.expressions:
            shown = item.this if isinstance(item, exp.Alias) else item
            if isinstance(shown, exp.Star) and alone and not any(shown.args.values()):
                for name in self._columns(_name(source)):
                    found[name.lower()] = exp.column(name, table=source.alias_or_name, quoted=True)
            elif isinstance(shown, exp.Column) and not shown.is_star and (alone or shown.table.lower() == own):
                found[item.alias_or_name.lower()] = shown
            else:
                found.pop(item.alias_or_name.lower(), None)
        return found


def _name(table: exp.Table) -> str:
    return f"{table.db}.{table.name}".lower()


def _only_source(tree: exp.Query) -> exp.Table | None:
    """The one table or view that ``tree`` reads, if it is a SELECT that makes at most a row of each of its rows."""
    if not isinstance(tree, exp.Select) or any(tree.args.get(key) for key in ("joins", "order", "with_", *_REDUCING)):
        return None
    source = tree.args["from_"].this if tree.args.get("from_") else None
    if not isinstance(source, exp.Table) or not source.db or source.args.get("joins"):
        return None
    renamed = any(alias.args.get("columns") for alias in tree.find_all(exp.TableAlias))
    return None if renamed or sum(1 for _ in tree.find_all(exp.Query)) > 1 else source


def _is_local(view: View, views: Mapping[str, View]) -> bool:
    """Whether the rows that ``view`` makes of all nodes' tables are those that it makes of each node's."""
    if view.local or view.columns or view.problem:
        return view.local
    tree = _tree(view.sql)
    source = _only_source(tree)
    if source is None or looks_at_many_rows(tree) or tree.find(exp.Rand):
        return False
    return _name(source) not in views or _is_local(views[_name(source)], views)


def _words(root: exp.Expr) -> set[str]:
    """Every name in the query, in lower case; none when it takes whole rows."""
    if isinstance(root, exp.Query) and names_whole_rows(root):
        return set()
    return {identifier.name.lower() for identifier in root.find_all(exp.Identifier)}


def _leave_out(select: exp.Select, words: set[str]) -> None:
    """Drops what ``select`` shows under no name of ``words``, and left joins that are not needed then."""
    items = [item for item in select.expressions if item.alias_or_name.lower() in words]
    select.set("expressions", items or select.expressions[:1])
    for join in reversed(select.args.get("joins") or []):
        name = join.this.alias_or_name.lower()
        own = {id(column) for column in join.find_all(exp.Column)}
        named = any(c.table.lower() == name for c in select.find_all(exp.Column) if id(c) not in own)
        if join.side.upper() == "LEFT" and not named:
            select.args["joins"].remove(join)


def _narrow(select: exp.Select, conditions: list[exp.Expr], plain: Mapping[str, exp.Column]) -> None:
    """Says ``conditions``, which are about what ``select`` shows, of its first source, before the rows are joined."""
    if not conditions:
        return
    source = select.args["from_"].this
    for condition in conditions:
        for column in list(condition.find_all(exp.Column)):
            meant = plain[column.name.lower()].copy()
            meant.set("table", exp.to_identifier(source.alias_or_name, quoted=True))
            column.replace(meant)
    if any(join.method.upper() == "ASOF" for join in select.args.get("joins") or []):
        # An ASOF join in the same SELECT would hide from the ranges which rows of its left side matter.
        alias = source.alias_or_name
        bare = source.copy()
        bare.set("alias", exp.TableAlias(this=exp.to_identifier(alias, quoted=True)))
        inner = exp.select("*").from_(bare, copy=False).where(*conditions, copy=False)
        source.replace(exp.Subquery(this=inner, alias=exp.TableAlias(this=exp.to_identifier(alias, quoted=True))))
    else:
        select.where(*conditions, copy=False)


@lru_cache(maxsize=512)
def _tree(sql: str) -> exp.Query:
    """The tree of a view's SQL, without its comments; copy it before it is changed."""
    tree = parse(sql)
    for node in tree.walk():
        node.comments = None
    return tree
