"""Losses that the kernel counts, as rows: rings that were full, probes over their budget, times when all was paused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from probing.daemon.clock import Clock
from probing.daemon.source import Loss, Sink

__all__ = ("CountingSession", "LossMeter", "ProbeSlot")

INTERVAL_NS = 1_000_000_000
# How long a probe that was hit too often stays off before it is tried again.
BUDGET_REST_NS = 10_000_000_000
TABLES = {
    "collectives": "comm.ops",
    "communicators": "comm.communicators",
    "cuda_syncs": "cuda.syncs",
    "lifecycle": "process.events",
    "log_writes": "process.logs",
    "optimizer_steps": "train.steps",
    "python_samples": "python.samples",
}
# Probes of these show how operations end.
ENDS_SEEN_BY = ("comm.ops", "cuda.syncs")


@dataclass(frozen=True, slots=True)
class ProbeSlot:
    """What is counted under the number of a probe, and which rows are missing when it is switched off."""

    name: str
    source: str
    table: str


class CountingSession(Protocol):
    @property
    def paused(self) -> bool: ...

    def counters(self) -> dict[str, dict[str, int]]: ...

    def set_budget(self, slot: int, hits_a_second: int) -> None: ...


class LossMeter:
    """``tick`` is called often and looks once a second. ``slots`` says what is counted under a probe's number.

    ``also`` gives losses that others found; ``blinded`` is told the monotonic time up to which ends may be missed.
    """

    def __init__(
        self,
        session: CountingSession,
        clock: Clock,
        sink: Sink,
        slots: Mapping[int, ProbeSlot],
        budget: int,
        known_lost: Mapping[str, int],
        also: Callable[[], list[Loss]],
        blinded: Callable[[int], object],
    ) -> None:
        self._session = session
        self._clock = clock
        self._sink = sink
        self._slots = dict(slots)
        self._budget = budget
        self._also = also
        self._blinded = blinded
        self._last = clock.pair()
        self._lost = dict(known_lost)
        self._refused = {name: c["refused"] for name, c in session.counters().items() if "refused" in c}
        self._paused_since: int | None = None
        for slot in slots:
            session.set_budget(slot, budget)

    @property
    def lost(self) -> dict[str, int]:
        """Records that each ring has lost as far as rows of probing.losses tell it."""
        return dict(self._lost)

    @property
    def off(self) -> list[str]:
        """The probes that are switched off because they were hit too often."""
        counters = self._session.counters()
        return [p.name for slot, p in self._slots.items() if counters.get(f"probe:{slot}", {}).get("off_ns")]

    @property
    def hits(self) -> int:
        return sum(counts.get("hits", 0) for counts in self._session.counters().values())

    @property
    def samples(self) -> int:
        """Stacks that were sampled."""
        return self._session.counters().get("python_samples", {}).get("pushed", 0)

    def tick(self) -> None:
        pair = self._clock.pair()
        if pair.mono_ns - self._last.mono_ns < INTERVAL_NS:
            return
        since, self._last = self._last.real_ns, pair
        for loss in self._also():
            self._sink.lost(loss)
        counters = self._session.counters()
        for ring, table in TABLES.items():
            self._ring(ring, table, counters.get(ring, {}).get("lost", 0), since, pair.real_ns)
        for slot, probe in self._slots.items():
            if counts := counters.get(f"probe:{slot}"):
                self._probe(slot, probe, counts, since, pair.real_ns, pair.mono_ns)
        self._pause(since, pair.real_ns)

    def _ring(self, ring: str, table: str, lost: int, since: int, now: int) -> None:
        if more := lost - self._lost.get(ring, 0):
            self._sink.lost(Loss(ring, table, "ring", "the ring was full", since, now, max(more, 0)))
            self._lost[ring] = lost

    def _probe(self, slot: int, probe: ProbeSlot, counts: Mapping[str, int], since: int, now: int, mono: int) -> None:
        more = counts["refused"] - self._refused.get(f"probe:{slot}", 0)
        if more > 0:
            reason = f"{probe.name} was hit more than {self._budget} times a second and switched off"
            self._sink.lost(Loss(probe.source, probe.table, "kernel", reason, since, now, more))
            self._refused[f"probe:{slot}"] = counts["refused"]
            if probe.table in ENDS_SEEN_BY:
                self._blinded(mono)
        if counts["off_ns"] and mono - counts["off_ns"] > BUDGET_REST_NS:
            self._session.set_budget(slot, self._budget)

    def _pause(self, since: int, now: int) -> None:
        if self._session.paused:
            self._paused_since = self._paused_since or since
        elif self._paused_since is not None:
            for source, table in TABLES.items():
                self._sink.lost(Loss(source, table, "kernel", "all probes were paused", self._paused_since, now))
            self._paused_since = None
