"""Stores the findings that the service sends as rows of ``diagnosis.findings``, and bounds what it may send."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from probing.api.errors import UsageError
from probing.api.tables import table_named
from probing.daemon.arrow import batch_of
from probing.daemon.clock import Clock
from probing.daemon.source import Sink

__all__ = ("FindingRows",)

_TABLE = "diagnosis.findings"
_OWN = frozenset({"node", "ts"})
_MAX_ROWS = 256
_MAX_NAME = 4096
# One finding with its stacks; the message that carries it has 1 MB at most.
_MAX_TEXT = 1 << 19


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
        self._sink.put(_TABLE, batch_of(_TABLE, [_checked(row) | own for row in rows]))
        return len(rows)


def _checked(row: Any) -> dict[str, Any]:
    schema = table_named(_TABLE).physical
    if not isinstance(row, Mapping) or not row.keys() <= set(schema.names) - _OWN:
        raise UsageError("a finding has other fields than diagnosis.findings")
    for name, value in row.items():
        if value is not None and not _fits(value, schema.field(name).type):
            raise UsageError(f"the field {name} of a finding does not have its type")
    return dict(row)


def _fits(value: Any, kind: pa.DataType) -> bool:
    if pa.types.is_timestamp(kind):
        return type(value) is int and abs(value) < 1 << 63
    if pa.types.is_floating(kind):
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, str) and len(value) <= (_MAX_TEXT if pa.types.is_string(kind) else _MAX_NAME)
