"""Tells functions of one row from functions of many rows."""

from __future__ import annotations

import re
from functools import lru_cache

from sqlglot import exp

from probing.federation.planning.catalog import open_database
from probing.federation.planning.shapes import Unsplittable
from probing.federation.sql.dialect import to_sql

__all__ = ("is_aggregate", "require_row_function", "require_row_functions")

_CALL = re.compile(r"^([A-Za-z_][A-Za-z0-9_]*)\(")


@lru_cache(maxsize=1)
def _functions() -> dict[str, str]:
    """Returns the kind of each function of this DuckDB; where a name has several kinds, the aggregate wins."""
    with open_database(memory_limit="256MiB", threads=1) as db:
        rows = db.execute("SELECT lower(function_name), function_type FROM duckdb_functions()").fetchall()
    kinds: dict[str, str] = {}
    for name, kind in rows:
        if kinds.get(name) != "aggregate":
            kinds[name] = kind
    return kinds


def is_aggregate(node: exp.Expr) -> bool:
    """Whether ``node`` itself is the call of an aggregate function, known to sqlglot or only to DuckDB."""
    if isinstance(node, (exp.AggFunc, exp.Connector)):
        # AND and OR are functions to sqlglot, and the text of one may begin with the call of an aggregate.
        return isinstance(node, exp.AggFunc)
    return isinstance(node, exp.Func) and _functions().get(_name(node)) == "aggregate"


def require_row_function(node: exp.Expr) -> None:
    """Raises Unsplittable when ``node`` itself may read more than one row."""
    if is_aggregate(node) or isinstance(node, (exp.Filter, exp.WithinGroup)):
        raise Unsplittable("it aggregates")
    if isinstance(node, exp.Anonymous) and _functions().get(_name(node)) != "scalar":
        # A macro can hide an aggregate (geometric_mean does).
        raise Unsplittable(f"{node.name} may look at many rows")


def require_row_functions(root: exp.Expr) -> None:
    """Raises Unsplittable when a call in ``root`` may read more than one row."""
    for node in root.walk():
        require_row_function(node)


def _name(node: exp.Expr) -> str:
    if isinstance(node, exp.Anonymous):
        return str(node.name).lower()
    call = _CALL.match(to_sql(node))
    return call.group(1).lower() if call else ""
