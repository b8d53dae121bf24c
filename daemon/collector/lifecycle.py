"""The source of processes: passes events of the kernel to discovery, and new mappings to the watch of libraries.

Processes with frequent events are passed on less often (``Pace``). Records of a process that is not identified yet wait
in their ring for a short time (``IdentityWait``).
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from probing.daemon.bpf.mmap_events import MmapWatch
from probing.daemon.clock import ClockPair
from probing.daemon.collector.libraries.watch import LibraryWatch, YoungProcesses
from probing.daemon.collector.live_settings import Changes
from probing.daemon.processes.discovery import Discovery
from probing.daemon.processes.quarantine import Quarantine
from probing.daemon.source import Identity, RingConsumer, Source
from probing.daemon.source_state import SourceState, Totals, first_of

__all__ = (
    "HOLD_S",
    "IdentityWait",
    "Lifecycle",
    "Pace",
)

FIRST_S, LAST_S = 0.2, 10.0
# The time after which ``Pace`` forgets a process without events, s.
QUIET_S = 30.0


@dataclass(slots=True)
class _Known:
    """A process with events. ``seen``: the last event; ``due``: when the process may pass again; ``span``: the next
    pause, s; ``waits``: it had an event since it last passed. Times are on time.monotonic().
    """

    seen: float
    due: float
    span: float
    waits: bool


class Pace:
    """Rate-limits the handling of processes with frequent events: each time a process is let through, the pause before
    it may be let through again doubles, up to LAST_S. Not thread-safe.
    """

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}

    def passing(self, pids: Iterable[int]) -> list[int]:
        """Returns the processes that pass now. ``pids``: the processes that had an event. A process in a pause is
        returned by the first call after its pause, so call this often.
        """
        now = time.monotonic()
        for pid in pids:
            known = self._known.get(pid)
            if known is None:
                self._known[pid] = _Known(now, now, FIRST_S, waits=True)
            else:
                known.seen, known.waits = now, True
        found = [pid for pid, known in self._known.items() if known.waits and known.due <= now]
        for pid in found:
            known = self._known[pid]
            known.waits, known.due, known.span = False, now + known.span, min(2 * known.span, LAST_S)
        quiet = [pid for pid, known in self._known.items() if now - known.seen > QUIET_S]
        for pid in quiet:
            del self._known[pid]
        return found


FORK, EXEC, EXIT, OOM = 1, 2, 3, 4
# If the kernel does not report new mappings, all processes are scanned at this interval, s. If it does, this is the
# interval of the search for CPUs that came online.
SCAN_S = 30.0


class Lifecycle(Source):
    """The source of processes. ``mappings``: None if the kernel refuses to report new mappings; then young processes
    are polled.

    ``quarantined`` returns the processes in quarantine.
    """

    name = "processes"
    table = "process.events"
    objects: ClassVar[tuple[str, ...]] = ("lifecycle",)

    def __init__(
        self,
        events: Discovery,
        mappings: MmapWatch | None,
        libraries: LibraryWatch,
        settings: Changes,
        quarantined: Callable[[], list[Quarantine]],
    ) -> None:
        self._events = events
        self._mappings = mappings
        self._libraries = libraries
        self._settings = settings
        self._quarantined = quarantined
        self._lost = 0
        self._young = YoungProcesses()
        self._scanned = time.monotonic()
        self._pace = Pace()

    @property
    def rings(self) -> Mapping[str, RingConsumer]:
        return {"lifecycle": RingConsumer(self.assemble, self.table)}

    @property
    def live_tables(self) -> Mapping[str, Callable[[ClockPair], pa.RecordBatch]]:
        return {"process.processes": self._events.rows, "process.envs": self._events.envs}

    def process_exited(self, process: Identity) -> None:
        self._settings.forget(process.pid, process.start_ns)

    def states(self, totals: Totals) -> list[SourceState]:
        silent = [f"process {q.pid} is not read: an earlier read did not end ({q.op})" for q in self._quarantined()]
        if self._mappings is None:
            silent.append("new mappings are found by polling: kernel.perf_event_paranoid is above 2")
        return [totals.of(self.name, self.table, "lifecycle", reason=first_of(silent))]

    def assemble(self, records: npt.NDArray[Any], _: ClockPair) -> Mapping[str, pa.RecordBatch]:
        """Passes records of the ring ``lifecycle`` to discovery, which puts rows once a process is identified."""
        fields = ("type", "tgid", "start_ns", "ktime", "ppid", "exit_code")
        for kind, tgid, start_ns, ktime, ppid, status in zip(*(records[f].tolist() for f in fields), strict=True):
            if kind == FORK:
                self._events.on_fork(tgid, start_ns, ktime, ppid)
            elif kind == EXEC:
                self._events.on_exec(tgid, start_ns, ktime)
                self._libraries.changed(tgid)
                self._young.add(tgid)
            elif kind == EXIT:
                self._events.on_exit(tgid, start_ns, ktime, status)
                self._libraries.changed(tgid)
                self._young.remove(tgid)
            elif kind == OOM:
                self._events.on_oom(tgid, start_ns, ktime)
        return {}

    def read_mappings(self) -> None:
        """Passes processes with new mappings to the watch of libraries and to discovery. One thread calls it often."""
        pids = self._polled() if self._mappings is None else self._reported(self._mappings)
        for pid in pids:
            self._libraries.seen(pid)
        for pid in self._pace.passing(pids):
            self._events.on_mapping(pid)

    def _reported(self, mappings: MmapWatch) -> set[int]:
        now = time.monotonic()
        if now - self._scanned >= SCAN_S:
            self._scanned = now
            if mappings.refresh():
                self._libraries.scan()
        pids = {mapping.pid for mapping in mappings.read()}
        if mappings.lost != self._lost:
            self._lost = mappings.lost
            self._libraries.scan()
        return pids

    def _polled(self) -> set[int]:
        now = time.monotonic()
        if now - self._scanned >= SCAN_S:
            self._scanned = now
            self._libraries.scan()
        return set(self._young.due())


# The maximum time for which records wait for the identity of their process, s. The wait delays only queries.
HOLD_S = 0.5
# The maximum number of processes for which records wait, about 200 bytes each. The oldest process is dropped first.
MAX_SEEN = 65536
_MIX = np.uint64(0x9E37_79B9_7F4A_7C15)


class IdentityWait:
    """Holds records until their process is identified. One object serves all rings, in the thread that drains."""

    def __init__(self, processes: Discovery, now: Callable[[], float] = time.monotonic) -> None:
        self._processes = processes
        self._now = now
        self._since: OrderedDict[tuple[int, int], float] = OrderedDict()

    def takes(self, records: npt.NDArray[Any]) -> int:
        """Returns the number of records that may become rows now: all records before the first record whose process is
        still awaited.

        ``records`` have ``tgid`` and ``start_ns``. The wait for a process begins at the first call with a record of
        this process.
        """
        mixed = records["start_ns"] * _MIX + records["tgid"]
        firsts = np.unique(mixed, return_index=True)[1].tolist()
        keys = [(int(records["tgid"][at]), int(records["start_ns"][at])) for at in firsts]
        return min((at for at, key in zip(firsts, keys, strict=True) if self._waits(key)), default=len(records))

    def _waits(self, key: tuple[int, int]) -> bool:
        if not self._processes.expected(*key):
            return False
        now = self._now()
        if key not in self._since:
            self._since[key] = now
            if len(self._since) > MAX_SEEN:
                self._since.popitem(last=False)
            self._processes.on_mapping(key[0])
        return now - self._since[key] < HOLD_S
