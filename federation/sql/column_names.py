"""Finds a column in a query that no table in it has, without a database.

Only what is surely unknown is found: a name that anything in the query could mean is left to the database.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection

from sqlglot import exp

from probing.api.errors import QueryRejected
from probing.federation.sql.dialect import table_name
from probing.federation.sql.view_lookup import NamesOf

__all__ = ("require_columns",)

# Columns of table functions.
_SERIES = ("generate_series", "range", "unnest")


def require_columns(root: exp.Query, columns: NamesOf) -> None:
    """Raises QueryRejected for a column that none of the tables has. ``columns``: those of a table or view."""
    known: set[str] = set(_SERIES)
    # Of each qualifier the columns; None where they are not known.
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
    """Names that the query itself gives to values, rows and tables."""
    made = [alias.alias for alias in root.find_all(exp.Alias, exp.TableAlias, exp.CTE)]
    made += [name.name for alias in root.find_all(exp.TableAlias) for name in alias.args.get("columns") or ()]
    made += [name.name for several in root.find_all(exp.Aliases) for name in several.aliases]
    made += [name.name for function in root.find_all(exp.Lambda) for name in function.expressions]
    return {name.lower() for name in made}


def _unknown(column: exp.Column, known: Collection[str]) -> QueryRejected:
    near = difflib.get_close_matches(column.name.lower(), known, 2)
    hint = f"did you mean {' or '.join(near)}?" if near else "`probingctl tables TABLE` shows the columns"
    return QueryRejected(f"there is no column {column.sql(dialect='duckdb')[:80]}", hint=hint)
