"""The source of users' probes: loads, attaches, drains and unloads the probes in a directory."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy.typing as npt

from probing.api.errors import AttachError, ConfigError, ProbingError
from probing.daemon.clock import Clock
from probing.daemon.context import Context
from probing.daemon.elf.symbols import SymbolFinder
from probing.daemon.processes.discovery import Discovery
from probing.daemon.processes.parsers import symbols_by
from probing.daemon.processes.procfs import Mapping
from probing.daemon.processes.reader_pool import ReaderPool
from probing.daemon.source import Identity, Loss, ProcessKey, Sink, Source
from probing.daemon.source_state import SourceState, Totals
from probing.daemon.user_probes.compiler import load
from probing.daemon.user_probes.running import Counts, Running, rows_of
from probing.daemon.user_probes.spec import read_spec, spec_names, stamp_of
from probing.daemon.user_probes.targets import Targets
from probing.daemon.user_tables import UserTables
from probing.daemon.worker import Worker

__all__ = ("ProbeState", "UserProbes")

# The interval at which files, processes and counters are checked, s.
LOOK_S = 0.5
# The interval at which the rings are read, s: while there are probes, and while there are none.
_DRAIN_S, _IDLE_S = 0.1, 1.0
# How long a probe that was hit too often stays detached, ns.
REST_NS = 10_000_000_000
# The pause before a probe is loaded again after its loading failed for a temporary reason, ns.
RETRY_NS = 60_000_000_000
MAX_REPLACED = 4096
_log = logging.getLogger(__name__)


class ProbeState(NamedTuple):
    """The state of a probe. ``state``: one of the states of a source: running, degraded, paused or stopped."""

    name: str
    table: str
    state: str
    reason: str = ""
    lost: int = 0
    detail: str = ""


@dataclass(slots=True)
class _Probe:
    """A probe of the directory. ``off_ns``: the monotonic time at which the probe was detached after too many hits, 0
    if it is not detached for that reason; ``off_since_ns``: the same time in UTC. ``reported``: the counts at the last
    report.
    """

    stamp: tuple[object, ...]
    running: Running | None = None
    reason: str = ""
    retry_ns: int = 0
    off_ns: int = 0
    off_since_ns: int = 0
    reported: Counts = field(default_factory=lambda: Counts(0, 0, 0, 0))
    lost: int = 0


class UserProbes(Source):
    """The source of users' probes. ``readers`` and ``symbols`` read processes. ``multi``: whether the kernel has
    uprobe_multi links; ``fuse``: whether files of FUSE mounts get probes, too. The process with bcc is started only if
    there is a probe.
    """

    name = "user_probes"

    def __init__(
        self,
        folder: Path,
        tables: UserTables,
        sink: Sink,
        processes: Discovery,
        readers: ReaderPool,
        symbols: SymbolFinder,
        node: str,
        clock: Clock,
        *,
        multi: bool = True,
        fuse: bool = False,
    ) -> None:
        self._folder = folder
        self._tables = tables
        self._sink = sink
        self._processes = processes
        self._targets = Targets(readers, symbols, fuse=fuse)
        self._node = node
        self._clock = clock
        self._multi = multi
        self._probes: dict[str, _Probe] = {}
        self._trouble = ""
        self._paused_ns = 0
        self._replaced: deque[ProcessKey] = deque(maxlen=MAX_REPLACED)
        self._counted_ns = clock.pair().real_ns
        # Guards the dictionary and the rings: ``tick`` reads them, the worker's thread changes them.
        self._lock = threading.Lock()
        self._worker = Worker("user probes", self._look, lambda: LOOK_S)

    @classmethod
    def make(cls, context: Context) -> UserProbes:
        return cls(
            Path(context.config.probes.user_dir),
            context.find(UserTables),
            context.sink,
            context.processes,
            context.readers,
            symbols_by(context.parsers.stacks),
            context.node,
            context.clock,
            multi=context.session.features.uprobe_multi,
            fuse=context.config.probes.fuse,
        )

    def start(self) -> None:
        """Starts the thread, and returns at once. Probes are loaded one by one; an invalid probe is ``degraded``."""
        self._worker.start()

    def finish(self) -> None:
        self.stop()

    def stop(self) -> None:
        """Detaches and unloads all probes, and passes the last rows to the sink."""
        self._worker.stop()
        self.drain()
        for name in list(self._probes):
            self._unload(name)

    def pause(self, paused: bool) -> None:
        """Detaches all probes, or attaches them again."""
        if paused and not self._paused_ns:
            self._paused_ns = self._clock.pair().real_ns
        elif not paused and self._paused_ns:
            since, self._paused_ns = self._paused_ns, 0
            self._gap("all probes were paused", since)
        self._worker.wake()

    def process_identified(self, who: Identity) -> None:  # noqa: ARG002
        self._worker.wake()

    def process_replaced(self, pid: int, start_ns: int) -> None:
        """Attaches the probes again, since the new program maps other libraries."""
        self._replaced.append(ProcessKey(pid, start_ns))
        self._worker.wake()

    def process_exited(self, who: Identity) -> None:  # noqa: ARG002
        self._worker.wake()

    @property
    def tick_s(self) -> Callable[[], float]:
        """The interval is short while there are probes, since ``tick`` reads their rings."""
        return lambda: _DRAIN_S if self._probes else _IDLE_S

    def tick(self) -> None:
        self.drain()

    def drain(self) -> None:
        """Reads the rings of the probes, and passes the rows to the sink."""
        with self._lock:
            for name, probe in self._probes.items():
                if probe.running is not None:
                    self._drain(name, probe.running)

    def states(self, totals: Totals) -> list[SourceState]:
        return [
            SourceState(p.name, p.state, p.reason, totals.rows.get(p.table, 0), p.lost, p.detail) for p in self.probes()
        ]

    def probes(self) -> list[ProbeState]:
        """Returns the state of each probe, and of the directory if it cannot be read."""
        with self._lock:
            found = [self._state(name, probe) for name, probe in sorted(self._probes.items())]
        if self._trouble:
            found.append(ProbeState(self.name, "", "degraded", self._trouble))
        return found

    def _state(self, name: str, probe: _Probe) -> ProbeState:
        running = probe.running
        reasons = [probe.reason] if probe.reason else []
        state, detail = "degraded" if reasons else "running", ""
        if running is None:
            state = "degraded"
        else:
            if probe.off_ns:
                state = "degraded"
                reasons.append(f"hit more than {running.spec.budget} times a second: detached for 10 s")
            elif self._paused_ns:
                state = "paused"
            places = dict.fromkeys(place.where for place in running.spec.attach)
            detail = f"{', '.join(places)}: {running.attached}"
            if troubles := list(running.reasons.values()):
                state = "degraded"
                reasons += sorted(set(troubles))
        return ProbeState(f"user:{name}", f"user.{name}", state, "; ".join(reasons), probe.lost, detail)

    def _look(self) -> None:
        self._reload()
        self._count()
        mapped: dict[tuple[int, int], Sequence[Mapping]] = {}

        def files(who: Identity) -> Sequence[Mapping]:
            key = (who.pid, who.start_ns)
            if key not in mapped:
                mapped[key] = self._targets.files(who)
            return mapped[key]

        replaced = [self._replaced.popleft() for _ in range(len(self._replaced))]
        live = self._processes.live() if self._probes else []
        running = [(probe.running, probe) for probe in self._probes.values() if probe.running is not None]
        for loaded, _ in running:
            loaded.forget(replaced)
        for loaded, probe in running:
            if self._paused_ns or probe.off_ns:
                loaded.detach()
                continue
            loaded.follow([who for who in live if _is_probed(loaded.spec.who, who)], files, self._targets)

    def _reload(self) -> None:
        try:
            names = spec_names(self._folder)
            self._trouble = ""
        except ProbingError as e:
            self._trouble = e.message
            return
        for name in [name for name in self._probes if name not in names]:
            self._unload(name)
        for name in names:
            stamp, known = stamp_of(self._folder, name), self._probes.get(name)
            now = self._clock.pair().mono_ns
            if known is None or known.stamp != stamp or (known.retry_ns and now >= known.retry_ns):
                self._load(name, stamp)
            if self._worker.stopped:
                return

    def _load(self, name: str, stamp: tuple[object, ...]) -> None:
        """Loads a probe. Its earlier version ends even if the new version fails, so that only code that is still in the
        directory runs.
        """
        probe = _Probe(stamp)
        try:
            spec = read_spec(self._folder, name)
            loaded = load(spec, self._folder, self._tables.folder, multi=self._multi)
            try:
                probe.running = Running(spec, self._tables.define(spec.table), loaded, multi=self._multi)
            except BaseException:
                loaded.close()
                raise
        except (ProbingError, OSError) as error:
            # An OSError is raised, for example, if the ring cannot be mapped for lack of memory.
            e = error if isinstance(error, ProbingError) else _not_opened(error)
            probe.reason = e.message if not e.hint else f"{e.message} ({e.hint})"
            _log.warning("the probe %s is not loaded: %s", name, probe.reason)
            if not isinstance(e, ConfigError):
                probe.retry_ns = self._clock.pair().mono_ns + RETRY_NS
        self._replace(name, probe)

    def _unload(self, name: str) -> None:
        self._replace(name, None)

    def _replace(self, name: str, by: _Probe | None) -> None:
        """Ends the probe and puts ``by`` in its place in one step, so that ``probes`` never misses the probe."""
        ended = self._probes.get(name)
        if ended is not None and ended.running is not None:
            ended.running.detach()
            self._count()
        with self._lock:
            if by is not None:
                self._probes[name] = by
            else:
                self._probes.pop(name, None)
            if ended is not None and ended.running is not None:
                self._drain(name, ended.running)
                ended.running.close()

    def _drain(self, name: str, running: Running) -> None:
        pair = self._clock.pair()

        # A later version of the probe may have added columns to its table.
        table = self._tables[running.table.name]

        def take(records: npt.NDArray[Any]) -> None:
            batch = rows_of(running.spec, table, records, pair, self._node, self._processes)
            self._sink.put(table.name, batch)

        try:
            running.drain(take)
        except ProbingError as e:
            _log.warning("the ring of the probe %s cannot be read: %s", name, e.message)

    def _count(self) -> None:
        """Reports losses, and sets ``off_ns`` of a probe that is hit too often. After REST_NS, resets ``off_ns``."""
        pair = self._clock.pair()
        since, self._counted_ns = self._counted_ns, pair.real_ns
        for name, probe in list(self._probes.items()):
            if probe.running is None:
                continue
            counts, before = probe.running.counts(), probe.reported
            probe.reported = counts
            lose = partial(self._lose, probe, name, since, pair.real_ns)
            if more := counts.lost - before.lost:
                lose("ring", "the ring was full", more)
            if more := counts.refused - before.refused:
                lose("kernel", f"it was hit more than {probe.running.spec.budget} times a second", more)
                if not probe.off_ns:
                    probe.off_ns, probe.off_since_ns = pair.mono_ns, pair.real_ns
            elif probe.off_ns and pair.mono_ns - probe.off_ns > REST_NS:
                since_off, probe.off_ns = probe.off_since_ns, 0
                self._lose(probe, name, since_off, pair.real_ns, "kernel", "it was detached after too many hits", None)

    def _lose(
        self, probe: _Probe, name: str, since: int, until: int, stage: str, reason: str, count: int | None
    ) -> None:
        probe.lost += count or 0
        self._sink.lost(Loss(f"user:{name}", f"user.{name}", stage, reason, since, until, count))

    def _gap(self, reason: str, since: int) -> None:
        now = self._clock.pair().real_ns
        for name, probe in list(self._probes.items()):
            if probe.running is not None:
                self._lose(probe, name, since, now, "kernel", reason, None)


def _not_opened(error: OSError) -> AttachError:
    return AttachError(f"it cannot be opened: {error.strerror}", hint="it is tried again each minute")


def _is_probed(who: str, process: Identity) -> bool:
    return process.role == "trainer" if who == "trainers" else True
