"""Stores the rows of findings, starts hooks for new ones, and gives them to the other nodes of their jobs."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from probing.api.errors import PeerError
from probing.api.text import escape
from probing.daemon.diagnose.lifecycle import Event
from probing.daemon.diagnose.problems import Problems

__all__ = ("Outbox",)

# Rows that wait while the collector does not take them: of this node, and of others.
MAX_ROWS, MAX_OF_OTHERS = 256, 64
_log = logging.getLogger(__name__)
_Row = Mapping[str, Any]


class _Store(Protocol):
    def record(self, rows: Sequence[_Row]) -> None: ...


class Outbox:
    """Counts rows that were ``stored`` and ``lost``. ``hook`` gets the rows of new findings, ``share`` gets all rows;
    neither may wait."""

    def __init__(
        self,
        node: str,
        store: _Store,
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
        """Queues rows that were found here. The hook comes first: should this node die now, it is not lost."""
        for event in events:
            row = {**event.row, "found_by": self._node}
            self._queue(self._rows, row, MAX_ROWS)
            if event.new:
                _log.warning("%s: %s", row["verdict"], escape(row["sentence"]))
                self._hook(row)
            self._share(row)

    def keep(self, row: _Row) -> None:
        """Queues a row that another node found: to be stored only."""
        self._queue(self._of_others, row, MAX_OF_OTHERS)

    def flush(self) -> None:
        """Stores the rows that wait, each in a message of its own, which is bounded."""
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
