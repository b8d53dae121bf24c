"""Reports losses as rows of probing.losses: full rings, hits beyond the budget (by process if possible), and pauses of
all probes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from probing.daemon.bpf.session import Session
from probing.daemon.clock import Clock, ClockPair
from probing.daemon.source import Loss, ProbeSlot, Sink

__all__ = ("LossMeter",)

# A probe that was hit too often on one CPU, by all processes together, stays off for this time, ns.
REST_NS = 10_000_000_000
# A probe is switched off when one CPU accepts this multiple of its budget in a second: PROBE_BUDGETS of guard.bpf.h.
PROBE_BUDGETS = 8
# Tables whose operations stay open if the probes miss their end.
ENDS_SEEN_BY = ("comm.ops", "cuda.syncs")


class _Refusals:
    """Reports refused hits. ``look`` reports the hits refused since its last call, or since the last report of the
    previous collector.

    ``blinded`` is called with the monotonic time up to which ends of operations may have been missed, and with the pid
    of the process that missed them (None: all processes).
    """

    def __init__(
        self,
        session: Session,
        sink: Sink,
        slots: Mapping[int, ProbeSlot],
        budget: int,
        blinded: Callable[[int, int | None], object],
        pair: ClockPair,
    ) -> None:
        self._session = session
        self._sink = sink
        self._slots = dict(slots)
        self._budget = budget
        self._blinded = blinded
        self._reported = {slot: session.reported_refusals(slot) for slot in slots}
        # The refusals by process at the last report. ``_report`` subtracts them to get the later refusals.
        last = max((ts for _, ts in self._reported.values()), default=0)
        self._of_processes = session.refusals(before_ns=last - pair.mono_to_utc_ns)
        for slot in slots:
            session.set_budget(slot, budget)

    def off(self, counters: Mapping[str, Mapping[str, int]]) -> list[str]:
        """Returns the names of the probes that are switched off for all processes."""
        return [p.name for slot, p in self._slots.items() if counters.get(f"probe:{slot}", {}).get("off_ns")]

    def look(self, counters: Mapping[str, Mapping[str, int]], since: int, pair: ClockPair) -> None:
        """Reports refused hits. ``counters``: the session's counters. ``since``: the UTC time of the last look, ns."""
        of_processes: dict[tuple[int, int], int] | None = None
        for slot, probe in self._slots.items():
            counts = counters.get(f"probe:{slot}")
            if counts is None:
                continue
            if counts["refused"] > self._reported[slot][0]:
                of_processes = self._session.refusals() if of_processes is None else of_processes
                self._report(slot, probe, counts, of_processes, since, pair)
            if counts["off_ns"] and pair.mono_ns - counts["off_ns"] > REST_NS:
                self._session.set_budget(slot, self._budget)
        if of_processes is not None:
            # Processes that were dropped from the kernel's map are dropped from this dict, too.
            self._of_processes = {key: min(self._of_processes.get(key, 0), n) for key, n in of_processes.items()}

    def _report(
        self,
        slot: int,
        probe: ProbeSlot,
        counts: Mapping[str, int],
        of_processes: Mapping[tuple[int, int], int],
        since: int,
        pair: ClockPair,
    ) -> None:
        reported, reported_ts = self._reported[slot]
        since = min(since, reported_ts or since)
        left = counts["refused"] - reported
        limit = f"more than {self._budget} times a second"
        for (number, pid), refused in of_processes.items():
            before = self._of_processes.get((number, pid), 0)
            # A count that is smaller than before was reset. Counts may have grown since the total was read, so ``left``
            # limits them.
            more = min(refused - before if refused >= before else refused, left)
            if number == slot and more > 0:
                self._lose(probe, probe.why or f"this process hit {probe.name} {limit}", since, pair, more, pid)
                self._of_processes[number, pid] = (before if refused >= before else 0) + more
                left -= more
        if left and counts["off_ns"]:
            reason = f"{probe.name} was hit more than {PROBE_BUDGETS * self._budget} times a second and switched off"
            self._lose(probe, reason, since, pair, left, None)
        elif left:
            self._lose(probe, f"processes that are no longer known hit {probe.name} {limit}", since, pair, left, None)
        self._reported[slot] = counts["refused"], pair.real_ns
        self._session.set_reported_refusals(slot, *self._reported[slot])

    def _lose(self, probe: ProbeSlot, reason: str, since: int, pair: ClockPair, count: int, pid: int | None) -> None:
        self._sink.lost(Loss(probe.source, probe.table, "kernel", reason, since, pair.real_ns, count, pid))
        # If ``why`` is set, the slot limits the share of a map or ring that a process may use. A used-up share refuses
        # beginnings of operations, not ends.
        if probe.table in ENDS_SEEN_BY and not probe.why:
            self._blinded(pair.mono_ns, pid)


INTERVAL_NS = 1_000_000_000


class LossMeter:
    """Reads the counters once a second; ``tick`` may be called more often. ``tables``: the table of each ring.

    ``also`` returns the losses of the store; ``blinded``: see ``_Refusals``.
    """

    def __init__(
        self,
        session: Session,
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
        self._refusals = _Refusals(session, sink, slots, budget, blinded, self._last)
        # When the pause began, UTC ns, even if an earlier daemon began it. If unknown, the start of this daemon counts.
        began = session.paused_ns
        since = began + self._last.mono_to_utc_ns if began else self._last.real_ns
        self._paused_since = since if session.paused else None

    @property
    def lost(self) -> dict[str, int]:
        """By ring, the number of lost records that rows of probing.losses report."""
        return dict(self._lost)

    @property
    def off(self) -> list[str]:
        """The names of the probes that were off at the last tick, because they were hit too often."""
        return self._refusals.off(self._counters)

    @property
    def hits(self) -> int:
        """The number of hits of all probes up to the last tick."""
        return sum(counts.get("hits", 0) for counts in self._counters.values())

    @property
    def samples(self) -> int:
        """The number of stacks sampled up to the last tick."""
        return self._counters.get("python_samples", {}).get("pushed", 0)

    def pause(self, paused: bool) -> None:
        """Notes the beginning of a pause. At the end of the pause, reports the time without probes, however short, as a
        gap of each table.
        """
        now = self._clock.pair().real_ns
        if paused:
            self._paused_since = self._paused_since or now
        elif self._paused_since is not None:
            since, self._paused_since = self._paused_since, None
            for source, table in self._tables.items():
                self._sink.lost(Loss(source, table, "kernel", "all probes were paused", since, now))

    def stood_still(self, since_ns: int, until_ns: int) -> None:
        """Reports a gap of each table: from ``since_ns`` to ``until_ns`` (CLOCK_MONOTONIC) nothing was recorded,
        because this process did not run.
        """
        offset = self._clock.pair().mono_to_utc_ns
        reason = "the daemon stood still for longer than a minute, and the programs stopped recording"
        for source, table in self._tables.items():
            self._sink.lost(Loss(source, table, "kernel", reason, since_ns + offset, until_ns + offset))

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
