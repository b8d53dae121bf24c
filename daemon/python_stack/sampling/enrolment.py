"""Enrols a process in the maps of the sampler's programs: its rates, the PyThreadState of each thread, and its threads
off the CPU.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from probing.api.errors import CorruptTarget, ProbingError
from probing.daemon.ipc import Header
from probing.daemon.processes.reader_pool import ReaderPool
from probing.daemon.python_stack.sampling.adoption import Adopted, Adoption, ReadChecks
from probing.daemon.python_stack.sampling.processes import NAME, KnownProcesses
from probing.daemon.python_stack.sampling.programs import SamplingPrograms
from probing.daemon.python_stack.walk.locate import RuntimeInfo
from probing.daemon.source import Loss, ProcessKey

__all__ = ("Enrolled", "Enrolment", "Rates")

# The maximum number of times per second that the stack of a thread is walked when the thread leaves the CPU.
OFF_RATE = 50
PREPARE_S = 5.0
SCAN_S = 1.0
MAX_NAMES = 8_192
_log = logging.getLogger(__name__)


class Rates(NamedTuple):
    """The rates of a process. ``hz``: samples a second on each CPU, 0: the process is not sampled. ``off_cpu``: time
    off the CPU is sampled, too.
    """

    hz: int = 0
    off_cpu: bool = False


@dataclass(slots=True)
class Enrolled:
    """The state of a process in the programs' maps. ``threads``: tid -> (address of its PyThreadState, thread_id).

    ``scanned``: the time.monotonic() at which the last visit ended; ``scan_s``: the duration of the last scan of its
    threads. ``short``: the map had no room for all threads of the process.
    """

    rates: Rates = field(default_factory=Rates)
    added: bool = False
    threads: dict[int, tuple[int, int]] = field(default_factory=dict)
    short: bool = False
    adopted: Adopted = field(default_factory=Adopted)
    scanned: float = 0.0
    scan_s: float = 0.0

    def reset(self) -> None:
        """Resets the state, after the programs' maps were cleared."""
        self.added, self.threads, self.adopted = False, {}, Adopted()


class Enrolment:
    """Enrols processes. Thread-safe, but two threads must not enrol the same process at once."""

    def __init__(
        self,
        kernel: SamplingPrograms,
        readers: ReaderPool,
        known: KnownProcesses,
        read_checks: ReadChecks,
        lost: Callable[[Loss], None],
    ) -> None:
        self._kernel = kernel
        self._readers = readers
        self._known = known
        self._lost = lost
        # Only one thread at a time changes the maps.
        self._maps = threading.Lock()
        self._refused = ""
        self._adoption = Adoption(kernel, self._maps, readers, read_checks)
        self._clock = Rates()

    def start(self) -> None:
        """Deletes the entries that an earlier daemon left in the maps. Raises ProbingError."""
        with self._maps:
            self._kernel.clear()

    def stop(self) -> None:
        """Stops the clock and removes all processes."""
        with self._maps:
            self._kernel.set_clock(0, False)
            self._kernel.clear()
            self._clock = Rates()

    def bring_up(self, key: ProcessKey, process: Enrolled, rates: Rates, is_current: Callable[[], bool]) -> bool:
        """Enrols the process with ``rates``. Returns whether its threads changed, or it was not enrolled before.

        Changes nothing if ``is_current()`` has become False meanwhile. Raises ProbingError.
        """
        state = self._known.find(key)
        process.rates = rates
        if rates.hz <= 0:
            if process.added:
                self.remove(key)
                process.added, process.threads = False, {}
            return False
        state.rate = rates.hz
        runtime, layout = self._known.prepared(state, PREPARE_S)
        began = time.monotonic()
        scan = self._scan(key, runtime)
        process.scan_s = time.monotonic() - began
        off_rate = OFF_RATE if rates.off_cpu else 0
        threads = _threads(key[0], scan)
        names = {int(tid): str(name) for tid, _, _, name in scan["threads"]}
        # Names of threads that ended meanwhile are kept, since their samples may still be in the ring.
        state.names = {**state.names, **names} if len(state.names) < MAX_NAMES else names
        with self._maps:
            if not is_current():
                return False
            if process.added:
                self._kernel.set_rate(*key, rates.hz, off_rate)
            else:
                owner = state.identity.owner if state.identity is not None else 0
                self._kernel.add(*key, layout, runtime, int(scan["gil"]), rates.hz, off_rate, owner)
            no_room = 0
            if changed := not process.added or process.short or threads != process.threads:
                no_room = self._kernel.set_threads(*key, threads)
        process.added, process.threads, process.short = True, threads, no_room > 0
        if no_room:
            self._lose(key, process, no_room, self._kernel.room[0])
        return changed

    def adopt(self, key: ProcessKey, process: Enrolled) -> bool:
        """Makes entries for threads off the CPU. Returns whether some threads still have no entry."""
        state = self._known.find(key)
        if not process.added or not process.rates.off_cpu or state.runtime is None:
            process.adopted = Adopted()
            return False
        process.adopted = self._adoption.visit(state, state.runtime, process.threads, process.adopted)
        if process.adopted.no_room:
            self._lose(key, process, process.adopted.no_room, self._kernel.room[1])
        return bool(process.adopted.left)

    def remove(self, key: ProcessKey) -> None:
        """Ends the sampling of the process."""
        self._change(partial(self._kernel.remove, *key))

    def set_clock(self, processes: Iterable[Enrolled]) -> None:
        """Sets the clock to the fastest rate that ``processes`` need."""
        rates = [process.rates for process in processes if process.added]
        clock = Rates(max((r.hz for r in rates), default=0), any(r.hz > 0 and r.off_cpu for r in rates))

        def change() -> None:
            if clock != self._clock:
                self._kernel.set_clock(*clock)
                self._clock = clock

        self._change(change)

    def _scan(self, key: ProcessKey, runtime: RuntimeInfo) -> Header:
        try:
            return self._readers.call(
                "threads",
                pid=key[0],
                start_ns=key[1],
                timeout=2 * SCAN_S,
                runtime=runtime.to_dict(),
                timeout_ms=int(SCAN_S * 1000),
            ).header
        except CorruptTarget:
            # The process may run another program by now.
            self._known.unprepare(self._known.find(key))
            raise

    def _lose(self, key: ProcessKey, process: Enrolled, count: int, room: int) -> None:
        now, until = time.monotonic(), time.time_ns()
        # At the earliest, the loss began at the last scan.
        since = until - int((now - process.scanned) * 1e9) if process.scanned else until
        reason = (
            f"no room in the map for {count} threads: a process may have {room}, and its user a share of all threads"
        )
        self._lost(Loss(NAME, "python.samples", "resolve", reason, since, until, pid=key[0]))

    def _change(self, change: Callable[[], object]) -> None:
        with self._maps:
            try:
                change()
            except ProbingError as e:
                # The refusal is the same for each process and thread, so it is logged once. `status` shows it while it
                # lasts.
                if e.message != self._refused:
                    _log.warning("the sampler's maps cannot be changed: %s", e.message)
                self._refused = e.message


def _threads(pid: int, scan: Mapping[str, Any]) -> dict[int, tuple[int, int]]:
    """Returns the threads for the map. A thread without a PyThreadState is included only if it certainly has none.

    The programs do not report an included thread as unknown, so it is not examined again for a while. It is not certain
    that the main thread has no PyThreadState, because its interpreter may just be starting. After an incomplete scan
    this is not certain for any thread.
    """
    states = {int(tid): (int(state), int(thread_id)) for tid, state, thread_id, _ in scan["threads"]}
    return {tid: state for tid, state in states.items() if state[0] or (scan["complete"] and tid != pid)}
