"""Finds tables ``global.…`` and views ``view.…`` in a query, which is parsed only if it contains such a word."""

from __future__ import annotations

import re

from probing.api.errors import QueryRejected

__all__ = ("GLOBAL", "LOCAL", "USER_VIEWS", "names_user_views", "wants_all_nodes")

LOCAL = "probe"
"""The catalog of a node's tables: probe.SCHEMA.TABLE is SCHEMA.TABLE."""
GLOBAL = "global"
"""The catalog of the tables of all nodes."""
USER_VIEWS = "view"
"""The schema of views that users write."""
_GLOBAL_WORD = re.compile(rf'\b{GLOBAL}"?\s*\.', re.IGNORECASE)
_VIEW_WORD = re.compile(rf'\b{USER_VIEWS}"?\s*\.', re.IGNORECASE)


def wants_all_nodes(sql: str) -> bool:
    """Returns whether ``sql`` names a table ``global.SCHEMA.TABLE``; False if ``sql`` is not a query."""
    return bool(_GLOBAL_WORD.search(sql)) and any(catalog == GLOBAL for catalog, _ in _places(sql))


def names_user_views(sql: str) -> bool:
    """Returns whether ``sql`` names a ``view.NAME``; False if ``sql`` is not a query."""
    return bool(_VIEW_WORD.search(sql)) and any(schema == USER_VIEWS for _, schema in _places(sql))


def _places(sql: str) -> list[tuple[str, str]]:
    """Returns catalog and schema of each table in the query, in lower case."""
    from sqlglot import exp

    from probing.federation.sql.dialect import parse

    try:
        return [(table.catalog.lower(), table.db.lower()) for table in parse(sql).find_all(exp.Table)]
    except (QueryRejected, RecursionError):
        return []
