"""What the watch reads and stores: the progress of jobs, and findings, by the collector and the query engine."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from probing.api.errors import InternalError
from probing.api.text import sql_text
from probing.daemon.diagnose.gather.tables import Queries, query_rows

__all__ = ("Collector", "FindingsStore")

LIVE_S = 2.0
QUERY_S = 3.0
# A job may stand still over a weekend, in which its finding does not change.
# What this node found comes first: others cannot fill its place.
_NEWEST = """\
SELECT * FROM diagnosis.findings WHERE ts > now() - INTERVAL 7 DAY
QUALIFY row_number() OVER (PARTITION BY job, run, finding_id ORDER BY ts DESC) = 1
ORDER BY (coalesce(found_by, {node}) = {node}) DESC, (state = 'open') DESC, ts DESC LIMIT 1024"""


class Collector(Protocol):
    """``service.collector_client.CollectorClient``."""

    def live(self, table: str, timeout: float) -> bytes: ...

    def record_findings(self, rows: Sequence[Mapping[str, Any]], timeout: float) -> None: ...


class FindingsStore:
    """Implements ``watch.Store``."""

    def __init__(self, collector: Collector, queries: Queries, node: str) -> None:
        self._newest = _NEWEST.format(node=sql_text(node))
        self._collector = collector
        self._queries = queries

    def progress(self) -> bytes:
        return self._collector.live("comm.progress", LIVE_S)

    def findings(self) -> Sequence[Mapping[str, Any]]:
        """Returns the newest row of each finding of the last week, those of this node first, then open ones; times are
        UTC ns.

        Raises ProbingError.
        """
        rows, missing = query_rows(self._queries, {"findings": self._newest}, time.monotonic() + QUERY_S)
        if missing:
            raise InternalError("; ".join(one.text for one in missing))
        return rows.get("findings", ())

    def record(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self._collector.record_findings(rows, LIVE_S)
