"""Which processes train, from the first instant to the last: events and scans in, identities and rows out.

One thread decides; reads of targets go through readers, several at once, each with a deadline. Whoever brings an event
only leaves it in a queue. What an event does not say (a process that imports torch a second after it started, an event
that was lost) is found by looking again, ever more rarely, and by listing all processes from time to time.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from probing.api.errors import ProbingError, ProcessGone
from probing.daemon.arrow import batch_of, integers, texts_and_indices
from probing.daemon.clock import Clock, ClockPair
from probing.daemon.processes.announce import Announcer, Listener
from probing.daemon.processes.facts import Facts, Key
from probing.daemon.processes.lineage import Lineage
from probing.daemon.processes.live import backends_of, read_states
from probing.daemon.processes.readers import Readers
from probing.daemon.processes.registry import MAX_DEAD, Process, Registry, settled
from probing.daemon.processes.roles import NATIVE_LAUNCHERS, launches
from probing.daemon.processes.rows import env_rows, process_from_detail, process_row
from probing.daemon.processes.schedule import Agenda
from probing.daemon.source import Identity, Loss, Sink

__all__ = ("RESTORED", "Discovery")

# Columns of process.events that ``restore`` needs.
RESTORED = ("pid", "start_ns", "event", "detail", "ts")
MAX_QUEUE = 100_000
# After exec or fork a process gets its program and first libraries: looking at once would see nothing.
SETTLE_S = 0.03
# How long results of one batch are waited for, so that older processes are placed before younger ones.
BATCH_S, SCAN_BATCH_S = 0.25, 0.6
READ_TIMEOUT_S = 1.0
# When a Python that may still become a trainer is looked at again, s after the look before.
AGAIN_S = (0.2, 0.3, 0.5, 0.5, 1.0, 1.0, 2.0, 2.0, 4.0, 8.0, 15.0)
RARELY_S, MAX_RARELY_S = 30.0, 120.0
# The same for one that is watched or has a framework, while it is young and later.
NEAR_S, NEAR_LATER_S = 5.0, 15.0
# How often a process is looked at for its Python version alone.
MAX_LOOKS = 10
# When one that could not be read is tried again; a quarantined one is refused at once until its time is over.
RETRY_S, MAX_RETRY_S = 2.5, 300.0
_log = logging.getLogger(__name__)


def _no_version(_pid: int, _start_ns: int) -> str:
    return ""


def _no_backends(_pid: int, _start_ns: int) -> Iterable[str]:
    return ()


class Discovery:
    """The source ``processes``, and the ``Processes`` of all others. Safe for any thread.

    ``python_version(pid, start_ns)`` and ``backends(pid, start_ns)`` ask other sources; they may raise ProbingError.
    ``rescan_s``: how often all processes are listed, s; ``grace_s``: how long one that is not among them may be without
    an exit event, s.
    """

    name = "processes"

    def __init__(
        self,
        readers: Readers,
        sink: Sink,
        clock: Clock,
        node: str,
        *,
        python_version: Callable[[int, int], str] = _no_version,
        backends: Callable[[int, int], Iterable[str]] = _no_backends,
        rescan_s: float = 30.0,
        grace_s: float = 1.0,
    ) -> None:
        self._readers = readers
        self._sink = sink
        self._clock = clock
        self._node = node
        self._python_version = python_version
        self._backends = backends
        self._rescan_s = rescan_s
        self._grace_s = grace_s
        self._announcer = Announcer(sink, clock, node)
        self.listeners: list[Listener] = self._announcer.listeners
        self._registry = Registry(node, clock.boot_id)
        self._lineage = Lineage(self._registry.newest)
        # Over the registry, but for who asks about one process.
        self._known = threading.Lock()
        self._queue: deque[tuple[Any, ...]] = deque()
        self._wake = threading.Event()
        self._overflow = False
        self._stopped = False
        self._scanned = threading.Event()
        self._thread: threading.Thread | None = None
        self._executor: ThreadPoolExecutor | None = None
        # Finding a Python's version takes several reads: it must not keep others from being identified.
        self._versions: ThreadPoolExecutor | None = None
        # Of the thread only: when to look at which process, what is being read, what needs no look.
        self._agenda = Agenda()
        self._wanted: set[int] = set()
        self._reading: dict[Key, Future[Facts]] = {}
        self._looks: dict[Key, int] = {}
        self._ignored: set[Key] = set()
        self._versioned: set[Key] = set()
        self._early_exits: dict[Key, tuple[int | None, int | None]] = {}
        self._missing: dict[Key, float] = {}

    def start(self) -> None:
        """Begin with a scan of all processes; ``scanned`` tells when it is done."""
        self._stopped = False
        self._executor = ThreadPoolExecutor(self._readers.size, thread_name_prefix="identity")
        self._versions = ThreadPoolExecutor(1, thread_name_prefix="version")
        self._thread = threading.Thread(target=self._run, name="processes", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(10)
        for executor in (self._executor, self._versions):
            if executor is not None:
                executor.shutdown(wait=True, cancel_futures=True)

    def scanned(self, timeout: float) -> bool:
        """Wait until all processes that lived at the start were looked at; False: not within ``timeout`` seconds."""
        return self._scanned.wait(timeout)

    # Events, from the collector. Times are CLOCK_MONOTONIC ns.

    def on_exec(self, tgid: int, start_ns: int, ktime: int) -> None:
        self._lineage.replaced(tgid)
        self._post("exec", tgid, start_ns, ktime)

    def on_fork(self, tgid: int, start_ns: int, ktime: int, ppid: int) -> None:
        self._lineage.forked(tgid, start_ns, ppid)
        self._post("fork", tgid, start_ns, ktime, ppid)

    def on_exit(self, tgid: int, start_ns: int, ktime: int, status: int | None = None) -> None:
        """``status`` as waitpid(2) gives it; None when it is not known."""
        self._post("exit", tgid, start_ns, ktime, status)

    def on_oom(self, tgid: int, start_ns: int, ktime: int) -> None:
        """The kernel is out of memory and kills it. ``start_ns`` is 0 where that is not known."""
        self._post("oom", tgid, start_ns, ktime)

    def on_mapping(self, pid: int) -> None:
        """The process mapped a library of interest."""
        self._post("mapping", pid)

    def on_communicator(self, pid: int, start_ns: int, rank: int, world_size: int) -> None:
        """The communicator that spans the job was seen: its rank counts where the environment names none."""
        self._post("ranks", (pid, start_ns), rank, world_size)

    # Who is who.

    def identity(self, pid: int, start_ns: int) -> Identity | None:
        """See ``source.Processes``. Takes no lock. One that ended before it was read has its parent's job and run."""
        process = self._registry.get((pid, start_ns))
        return process.identity if process is not None else self._lineage.inherited((pid, start_ns))

    def expected(self, pid: int, start_ns: int) -> bool:
        """Whether the process is not identified, and may be soon: it is not known to have ended. Takes no lock."""
        key = (pid, start_ns)
        return self._registry.get(key) is None and not self._lineage.has_ended(key)

    def live(self) -> list[Identity]:
        """All watched processes that live, oldest first."""
        with self._known:
            return sorted((p.identity for p in self._registry.live()), key=lambda who: (who.start_ns, who.pid))

    def rows(self, pair: ClockPair) -> pa.RecordBatch:
        """process.processes as it is now; the states are read for it."""
        with self._known:
            shown = self._registry.shown()
        states = read_states(self._readers, [process for process in shown if not process.ended])
        rows = []
        for process in shown:
            state, threads = states.get(process.key, ("exited" if process.ended else None, []))
            used = backends_of(threads) | (set() if process.ended else set(self._backends(*process.key)))
            if used - process.backends:
                process.backends = process.backends | used
                self._post("backends", process.key, used)
            rows.append(process_row(self._node, pair.real_ns, process, state))
        return batch_of("process.processes", rows)

    def envs(self, pair: ClockPair) -> pa.RecordBatch:
        """process.envs: the allowed variables of all watched processes that live."""
        with self._known:
            live = self._registry.live()
        return batch_of("process.envs", [row for p in live for row in env_rows(self._node, pair.real_ns, p)])

    def restore(self, rows: pa.Table) -> int:
        """Take up the processes of stored process.events of this boot, before ``start``; how many."""
        identified, ended = _newest(rows)
        details: dict[Key, str] = {}
        # Rows of one process can lie in several segments: the newest of each counts.
        for row in identified.to_pylist():
            if row["detail"]:
                details.pop((row["pid"], row["start_ns"]), None)
                details[row["pid"], row["start_ns"]] = row["detail"]
        count = 0
        with self._known:
            for key in list(details)[-MAX_DEAD:]:
                found = process_from_detail(*key, details[key], self._clock.boot_id)
                if found is not None:
                    self._registry.restore(*found, ended=key in ended)
                    count += 1
        return count

    # The thread.

    def _post(self, *event: Any) -> None:
        if len(self._queue) >= MAX_QUEUE:
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
                    self._event(*self._queue.popleft())
                self._look_at_due()
            except ProbingError as e:
                _log.warning("processes cannot be looked at: %s", e.message)
            except Exception:  # whoever is watched stays watched, whatever goes wrong over one process
                _log.exception("looking at processes failed")
            if not self._queue:
                self._wake.wait(max(0.0, self._agenda.next_at(next_scan) - time.monotonic()))
            self._wake.clear()

    def _scan(self) -> bool:
        """Compare all processes with what is known: an event may have been lost. False: they could not be listed."""
        try:
            found = self._list(None)
        except ProbingError as e:
            _log.warning("processes cannot be listed: %s", e.message)
            return False
        if self._overflow:
            self._overflow = False
            now = self._clock.pair().real_ns
            self._sink.lost(Loss(self.name, "process.events", "ring", "too many processes started", now, now))
        alive = {(pid, start) for pid, start, _, letter, _, _ in found if letter not in "ZX"}
        self._end_missing(alive)
        self._ignored &= alive
        exes = {(pid, start): exe for pid, start, _, _, _, exe in found}
        fresh = {key: exes[key] for key in alive if key not in self._ignored and key not in self._looks}
        # Whoever may train comes first: it must not wait for the many that do not.
        self._read([key for key, exe in fresh.items() if _may_train(exe)], settle=SCAN_BATCH_S)
        self._read([key for key, exe in fresh.items() if not _may_train(exe)], settle=SCAN_BATCH_S)
        self._scanned.set()
        return True

    def _end_missing(self, alive: set[Key]) -> None:
        """Whoever is not there and was not there a while ago has ended; until then its exit may be on its way to us."""
        now = time.monotonic()
        with self._known:
            missing = [key for key in self._registry.alive() if key not in alive]
        self._missing = {key: self._missing.get(key, now) for key in missing}
        for key, since in list(self._missing.items()):
            if now - since >= self._grace_s:
                del self._missing[key]
                self._ended(key, None, None)

    def _event(self, kind: str, *values: Any) -> None:
        if kind == "exit":
            pid, start_ns, ktime, status = values
            self._ended((pid, start_ns), status, ktime)
        elif kind == "oom":
            self._out_of_memory(*values)
        elif kind == "exec":
            self._replaced(values[0], values[1])
        elif kind == "fork":
            # Only the children of who is looked at matter; anybody else shows up with exec.
            with self._known:
                parents = {pid for pid, _ in self._registry.alive()}
            if values[3] in parents:
                self._wanted.add(values[0])
                self._agenda.add(values[0], SETTLE_S)
        elif kind == "mapping":
            self._wanted.add(values[0])
            self._agenda.add(values[0], 0.0)
        elif kind == "facts":
            self._take(values)
        else:
            self._note(kind, *values)

    def _out_of_memory(self, pid: int, start_ns: int, mono_ns: int) -> None:
        with self._known:
            live = self._registry.live()
        for process in live:
            if process.key == (pid, start_ns) or (not start_ns and process.key[0] == pid):
                self._announcer.out_of_memory(process, mono_ns)

    def _note(self, kind: str, key: Key, *values: Any) -> None:
        with self._known:
            if kind == "python":
                changed = self._registry.note_python(key, *values)
            elif kind == "backends":
                changed = self._registry.note_backends(key, *values)
            else:
                changed = self._registry.note_ranks(key, *values)
        if kind == "python" and values == (None,) and self._looks.get(key, MAX_LOOKS) < MAX_LOOKS:
            # It may only have begun, or was slow to read: the next look asks again.
            self._versioned.discard(key)
            self._wanted.add(key[0])
            self._agenda.add(key[0], AGAIN_S[min(self._looks[key], len(AGAIN_S)) - 1])
        self._tell(changed)

    def _replaced(self, pid: int, start_ns: int) -> None:
        key = (pid, start_ns)
        self._ignored.discard(key)
        self._looks.pop(key, None)
        with self._known:
            watched = self._registry.get(key) is not None
            self._registry.replaced(key)
        if watched:
            self._announcer.replaced(pid, start_ns)
            self._wanted.add(pid)
        self._agenda.add(pid, SETTLE_S)

    def _look_at_due(self) -> None:
        pids = self._agenda.due()
        if not pids:
            return
        keys = []
        for pid, start_ns, _, letter, _, exe in self._list(pids):
            key = (pid, start_ns)
            wanted = pid in self._wanted or _may_train(exe) or key in self._registry
            if letter not in "ZX" and wanted:
                keys.append(key)
            elif letter not in "ZX":
                self._ignored.add(key)
        self._wanted.difference_update(pids)
        self._read(keys)

    def _list(self, pids: list[int] | None) -> list[Any]:
        answer = self._readers.call("list", timeout=READ_TIMEOUT_S * 5, pids=pids)
        return list(json.loads(answer.payload))

    def _read(self, keys: Iterable[Key], settle: float = BATCH_S) -> None:
        """Find out about processes, several at once; what takes longer than ``settle`` seconds comes as an event."""
        assert self._executor is not None
        fresh = [key for key in keys if key not in self._reading]
        for key in fresh:
            self._reading[key] = self._executor.submit(self._identify, key)
        wait([self._reading[key] for key in fresh], timeout=settle)
        done = [key for key in fresh if self._reading[key].done()]
        for key in fresh:
            if key not in done:
                self._reading[key].add_done_callback(lambda _, key=key: self._post("facts", key))  # type: ignore[misc]
        self._take(done)

    def _identify(self, key: Key) -> Facts:
        answer = self._readers.call("identity", pid=key[0], start_ns=key[1], timeout=READ_TIMEOUT_S)
        facts = Facts.from_reader(answer.header)
        used = frozenset(f"pt_{name}" for name in self._backends(*key))
        return replace(facts, threads=facts.threads | used)

    def _take(self, keys: Iterable[Key]) -> None:
        """Place the processes that were read."""
        found = [facts for key in keys if (facts := self._result(key))]
        with self._known:
            found = [facts for facts in found if not self._registry.over(facts.key)]
        self._read_launchers(found)
        with self._known:
            changed = self._registry.update(found) if found else []
        self._tell(changed)
        for facts in found:
            self._follow(facts)
            if facts.key in self._early_exits:
                self._ended(facts.key, *self._early_exits.pop(facts.key))

    def _result(self, key: Key) -> Facts | None:
        future = self._reading.pop(key)
        try:
            facts = future.result()
        except ProcessGone:
            self._early_exits.pop(key, None)
            self._lineage.ended(key)
            return None
        except ProbingError as e:
            self._early_exits.pop(key, None)
            looks = self._looks[key] = self._looks.get(key, 0) + 1
            _log.log(
                logging.INFO if looks == 1 else logging.DEBUG, "process %d is not known yet: %s", key[0], e.message
            )
            self._wanted.add(key[0])
            self._agenda.add(key[0], min(RETRY_S * 2**looks, MAX_RETRY_S))
            return None
        if facts.python or facts.framework or launches(facts):
            return facts
        self._ignored.add(key)
        self._early_exits.pop(key, None)
        return None

    def _read_launchers(self, found: list[Facts]) -> None:
        # Who starts ranks must be known before them, for it names their run.
        own = {facts.key for facts in found}
        with self._known:
            missing = {
                (pid, start)
                for facts in found
                for pid, start, program in facts.ancestors
                if (pid, start) not in own | self._ignored | self._reading.keys()
                and (program in NATIVE_LAUNCHERS or _may_train(program))
                and self._registry.facts_of((pid, start)) is None
            }
        if missing:
            self._read(missing)

    def _follow(self, facts: Facts) -> None:
        """Ask for what a process did not show yet, and look again while it may become somebody else."""
        key = facts.key
        with self._known:
            process = self._registry.get(key)
        looks = self._looks[key] = self._looks.get(key, 0) + 1
        if process is not None and facts.python and key not in self._versioned:
            self._versioned.add(key)
            assert self._versions is not None
            self._versions.submit(self._find_version, key)
        if not settled(facts, process):
            self._wanted.add(facts.pid)
            self._agenda.add(facts.pid, _pause(looks, near=process is not None or facts.framework))

    def _find_version(self, key: Key) -> None:
        version: str | None = None
        try:
            version = self._python_version(*key)
        except ProbingError as e:
            _log.info("the Python of process %d is not known: %s", key[0], e.message)
        self._post("python", key, version)

    def _ended(self, key: Key, status: int | None, mono_ns: int | None) -> None:
        self._ignored.discard(key)
        self._versioned.discard(key)
        self._looks.pop(key, None)
        self._readers.forget(*key)
        with self._known:
            process = self._registry.end(key)
        if process is not None:
            self._announcer.exited(process, status, mono_ns)
        elif key in self._reading:
            self._early_exits[key] = status, mono_ns
        elif not self._registry.over(key):
            self._lineage.ended(key)

    def _tell(self, changed: list[Process]) -> None:
        self._announcer.identified(changed)


def _newest(rows: pa.Table) -> tuple[pa.Table, set[Key]]:
    """Returns the newest identifying rows of process.events, by time, and the processes that have ended.

    There can be very many rows: no Python object is made for most of them.
    """
    texts, codes = texts_and_indices(rows.column("event").dictionary_encode().unify_dictionaries().combine_chunks())
    number = {text: code for code, text in enumerate(texts)}
    times, pids, starts = (integers(rows.column(name).combine_chunks()) for name in ("ts", "pid", "start_ns"))
    order = np.argsort(times, kind="stable")
    known = order[codes[order] == number.get("identified", -1)][-4 * MAX_DEAD :]
    gone = np.flatnonzero((codes == number.get("exit", -1)) & np.isin(pids, pids[known]))
    ended = set(zip(pids[gone].tolist(), starts[gone].tolist(), strict=True))
    return rows.select(["pid", "start_ns", "detail"]).take(pa.array(known)), ended


def _pause(looks: int, *, near: bool) -> float:
    """When a process that was looked at so often is looked at again, s."""
    if looks <= len(AGAIN_S):
        delay = AGAIN_S[looks - 1]
    else:
        delay = min(RARELY_S * 2 ** min(looks - len(AGAIN_S) - 1, 8), MAX_RARELY_S)
    return min(delay, NEAR_S if looks <= 2 * len(AGAIN_S) else NEAR_LATER_S) if near else delay


def _may_train(program: str) -> bool:
    """The name or path of a program that may be a Python or start the ranks of a job."""
    name = program.rpartition("/")[2]
    return name.startswith("python") or name in NATIVE_LAUNCHERS or not name
