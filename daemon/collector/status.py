"""Collects the fields of probing.v1.StatusReply."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from probing.daemon.source_state import SourceState
from probing.daemon.supervisor.fatal import RESTARTED

__all__ = ("Status", "summary_of")

# The drain looks at the rings ten times a second: after so long without a look it hangs, s.
STILL_S = 3.0
_MAX_REASON = 300


class Status:
    """``starting`` until ``ready`` is set.

    ``drain`` returns the seconds since the last step of the drain, and the bytes that wait in the rings.
    """

    def __init__(self, started_ns: int, boot_id: str) -> None:
        self._started_ns = started_ns
        self._boot_id = boot_id
        self._restarted = os.environ.get(RESTARTED, "")
        self.ready = False
        # Returns why all probes are paused; empty: they are not.
        self.paused: Callable[[], str] = str
        self.store: Callable[[], Mapping[str, Any]] = dict
        self.sources: Callable[[], list[SourceState]] = list
        self.processes: Callable[[], int] = lambda: 0
        self.failure: Callable[[], str | None] = lambda: None
        self.drain: Callable[[], tuple[float, int]] = lambda: (0.0, 0)
        # Rows that wait for the log, and reported losses by source and stage.
        self.waiting: Callable[[], int] = lambda: 0
        self.losses: Callable[[], Mapping[tuple[str, str], int]] = dict

    def to_dict(self) -> dict[str, Any]:
        store = self.store()
        sources = self.sources()
        paused = self.paused()
        reasons = [s.reason for s in sources if s.state == "degraded"]
        if store.get("state") == "degraded":
            reasons.append(str(store.get("reason")))
        if failure := self.failure():
            reasons.append(failure)
        age, backlog = self.drain()
        if self.ready and age > STILL_S:
            reasons.append(f"the rings have not been drained for {age:.0f} s, {backlog} bytes wait in them")
        state = self._state(bool(paused), bool(reasons))
        if self._restarted:
            reasons.append(f"the collector was started again: {self._restarted}")
        return {
            "state": state,
            "reason": "; ".join(dict.fromkeys([paused, *reasons] if paused else reasons)),
            "started_ns": self._started_ns,
            "boot_id": self._boot_id,
            "sources": [s.to_dict() for s in sources],
            "store_bytes": int(store.get("bytes", 0)),
            "store_segments": int(store.get("segments", 0)),
            "processes": self.processes(),
            "drain_age_ms": int(age * 1000),
            "drain_backlog_bytes": backlog,
            "waiting_rows": self.waiting(),
            "losses": [
                {"source": source, "stage": stage, "reported": count}
                for (source, stage), count in list(self.losses().items())
            ],
        }

    def _state(self, paused: bool, degraded: bool) -> str:
        if not self.ready:
            return "starting"
        if paused:
            return "paused"
        return "degraded" if degraded else "running"


def summary_of(status: Mapping[str, Any]) -> str:
    """Returns ``Status.to_dict`` in a line for `systemctl status`."""
    if status["state"] == "running":
        count = status["processes"]
        return f"collecting from {count} process{'' if count == 1 else 'es'}"
    reason = " ".join(status["reason"].split())
    return f"{status['state']}: {reason if len(reason) <= _MAX_REASON else f'{reason[: _MAX_REASON - 1]}…'}"
