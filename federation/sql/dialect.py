"""Parses SQL: one SELECT and its tables."""

from __future__ import annotations

import re

import sqlglot
from sqlglot import exp

from probing.api.errors import NO_TABLE, QueryRejected
from probing.federation.sql.reading import statements

__all__ = ("evaluates_code", "expression", "first_line", "needs_helper", "parse", "table_name", "tables_in", "to_sql")

_EXPRESSION = re.compile(r"\bpython\s*\.\s*`([^`]{1,200})`", re.IGNORECASE)
_READ = "use `probingctl query` or `probingctl eval`; `probingctl vars` reads variables from outside"


def parse(sql: str) -> exp.Query:
    """Returns the tree of the SELECT (or UNION of SELECTs) in ``sql``. Raises QueryRejected."""
    try:
        found = statements(sql)
    except sqlglot.errors.SqlglotError as e:
        raise evaluates_code(sql) or QueryRejected(f"the SQL cannot be parsed: {first_line(e)}") from None
    except RecursionError:
        raise QueryRejected("the query is nested too deeply", hint="use WITH for its parts") from None
    if len(found) != 1 or not isinstance(found[0], exp.Query):
        raise QueryRejected("a query must be one SELECT")
    root = found[0]
    if root.find(exp.Insert, exp.Update, exp.Delete, exp.Copy, exp.Command, exp.Create, exp.Into):
        raise QueryRejected("a query can only read")
    return root


def evaluates_code(sql: str) -> QueryRejected | None:
    """Returns the error for a query with python.`EXPRESSION`, which only Probing accepts; None for any other query."""
    found = _EXPRESSION.search(sql)
    return _evaluation(found.group(1)) if found else None


def needs_helper(name: str, meant: str = "") -> QueryRejected | None:
    """Returns the error for a table of Probing that only code inside a job could fill; None for any other ``name``.

    ``meant`` names similar tables that exist.
    """
    schema, _, table = name.partition(".")
    if schema.lower() != "python" or not table:
        return None
    if not re.fullmatch(r"\w+", table):
        return _evaluation(table)
    hint = f"{meant} A table that a job fills itself exists once the job has written a row (ExternalTable)".strip()
    return QueryRejected(f"there is no table {name[:80]}", hint=hint, code=NO_TABLE)


def _evaluation(code: str) -> QueryRejected:
    shown = " ".join(code.split())[:80]
    return QueryRejected(
        f"python.`{shown}` evaluates code in processes, which a node does not do in a query", hint=_READ
    )


def expression(sql: str) -> exp.Expr:
    """Returns the tree of one SQL expression of our own."""
    return sqlglot.parse_one(sql, dialect="duckdb")


def to_sql(node: exp.Expr) -> str:
    return node.sql(dialect="duckdb")


def table_name(table: exp.Table) -> str:
    """Returns ``schema.table`` in lower case, or the name alone."""
    return ".".join(part.name.lower() for part in table.parts)


def tables_in(root: exp.Query) -> list[exp.Table]:
    """Returns the nodes that name a stored table, not a CTE or a table function."""
    ctes = {cte.alias_or_name.lower() for cte in root.find_all(exp.CTE)}
    return [
        table
        for table in root.find_all(exp.Table)
        if isinstance(table.this, exp.Identifier) and not (len(table.parts) == 1 and table.name.lower() in ctes)
    ]


def first_line(error: Exception) -> str:
    """Returns the first line of sqlglot's message, without the escape sequences that underline a place."""
    text = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return "".join(c for c in text if c.isprintable()).replace("[4m", "").replace("[0m", "").strip()
