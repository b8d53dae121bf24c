"""The collector: opens the session and the store, builds the sources, and starts and stops all parts in order."""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import pyarrow as pa

from probing.api.errors import AttachError, InternalError, PrivilegeError, ProbingError
from probing.api.typed import with_fields
from probing.daemon.bpf.capabilities import explained
from probing.daemon.bpf.mmap_events import MmapWatch
from probing.daemon.bpf.session import Session
from probing.daemon.clock import ClockPair, SystemClock
from probing.daemon.collector.control import ControlServer, Handler, Requests
from probing.daemon.collector.daemon_rows import CostMeter, FindingRows, Status, store_batch, summary_of, version_batch
from probing.daemon.collector.drain import LOOK_S, DrainLoop
from probing.daemon.collector.group_records import GroupRecords
from probing.daemon.collector.libraries.probes import LibraryProbes
from probing.daemon.collector.libraries.watch import LibraryWatch
from probing.daemon.collector.lifecycle import IdentityWait, Lifecycle
from probing.daemon.collector.live_settings import Changes
from probing.daemon.collector.losses import LossMeter
from probing.daemon.collector.pausing import Pausing
from probing.daemon.collector.recordings import Record, open_recorder
from probing.daemon.collector.row_buffer import RowBuffer
from probing.daemon.collector.settings import limits_of, own_users, user_number
from probing.daemon.collector.source_set import SOURCES, SourceSet, objects_of, ring_sizes_of
from probing.daemon.collector.ticker import Ticker
from probing.daemon.collector.upgrade import take_over_layouts
from probing.daemon.config import Config
from probing.daemon.context import Context, SourceType
from probing.daemon.labels.source import Labels
from probing.daemon.nccl_uprobes.operations.source import FIRST_OBJECT, CollectivesSource
from probing.daemon.processes.conditions.answers import ConditionAnswers
from probing.daemon.processes.discovery import RESTORED, Discovery
from probing.daemon.processes.liveness import OwnProcesses, is_alive
from probing.daemon.processes.parsers import ParserPools
from probing.daemon.processes.reader_pool import ReaderPool
from probing.daemon.python_stack.answers import StackAnswers
from probing.daemon.python_stack.source import StacksOnDemand
from probing.daemon.source_state import SourceState, Totals
from probing.daemon.store.format import JOB_ROWS
from probing.daemon.store.store import Store
from probing.daemon.store.tasks.worker import RemoteWorker
from probing.daemon.user_tables import UserTables

__all__ = ("Collector",)

_log = logging.getLogger(__name__)
READERS = 3
SCAN_TIMEOUT_S = 10.0
DAY_NS = 86_400_000_000_000
TICK_S = 1.0
LIBRARIES_TIMEOUT_S = 5.0
# Late BPF programs are loaded this many seconds after the start, so that they do not delay the first answer to a
# client.
LATE_S = 2.0


class Collector:
    """All parts of the collector, built in the order of their dependencies. ``start`` starts them.

    Raises ProbingError if a part cannot be built; in that case the parts built before it are stopped.
    """

    def __init__(self, config: Config, kinds: Sequence[SourceType] = SOURCES) -> None:
        self._config = config
        self._kinds = kinds
        self._node = config.node_name or socket.gethostname()
        self._clock = SystemClock()
        self._runtime = Path(config.runtime_dir)
        self._begun = math.inf
        started_ns = self._clock.pair().real_ns
        # Set at the end of ``start``, or when the collector stops or cannot be built.
        self._settled = threading.Event()
        # Guards ``Pausing.follow``, because the main loop and the threads of clients call it.
        self._pause_lock = threading.Lock()
        self._undo = contextlib.ExitStack()
        with contextlib.ExitStack() as failed:
            failed.push(self._undo)
            # Readers and parsers come first: they start while the store is recovered and the programs are loaded.
            self._readers = ReaderPool(str(self._runtime / "reader.sock"), READERS)
            self._undo.callback(self._readers.close)
            self._parsers = ParserPools(str(self._runtime / "parser.sock"))
            self._undo.callback(self._parsers.close)
            state = Path(config.state_dir)
            self._tables = UserTables(state / "user_tables.json")
            # The changed settings are read before the store opens, so that changed limits apply from the start.
            self._changes = Changes(config, state / "changes.json", lambda: self._clock.pair().real_ns)
            self._store = self._open_store()
            self._buffer = RowBuffer(self._node, self._clock, self._tables)
            self._buffer.restore(self._rows_read())
            for loss in self._store.recovery_losses:
                self._buffer.lost(loss)
            self._session = self._open_session()
            self._pausing = Pausing(self._session, self._runtime / "pause", self._clock)
            own = OwnProcesses(own_users(config))
            self._own = own
            self._discovery = self._make_discovery(own)
            self._context = self._make_context()
            self._sources = SourceSet(self._buffer)
            self._sources.build(kinds, self._context, self._undo)
            self._undo.callback(self._discovery.stop)
            self._undo.callback(self._settled.set)
            probes = LibraryProbes(self._session, self._sources.libraries, self._buffer, self._clock)
            self._libraries = LibraryWatch(self._readers, probes, fuse=config.probes.fuse, own=own)
            self._undo.callback(self._libraries.stop)
            self._mappings = self._watch_mappings()
            self._lifecycle = Lifecycle(
                self._discovery, self._mappings, self._libraries, self._changes, self._readers.quarantined
            )
            self._sources.add(self._lifecycle)
            self._discovery.listeners += self._sources
            self._changes.listeners.append(self._settings_changed)
            self._loop = self._make_loop()
            self._losses = self._make_losses()
            self._drain_thread = threading.Thread(target=self._loop.run, name="drain", daemon=True)
            self._status = Status(
                started_ns,
                self._clock.boot_id,
                paused=lambda: self._pausing.reason,
                store=self._store.status,
                sources=self._source_states,
                processes=lambda: len(self._discovery.live()),
                failure=lambda: self._loop.failure,
                drain=lambda: (self._loop.age_s, self._loop.backlog),
                waiting=lambda: self._buffer.waiting,
                losses=lambda: self._buffer.reported,
            )
            failed.pop_all()

    def _open_store(self) -> Store:
        config, changes = self._config, self._changes
        store = Store.open(
            config.state_dir,
            node=self._node,
            clock=self._clock,
            limits=limits_of(config, changes.value),
            tables=self._tables,
            worker=partial(RemoteWorker, self._runtime / "maintenance.sock"),
        )
        self._undo.callback(store.close)
        self._tables.drop_empty(partial(_tables_with_rows, store))
        changes.listeners.append(lambda: store.set_limits(limits_of(config, changes.value)))
        changes.deletes = lambda value: store.deletion(limits_of(config, value))
        changes.waiting = store.waiting
        return store

    def _open_session(self) -> Session:
        config = self._config
        objects, optional = objects_of(self._kinds)
        try:
            session = Session.open(
                config.instance,
                [*Lifecycle.objects, *objects],
                pin_root=Path(config.probes.bpffs),
                fallback=config.probes.force_fallback,
                sizes=ring_sizes_of(self._kinds, config),
                optional=optional,
                late=[name for kind in self._kinds for name in kind.late_objects],
            )
        except (AttachError, PrivilegeError) as e:
            raise explained(e) from e.__cause__
        self._undo.callback(session.close, True)
        # A thread loads the programs for collectives during the search for libraries, because both take about as long.
        ahead = threading.Thread(target=_load_ahead, args=(session,), name="programs", daemon=True)
        ahead.start()
        self._undo.callback(ahead.join)
        return session

    def _make_discovery(self, own: OwnProcesses) -> Discovery:
        """Returns the discovery of processes. The discovery gets some facts from sources, and sources look up
        identities in the discovery. Because of this cycle, the discovery looks up a source only when it needs a fact.
        """

        def stacks() -> StacksOnDemand:
            return self._context.find(StacksOnDemand)

        return Discovery(
            self._readers,
            self._buffer,
            self._clock,
            self._node,
            python_version=self._python_version,
            module_state=lambda pid, start_ns: stacks().module_state(pid, start_ns),
            training_threads=lambda keys: stacks().training_threads(keys),
            runs_python=lambda pid, start_ns, tid: stacks().runs_python(pid, start_ns, tid),
            backends=lambda pid, start_ns: self._context.find(CollectivesSource).backends_of(pid, start_ns),
            cgroup=self._config.cgroup,
            own=own,
        )

    def _python_version(self, pid: int, start_ns: int) -> str:
        # ``python_version`` may start a parser. The start of the daemon must not wait for a parser, so this call waits
        # until the start is over.
        self._settled.wait()
        return self._context.find(StacksOnDemand).stacks.python_version(pid, start_ns)

    def _make_context(self) -> Context:
        context = Context(
            self._config,
            self._node,
            self._session,
            self._readers,
            self._parsers,
            self._buffer,
            self._clock,
            self._changes,
            self._discovery,
            self._rows_read(),
        )
        context.share(self._tables)
        return context

    def _rows_read(self) -> Mapping[str, int]:
        """Returns the number of the next row to read from each memory file of a job, by file name. The numbers come
        from the last record of the log. The result is empty if they are from another boot.
        """
        read = self._store.positions.get(JOB_ROWS, {})
        return read.get("rows", {}) if read.get("boot_id") == self._clock.boot_id else {}

    def _watch_mappings(self) -> MmapWatch | None:
        """Returns the watch of new mappings; None if the kernel refuses it, as Debian's kernel does without
        CAP_SYS_ADMIN while perf_event_paranoid is 3.
        """
        try:
            mappings = MmapWatch(self._libraries.interesting)
        except PrivilegeError as e:
            _log.warning("new mappings are found by polling: %s", e.message)
            return None
        self._undo.callback(mappings.close)
        return mappings

    def _make_loop(self) -> DrainLoop:
        consumers = self._sources.rings
        return DrainLoop(
            self._store,
            {name: self._session.rings[name] for name in consumers},
            consumers,
            self._buffer,
            self._clock,
            each_look=(lambda: self._losses.tick(),),
            lost=lambda: self._losses.lost,
            record=self._record(),
            takes=IdentityWait(self._discovery).takes,
        )

    def _make_losses(self) -> LossMeter:
        return LossMeter(
            self._session,
            self._clock,
            self._buffer,
            {name: consumer.table for name, consumer in self._sources.rings.items()},
            self._sources.probe_slots,
            self._config.probes.hit_budget,
            self._loop.resume(),
            self._store.take_losses,
            self._sources.ends_missed,
        )

    def _record(self) -> Record | None:
        folder = self._config.probes.recordings
        if not folder:
            return None
        recorder = open_recorder(Path(folder), self._clock)
        self._undo.callback(recorder.close)
        return recorder.write

    def _make_tickers(self) -> list[Ticker]:
        mappings = self._mappings
        cost = CostMeter(self._node, self._clock, self._buffer, lambda: self._losses.hits, lambda: self._losses.samples)
        own = [Ticker(s.name, every, s.tick) for s in self._sources if (every := s.tick_s) is not None]
        return [
            Ticker("mappings", LOOK_S, self._lifecycle.read_mappings, wakes=mappings.filenos() if mappings else ()),
            *own,
            Ticker("ticks", TICK_S, *(s.tick for s in self._sources if s.tick_s is None), cost.tick),
            # Listeners of changed settings attach probes and may wait for a parser, so they run in a thread of their
            # own.
            Ticker("changes", TICK_S, self._changes.tick),
        ]

    def start(self) -> None:
        """Starts answering, draining and searching for processes. Returns after the first scan of all processes."""
        undo = self._undo
        self._listen()
        if self._session.paused:
            self._sources.paused()
        self._follow_pause()
        self._sources.start()
        self._libraries.start()
        pair = self._clock.pair()
        # If the wall clock was set forward since the boot, rows of this boot can have times before the computed boot
        # time. So rows of one more day are read.
        boot_ns = pair.real_ns - pair.boot_ns - DAY_NS
        self._discovery.restore(self._store.rows("process.events", RESTORED, since_ns=boot_ns))
        for source in self._sources:
            for table, (columns, restore) in source.restored_tables.items():
                restore(self._store.rows(table, columns, since_ns=boot_ns))
        # This comes after the processes are restored, so that the rows get their job and rank.
        take_over_layouts(self._session, self._sources.rings, self._store, self._buffer, self._clock)
        self._discovery.start()
        self._drain_thread.start()
        undo.callback(self._drain_thread.join)
        undo.callback(self._loop.stop)
        for ticker in self._make_tickers():
            ticker.start()
            undo.callback(ticker.stop)
        # Sources finish before the last drain, so that the last drain writes the rows that ``finish`` puts.
        for source in self._sources:
            undo.callback(source.finish)
        # The start waits for the first scans, but only until these timeouts, so that slow processes and files do not
        # delay it further.
        self._session.load_late(FIRST_OBJECT)
        self._libraries.scanned(LIBRARIES_TIMEOUT_S)
        self._discovery.scanned(SCAN_TIMEOUT_S)
        self._sources.started(is_alive)
        self._begun = time.monotonic()
        self._status.ready = True
        self._settled.set()
        status = self._status.to_dict()
        if status["state"] == "degraded":
            _log.warning("ready, but degraded: %s", status["reason"])

    def _listen(self) -> None:
        def live(rows: Callable[[ClockPair], pa.RecordBatch]) -> Callable[[], pa.RecordBatch]:
            return lambda: rows(self._clock.pair())

        tables = {table: live(rows) for table, rows in self._sources.live_tables.items()}
        tables["probing.store"] = live(lambda pair: store_batch(self._node, pair.real_ns, self._store.status()))
        tables["probing.versions"] = live(lambda pair: version_batch(self._node, pair.real_ns))
        answers = self._context.find(StacksOnDemand).answers
        requests = Requests(
            self._store,
            answers,
            self._changes,
            tables,
            self._loop.flush,
            self._status.to_dict,
            self._pause,
            self._tables.described,
            FindingRows(self._node, self._buffer, self._clock).put,
            ConditionAnswers(self._readers, answers.chosen).conditions,
        )
        users = frozenset({user_number(self._config.users.service)})
        labels = {"label": self._context.find(Labels).answer}
        handlers = {**requests.handlers(), **labels, **self._code_handlers(answers), **self._group_handlers()}
        control = ControlServer(Path(self._config.control_socket), handlers, users)
        control.on_disconnect = requests.release_all
        control.start()
        self._undo.callback(control.stop)

    def _group_handlers(self) -> Mapping[str, Handler]:
        if not self._config.groups.enabled:
            return {}
        records = GroupRecords(Path(self._config.state_dir) / "groups")
        return {"keep_group": with_fields(records.keep), "kept_groups": lambda _: records.kept()}

    def _code_handlers(self, answers: StackAnswers) -> Mapping[str, Handler]:
        """Returns the handler of the request that runs code in processes. The handler's module is imported only with
        ``inject.enabled``.
        """
        if not self._config.inject.enabled:
            return {}
        from probing.daemon.inject.requests import Evaluations

        evaluations = Evaluations(
            self._config.inject,
            str(self._runtime / "injector.sock"),
            self._readers,
            self._parsers.stacks,
            answers.chosen,
            self._own,
            self._node,
            self._buffer,
            self._clock,
        )
        self._undo.callback(evaluations.close)
        return {"eval": evaluations.answer}

    def stop(self) -> None:
        self._undo.close()

    def summary(self) -> str:
        """Returns the state of the collector as one line."""
        return summary_of(self._status.to_dict())

    def complete(self) -> bool:
        """Loads the next BPF object that the start did not need. Returns whether all objects are loaded.

        The main loop calls it before each ``check``. Raises AttachError, PrivilegeError.
        """
        if time.monotonic() >= self._begun + LATE_S and (late := self._session.late):
            self._session.load_late(min(late))
        return not self._session.late

    def check(self) -> None:
        """Tells the BPF programs that the daemon runs (heartbeat), and applies a changed pause. The main loop calls it
        each second.

        Raises InternalError if the rings are no longer drained, StoreError if the state directory was deleted.
        After either error a new collector continues where this collector stopped.
        """
        if not self._drain_thread.is_alive():
            raise InternalError("the rings are not drained any more")
        self._store.check()
        if (blind := self._session.heartbeat()) is not None:
            self._losses.stood_still(*blind)
            self._sources.ends_missed(blind[1])
        self._follow_pause()

    def _follow_pause(self) -> None:
        with self._pause_lock:
            if self._pausing.follow():
                self._losses.pause(self._session.paused)
                self._sources.pause(self._session.paused, self._clock.pair().mono_ns)

    def _pause(self, paused: bool) -> bool:
        self._pausing.asked = paused
        self.check()
        return self._session.paused

    def _settings_changed(self) -> None:
        for library in self._sources.settings_changed():
            self._libraries.look_again(library.name)

    def _source_states(self) -> list[SourceState]:
        return self._sources.states(
            Totals(
                "paused" if self._session.paused else "running",
                self._buffer.rows,
                self._buffer.lost_rows,
                self._losses.off,
                self._libraries.attached,
                self._libraries.reasons,
            )
        )


def _tables_with_rows(store: Store) -> set[str]:
    """Returns the names of the tables that have segments, or rows in the log."""
    files = store.snapshot()
    store.release(files["generation"])
    return {*files["tables"], *(table for part in files["parts"] for table in part["tables"])}


def _load_ahead(session: Session) -> None:
    # Errors are ignored here: ``start`` loads the object again, and raises the error.
    with contextlib.suppress(ProbingError, OSError):
        session.load_late(FIRST_OBJECT)
