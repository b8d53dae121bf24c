"""Reads the progress of jobs for the watch, and reads and stores findings, through the collector and the query engine.

New findings start hooks, and all findings go to the other nodes of their jobs.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from probing.api.errors import InternalError, PeerError
from probing.api.text import escape, sql_text
from probing.daemon.diagnose.gather.tables import Collector, query_rows
from probing.daemon.diagnose.lifecycle import Event
from probing.daemon.diagnose.problems import Problems
from probing.daemon.query.engine import Engine

__all__ = ("FindingsStore", "Outbox")

LIVE_S = 2.0
QUERY_S = 3.0
# Seven days, because a job may stand still over a weekend, during which its finding gets no new row. Findings of this
# node come first, so that findings of other nodes cannot displace them.
_NEWEST = """\
SELECT * FROM diagnosis.findings WHERE ts > now() - INTERVAL 7 DAY
QUALIFY row_number() OVER (PARTITION BY job, run, finding_id ORDER BY ts DESC) = 1
ORDER BY (coalesce(found_by, {node}) = {node}) DESC, (state = 'open') DESC, ts DESC LIMIT 1024"""


class FindingsStore:
    """Reads stored findings by queries, and sends new findings to the collector, which stores them.

    ``stored`` is called with each row that was stored, and must not block."""

    def __init__(
        self,
        collector: Collector,
        queries: Engine,
        node: str,
        stored: Callable[[Mapping[str, Any]], None] = lambda _: None,
    ) -> None:
        self._stored = stored
        self._newest = _NEWEST.format(node=sql_text(node))
        self._collector = collector
        self._queries = queries

    def progress(self) -> bytes:
        """Returns ``comm.progress`` as an Arrow IPC stream."""
        return self._collector.live("comm.progress", LIVE_S)

    def findings(self) -> Sequence[Mapping[str, Any]]:
        """Returns the newest row of each finding of the last week, findings of this node first, then open findings of
        other nodes; times are UTC ns.

        Raises ProbingError.
        """
        rows, missing = query_rows(self._queries, {"findings": self._newest}, time.monotonic() + QUERY_S)
        if missing:
            raise InternalError("; ".join(one.text for one in missing))
        return rows.get("findings", ())

    def record(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Stores rows of ``diagnosis.findings``."""
        self._collector.record_findings(rows, LIVE_S)
        for row in rows:
            self._stored(row)


# The maximum numbers of rows that wait until the collector stores them: rows of this node, and rows of other nodes.
MAX_ROWS, MAX_OF_OTHERS = 256, 64
_log = logging.getLogger(__name__)
_Row = Mapping[str, Any]


class Outbox:
    """Queues findings that are to be stored. Counts rows that were ``stored`` and ``lost``. ``hook`` gets the rows of
    new findings, ``share`` gets all rows of this node's findings; they must not block."""

    def __init__(
        self,
        node: str,
        store: FindingsStore,
        hook: Callable[[_Row], None],
        share: Callable[[_Row], None],
        problems: Problems,
    ) -> None:
        self._node = node
        self._store = store
        self._hook = hook
        self._share = share
        self._problems = problems
        self._rows: deque[_Row] = deque()
        self._of_others: deque[_Row] = deque()
        self.stored = self.lost = 0

    def put(self, events: Iterable[Event]) -> None:
        """Queues the rows of findings of this node. The hook gets a new finding before it is stored: if this node dies
        in between, the finding is not lost."""
        for event in events:
            row = {**event.row, "found_by": self._node}
            self._queue(self._rows, row, MAX_ROWS)
            if event.new:
                _log.warning("%s: %s", row["verdict"], escape(row["sentence"]))
                self._hook(row)
            self._share(row)

    def keep(self, row: _Row) -> None:
        """Queues a row of another node's finding, which is stored, but starts no hook and is not shared."""
        self._queue(self._of_others, row, MAX_OF_OTHERS)

    def flush(self) -> None:
        """Stores the waiting rows, each in its own message, since the size of a message is limited."""
        with self._problems.noted("storing findings"):
            while rows := self._rows or self._of_others:
                try:
                    self._store.record([rows[0]])
                except PeerError:
                    # The collector is being replaced: the row waits.
                    raise
                except Exception:
                    rows.popleft()
                    self.lost += 1
                    raise
                rows.popleft()
                self.stored += 1

    def _queue(self, rows: deque[_Row], row: _Row, most: int) -> None:
        if len(rows) == most:
            rows.popleft()
            self.lost += 1
        rows.append(row)
