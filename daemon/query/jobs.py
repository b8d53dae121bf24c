"""Limits a query to the rows of some jobs: each table becomes a subquery with a condition on its column ``job``."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from sqlglot import exp

from probing.api.errors import QueryRejected
from probing.api.tables import Table

__all__ = ("limit_to_jobs",)

# They say nothing about any job.
OPEN = frozenset(("cluster.members", "probing.column_docs", "probing.table_docs"))
# DuckDB moves no condition of the caller behind a LIMIT: one that fails would show a value of another job's row.
ALL_ROWS = (1 << 62) - 1
_KEPT = ("joins", "laterals", "sample")


def limit_to_jobs(tables: Iterable[tuple[exp.Table, str]], known: Mapping[str, Table], jobs: Collection[str]) -> None:
    """Changes the query of ``tables``, which are all places where it names a table, with the table's name.

    Raises QueryRejected for a table whose rows do not say to which job they belong.
    """
    for node, name in tables:
        if name in OPEN:
            continue
        if "job" not in [column.name for column in known[name].columns]:
            raise QueryRejected(
                f"the token is limited to jobs, and {name} does not say to which job a row belongs",
                hint="use a token without such a limit",
            )
        bare = exp.Table(this=node.this.copy(), db=node.args["db"].copy())
        names = [exp.Literal.string(job) for job in sorted(jobs)]
        condition = exp.In(this=exp.column("job", quoted=True), expressions=names)
        own = exp.select("*").from_(bare).where(condition).limit(ALL_ROWS)
        limited = own.subquery(node.alias or node.name, copy=False)
        if node.alias_column_names:
            limited.set("alias", node.args["alias"].copy())
        for key in _KEPT:
            limited.set(key, node.args.get(key))
        node.replace(limited)
