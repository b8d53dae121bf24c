"""Which processes are sampled and how often, and which of their threads is which: told to the programs in the kernel.

A process is looked at when it is identified, soon after a sample of a thread that nobody knows, and from time to time:
threads come and go.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from probing.api.errors import CorruptTarget, InternalError, ProbingError, ProcessGone
from probing.daemon.processes.readers import Readers
from probing.daemon.python_stack.sampling.adoption import Adopted, Adoption, AwayKernel, ReadChecks
from probing.daemon.python_stack.sampling.decoder import SampleRing
from probing.daemon.python_stack.sampling.known import KnownProcesses
from probing.daemon.python_stack.sampling.rows import NAME, Key
from probing.daemon.python_stack.walk.layouts import Layout
from probing.daemon.python_stack.walk.locate import RuntimeInfo
from probing.daemon.source import Identity, Loss

__all__ = ("Kernel", "SampledWatch", "Settings")

# Walks a second and thread at which it leaves the CPU.
OFF_RATE = 50
Settings = Callable[[Identity], tuple[int, bool]]
"""How a process is to be sampled: samples a second and CPU (0: not at all), and whether off the CPU too."""
PREPARE_S = 5.0
SCAN_S = 1.0
# How soon a process with unknown threads is scanned again, s, and how often any other.
SOON_S, MAX_SOON_S = 0.1, 1.0
REST_S, MAX_REST_S = 5.0, 60.0
RETRY_S, MAX_RETRY_S = 0.2, 60.0
MAX_NAMES = 8_192
_SCAN_SHARE = 20
_WORKERS = 2
_log = logging.getLogger(__name__)


class Kernel(AwayKernel, Protocol):
    """The programs, their maps and their ring. Not safe for two threads, but ``ring`` is for two readers."""

    @property
    def ring(self) -> SampleRing: ...

    def add(
        self, pid: int, start_ns: int, layout: Layout, runtime: RuntimeInfo, gil: int, rate: int, off_rate: int
    ) -> None: ...

    def set_rate(self, pid: int, start_ns: int, rate: int, off_rate: int) -> None: ...

    def set_threads(self, pid: int, start_ns: int, threads: Mapping[int, tuple[int, int]]) -> int:
        """For how many there was no room."""

    def remove(self, pid: int, start_ns: int) -> None: ...

    def clear(self) -> None: ...

    def set_clock(self, hz: int, off_cpu: bool) -> None:
        """Sample on CPU at ``hz``, 0 for not at all, and off the CPU or not."""


@dataclass(slots=True)
class _Watched:
    """A process to be sampled. Times are time.monotonic(); ``rest``, ``soon``, ``retry`` and ``took`` are spans, s.

    ``short``: there was no room for all of its threads.
    """

    who: Identity
    due: float
    rest: float = REST_S
    soon: float = SOON_S
    retry: float = RETRY_S
    scanned: float = 0.0
    took: float = 0.0
    unresolved: float = 0.0
    wanted: tuple[int, bool] = (0, False)
    added: bool = False
    busy: bool = False
    refused: ProbingError | None = None
    threads: dict[int, tuple[int, int]] = field(default_factory=dict)
    short: bool = False
    adopted: Adopted = field(default_factory=Adopted)


class SampledWatch:
    """Safe for any thread; what it is told of processes never waits."""

    def __init__(
        self,
        kernel: Kernel,
        readers: Readers,
        known: KnownProcesses,
        settings: Settings,
        read_checks: ReadChecks,
        lost: Callable[[Loss], None],
    ) -> None:
        self._kernel = kernel
        self._readers = readers
        self._known = known
        self._settings = settings
        self._lost = lost
        # Guards what follows, and wakes the thread that scans.
        self._changed = threading.Condition()
        self._watched: dict[Key, _Watched] = {}
        self._running = False
        # One at a time tells the programs; never taken while ``_changed`` is held.
        self._telling = threading.Lock()
        self._adoption = Adoption(kernel, self._telling, readers, read_checks)
        self._clock = (0, False)
        self._workers: ThreadPoolExecutor | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Raises ProbingError when the programs cannot be told."""
        with self._telling:
            self._kernel.clear()
        self._workers = ThreadPoolExecutor(_WORKERS, thread_name_prefix="python-threads")
        self._running = True
        self._thread = threading.Thread(target=self._run, args=(self._workers,), name="python-samples", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Nothing is sampled any more; what is watched is sampled again by ``start``."""
        with self._changed:
            self._running = False
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        if self._workers is not None:
            self._workers.shutdown(wait=True, cancel_futures=True)
        with self._telling:
            self._kernel.set_clock(0, False)
            self._kernel.clear()
            self._clock = (0, False)
        with self._changed:
            for watched in self._watched.values():
                watched.added, watched.busy, watched.due = False, False, 0.0
                watched.threads, watched.adopted = {}, Adopted()

    @property
    def sampled(self) -> int:
        """How many processes are sampled now."""
        with self._changed:
            return sum(watched.added for watched in self._watched.values())

    @property
    def reason(self) -> str:
        """Why processes that should be sampled are not, each reason with its processes; empty when all are."""
        by_reason: defaultdict[str, list[int]] = defaultdict(list)
        with self._changed:
            for (pid, _), watched in self._watched.items():
                if watched.refused is not None:
                    by_reason[watched.refused.message.replace(f"process {pid}", "a process")].append(pid)
        return "; ".join(f"{reason}: pid {', '.join(map(str, sorted(pids)))}" for reason, pids in by_reason.items())

    def watch(self, who: Identity) -> None:
        """New, or somebody else than before."""
        key = who.pid, who.start_ns
        self._known.lives(key)
        with self._changed:
            watched = self._watched.setdefault(key, _Watched(who, 0.0))
            watched.who, watched.due = who, time.monotonic()
            self._changed.notify_all()

    def renew(self, key: Key) -> None:
        """It runs another program now; who it is may be told before or after."""
        with self._changed:
            watched = self._watched.get(key)
            if watched is None:
                return
            self._watched[key] = _Watched(watched.who, time.monotonic())
            self._changed.notify_all()
        self._known.left(key)
        self._known.lives(key)

    def leave(self, key: Key) -> None:
        """It ended, or is nobody any more who is sampled."""
        with self._changed:
            if self._watched.pop(key, None) is None:
                return
            self._changed.notify_all()
        self._known.left(key)

    def settings_changed(self) -> None:
        """Ask for the settings of all processes again."""
        with self._changed:
            for watched in self._watched.values():
                watched.due = time.monotonic()
            self._changed.notify_all()

    def unresolved(self, keys: set[Key]) -> None:
        """There were samples of threads of these processes that nobody knows."""
        with self._changed:
            for key in keys & self._watched.keys():
                watched, now = self._watched[key], time.monotonic()
                if now - watched.unresolved > REST_S:
                    watched.soon = SOON_S
                watched.unresolved = now
                # One with thousands of threads that come and go must not keep a reader busy.
                soon = max(now, watched.scanned + max(watched.soon, min(_SCAN_SHARE * watched.took, REST_S)))
                if soon < watched.due:
                    watched.due, watched.soon = soon, min(2 * watched.soon, MAX_SOON_S)
            self._changed.notify_all()

    def _run(self, workers: ThreadPoolExecutor) -> None:
        gone: set[Key] = set()
        present: set[Key] = set()
        while True:
            with self._changed:
                if not self._running:
                    return
                gone, present = present - self._watched.keys(), set(self._watched)
                now = time.monotonic()
                due = [(k, w) for k, w in self._watched.items() if w.due <= now and not w.busy]
                for _, watched in due:
                    watched.busy = True
                if not due and not gone:
                    times = [w.due for w in self._watched.values() if not w.busy]
                    self._changed.wait(max(0.0, min(times) - now) if times else None)
                    continue
            if gone:
                self._forget(gone)
            for key, watched in due:
                workers.submit(self._visit, key, watched)

    def _forget(self, gone: Iterable[Key]) -> None:
        for key in gone:
            self._tell(partial(self._kernel.remove, *key))
        self._set_clock()

    def _visit(self, key: Key, watched: _Watched) -> None:
        """Look at one process: its settings, its CPython, its threads."""
        began = time.monotonic()
        error: ProbingError | None = None
        try:
            changed = self._bring_up(key, watched)
            # Where a thread is that is away is told once its return would be seen.
            self._set_clock()
            changed = self._adopt(key, watched) or changed
        except ProbingError as e:
            error, changed = e, False
        except Exception as e:  # one process must not end the sampling of all others
            _log.exception("process %d cannot be sampled", key[0])
            error, changed = InternalError(f"a process cannot be sampled: {type(e).__name__}"), False
        with self._changed:
            watched.busy, watched.refused = False, None if isinstance(error, ProcessGone) else error
            watched.scanned = time.monotonic()
            watched.rest = REST_S if changed else min(2 * watched.rest, MAX_REST_S)
            watched.retry = RETRY_S if error is None else min(2 * watched.retry, MAX_RETRY_S)
            if watched.due <= began:
                watched.due = watched.scanned + (watched.rest if error is None else watched.retry)
            left = key not in self._watched
            self._changed.notify_all()
        if left:
            self._tell(partial(self._kernel.remove, *key))
        self._set_clock()

    def _bring_up(self, key: Key, watched: _Watched) -> bool:
        """Have the programs sample a process as it is wanted; whether anything of it was new."""
        process = self._known.find(key)
        watched.wanted = hz, off_cpu = self._settings(watched.who)
        process.who = watched.who
        if hz <= 0:
            if watched.added:
                self._tell(partial(self._kernel.remove, *key))
                watched.added, watched.threads = False, {}
            return False
        process.rate = hz
        runtime, layout = self._known.prepared(process, PREPARE_S)
        began = time.monotonic()
        scan = self._scan(key, runtime)
        watched.took = time.monotonic() - began
        off_rate = OFF_RATE if off_cpu else 0
        threads = _threads(key[0], scan)
        names = {int(tid): str(name) for tid, _, _, name in scan["threads"]}
        # Samples of threads that ended since are on their way.
        process.names = {**process.names, **names} if len(process.names) < MAX_NAMES else names
        with self._telling:
            if self._watched.get(key) is not watched:
                return False
            if watched.added:
                self._kernel.set_rate(*key, hz, off_rate)
            else:
                self._kernel.add(*key, layout, runtime, int(scan["gil"]), hz, off_rate)
            no_room = 0
            if new := not watched.added or watched.short or threads != watched.threads:
                no_room = self._kernel.set_threads(*key, threads)
        watched.added, watched.threads, watched.short = True, threads, no_room > 0
        if no_room:
            self._tell_no_room(key, watched, no_room, self._kernel.room[0])
        return new

    def _adopt(self, key: Key, watched: _Watched) -> bool:
        """Whether there still are threads away of which the programs know nothing."""
        process = self._known.find(key)
        if not watched.added or not watched.wanted[1] or process.runtime is None:
            watched.adopted = Adopted()
            return False
        watched.adopted = self._adoption.visit(process, process.runtime, watched.threads, watched.adopted)
        if watched.adopted.no_room:
            self._tell_no_room(key, watched, watched.adopted.no_room, self._kernel.room[1])
        return bool(watched.adopted.left)

    def _tell_no_room(self, key: Key, watched: _Watched, count: int, room: int) -> None:
        now, until = time.monotonic(), time.time_ns()
        # It has been so since the last scan at most.
        since = until - int((now - watched.scanned) * 1e9) if watched.scanned else until
        reason = f"{count} threads more than the {room} of one process that the sampler has room for"
        self._lost(Loss(NAME, "python.samples", "resolve", reason, since, until, pid=key[0]))

    def _scan(self, key: Key, runtime: RuntimeInfo) -> dict[str, Any]:
        try:
            return self._readers.call(
                "threads", pid=key[0], start_ns=key[1], timeout=2 * SCAN_S,
                runtime=runtime.to_dict(), timeout_ms=int(SCAN_S * 1000),
            ).header  # fmt: skip
        except CorruptTarget:
            # It may run another program by now.
            self._known.unprepare(self._known.find(key))
            raise

    def _set_clock(self) -> None:
        with self._changed:
            wanted = [w.wanted for w in self._watched.values() if w.added]
        clock = (max((hz for hz, _ in wanted), default=0), any(hz > 0 and off for hz, off in wanted))

        def tell() -> None:
            if clock != self._clock:
                self._kernel.set_clock(*clock)
                self._clock = clock

        self._tell(tell)

    def _tell(self, what: Callable[[], object]) -> None:
        with self._telling:
            try:
                what()
            except ProbingError as e:
                _log.warning("the sampler's programs cannot be told: %s", e.message)


def _threads(pid: int, scan: Mapping[str, Any]) -> dict[int, tuple[int, int]]:
    """What is known of the threads; one without a Python state is told as such only where that is sure.

    Nobody asks again for a while about one that is: so not the main thread's, whose interpreter may just be starting,
    and none of a scan that may have missed some.
    """
    found = {int(tid): (int(state), int(thread_id)) for tid, state, thread_id, _ in scan["threads"]}
    return {tid: known for tid, known in found.items() if known[0] or (scan["complete"] and tid != pid)}
