"""Sums up comm.progress for each process: collectives a second, the age of its last call, how late it calls."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from probing.client.collectives.ranks import process_of
from probing.client.collectives.silence import Process
from probing.client.render.rows import Row
from probing.client.top.history import Lags, Rates

__all__ = ("Progress",)

_Group = tuple[Any, ...]


class Progress:
    """Follows the rows of comm.progress of all nodes from one refresh to the next."""

    def __init__(self, window: float) -> None:
        """``window``: seconds over which rates are taken."""
        self._rates = Rates(window)
        self._lags = Lags()

    def calls(self, rows: Iterable[Row]) -> dict[Process, Row]:
        """Returns collectives_per_s and last_age_ns, ns, by process. No rate is known at the first look."""
        found: dict[Process, Row] = {}
        totals: dict[tuple[Any, ...], int] = {}
        for row in rows:
            key = (*process_of(row), row["start_ns"])
            totals[key] = totals.get(key, 0) + (row["calls"] or 0)
            own = found.setdefault(process_of(row), {"now_ns": row["now_ns"], "last_age_ns": None, "key": key})
            if row["call_ns"] is not None:
                age = max(0, row["now_ns"] - row["call_ns"])
                own["last_age_ns"] = age if own["last_age_ns"] is None else min(own["last_age_ns"], age)
        for own in found.values():
            own["collectives_per_s"] = self._rates.add(own["key"], own["now_ns"], totals[own["key"]])
        self._rates.keep(totals)
        return found

    def lags(self, rows: Iterable[Row]) -> dict[Process, int]:
        """Returns the worst lag over the communicators of each process, ns.

        Ranks whose last operation is the same one are compared. Between nodes a lag has the difference of their clocks.
        """
        same: dict[_Group, list[Row]] = {}
        keys = set()
        for row in rows:
            keys.add(_member(row))
            if row["seq"] is not None and row["call_ns"] is not None and (row["size"] or 2) > 1:
                same.setdefault((row["job"], row["run"], row["comm"], row["seq"]), []).append(row)
        for (_, _, _, seq), members in same.items():
            if len(members) < 2:
                continue
            calls = sorted(row["call_ns"] for row in members)
            middle = calls[(len(calls) - 1) // 2]
            for row in members:
                self._lags.add(_member(row), seq, row["call_ns"] - middle)
        self._lags.keep(keys)
        found: dict[Process, int] = {}
        for node, pid, start_ns, comm in keys:
            lag = self._lags.of((node, pid, start_ns, comm))
            if lag is not None:
                found[node, pid] = max(lag, found.get((node, pid), lag))
        return found


def _member(row: Row) -> tuple[str, int, int, Any]:
    return row["node"], row["pid"], row["start_ns"], row["comm"]
