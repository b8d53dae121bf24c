"""States of aggregates that DuckDB exports: how the caller requests a state, and how a node writes the request
for DuckDB.

``export_state('ENGINE', CALL)`` requests the state of an aggregate call. It is a function of probingd, which nodes
check; sqlglot would read DuckDB's own form, ``CALL EXPORT_STATE``, as an alias. The form of a state depends on the
version of the engine. So a node with another version refuses the request, and the caller requests the rows instead.
"""

from __future__ import annotations

from sqlglot import exp
from sqlglot.dialects.duckdb import DuckDB
from sqlglot.generators.duckdb import DuckDBGenerator

from probing.api.errors import EngineDiffers, QueryRejected
from probing.federation.engine import engine_version

__all__ = ("exported", "has_states", "is_export", "require_export", "with_states")

_NAME = "export_state"
_KINDS = (exp.ApproxDistinct, exp.ApproxQuantile)


def exported(call: str) -> str:
    """Returns SQL that requests the state of the aggregate ``call``. A node whose DuckDB version differs from ours
    refuses the request.
    """
    return f"{_NAME}('{engine_version()}', {call})"


def is_export(node: exp.Expr) -> bool:
    return isinstance(node, exp.Anonymous) and isinstance(node.this, str) and node.this.lower() == _NAME


def has_states(root: exp.Expr) -> bool:
    return any(is_export(node) for node in root.find_all(exp.Anonymous))


def require_export(node: exp.Expr) -> None:
    """Checks one request for a state.

    Raises QueryRejected unless the request is an item of the outermost SELECT and calls an aggregate whose states are
    used; EngineDiffers if the request is for the state of another version of the engine.
    """
    item, items = node.parent, node.expressions
    whole = isinstance(item, exp.Alias) and isinstance(item.parent, exp.Select) and item.parent.parent is None
    call = items[1].this if len(items) == 2 and isinstance(items[1], exp.Filter) else items[-1] if items else None
    named = len(items) == 2 and isinstance(items[0], exp.Literal) and items[0].is_string
    if not whole or not named or not isinstance(call, _KINDS):
        raise QueryRejected(f"{_NAME} is only for queries over many nodes")
    if items[0].name != engine_version():
        raise EngineDiffers(f"states of DuckDB {items[0].name[:20]} were requested, this node has {engine_version()}")


def with_states(root: exp.Expr) -> str:
    """Returns ``root`` as SQL for the engine. sqlglot would misread this SQL, so it must not be parsed again."""
    return _Generator(dialect=DuckDB, comments=False).generate(root)


class _Generator(DuckDBGenerator):
    def anonymous_sql(self, expression: exp.Anonymous) -> str:
        if is_export(expression):
            return f"{self.sql(expression.expressions[1])} EXPORT_STATE"
        return str(super().anonymous_sql(expression))
