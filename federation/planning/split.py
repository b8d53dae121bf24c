"""Plans a SELECT over many nodes: the SQL for each node, and the SQL that merges the answers.

A plan gives the rows of the same SELECT over the union of all nodes' tables, except for what SQL itself leaves open
(ties under LIMIT, the order in which floats are added). There are three ways; the first way that is sound is used:

* rows: nodes run the SELECT, and the client concatenates, sorts and limits their rows;
* aggregate: nodes compute partial aggregates, which the client combines;
* ship: nodes send the rows and columns of each table that may matter, and the client runs the SELECT.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial

from sqlglot import exp

from probing.api.errors import QueryError, QueryRejected
from probing.api.tables import TABLES
from probing.api.tables.schema import View
from probing.api.tables.views import VIEWS
from probing.api.text import sql_name, sql_table
from probing.federation.planning.aggregate import aggregate_plan
from probing.federation.planning.catalog import Catalog, Columns, api_catalog, same_types
from probing.federation.planning.shapes import (
    PART,
    Draft,
    Part,
    Unsplittable,
    hidden_order,
    limit_rows,
    plain_select,
    require_row_functions,
)
from probing.federation.sql.allowed import check_node, check_sizes
from probing.federation.sql.dialect import parse, table_name, tables_in, to_sql
from probing.federation.sql.filters import certain_of, looks_at_many_rows, names_whole_rows
from probing.federation.sql.headings import with_headings
from probing.federation.sql.narrowing import narrow_all
from probing.federation.sql.states import has_states
from probing.federation.sql.times import fix_times
from probing.federation.sql.views import expand, known_columns, set_apart

__all__ = ("Part", "Plan", "each_node", "plan")

_Way = Callable[[Catalog, exp.Query, Columns], Draft]


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of a query. ``final``: SQL over the tables that ``parts`` name. ``columns``: names and types of the
    result.

    ``kind``: rows, aggregate, ship, or local for a query without tables. ``why``: why rows must be shipped.
    ``classic``: a plan without states of aggregates, used if a node's engine has another version; None if ``parts``
    request no states.
    """

    kind: str
    parts: tuple[Part, ...]
    final: str
    columns: Columns
    why: str = ""
    classic: Plan | None = None


def plan(sql: str, now_ns: int, catalog: Catalog | None = None, views: Mapping[str, View] = VIEWS) -> Plan:
    """Returns the plan of ``sql`` for many nodes. ``now_ns`` (UTC ns) is the value of now().

    ``catalog``: the tables as queries on a node see them, by default the tables of probing.api. ``views`` are expanded
    here, so that nodes need not have them. Raises QueryRejected for a statement that is not a SELECT and for SQL that
    nodes do not allow, NotFound for an unknown table, QueryError if ``sql`` does not bind.
    """
    chosen = catalog if catalog is not None else api_catalog()
    try:
        with chosen.lock:
            return _plan(with_headings(parse(sql), sql), now_ns, chosen, views)
    except RecursionError:
        raise QueryRejected("the query is nested too deeply") from None


def each_node(sql: str, now_ns: int, catalog: Catalog | None = None) -> Plan:
    """Returns a plan whose rows are the answers of the nodes to ``sql``, one after the other.

    The SELECT must not join or group rows of different nodes, and must name no views. Raises the errors of ``plan``.
    """
    chosen = catalog if catalog is not None else api_catalog()
    root = fix_times(parse(sql), now_ns)
    with chosen.lock:
        chosen.require(table_name(table) for table in tables_in(root))
        columns = chosen.describe(to_sql(root))
    body = ", ".join(f"c{i} AS {sql_name(name)}" for i, (name, _) in enumerate(columns))
    parts = (Part(PART, to_sql(root), tuple((f"c{i}", kind) for i, (_, kind) in enumerate(columns))),)
    return Plan("rows", parts, f"SELECT {body} FROM {PART}", columns)


def _plan(root: exp.Query, now_ns: int, catalog: Catalog, views: Mapping[str, View]) -> Plan:
    columns = known_columns(views, catalog.schemas)
    apart = set_apart(root, views, columns)
    # Nodes check their parts, but the last step runs in this process, and even binding can compute constants. So the
    # query is checked here, too. WITH RECURSIVE is allowed in the last step, because its rows count as memory and it
    # ends at the deadline.
    for node in root.walk():
        if not isinstance(node, exp.With):
            check_node(node)
    check_sizes(root)
    root = fix_times(root, now_ns)

    def with_views(sql: str) -> str:
        return to_sql(fix_times(expand(parse(sql), {**views, **apart}, columns), now_ns))

    with catalog.beside({name: with_views(f"SELECT * FROM {sql_table(name)}") for name in apart}):
        found = _split(root, catalog)
    if apart:
        found = _each_part(found, lambda part: replace(part, sql=with_views(part.sql)))
    if some := catalog.schemas.keys() - TABLES.keys():
        found = _each_part(found, lambda part: replace(part, source=_source(parse(part.sql), some)))
    if catalog.uneven:
        found = _each_part(found, lambda part: replace(part, sql=to_sql(_filled(parse(part.sql), catalog))))
    return found


def _each_part(found: Plan, change: Callable[[Part], Part]) -> Plan:
    parts = tuple(map(change, found.parts))
    return replace(found, parts=parts, classic=found.classic and _each_part(found.classic, change))


def _filled(root: exp.Query, catalog: Catalog) -> exp.Query:
    """Returns ``root``, changed so that its tables have the same columns and types on all nodes. Changes only tables
    with a column that a node may lack or have with another type, and only if ``root`` names such a column.
    """
    words = {identifier.name.lower() for identifier in root.find_all(exp.Identifier)}
    whole = names_whole_rows(root)
    filled: set[str] = set()
    for table in tables_in(root):
        name = table_name(table)
        uneven = catalog.uneven.get(name, ())
        if uneven and (whole or not words.isdisjoint(uneven)):
            filled.add(name)
            rows = exp.select("*").from_(exp.Table(this=table.this.copy(), db=table.args["db"].copy()))
            # All nodes have ts and job. Conditions on these columns let a node prune what it reads.
            rows = rows.where(*certain_of(table, {"ts", "job"} - set(uneven)))
            nulls = ", ".join(f"CAST(NULL AS {kind}) AS {sql_name(c)}" for c, kind in catalog.columns[name])
            inner = parse(f"{to_sql(rows)} UNION ALL BY NAME SELECT {nulls} WHERE FALSE")
            alias = table.args.get("alias") or exp.TableAlias(this=exp.to_identifier(table.name, quoted=True))
            more = {key: value for key in ("joins", "laterals", "sample") if (value := table.args.get(key))}
            table.replace(exp.Subquery(this=inner, alias=alias, **more))
    for column in root.find_all(exp.Column):
        if f"{column.text('db')}.{column.table}".lower() in filled:
            column.set("db", None)
    return root


def _source(root: exp.Query, some: Collection[str]) -> str:
    """Returns the only table of ``some`` that ``root`` reads, if ``root`` has no rows when that table has no rows;
    else an empty string.
    """
    read = {table_name(table) for table in tables_in(root)}.intersection(some)
    first = _first_table(root)
    return first if read == {first} else ""


def _first_table(root: exp.Expr) -> str:
    """Returns the table that must have rows so that ``root`` has rows, whatever other tables contain. Returns an empty
    string if there is no such table.
    """
    if not isinstance(root, exp.Select) or root.args.get("from_") is None:
        return ""
    joins = root.args.get("joins") or []
    source = root.args["from_"].this
    if any(join.side.upper() in ("RIGHT", "FULL") for join in joins) or source.args.get("joins"):
        return ""
    if isinstance(source, exp.Subquery):
        return "" if looks_at_many_rows(source.this) else _first_table(source.this)
    return table_name(source) if isinstance(source, exp.Table) and isinstance(source.this, exp.Identifier) else ""


def _split(root: exp.Query, catalog: Catalog, *, states: bool = True) -> Plan:
    names = [table_name(table) for table in tables_in(root)]
    catalog.require(names)
    columns = catalog.describe(to_sql(root))
    if not names:
        return Plan("local", (), to_sql(root), columns)
    ways: tuple[tuple[str, _Way], ...] = (("rows", _rows), ("aggregate", partial(aggregate_plan, states=states)))
    why = ""
    for kind, way in ways:
        try:
            found = _checked(kind, way(catalog, root.copy(), columns), columns, catalog)
        except Unsplittable as e:
            why = e.message
        except QueryError:
            # DuckDB does not bind a part that was split wrongly; then the next way is tried.
            why = "its parts do not bind"
        else:
            sends_states = any(has_states(parse(part.sql)) for part in found.parts)
            return replace(found, classic=_split(root, catalog, states=False)) if sends_states else found
    return Plan("ship", _ship_parts(root, catalog), to_sql(root), columns, why)


def _checked(kind: str, draft: Draft, columns: Columns, catalog: Catalog) -> Plan:
    """Returns ``draft`` as a plan if it binds and has the columns and types of the query."""
    part = tuple((name, kind) for name, (_, kind) in zip(draft.names, catalog.describe_part(draft.sql), strict=True))
    final = catalog.describe_over(PART, part, draft.final)
    if not same_types(final, columns):
        raise Unsplittable(f"types differ: {final} for {columns}")
    return Plan(kind, (Part(PART, draft.sql, part),), draft.final, columns)


def _spell_star(select: exp.Select, columns: Columns) -> None:
    """Replaces ``*`` in ``select`` by names of columns, since a table may have other columns on a node of another
    version.
    """
    items = select.expressions
    stars = [i for i, item in enumerate(items) if isinstance(_unqualified(item), exp.Star)]
    if len(stars) != 1 or any(v for k, v in _unqualified(items[stars[0]]).args.items() if not k.startswith("except")):
        return
    first, number = stars[0], len(columns) - len(items) + 1
    named = [exp.column(name, quoted=True) for name, _ in columns[first : first + number]]
    select.set("expressions", [*items[:first], *named, *items[first + 1 :]])


def _unqualified(item: exp.Expr) -> exp.Expr:
    return item.this if isinstance(item, exp.Column) and isinstance(item.this, exp.Expr) else item


def _rows(_catalog: Catalog, root: exp.Query, columns: Columns) -> Draft:
    select = plain_select(root)
    _spell_star(select, columns)
    if select.args.get("group") or select.args.get("having"):
        raise Unsplittable("it aggregates")
    require_row_functions(select)
    rows = limit_rows(select)
    shown = [f"c{i}" for i in range(len(columns))]
    keys, hidden = hidden_order(select, columns)
    distinct = select.args.get("distinct")
    if distinct is not None and hidden:
        raise Unsplittable("DISTINCT with ORDER BY of another expression")
    for i, key in enumerate(hidden):
        select.append("expressions", exp.alias_(key.copy(), f"__o{i}", copy=False))
    names = [*shown, *(f"o{i}" for i in range(len(hidden)))]
    tail = f" ORDER BY {', '.join(keys)}" if keys else ""
    for clause in ("limit", "offset"):
        value = select.args.get(clause)
        tail += f" {to_sql(value)}" if value is not None else ""
        select.set(clause, None)
    if rows is None:
        select.set("order", None)
    else:
        select.limit(rows, copy=False)
    body = ", ".join(f"c{i} AS {sql_name(name)}" for i, (name, _) in enumerate(columns))
    final = f"SELECT {'DISTINCT ' if distinct is not None else ''}{body} FROM {PART}{tail}"
    return Draft(to_sql(select), tuple(names), final)


def _ship_parts(root: exp.Query, catalog: Catalog) -> tuple[Part, ...]:
    """Returns a part for each stored table of ``root``, under the name of the table."""
    places: dict[str, list[exp.Table]] = {}
    narrowed = root.copy()
    narrow_all(narrowed, lambda name: [column for column, _ in catalog.columns.get(name, ())])
    for table in tables_in(narrowed):
        places.setdefault(table_name(table), []).append(table)
    everything = names_whole_rows(root)
    words = {identifier.name.lower() for identifier in root.find_all(exp.Identifier)}
    return tuple(_shipped(name, tables, catalog.columns[name], words, everything) for name, tables in places.items())


def _shipped(name: str, tables: list[exp.Table], columns: Columns, words: set[str], everything: bool) -> Part:
    # Any identifier of the query may be a column: a column too many does no harm, a column too few does.
    wanted = columns if everything else tuple(c for c in columns if c[0].lower() in words)
    wanted = wanted or columns[:1]
    sql = f"SELECT {', '.join(sql_name(column) for column, _ in wanted)} FROM {sql_table(name)}"
    filters = [_filter(table, columns) for table in tables]
    found = [f for f in filters if f is not None]
    if len(found) == len(filters):
        sql += " WHERE " + " OR ".join(f"({to_sql(f)})" for f in dict.fromkeys(found))
    return Part(name, sql, wanted)


def _filter(table: exp.Table, columns: Columns) -> exp.Expr | None:
    """Returns the condition that a row of ``table`` must meet to matter to the query; None if any row may matter."""
    kept = certain_of(table, {name.lower() for name, _ in columns})
    if not kept:
        return None
    return exp.and_(*kept, copy=False) if len(kept) > 1 else kept[0]
