"""The store: a write-ahead log, the Parquet segments it is sealed into, retention and snapshots."""

from __future__ import annotations

from probing.daemon.store.limits import StoreLimits, TableLimits
from probing.daemon.store.snapshot import StoreSnapshot
from probing.daemon.store.store import Store

__all__ = ("Store", "StoreLimits", "StoreSnapshot", "TableLimits")
