"""The module that a training job may import to report tables, spans, events, metrics and steps.

It needs no daemon and has no dependency. Each name is loaded when it is first used: the daemon and its client, which
are part of this package, load none of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from probing.rows import ExternalTable
    from probing.spans import attach_training_phases, event, is_enabled, metric, phase, span, step
    from probing.table_decorator import table

__all__ = ("ExternalTable", "attach_training_phases", "event", "is_enabled", "metric", "phase", "span", "step", "table")
_MODULES = {"ExternalTable": "rows", "table": "table_decorator"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"probing.{_MODULES.get(name, 'spans')}"), name)
