"""The store: a write-ahead log, the Parquet segments into which it is sealed, retention and snapshots."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from probing.daemon.store.limits import StoreLimits, TableLimits
    from probing.daemon.store.snapshot import StoreSnapshot
    from probing.daemon.store.store import Store

__all__ = ("Store", "StoreLimits", "StoreSnapshot", "TableLimits")
_MODULES = {"Store": "store", "StoreLimits": "limits", "StoreSnapshot": "snapshot", "TableLimits": "limits"}


def __getattr__(name: str) -> Any:
    # Modules are imported when they are used, because the service and the workers do not need the writer.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
