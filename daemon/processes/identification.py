"""The thread that identifies processes, from events and scans.

Readers read several processes at once, each with a deadline; only this thread assigns identities. Some changes come
without an event, for example when a process imports torch a second after its start, and events can be lost. So each
process is read again after growing pauses, and all processes are listed from time to time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Mapping
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import Any

from probing.api.errors import ProbingError, ProcessGone
from probing.daemon.clock import Clock
from probing.daemon.fairness import FairExecutor
from probing.daemon.processes.announce import Announcer
from probing.daemon.processes.facts import Facts
from probing.daemon.processes.lineage import Lineage
from probing.daemon.processes.liveness import is_alive, owner_now
from probing.daemon.processes.ranking import Membership, ModuleState
from probing.daemon.processes.reader_pool import ReaderPool, payload_of
from probing.daemon.processes.registry import MAX_OF_OWNER, Process, Registry, settled
from probing.daemon.processes.roles import NATIVE_LAUNCHERS, launches
from probing.daemon.processes.schedule import AGAIN_S, Agenda, next_look_s, retry_s
from probing.daemon.processes.target import Summary
from probing.daemon.source import Loss, ProcessKey, Sink

__all__ = ("Identification",)

MAX_QUEUE = 100_000
# The time from exec or fork to the first read, s: the process maps its program and first libraries meanwhile.
SETTLE_S = 0.03
# The kinds of events that answer a question about a process. They are not limited: each question has one answer.
ANSWERS = frozenset({"facts", "module", "python", "thread"})
# How long the thread waits for the results of a batch, s, so that older processes are identified before younger ones.
BATCH_S, SCAN_BATCH_S = 0.25, 0.6
READ_TIMEOUT_S = 1.0
# After MAX_LOOKS reads of a process, a failed search for its Python version is not repeated. After MAX_MODULE_LOOKS
# reads, its modules are no longer searched for its rank.
MAX_LOOKS, MAX_MODULE_LOOKS = 10, 22
# While this many reads of versions and modules are pending, no read of modules is added. A process that is left out is
# tried again after its next read.
MAX_WAITING = 64
_log = logging.getLogger(__name__)


class Identification:
    """Identifies processes in a thread. ``post`` is thread-safe; the other methods are for this object's thread. The
    lock ``known`` guards ``registry``.

    ``own``: the daemon's processes. They are ignored, because otherwise each new reader would itself have to be read,
    which would make slow readers slower.
    """

    def __init__(
        self,
        readers: ReaderPool,
        sink: Sink,
        clock: Clock,
        announcer: Announcer,
        registry: Registry,
        known: threading.Lock,
        lineage: Lineage,
        *,
        python_version: Callable[[int, int], str],
        backends: Callable[[int, int], Iterable[str]],
        module_state: Callable[[int, int], ModuleState | None],
        runs_python: Callable[[int, int, int], bool],
        training_threads: Callable[[Iterable[ProcessKey]], Mapping[tuple[int, int], int]],
        started_ns: int,
        cgroup: str,
        own: Container[int],
        rescan_s: float,
        grace_s: float,
    ) -> None:
        self._readers = readers
        self._sink = sink
        self._clock = clock
        self._announcer = announcer
        self._registry = registry
        self._known = known
        self._lineage = lineage
        self._python_version = python_version
        self._backends = backends
        self._module_state = module_state
        self._runs_python = runs_python
        self._training_threads = training_threads
        self._started_ns = started_ns
        self._cgroup = cgroup.rstrip("/")
        self._own = own
        self._rescan_s = rescan_s
        self._grace_s = grace_s
        self._queue: deque[tuple[Any, ...]] = deque()
        self._wake = threading.Event()
        self._overflow = False
        self._stopped = False
        self.scanned = threading.Event()
        self._thread: threading.Thread | None = None
        self._executor: FairExecutor | None = None
        # Finds version and modules of Python processes. This takes several reads, which must not delay other processes.
        self._pythons: FairExecutor | None = None
        self._waiting: set[Future[None]] = set()
        # The schedule of reads, the pids that are read whatever their program is, and the processes being read now.
        self._agenda = Agenda()
        self._wanted: set[int] = set()
        self._reading: dict[ProcessKey, Future[Facts]] = {}
        # Processes that called exec while they were read: parts of the answer may be from the earlier program.
        self._outdated: set[ProcessKey] = set()
        # For each process, the number of reads that succeeded, and of reads that failed since the last success.
        self._looks: dict[ProcessKey, int] = {}
        self._failures: dict[ProcessKey, int] = {}
        self._ignored: set[ProcessKey] = set()
        self._versioned: set[ProcessKey] = set()
        self._grouped: set[ProcessKey] = set()
        # Trainers that started before this daemon. Their stacks are read together, to find the threads that train.
        self._late: set[ProcessKey] = set()
        self._early_exits: dict[ProcessKey, tuple[int | None, int | None]] = {}
        self._missing: dict[ProcessKey, float] = {}

    def start(self) -> None:
        self._stopped = False
        self._executor = FairExecutor(self._readers.size, "identity")
        self._pythons = FairExecutor(1, "pythons")
        self._thread = threading.Thread(target=self._run, name="processes", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(10)
        for executor in (self._executor, self._pythons):
            if executor is not None:
                executor.stop()

    def post(self, *event: Any) -> None:
        """Queues an event: its kind and values. If MAX_QUEUE events wait, the event is dropped, and all processes are
        scanned. An answer to this object's own question is never dropped, because each question is asked only once.
        """
        if len(self._queue) >= MAX_QUEUE and event[0] not in ANSWERS:
            self._overflow = True
        else:
            self._queue.append(event)
        self._wake.set()

    def _run(self) -> None:
        next_scan = time.monotonic()
        while not self._stopped:
            now = time.monotonic()
            try:
                if now >= next_scan or self._overflow:
                    soon = not self._scan() or self._missing
                    next_scan = now + (min(self._rescan_s, self._grace_s) if soon else self._rescan_s)
                while self._queue:
                    if self._queue[0][0] == "membership":
                        self._take_memberships()
                    else:
                        self._event(*self._queue.popleft())
                self._look_at_due()
                self._look_at_late()
            except ProbingError as e:
                _log.warning("processes cannot be identified: %s", e.message)
            except Exception:  # an error with one process must not stop the identification of all others
                _log.exception("identifying processes failed")
            if not self._queue:
                self._wake.wait(max(0.0, self._agenda.next_at(next_scan) - time.monotonic()))
            self._wake.clear()

    def _scan(self) -> bool:
        """Lists all processes, because events may have been lost, and reads the new ones. Returns False if the list
        fails."""
        try:
            found = self._list(None)
        except ProbingError as e:
            _log.warning("processes cannot be listed: %s", e.message)
            return False
        if lost := self._overflow:
            self._overflow = False
            now = self._clock.pair().real_ns
            self._sink.lost(Loss("processes", "process.events", "ring", "too many processes started", now, now))
        alive = {ProcessKey(pid, start) for pid, start, _, letter, _, _ in found if letter not in "ZX"}
        exes = {ProcessKey(pid, start): exe for pid, start, _, _, _, exe in found}
        self._end_missing(alive)
        self._ignored &= alive
        if lost:
            # The exec by which a shell became a Python may be among the lost events.
            self._ignored = {key for key in self._ignored if not _may_train(exes[key])}
        self._failures = {key: count for key, count in self._failures.items() if key in alive}
        seen = self._ignored | self._looks.keys() | self._failures.keys()
        fresh = {key: exes[key] for key in alive - seen}
        for key in [key for key in fresh if key.pid in self._own]:
            self._ignored.add(key)
            del fresh[key]
        # Processes that may train are read first: they must not wait for the many others.
        self._read([key for key, exe in fresh.items() if _may_train(exe)], settle=SCAN_BATCH_S)
        self._read([key for key, exe in fresh.items() if not _may_train(exe)], settle=SCAN_BATCH_S)
        self.scanned.set()
        return True

    def _end_missing(self, alive: set[ProcessKey]) -> None:
        """Marks processes as ended that were missing from the list for ``grace_s``. Within this time their exit events
        may still arrive. The list has at most MAX_PIDS processes, so a missing process may still live.
        """
        now = time.monotonic()
        with self._known:
            missing = [key for key in self._registry.alive() if key not in alive]
        missing = [key for key in missing if not is_alive(*key)]
        self._missing = {key: self._missing.get(key, now) for key in missing}
        for key, since in list(self._missing.items()):
            if now - since >= self._grace_s:
                del self._missing[key]
                self._ended(key, None, None)

    def _event(self, kind: str, *values: Any) -> None:
        if kind == "exit":
            pid, start_ns, ktime, status = values
            self._ended(ProcessKey(pid, start_ns), status, ktime)
        elif kind == "oom":
            self._out_of_memory(*values)
        elif kind == "exec":
            self._replaced(*values)
        elif kind == "fork":
            # Only children of watched processes are read now; any other process is read when it calls exec.
            with self._known:
                watched = self._registry.lives(values[3])
            if watched:
                self._wanted.add(values[0])
                self._agenda.add(values[0], SETTLE_S)
        elif kind == "mapping":
            if values[0] not in self._own:
                self._wanted.add(values[0])
                self._agenda.add(values[0], 0.0)
        elif kind == "facts":
            self._take(values)
        elif kind == "issuer":
            self._ask_python(values[0].pid, self._check_thread, *values)
        else:
            self._note(kind, *values)

    def _out_of_memory(self, pid: int, start_ns: int, mono_ns: int) -> None:
        with self._known:
            live = self._registry.live()
        for process in live:
            if process.key == (pid, start_ns) or (not start_ns and process.key[0] == pid):
                self._announcer.out_of_memory(process, mono_ns)

    def _note(self, kind: str, key: ProcessKey, *values: Any) -> None:
        with self._known:
            if kind == "python":
                changed = self._registry.note_python(key, *values)
            elif kind == "thread":
                changed = self._registry.note_thread(key, *values)
            elif kind == "module":
                changed = self._registry.note_module(key, *values)
            else:
                changed = self._registry.note_backends(key, *values)
        if kind == "backends":
            self._read_group(key)
        if kind == "python" and values == (None,) and self._looks.get(key, MAX_LOOKS) < MAX_LOOKS:
            # The process may just have started, or was slow to read: the next read tries again.
            self._versioned.discard(key)
            self._wanted.add(key[0])
            self._agenda.add(key[0], AGAIN_S[min(self._looks[key], len(AGAIN_S)) - 1])
        self._announcer.identified(changed)

    def _take_memberships(self) -> None:
        """Passes all communicators at the head of the queue to the registry in one call, so that the registry weighs
        the evidence only once. There can be many, because each rank of a job reports each of its communicators.
        """
        found: list[tuple[ProcessKey, Membership]] = []
        while self._queue and self._queue[0][0] == "membership":
            _, key, membership = self._queue.popleft()
            found.append((ProcessKey(*key), membership))
        with self._known:
            # The records of a process may be assembled after its exit. A note made so late would never be dropped.
            found = [(key, membership) for key, membership in found if not self._is_over(key)]
            changed = self._registry.note_memberships(found)
        for key, _ in found:
            self._read_group(key)
        self._announcer.identified(changed)

    def _is_over(self, key: ProcessKey) -> bool:
        return self._registry.over(key) or self._lineage.has_ended(key)

    def _read_group(self, key: ProcessKey) -> None:
        # Once a process has made a process group of torch.distributed, the environment variables that torch read for it
        # are set, so the process is read again now.
        if (key in self._looks or key in self._failures) and key not in self._grouped:
            self._grouped.add(key)
            self._wanted.add(key.pid)
            self._agenda.add(key.pid, 0.0)

    def _replaced(self, pid: int, start_ns: int, mono_ns: int) -> None:
        key = ProcessKey(pid, start_ns)
        self._ignored.discard(key)
        self._grouped.discard(key)
        self._versioned.discard(key)
        self._looks.pop(key, None)
        self._failures.pop(key, None)
        with self._known:
            watched = self._registry.get(key) is not None
            self._registry.replaced(key)
        if watched:
            self._announcer.replaced(pid, start_ns, mono_ns)
            self._wanted.add(pid)
        if key in self._reading:
            self._outdated.add(key)
        self._agenda.add(pid, SETTLE_S)

    def _look_at_due(self) -> None:
        pids = self._agenda.due()
        if not pids:
            return
        keys = []
        try:
            listed = self._list(pids)
        except ProbingError:
            # For example, no reader is free. The pids are added again, since nothing else would read these processes.
            for pid in pids:
                self._agenda.add(pid, retry_s(0))
            raise
        for pid, start_ns, _, letter, _, exe in listed:
            key = ProcessKey(pid, start_ns)
            wanted = (pid in self._wanted or _may_train(exe) or key in self._registry) and pid not in self._own
            if letter not in "ZX" and wanted:
                keys.append(key)
            elif letter not in "ZX":
                self._ignored.add(key)
        self._wanted.difference_update(pids)
        self._read(keys)

    def _look_at_late(self) -> None:
        if self._late and not self._reading and not self._queue:
            self._ask_python(0, self._find_threads, self._late)
            self._late = set()

    def _find_threads(self, keys: Iterable[ProcessKey]) -> None:
        try:
            found = self._training_threads(keys)
        except ProbingError as e:
            _log.info("cannot tell which threads train: %s", e.message)
            return
        for key, tid in found.items():
            self.post("thread", ProcessKey(*key), tid)

    def _list(self, pids: list[int] | None) -> list[Summary]:
        return payload_of(list[Summary], self._readers.call("list", timeout=READ_TIMEOUT_S * 5, pids=pids))

    def _read(self, keys: Iterable[ProcessKey], settle: float = BATCH_S) -> None:
        """Reads processes, several at once. The result of a read that takes longer than ``settle`` seconds is posted as
        an event.
        """
        assert self._executor is not None
        fresh = [key for key in keys if key not in self._reading]
        for key in fresh:
            self._reading[key] = self._executor.submit(owner_now(key.pid), self._identify, key)
        wait([self._reading[key] for key in fresh], timeout=settle)
        done = [key for key in fresh if self._reading[key].done()]
        for key in fresh:
            if key not in done:
                self._reading[key].add_done_callback(lambda _, key=key: self.post("facts", key))  # type: ignore[misc]
        self._take(done)

    def _identify(self, key: ProcessKey) -> Facts:
        answer = self._readers.call("identity", pid=key[0], start_ns=key[1], timeout=READ_TIMEOUT_S)
        facts = Facts.from_reader(answer.header)
        used = frozenset(f"pt_{name}" for name in self._backends(*key))
        return replace(facts, threads=facts.threads | used)

    def _take(self, keys: Iterable[ProcessKey]) -> None:
        """Passes the processes that were read to the registry, and publishes the changes."""
        found = [facts for key in keys if (facts := self._result(key))]
        with self._known:
            found = [facts for facts in found if not self._registry.over(facts.key)]
        self._read_launchers(found)
        with self._known:
            changed = self._registry.update(found) if found else []
            refused = [facts for facts in found if self._registry.facts_of(facts.key) is None]
        self._announcer.identified(changed)
        self._refuse(facts for facts in refused if facts.key not in self._looks)
        for facts in found:
            self._follow(facts)
            if facts.key in self._early_exits:
                self._ended(facts.key, *self._early_exits.pop(facts.key))

    def _refuse(self, processes: Iterable[Facts]) -> None:
        """Reports processes that are not watched because their owner has too many processes."""
        now = self._clock.pair().real_ns
        for owner, count in Counter(facts.owner for facts in processes).items():
            reason = f"more than {MAX_OF_OWNER} processes of user {owner} would be watched"
            self._sink.lost(Loss("processes", "process.events", "identity", reason, now, now, count))

    def _result(self, key: ProcessKey) -> Facts | None:
        future = self._reading.pop(key)
        if key in self._outdated:
            self._outdated.discard(key)
            # A process that has ended meanwhile cannot be read again.
            if key not in self._early_exits:
                self._wanted.add(key[0])
                self._agenda.add(key[0], 0.0)
                return None
        try:
            facts = future.result()
        except ProcessGone:
            self._early_exits.pop(key, None)
            self._lineage.ended(key)
            return None
        except Exception as e:  # an error with one process must not lose the reads that ended at the same time
            self._early_exits.pop(key, None)
            if not isinstance(e, ProbingError):
                _log.exception("reading process %d failed", key.pid)
            self._retry(key, str(e))
            return None
        self._failures.pop(key, None)
        with self._known:
            # A watched process is kept even if it has called exec and no longer trains: its earlier role must end.
            known = self._registry.facts_of(key) is not None
        if known or ((facts.python or facts.framework or launches(facts)) and self._within(facts)):
            return facts
        self._ignored.add(key)
        self._early_exits.pop(key, None)
        return None

    def _retry(self, key: ProcessKey, why: str) -> None:
        """Schedules the next read of a process that could not be read. A read during the process's quarantine fails at
        once, so the next read is made after the quarantine.
        """
        level = logging.DEBUG if key in self._failures else logging.INFO
        _log.log(level, "process %d is not identified yet: %s", key.pid, why)
        failures = self._failures.setdefault(key, 0)
        if not (pause_s := self._readers.quarantine_s(*key)):
            self._failures[key] = failures + 1
            pause_s = retry_s(failures)
        self._wanted.add(key.pid)
        self._agenda.add(key.pid, pause_s)

    def _within(self, facts: Facts) -> bool:
        """Returns whether the process is in the watched control group."""
        return not self._cgroup or any(f"{path}/".startswith(f"{self._cgroup}/") for path in facts.cgroup)

    def _read_launchers(self, found: list[Facts]) -> None:
        # Launchers are identified before their ranks, because a launcher names the run.
        own = {facts.key for facts in found}
        with self._known:
            missing = {
                key
                for facts in found
                for pid, start, program in facts.ancestors
                if (key := ProcessKey(pid, start)) not in own | self._ignored | self._reading.keys()
                and (program in NATIVE_LAUNCHERS or _may_train(program))
                and self._registry.facts_of(key) is None
            }
        if missing:
            self._read(missing)

    def _follow(self, facts: Facts) -> None:
        """Reads the Python version of a process, and schedules its next read while its role may change."""
        key = facts.key
        with self._known:
            process = self._registry.get(key)
        looks = self._looks[key] = self._looks.get(key, 0) + 1
        if process is not None and facts.python and key not in self._versioned:
            self._versioned.add(key)
            self._ask_python(key.pid, self._find_version, key)
        if process is not None and looks == 1 and key.start_ns < self._started_ns and _trains(facts, process):
            self._late.add(key)
        asked = looks <= MAX_MODULE_LOOKS and len(self._waiting) < MAX_WAITING
        if process is not None and asked and _only_modules_know(facts, process):
            self._ask_python(key.pid, self._find_module_state, key)
        if not settled(facts, process):
            self._wanted.add(facts.pid)
            self._agenda.add(facts.pid, next_look_s(looks, near=process is not None or facts.framework))

    def _ask_python(self, pid: int, ask: Callable[..., None], *values: Any) -> None:
        assert self._pythons is not None
        waiting = self._pythons.submit(owner_now(pid) if pid else None, ask, *values)
        self._waiting.add(waiting)
        waiting.add_done_callback(self._waiting.discard)

    def _check_thread(self, key: ProcessKey, tid: int) -> None:
        # A thread without Python does not train: autograd and Horovod issue collectives in C++ threads, on behalf of
        # the thread that trains.
        try:
            trains = tid == key.pid or self._runs_python(*key, tid)
        except ProbingError as e:
            _log.info("the threads of process %d cannot be read: %s", key[0], e.message)
            return
        if trains:
            self.post("thread", key, tid)

    def _find_module_state(self, key: ProcessKey) -> None:
        try:
            state = self._module_state(*key)
        except ProbingError as e:
            _log.debug("the modules of process %d cannot be read: %s", key[0], e.message)
            return
        if state is not None:
            self.post("module", key, state)

    def _find_version(self, key: ProcessKey) -> None:
        version: str | None = None
        try:
            version = self._python_version(*key)
        except ProbingError as e:
            _log.info("cannot find the Python of process %d: %s", key[0], e.message)
        self.post("python", key, version)

    def _ended(self, key: ProcessKey, status: int | None, mono_ns: int | None) -> None:
        self._ignored.discard(key)
        self._versioned.discard(key)
        self._grouped.discard(key)
        self._looks.pop(key, None)
        self._failures.pop(key, None)
        self._readers.forget(*key)
        with self._known:
            process = self._registry.end(key)
        if process is not None:
            self._announcer.exited(process, status, mono_ns)
        elif key in self._reading:
            self._early_exits[key] = status, mono_ns
        elif not self._registry.over(key):
            self._lineage.ended(key)


def _trains(facts: Facts, process: Process) -> bool:
    return facts.python and facts.framework and process.identity.role == "trainer"


def _only_modules_know(facts: Facts, process: Process) -> bool:
    return _trains(facts, process) and process.ranks is None


def _may_train(program: str) -> bool:
    """Returns whether ``program``, a name or path, may be a Python interpreter or may start the ranks of a job."""
    name = program.rpartition("/")[2]
    return name.startswith("python") or name in NATIVE_LAUNCHERS or not name
