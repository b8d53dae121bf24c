"""Reads which ranks of a run are on this node, and which connections of these ranks the kernel shows."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping

from probing.daemon.diagnose.coordination.peers import MAX_ADDRESSES, Holding, Sight, plain_address
from probing.daemon.diagnose.gather.tables import Collector, Row, live_rows

__all__ = ("LocalSights",)

# How long callers share a reading of a live table, s.
_FRESH_S = 1.0
_TIMEOUT_S = 2.0
# Roles whose connections count. Launchers are among them because a launcher hosts the store to which the ranks of other
# nodes connect.
_ROLES = frozenset(("trainer", "launcher"))
_Key = tuple[str, str]


class LocalSights:
    """Reads ``net.sockets`` and ``comm.progress``. Thread-safe."""

    def __init__(self, collector: Collector, now: Callable[[], float] = time.monotonic) -> None:
        self._collector = collector
        self._now = now
        self._lock = threading.Lock()
        self._sights: tuple[float, Mapping[_Key, Sight]] = (now() - _FRESH_S, {})
        self._holdings: tuple[float, Mapping[_Key, Holding]] = (now() - _FRESH_S, {})

    def sight(self, job: str, run: str) -> Sight:
        """Returns the connections of the ranks of a run in the last ten minutes; empty if the collector does not
        answer."""
        with self._lock:
            if self._now() - self._sights[0] >= _FRESH_S:
                self._sights = self._now(), _sights(self._rows("net.sockets"))
            return self._sights[1].get((job, run), Sight())

    def holding(self, job: str, run: str) -> Holding:
        """Returns the ranks of a run; empty if the collector does not answer."""
        with self._lock:
            if self._now() - self._holdings[0] >= _FRESH_S:
                self._holdings = self._now(), _holdings(self._rows("comm.progress"))
            return self._holdings[1].get((job, run), Holding())

    def _rows(self, table: str) -> Iterable[Row]:
        rows, _ = live_rows(self._collector, (table,), time.monotonic() + _TIMEOUT_S)
        return rows.get(table, ())


def _sights(rows: Iterable[Row]) -> dict[_Key, Sight]:
    ends: dict[_Key, tuple[set[str], set[str]]] = {}
    for row in rows:
        if row["role"] in _ROLES and row["job"]:
            own, other = ends.setdefault((row["job"], row["run"]), (set(), set()))
            own.add(row["local_address"])
            other.add(row["peer_address"])
    return {key: Sight(_plain(own), _plain(other)) for key, (own, other) in ends.items()}


def _plain(addresses: Iterable[str]) -> frozenset[str]:
    return frozenset(sorted({plain_address(one) for one in addresses} - {""})[:MAX_ADDRESSES])


def _holdings(rows: Iterable[Row]) -> dict[_Key, Holding]:
    of_runs: dict[_Key, list[Row]] = {}
    for row in rows:
        of_runs.setdefault((row["job"], row["run"]), []).append(row)
    return {
        key: Holding(
            frozenset(row["rank"] for row in own if row["rank"] is not None),
            max(row["world_size"] or 0 for row in own),
            sum(row["calls"] or 0 for row in own),
            any(row["ended"] is None for row in own),
        )
        for key, own in of_runs.items()
    }
