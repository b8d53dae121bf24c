"""Checks whether a SELECT has a form that can be split, and whether its functions read several rows; plans the clauses
that all ways of splitting share.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from sqlglot import exp

from probing.api.errors import QueryError
from probing.federation.planning.catalog import Columns, open_database
from probing.federation.sql.dialect import to_sql

__all__ = (
    "PART",
    "Draft",
    "Part",
    "Unsplittable",
    "hidden_order",
    "is_aggregate",
    "limit_rows",
    "plain_select",
    "require_row_function",
    "require_row_functions",
)

PART = "part"
_KNOWN = frozenset({"distinct", "expressions", "limit", "from_", "where", "group", "having", "order", "offset"})
# Above this LIMIT, a query with ORDER BY gets all rows of a node unsorted: sorting so many rows twice gains nothing.
_TOP_N = 100_000
_CALL = re.compile(r"^([A-Za-z_][A-Za-z0-9_]*)\(")


class Unsplittable(QueryError):
    """The query cannot be split soundly in this way; the planner tries the next way."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a plan: every node answers ``sql``, and the answers together are the table ``table`` of the
    last step.

    ``source``: the table of a job or a probe that the part needs; a node without this table has no rows for the part.
    Empty: the part needs no such table.
    """

    table: str
    sql: str
    columns: Columns
    source: str = ""


@dataclass(frozen=True, slots=True)
class Draft:
    """A draft of a plan: a part called ``PART`` with the columns ``names``, and the SQL of the last step over it."""

    sql: str
    names: tuple[str, ...]
    final: str


def plain_select(root: exp.Query) -> exp.Select:
    """Returns ``root``. Raises Unsplittable unless it is a SELECT from one table without subqueries or rare clauses."""
    if not isinstance(root, exp.Select):
        raise Unsplittable("it is not a single SELECT")
    if any(value for name, value in root.args.items() if name not in _KNOWN):
        raise Unsplittable("it has clauses that cannot be split")
    source = root.args["from_"].this if root.args.get("from_") else None
    if not isinstance(source, exp.Table) or not isinstance(source.this, exp.Identifier):
        raise Unsplittable("it reads no stored table")
    if any(value for name, value in source.args.items() if name not in ("this", "db", "alias")):
        raise Unsplittable("its table is sampled, pivoted or joined")
    alias = source.args.get("alias")
    if alias is not None and alias.args.get("columns"):
        raise Unsplittable("its table's columns are renamed")
    nested = (exp.Subquery, exp.Window, exp.Rand, exp.Placeholder, exp.Parameter, exp.Lateral, exp.Unnest)
    if root.find(*nested) or sum(1 for _ in root.find_all(exp.Query)) > 1:
        raise Unsplittable("it has a subquery, or an expression that reads other rows")
    distinct = root.args.get("distinct")
    if distinct is not None and distinct.args.get("on"):
        raise Unsplittable("DISTINCT ON")
    return root


def limit_rows(select: exp.Select) -> int | None:
    """Returns the number of rows that each node must send, counted from its first row; None for all rows."""
    limit, offset = select.args.get("limit"), select.args.get("offset")
    if limit is None:
        return None
    total = _literal(limit) + (_literal(offset) if offset is not None else 0)
    return total if total <= _TOP_N or select.args.get("order") is None else None


def _literal(clause: exp.Expr) -> int:
    value = clause.args.get("expression")
    if not isinstance(clause, (exp.Limit, exp.Offset)) or clause.args.get("limit_options"):
        raise Unsplittable("a limit that is not a plain number")
    if not isinstance(value, exp.Literal) or value.is_string or not value.name.isdecimal():
        raise Unsplittable("a limit that is not a plain number")
    return int(value.name)


def hidden_order(select: exp.Select, columns: Columns) -> tuple[list[str], list[exp.Expr]]:
    """Returns the ORDER BY keys over the part's columns, and the expressions that nodes must send in addition."""
    keys: list[str] = []
    hidden: list[exp.Expr] = []
    order = select.args.get("order")
    names = [name.lower() for name, _ in columns]
    for ordered in order.expressions if order is not None else []:
        inner = ordered.this
        if isinstance(inner, exp.Literal) and not inner.is_string:
            column = f"c{int(inner.name) - 1}"
        elif isinstance(inner, exp.Column) and len(inner.parts) == 1 and inner.name.lower() in names:
            if names.count(inner.name.lower()) > 1:
                raise Unsplittable("an ambiguous order")
            column = f"c{names.index(inner.name.lower())}"
        elif isinstance(inner, (exp.Var, exp.Literal)):
            raise Unsplittable("ORDER BY ALL")
        else:
            # As in the list of a SELECT, a column takes precedence over an alias of the same name.
            column = f"o{len(hidden)}"
            hidden.append(inner)
        key = ordered.copy()
        key.set("this", exp.column(column))
        keys.append(to_sql(key))
    return keys, hidden


@lru_cache(maxsize=1)
def _functions() -> dict[str, str]:
    """Returns the kind of each function of this DuckDB. A name that an aggregate shares with other functions counts as
    an aggregate.
    """
    with open_database(memory_limit="256MiB", threads=1) as db:
        rows = db.execute("SELECT lower(function_name), function_type FROM duckdb_functions()").fetchall()
    kinds: dict[str, str] = {}
    for name, kind in rows:
        if kinds.get(name) != "aggregate":
            kinds[name] = kind
    return kinds


def is_aggregate(node: exp.Expr) -> bool:
    """Returns whether ``node`` itself calls an aggregate function, known to sqlglot or only to DuckDB."""
    if isinstance(node, (exp.AggFunc, exp.Connector)):
        # sqlglot counts AND and OR as functions, and their text may begin with the call of an aggregate.
        return isinstance(node, exp.AggFunc)
    return isinstance(node, exp.Func) and _functions().get(_name(node)) == "aggregate"


def require_row_function(node: exp.Expr) -> None:
    """Raises Unsplittable if ``node`` itself may read more than one row."""
    if is_aggregate(node) or isinstance(node, (exp.Filter, exp.WithinGroup)):
        raise Unsplittable("it aggregates")
    if isinstance(node, exp.Anonymous) and _functions().get(_name(node)) != "scalar":
        # A macro can contain an aggregate (geometric_mean does).
        raise Unsplittable(f"{node.name} may read many rows")


def require_row_functions(root: exp.Expr) -> None:
    """Raises Unsplittable if a call in ``root`` may read more than one row."""
    for node in root.walk():
        require_row_function(node)


def _name(node: exp.Expr) -> str:
    if isinstance(node, exp.Anonymous):
        return str(node.name).lower()
    call = _CALL.match(to_sql(node))
    return call.group(1).lower() if call else ""
