"""Makes rows of ``probing.store`` from the status of the store."""

from __future__ import annotations

import pyarrow as pa

from probing.daemon.arrow import batch_of
from probing.daemon.store.status import StateStatus

__all__ = ("store_batch",)


def store_batch(node: str, now_ns: int, status: StateStatus) -> pa.RecordBatch:
    """Returns a row for each table that has segments, and one for the log. ``now_ns``: UTC."""
    log = {"kind": "log", "files": status["parts"], "bytes": status["log_bytes"]}
    segments = [
        {
            "kind": "segments",
            "table_name": name,
            "files": table["segments"],
            "bytes": table["bytes"],
            "rows": table["rows"],
            "oldest": table["ts_min"],
        }
        for name, table in sorted(status["tables"].items())
    ]
    return batch_of("probing.store", [{"node": node, "ts": now_ns, **row} for row in (log, *segments)])
