"""Plans aggregates by group: nodes compute partial aggregates, which the client combines."""

from __future__ import annotations

from dataclasses import dataclass, field

from sqlglot import exp

from probing.api.text import sql_name
from probing.federation.planning.catalog import Catalog, Columns
from probing.federation.planning.partials import Recipe, recipe
from probing.federation.planning.shapes import (
    PART,
    Draft,
    Unsplittable,
    is_aggregate,
    plain_select,
    require_row_function,
    require_row_functions,
)
from probing.federation.sql.dialect import table_name, to_sql

__all__ = ("aggregate_plan",)

_MAX_ALIAS_DEPTH = 16


@dataclass
class _Groups:
    """The names of the group keys, ``k0...``, and of the aggregates, ``a0...``; equal expressions share a name."""

    keys: list[exp.Expr] = field(default_factory=list)
    calls: list[exp.Expr] = field(default_factory=list)

    def lift(self, node: exp.Expr) -> exp.Expr:
        """Returns ``node`` with its keys and aggregates replaced by their names. Raises Unsplittable if a column
        remains.
        """
        if node in self.keys:
            return exp.column(f"k{self.keys.index(node)}")
        if isinstance(node, (exp.Filter, exp.IgnoreNulls)) or is_aggregate(node):
            if node not in self.calls:
                self.calls.append(node)
            return exp.column(f"a{self.calls.index(node)}")
        if isinstance(node, (exp.Column, exp.Star)):
            raise Unsplittable(f"{to_sql(node)} is neither grouped nor aggregated")
        require_row_function(node)
        for child in list(node.iter_expressions()):
            lifted = self.lift(child)
            if lifted is not child:
                child.replace(lifted)
        return node


class _Names:
    """Resolves identifiers of the query: columns of its table, and aliases."""

    def __init__(self, select: exp.Select, columns: Columns) -> None:
        self._columns = {name.lower() for name, _ in columns}
        self._aliases = {item.alias.lower(): item.this for item in select.expressions if isinstance(item, exp.Alias)}

    def resolve(self, node: exp.Expr, depth: int = 0, *, having: bool = False) -> exp.Expr:
        """Returns ``node`` with aliases replaced and columns without qualifiers.

        DuckDB prefers a column to an alias of the same name, but not always in HAVING, so such a name in HAVING raises
        Unsplittable.
        """
        if depth > _MAX_ALIAS_DEPTH:
            raise Unsplittable("aliases that refer to each other")
        if isinstance(node, exp.Column):
            return self._column(node, depth, having)
        for child in list(node.iter_expressions()):
            resolved = self.resolve(child, depth, having=having)
            if resolved is not child:
                child.replace(resolved)
        return node

    def _column(self, node: exp.Column, depth: int, having: bool) -> exp.Expr:
        name = node.name.lower()
        meant = self._aliases.get(name) if not node.table else None
        if name in self._columns:
            itself = isinstance(meant, exp.Column) and meant.name.lower() == name
            if having and meant is not None and not itself:
                raise Unsplittable(f"{name} can mean two things")
            return exp.column(name, quoted=True)
        if meant is None:
            raise Unsplittable(f"{name} is neither a column nor an alias")
        return exp.paren(self.resolve(meant.copy(), depth + 1), copy=False)


def aggregate_plan(catalog: Catalog, root: exp.Query, columns: Columns, *, states: bool = True) -> Draft:
    """Returns the draft for a SELECT with aggregates or GROUP BY over one table. Raises Unsplittable.

    ``states``: nodes may send states of aggregates, which only an engine of the same version can read.
    """
    select = plain_select(root)
    names = _Names(select, catalog.columns[table_name(select.args["from_"].this)])
    items = [item.this if isinstance(item, exp.Alias) else item for item in select.expressions]
    if select.find(exp.Star) and any(isinstance(item, (exp.Star, exp.Column)) and item.is_star for item in items):
        raise Unsplittable("a star beside aggregates")
    shown = [_bare(names.resolve(item.copy())) for item in items]
    groups = _Groups(_keys(select, names, shown))
    lifted = [groups.lift(item.copy()) for item in shown]
    having = select.args.get("having")
    condition = groups.lift(_bare(names.resolve(having.this.copy(), having=True))) if having is not None else None
    order = _order(select, names, groups, [name.lower() for name, _ in columns])
    if not groups.calls and not groups.keys:
        raise Unsplittable("it does not aggregate")
    where = select.args.get("where")
    body = ", ".join(f"{to_sql(e)} AS {sql_name(c)}" for e, (c, _) in zip(lifted, columns, strict=True))
    source, sends = _combined(catalog, select, groups, states)
    final = f"SELECT {'DISTINCT ' if select.args.get('distinct') else ''}{body} FROM ({source})"
    final += f" WHERE {to_sql(condition)}" if condition is not None else ""
    final += f" ORDER BY {', '.join(order)}" if order else ""
    for clause in ("limit", "offset"):
        if select.args.get(clause) is not None:
            final += f" {to_sql(select.args[clause])}"
    ask = _ask(select, names, groups, sends, where)
    return Draft(ask, (*(f"k{i}" for i in range(len(groups.keys))), *(f"s{i}" for i in range(len(sends)))), final)


def _keys(select: exp.Select, names: _Names, shown: list[exp.Expr]) -> list[exp.Expr]:
    group = select.args.get("group")
    if group is None:
        return []
    if group.args.get("all"):
        keys = [item for item in shown if not any(is_aggregate(node) for node in item.walk())]
    elif any(value for name, value in group.args.items() if name != "expressions"):
        raise Unsplittable("grouping sets")
    else:
        keys = [_key(item, names, shown) for item in group.expressions]
    for key in keys:
        require_row_functions(key)
        if not key.find(exp.Column):
            raise Unsplittable("a constant as a group")
    return list(dict.fromkeys(keys))


def _key(item: exp.Expr, names: _Names, shown: list[exp.Expr]) -> exp.Expr:
    if isinstance(item, exp.Literal) and not item.is_string:
        return shown[int(item.name) - 1]
    return _bare(names.resolve(item.copy()))


def _order(select: exp.Select, names: _Names, groups: _Groups, shown: list[str]) -> list[str]:
    order = select.args.get("order")
    keys = []
    for ordered in order.expressions if order is not None else []:
        inner = ordered.this
        if isinstance(inner, exp.Var):
            keys.append(to_sql(ordered))
            continue
        number = isinstance(inner, exp.Literal) and not inner.is_string
        own = isinstance(inner, exp.Column) and len(inner.parts) == 1 and shown.count(inner.name.lower()) == 1
        if not number and not own:
            if select.args.get("distinct"):
                raise Unsplittable("DISTINCT with ORDER BY of another expression")
            inner = groups.lift(_bare(names.resolve(inner.copy())))
        key = ordered.copy()
        key.set("this", inner.copy())
        keys.append(to_sql(key))
    return keys


def _combined(catalog: Catalog, select: exp.Select, groups: _Groups, states: bool) -> tuple[str, list[str]]:
    """Returns SQL that computes ``k0..., a0...`` from the parts, and the expressions that nodes send as ``s0...``."""
    types = _types(catalog, select, groups)
    keys = [f"k{i}" for i in range(len(groups.keys))]
    partition = f"OVER (PARTITION BY {', '.join(keys)})" if keys else "OVER ()"
    sends: list[str] = []
    outputs, means = list(keys), []
    for i, call in enumerate(groups.calls):
        how: Recipe = recipe(call.copy(), states=states)
        placed = []
        for sent in how.sends:
            if sent not in sends:
                sends.append(sent)
            placed.append(f"s{sends.index(sent)}")
        combine = how.combine
        for number, pair in enumerate(how.means):
            count, mean = (placed[column] for column in pair)
            name = f"m{i}_{number}"
            means.append(f"sum({count} * {mean}) {partition} / nullif(sum({count}) {partition}, 0) AS {name}")
            combine = combine.replace(f"{{mean{number}}}", name)
        outputs.append(f"CAST({combine.format(*placed)} AS {types[i]}) AS a{i}")
    source = f"(SELECT *, {', '.join(means)} FROM {PART})" if means else PART
    group = f" GROUP BY {', '.join(keys)}" if keys else ""
    return f"SELECT {', '.join(outputs)} FROM {source}{group}", sends


def _types(catalog: Catalog, select: exp.Select, groups: _Groups) -> list[str]:
    if not groups.calls:
        return []
    calls = ", ".join(to_sql(call) for call in groups.calls)
    return [kind for _, kind in catalog.describe(f"SELECT {calls} FROM {_table(select)}")]


def _ask(select: exp.Select, names: _Names, groups: _Groups, sends: list[str], where: exp.Expr | None) -> str:
    items = [f"{to_sql(key)} AS k{i}" for i, key in enumerate(groups.keys)]
    items += [f"{sent} AS s{i}" for i, sent in enumerate(sends)]
    ask = f"SELECT {', '.join(items)} FROM {_table(select)}"
    if where is not None:
        condition = names.resolve(where.this.copy())
        require_row_functions(condition)
        ask += f" WHERE {to_sql(condition)}"
    if groups.keys:
        ask += f" GROUP BY {', '.join(str(i + 1) for i in range(len(groups.keys)))}"
    return ask


def _table(select: exp.Select) -> str:
    table = select.args["from_"].this
    return to_sql(exp.Table(this=table.this.copy(), db=table.args["db"].copy() if table.args.get("db") else None))


def _bare(node: exp.Expr) -> exp.Expr:
    while isinstance(node, exp.Paren):
        node = node.this
    return node
