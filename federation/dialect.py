"""Reading SQL: one SELECT, its tables, and ``now()`` as one instant for all nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime, timezone

import sqlglot
from probing.api.errors import QueryRejected
from sqlglot import exp

__all__ = ("expression", "fix_now", "parse", "table_name", "tables_in", "to_sql")

MAX_TEXT = 64 * 1024
_NOW_NAMES = frozenset({"now", "get_current_timestamp", "transaction_timestamp"})


def parse(sql: str) -> exp.Query:
    """The tree of the one SELECT (or UNION of them) in ``sql``. Raises QueryRejected."""
    if len(sql) > MAX_TEXT:
        raise QueryRejected(f"the query is longer than {MAX_TEXT // 1024} kB")
    try:
        statements = [s for s in sqlglot.parse(sql, dialect="duckdb") if s is not None]
    except sqlglot.errors.SqlglotError as e:
        raise QueryRejected(f"this is not SQL that can be read: {_first_line(e)}") from None
    except RecursionError:
        raise QueryRejected("the query is nested too deeply") from None
    if len(statements) != 1 or not isinstance(statements[0], exp.Query):
        raise QueryRejected("a query is one SELECT")
    root = statements[0]
    if root.find(exp.Insert, exp.Update, exp.Delete, exp.Copy, exp.Command, exp.Create, exp.Into):
        raise QueryRejected("a query only reads")
    return root


def expression(sql: str) -> exp.Expression:
    """The tree of one SQL expression that we wrote ourselves."""
    return sqlglot.parse_one(sql, dialect="duckdb")


def to_sql(node: exp.Expression) -> str:
    return node.sql(dialect="duckdb")


def table_name(table: exp.Table) -> str:
    """``schema.table`` in lower case, or the bare name."""
    return ".".join(part.name.lower() for part in table.parts)


def tables_in(root: exp.Query) -> list[exp.Table]:
    """Every place where a stored table is named: no CTEs, no table functions."""
    ctes = {cte.alias_or_name.lower() for cte in root.find_all(exp.CTE)}
    return [
        table
        for table in root.find_all(exp.Table)
        if isinstance(table.this, exp.Identifier) and not (len(table.parts) == 1 and table.name.lower() in ctes)
    ]


def fix_now(root: exp.Query, now_ns: int) -> exp.Query:
    """``root`` with every word for the present put as ``now_ns`` (UTC ns), so that all nodes mean one instant."""
    ages = [n for n in root.find_all(exp.Anonymous) if n.name.lower() == "age" and len(n.expressions) == 1]
    for node, value in list(_present(root, now_ns)):
        node.replace(value)
    midnight = f"{datetime.fromtimestamp(now_ns // 1_000_000_000, tz=timezone.utc):%Y-%m-%d}"
    for age in ages:
        # age(x) counts from the midnight that today began with.
        age.set("expressions", [expression(f"CAST('{midnight}' AS TIMESTAMP)"), age.expressions[0]])
    return root


def _present(root: exp.Query, now_ns: int) -> Iterator[tuple[exp.Expression, exp.Expression]]:
    when = datetime.fromtimestamp(now_ns // 1_000_000_000, tz=timezone.utc)
    second = f"{when:%Y-%m-%d %H:%M:%S}"
    stamp = f"CAST('{second}.{now_ns % 1_000_000_000:09d}' AS TIMESTAMP_NS)"
    today = f"CAST('{when:%Y-%m-%d}' AS DATE)"
    time = f"CAST('{when:%H:%M:%S}.{now_ns % 1_000_000_000 // 1000:06d}' AS TIME)"
    make: dict[type[exp.Expression], Callable[[], exp.Expression]] = {
        exp.CurrentTimestamp: lambda: expression(stamp),
        exp.Localtimestamp: lambda: expression(stamp),
        exp.CurrentDate: lambda: expression(today),
        exp.CurrentTime: lambda: expression(time),
        exp.Localtime: lambda: expression(time),
    }
    for node in root.walk():
        if type(node) in make:
            yield node, make[type(node)]()
        elif isinstance(node, exp.Anonymous) and node.name.lower() in _NOW_NAMES:
            yield node, expression(stamp)


def _first_line(error: Exception) -> str:
    text = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return "".join(c for c in text if c.isprintable()).replace("[4m", "").replace("[0m", "").strip()
