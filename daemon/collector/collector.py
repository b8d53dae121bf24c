"""The collector, put together: one line a source, and the order in which they begin and end."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy.typing as npt

from probing.api.errors import ConfigError, InternalError
from probing.daemon.bpf.mmap_events import MmapWatch
from probing.daemon.bpf.recording import Recorder
from probing.daemon.bpf.session import Session
from probing.daemon.clock import ClockPair, SystemClock
from probing.daemon.collector import optional_sources
from probing.daemon.collector.communication import OBJECTS, OPTIONAL, RING, CommunicationSources
from probing.daemon.collector.context import Parsers, Shared
from probing.daemon.collector.control import ControlServer
from probing.daemon.collector.cost import CostMeter
from probing.daemon.collector.drain import LOOK_S, DrainLoop
from probing.daemon.collector.libraries.probes import LibraryProbes
from probing.daemon.collector.libraries.watch import LibraryWatch
from probing.daemon.collector.lifecycle import Lifecycle
from probing.daemon.collector.live_settings import Changes
from probing.daemon.collector.losses import LossMeter
from probing.daemon.collector.optional_sources import OptionalSources
from probing.daemon.collector.pausing import Pausing
from probing.daemon.collector.python_sources import PythonSources
from probing.daemon.collector.requests import Requests
from probing.daemon.collector.row_buffer import Outbox
from probing.daemon.collector.settings import limits_of, ring_size, user_number
from probing.daemon.collector.status import SourceState, Status, some
from probing.daemon.collector.ticker import Ticker
from probing.daemon.collector.unidentified import Strangers
from probing.daemon.collector.upgrade import take_over
from probing.daemon.config import Config
from probing.daemon.nccl_uprobes.communicators import rows as communicators
from probing.daemon.processes.discovery import RESTORED, Discovery
from probing.daemon.processes.reader_pool import ReaderPool
from probing.daemon.python_stack.sampling import programs as sampling
from probing.daemon.source import Loss
from probing.daemon.store.jobs.runner import RemoteWorker
from probing.daemon.store.store import Store
from probing.daemon.user_probes.tables import UserTables

__all__ = ("Collector",)

_log = logging.getLogger(__name__)
READERS = 3
SCAN_TIMEOUT_S = 10.0
DAY_NS = 86_400_000_000_000
TICK_S = 1.0
LIBRARIES_TIMEOUT_S = 5.0


class Collector:
    """``start`` raises ProbingError when it cannot collect; then ``stop`` undoes what was begun."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._node = config.node_name or socket.gethostname()
        self._clock = SystemClock()
        self._runtime = Path(config.runtime_dir)
        self._undo = contextlib.ExitStack()
        self._status = Status(self._clock.pair().real_ns, self._clock.boot_id)

    def start(self) -> None:
        undo, config = self._undo, self._config
        # First, so that their processes start while the store is recovered and the programs are loaded.
        self._readers = readers = ReaderPool(str(self._runtime / "reader.sock"), READERS)
        undo.callback(readers.close)
        parsers = Parsers(str(self._runtime / "parser.sock"))
        undo.callback(parsers.close)
        self._tables = UserTables(Path(config.state_dir) / "user_tables.json")
        # Before the store: limits that were changed for good hold from the start.
        changes = Changes(config, Path(config.state_dir) / "changes.json", lambda: self._clock.pair().real_ns)
        limits = limits_of(config, changes.value)
        self._store = store = Store.open(
            config.state_dir, node=self._node, clock=self._clock, limits=limits, tables=self._tables,
            worker=partial(RemoteWorker, self._runtime / "maintenance.sock"),
        )
        undo.callback(store.close)
        self._changes = changes
        changes.listeners.append(lambda: store.set_limits(limits_of(config, changes.value)))
        self._outbox = Outbox(self._node, self._clock, self._tables)
        for loss in self._store.recovery_losses:
            self._outbox.lost(loss)
        self._session = Session.open(
            config.instance,
            ["lifecycle", *OBJECTS],
            pin_root=Path(config.probes.bpffs),
            fallback=config.probes.force_fallback,
            sizes={RING: ring_size(config, "probes"), sampling.RING: ring_size(config, "sampling")},
            optional=[*OPTIONAL, *optional_sources.OBJECTS, *sampling.OBJECTS],
        )
        undo.callback(self._session.close, True)
        self._pausing = Pausing(self._session, self._runtime / "pause", self._clock)
        self._make_sources(readers, parsers)
        self._make_loop()
        self._begin()

    def _make_sources(self, readers: ReaderPool, parsers: Parsers) -> None:
        shared = Shared(
            self._config, self._node, self._session, readers, parsers, self._outbox, self._clock, self._changes
        )
        self._python = PythonSources(shared)
        self._undo.callback(self._python.close)
        self._discovery = Discovery(
            readers,
            self._outbox,
            self._clock,
            self._node,
            python_version=self._python.stacks.python_version,
            backends=lambda pid, start_ns: self._collectives.backends_of(pid, start_ns),
        )
        self._undo.callback(self._discovery.stop)
        self._communication = CommunicationSources(shared, self._discovery)
        self._undo.callback(self._communication.close)
        self._collectives = self._communication.collectives
        self._optional = OptionalSources(shared, self._discovery, self._tables)
        self._python.follow(self._discovery)
        self._discovery.listeners += [self._communication, self._optional, self._python]
        probes = LibraryProbes(self._session, self._communication.libraries, self._outbox, self._clock)
        self._libraries = LibraryWatch(readers, probes, fuse=self._config.probes.fuse)
        self._communication.look_again = self._libraries.look_again
        self._undo.callback(self._libraries.stop)
        self._mappings = MmapWatch(self._libraries.interesting)
        self._undo.callback(self._mappings.close)

    def _make_loop(self) -> None:
        lifecycle = Lifecycle(self._discovery, self._mappings, self._libraries)
        self._loop = DrainLoop(
            self._store,
            # What happens to a communicator closes operations on it: those come out in the same drain.
            {name: self._session.rings[name] for name in sorted(self._session.rings, key=communicators.RING.__ne__)},
            {
                "lifecycle": lifecycle.assemble,
                **self._communication.assemble,
                **self._optional.assemble,
                **self._python.assemble,
            },
            self._outbox,
            self._clock,
            each_look=(lambda: self._losses.tick(),),
            lost=lambda: self._losses.lost,
            record=self._recorder(),
            ready=self._python.ready,
            takes=dict.fromkeys(self._communication.identified, Strangers(self._discovery).takes),
            shares=dict.fromkeys(self._python.ready, sampling.FULL_SHARE),
            rests=dict.fromkeys(self._python.ready, sampling.REST_S),
        )
        self._losses = LossMeter(
            self._session,
            self._clock,
            self._outbox,
            self._communication.slots | self._optional.slots | self._python.slots,
            self._config.probes.hit_budget,
            self._loop.resume(),
            self._store.take_losses,
            self._collectives.abandon_before,
        )
        cost = CostMeter(self._node, self._clock, self._outbox, lambda: self._losses.hits, lambda: self._losses.samples)
        self._tickers = (
            Ticker("mappings", LOOK_S, lifecycle.read_mappings, wakes=self._mappings.filenos()),
            Ticker("users' rings", self._optional.tick_s, self._optional.tick),
            Ticker("ticks", TICK_S, self._python.tick, self._communication.tick, cost.tick),
            # Its listeners attach, and may wait for a parser.
            Ticker("changes", TICK_S, self._changes.tick),
        )

    def _recorder(self) -> Callable[[str, ClockPair, npt.NDArray[Any]], None] | None:
        folder = self._config.probes.recordings
        if not folder:
            return None
        path = Path(folder) / f"rings-{self._clock.pair().real_ns}.recording"
        try:
            recorder = Recorder(path)
        except OSError as e:
            hint = "the directory must be there and belong to the collector's user"
            raise ConfigError(f"no recording can be made at {path}: {e.strerror}", hint=hint) from e
        self._undo.callback(recorder.close)
        return recorder.write

    def _begin(self) -> None:
        status = self._status
        status.store, status.sources = self._store.status, self._source_states
        status.processes = lambda: len(self._discovery.live())
        status.paused = lambda: self._pausing.reason
        status.failure = lambda: self._loop.failure
        status.drain = lambda: (self._loop.age_s, self._loop.backlog)
        self._listen()
        self._communication.start()
        self._take_over()
        self._libraries.start()
        self._optional.start()
        self._python.start()
        pair = self._clock.pair()
        # A clock that was set since the boot may have stamped them earlier.
        boot_ns = pair.real_ns - pair.boot_ns - DAY_NS
        self._discovery.restore(self._store.rows("process.events", RESTORED, since_ns=boot_ns))
        self._discovery.start()
        self._drain_thread = threading.Thread(target=self._loop.run, name="drain", daemon=True)
        self._drain_thread.start()
        self._undo.callback(self._drain_thread.join)
        self._undo.callback(self._loop.stop)
        for ticker in self._tickers:
            ticker.start()
            self._undo.callback(ticker.stop)
        # Before the last drain: what these have seen is in no ring that the next daemon finds.
        self._undo.callback(self._optional.close)
        # What a stranger makes slow goes on behind.
        self._libraries.scanned(LIBRARIES_TIMEOUT_S)
        self._discovery.scanned(SCAN_TIMEOUT_S)
        self._communication.sweep()
        status.ready = True
        found = status.to_dict()
        if found["state"] == "degraded":
            _log.warning("ready, but degraded: %s", found["reason"])

    def _listen(self) -> None:
        clock, discovery = self._clock, self._discovery
        answers = self._python.answers(discovery)
        live = {
            "comm.inflight": lambda: self._collectives.inflight(clock.pair()),
            "process.processes": lambda: discovery.rows(clock.pair()),
            "process.envs": lambda: discovery.envs(clock.pair()),
            "python.backtrace": lambda: answers.backtrace(clock.pair().real_ns),
        }
        requests = Requests(
            self._store, answers, self._changes, live, self._loop.flush, self._status.to_dict, self._pause,
            self._tables.described,
        )  # fmt: skip
        users = frozenset({user_number(self._config.users.service)})
        control = ControlServer(Path(self._config.control_socket), requests.handlers(), users)
        control.on_disconnect = requests.release_all
        control.start()
        self._undo.callback(control.stop)

    def stop(self) -> None:
        self._undo.close()

    def check(self) -> None:
        """Now and then: the heartbeat of the programs, and the file that pauses everything.

        Raises InternalError when the rings are not drained any more, StoreError when the state directory was deleted: a
        fresh collector goes on where this one stopped.
        """
        if not self._drain_thread.is_alive():
            raise InternalError("the rings are not drained any more")
        self._store.check()
        if self._pausing.follow():
            self._optional.pause(self._session.paused)
            # What ends while the programs sleep is not seen to end.
            self._collectives.abandon_before(self._clock.pair().mono_ns)
        self._session.heartbeat()

    def _pause(self, paused: bool) -> bool:
        self._pausing.asked = paused
        self.check()
        return self._session.paused

    def _take_over(self) -> None:
        pair = self._clock.pair()
        if self._session.blind:
            since, until = (t + pair.mono_to_utc_ns for t in self._session.blind)
            reason = "no daemon ran for longer than a minute, and the programs slept"
            self._outbox.lost(Loss(RING, "comm.ops", "kernel", reason, since, until))
        record = self._session.rings[RING].record
        for foreign in self._session.foreign:
            take_over(
                foreign, RING, "operations", record, self._communication.collectives.assemble, self._store,
                self._outbox, self._clock,
            )

    def _source_states(self) -> list[SourceState]:
        state = "paused" if self._session.paused else "running"
        off = self._losses.off
        reason = some([*(f"switched off, hit too often: {n}" for n in off), *self._libraries.reasons])
        rows, lost = self._outbox.rows, self._outbox.lost_rows
        attached = some([f"{path} x{n}" for path, n in self._libraries.attached.items()], ", ")
        silent = some([f"process {q.pid} does not let itself be read ({q.op})" for q in self._readers.quarantined()])
        return [
            SourceState("collectives", "degraded" if off else state, reason, rows["comm.ops"], lost[RING], attached),
            *self._communication.states(state, rows, lost),
            SourceState("processes", state, silent, rows["process.events"], lost["lifecycle"]),
            *self._python.states(state, rows, lost),
            *self._optional.states(state, rows, lost),
        ]
