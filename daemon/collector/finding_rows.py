"""Stores the findings that the service sends as rows of ``diagnosis.findings``, and bounds what it may send."""

from __future__ import annotations

from typing import Any

from probing.api.errors import UsageError
from probing.daemon.arrow import batch_of
from probing.daemon.clock import Clock
from probing.daemon.row_check import checked_row
from probing.daemon.source import Sink

__all__ = ("FindingRows",)

_TABLE = "diagnosis.findings"
_OWN = frozenset({"node", "ts"})
_MAX_ROWS = 256


class FindingRows:
    def __init__(self, node: str, sink: Sink, clock: Clock) -> None:
        self._node = node
        self._sink = sink
        self._clock = clock

    def put(self, rows: Any) -> int:
        """Store ``rows``, dicts by column. Returns how many. Raises UsageError for what is no such row."""
        if not isinstance(rows, list) or len(rows) > _MAX_ROWS:
            raise UsageError(f"findings takes a list of at most {_MAX_ROWS} rows")
        own = {"node": self._node, "ts": self._clock.pair().real_ns}
        self._sink.put(_TABLE, batch_of(_TABLE, [checked_row(_TABLE, row, _OWN) | own for row in rows]))
        return len(rows)
