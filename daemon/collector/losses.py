"""Reports losses that the kernel counts: full rings, spent budgets, and times in which all probes were paused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from probing.daemon.clock import Clock
from probing.daemon.collector.refusals import BudgetedSession, Refusals
from probing.daemon.source import Loss, ProbeSlot, Sink

__all__ = ("CountingSession", "LossMeter")

INTERVAL_NS = 1_000_000_000


class CountingSession(BudgetedSession, Protocol):
    @property
    def paused(self) -> bool: ...

    def counters(self) -> dict[str, dict[str, int]]: ...


class LossMeter:
    """Reads the counters once a second; ``tick`` is called more often. ``tables``: the table of each ring.

    ``also`` returns losses that others found; ``blinded`` is that of ``Refusals``.
    """

    def __init__(
        self,
        session: CountingSession,
        clock: Clock,
        sink: Sink,
        tables: Mapping[str, str],
        slots: Mapping[int, ProbeSlot],
        budget: int,
        known_lost: Mapping[str, int],
        also: Callable[[], list[Loss]],
        blinded: Callable[[int, int | None], object],
    ) -> None:
        self._session = session
        self._clock = clock
        self._sink = sink
        self._tables = dict(tables)
        self._also = also
        self._last = clock.pair()
        self._counters = session.counters()
        self._lost = dict(known_lost)
        self._refusals = Refusals(session, sink, slots, budget, blinded, self._last)
        # UTC ns; after a restart amid a pause, the time of the restart.
        self._paused_since = self._last.real_ns if session.paused else None

    @property
    def lost(self) -> dict[str, int]:
        """Lost records of each ring that rows of probing.losses report."""
        return dict(self._lost)

    @property
    def off(self) -> list[str]:
        """Names of the probes that were switched off at the last tick, since they were hit too often."""
        return self._refusals.off(self._counters)

    @property
    def hits(self) -> int:
        """How often all probes were hit by the last tick."""
        return sum(counts.get("hits", 0) for counts in self._counters.values())

    @property
    def samples(self) -> int:
        """How many stacks were sampled by the last tick."""
        return self._counters.get("python_samples", {}).get("pushed", 0)

    def pause(self, paused: bool) -> None:
        """Reports the time without probes as a gap of every table when they are resumed, however short it was."""
        now = self._clock.pair().real_ns
        if paused:
            self._paused_since = self._paused_since or now
        elif self._paused_since is not None:
            since, self._paused_since = self._paused_since, None
            for source, table in self._tables.items():
                self._sink.lost(Loss(source, table, "kernel", "all probes were paused", since, now))

    def tick(self) -> None:
        pair = self._clock.pair()
        if pair.mono_ns - self._last.mono_ns < INTERVAL_NS:
            return
        since, self._last = self._last.real_ns, pair
        for loss in self._also():
            self._sink.lost(loss)
        counters = self._counters = self._session.counters()
        for ring, table in self._tables.items():
            self._ring(ring, table, counters.get(ring, {}).get("lost", 0), since, pair.real_ns)
        self._refusals.look(counters, since, pair)

    def _ring(self, ring: str, table: str, lost: int, since: int, now: int) -> None:
        if more := lost - self._lost.get(ring, 0):
            self._sink.lost(Loss(ring, table, "ring", "the ring was full", since, now, max(more, 0)))
            self._lost[ring] = lost
