"""States of aggregates that DuckDB exports: how the asker requests a state, and how a node writes the request.

``export_state('ENGINE', CALL)`` requests the state of an aggregate call. It is our own function, which the gate checks;
DuckDB's form is ``CALL EXPORT_STATE``, which sqlglot would read as an alias. The form of a state depends on the version
of the engine. So a node with another version refuses the request, and the asker requests the rows.
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
    """Returns SQL that requests the state of the aggregate ``call`` from a node with the engine of this version."""
    return f"{_NAME}('{engine_version()}', {call})"


def is_export(node: exp.Expr) -> bool:
    return isinstance(node, exp.Anonymous) and isinstance(node.this, str) and node.this.lower() == _NAME


def has_states(root: exp.Expr) -> bool:
    return any(is_export(node) for node in root.find_all(exp.Anonymous))


def require_export(node: exp.Expr) -> None:
    """Checks one request for a state.

    Raises QueryRejected unless it is an item of the outermost SELECT and calls an aggregate whose states are used here;
    EngineDiffers if the state would have the form of another version of the engine.
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
    """Returns ``root`` as SQL for the engine, which must not be parsed again."""
    return _Generator(dialect=DuckDB, comments=False).generate(root)


class _Generator(DuckDBGenerator):
    def anonymous_sql(self, expression: exp.Anonymous) -> str:
        if is_export(expression):
            return f"{self.sql(expression.expressions[1])} EXPORT_STATE"
        return str(super().anonymous_sql(expression))
