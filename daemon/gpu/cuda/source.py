"""The source of calls of the CUDA runtime: attaches probes to libcudart, and makes rows from their records and maps.

The same probes see when the collectives on a stream are done. They then close the open operations in the kernel, and
the source of collectives writes the rows of the closed operations.
"""

from __future__ import annotations

import logging
import os
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy.typing as npt
import pyarrow as pa

from probing.api.errors import ProbingError, UnsupportedTarget
from probing.daemon.bpf.session import Link, Session
from probing.daemon.clock import Clock, ClockPair
from probing.daemon.config import CudaConfig
from probing.daemon.context import Context
from probing.daemon.elf.symbols import SymbolFinder
from probing.daemon.gpu.cuda.frames import Frames
from probing.daemon.gpu.cuda.rows import (
    COUNTED,
    COUNTS,
    SUMS,
    LaunchRows,
    MemoryRows,
    drop_processes,
    processes_in,
    sync_rows,
)
from probing.daemon.gpu.cuda.symbols import (
    COMPLETION,
    EVENT_SLOTS,
    LAUNCHES,
    MEMORY,
    Group,
    Place,
    is_cudart,
    placed,
    slots,
)
from probing.daemon.processes.liveness import is_alive
from probing.daemon.processes.parsers import symbols_by
from probing.daemon.processes.reader_pool import ReaderPool
from probing.daemon.source import Identity, Loss, ProbedLibrary, ProbeSlot, Processes, RingConsumer, Sink, Source
from probing.daemon.source_state import SourceState, Totals

__all__ = ("OBJECTS", "OPTIONAL", "RING", "CudaSource")

OBJECTS = ("cuda",)
OPTIONAL = ("cuda_memory",)
RING = "cuda_syncs"
# Open operations are closed after this time, ns, if nobody queries their stream. That happens with a statically linked
# runtime, whose calls are not seen.
GIVE_UP_NS = 60_000_000_000
_STREAMS, _RESTS, _PROCESSES = "cuda_streams", "cuda_rests", "cuda_processes"
# Further maps with tgid and start_ns in their keys. Their entries are deleted when a program ends: after an exec the
# next program has the same key, and would take an old entry for its own.
_OF_PROGRAM = ("cuda_events", "cuda_captures_of")
# The interval at which the maps are searched for processes that ended without having been identified, s.
_CHECK_S = 10.0
_KEY = struct.Struct("<QQQ")
# The maximum number of runs of the program that closes the open operations of a stream. A run closes 256 of at most
# 1,024 operations.
_REST_RUNS = 32
# After a round in which a probe was off, the programs do not use CUDA events that are recorded within this time, ns. It
# is longer than the time between two rounds, even on a busy machine.
_DISTRUST_NS = 5_000_000_000
_log = logging.getLogger(__name__)


class CudaSource(Source):
    """The calls of the CUDA runtime. ``symbols`` finds symbols by name in the file at a descriptor; ``options`` returns
    the current configuration.

    Thread-safe. The source reads the maps in a thread of its own, which ``tick`` wakes once a second.
    """

    name = "cuda"
    table = "cuda.syncs"
    objects = OBJECTS
    late_objects = (*OBJECTS, *OPTIONAL)
    optional_objects = OPTIONAL
    files = (b"libcudart",)
    awaited = True

    def __init__(
        self,
        session: Session,
        processes: Processes,
        node: str,
        symbols: SymbolFinder,
        sink: Sink,
        readers: ReaderPool,
        clock: Clock,
        config: CudaConfig,
        options: Callable[[], CudaConfig] | None = None,
    ) -> None:
        self._options = options or (lambda: config)
        self._refused_options = ""
        self._session, self._processes, self._node = session, processes, node
        self._symbols, self._sink, self._clock, self._config = symbols, sink, clock, config
        self._links: dict[tuple[tuple[int, int], str], list[Link]] = {}
        self._attaching = threading.Lock()
        self._memory: MemoryRows | None = None
        if SUMS in session.maps:
            self._memory = MemoryRows(session.maps, node, processes, Frames(readers))
        self._launches = LaunchRows(session.maps, node, processes)
        self._files: dict[tuple[int, int], int] = {}
        self._void_before = 0
        self._unasked: dict[bytes, int] = {}
        self._ended: deque[tuple[int, int]] = deque()
        # When entries of each process were seen first, CLOCK_MONOTONIC ns.
        self._seen: dict[tuple[int, int], int] = {}
        self._next_memory = self._next_check = 0.0
        self._wake = threading.Event()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="cuda", daemon=True)

    @classmethod
    def make(cls, context: Context) -> CudaSource:
        def options() -> CudaConfig:
            now = {name: context.settings.value(f"cuda.{name}") for name in ("syncs", "memory", "launches")}
            return context.config.cuda._replace(**now)

        symbols = symbols_by(context.parsers.libraries)
        return cls(
            context.session,
            context.processes,
            context.node,
            symbols,
            context.sink,
            context.readers,
            context.clock,
            options(),
            options,
        )

    @property
    def rings(self) -> Mapping[str, RingConsumer]:
        return {RING: RingConsumer(self.assemble_syncs, self.table, identified=True)}

    @property
    def libraries(self) -> Sequence[ProbedLibrary]:
        return (self,)

    @property
    def probe_slots(self) -> Mapping[int, ProbeSlot]:
        return {slot: ProbeSlot(name, RING, self.table) for slot, name in self.slots.items()}

    def states(self, totals: Totals) -> list[SourceState]:
        return [totals.of(self.name, self.table, RING, reason=self._refused_options)]

    def settings_changed(self) -> bool:
        try:
            again = self.configure(self._options())
        except ProbingError as e:
            self._refused_options = e.message
            return False
        self._refused_options = ""
        return again

    def start(self) -> None:
        """Detaches probes of the earlier daemon that the configuration no longer wants, and starts the thread."""
        self._write_settings()
        unwanted = _programs((MEMORY, LAUNCHES)) - _programs(self._chosen())
        for link in list(self._session.links.values()):
            if link.program in unwanted:
                self._session.detach(link)
        pair = self._clock.pair()
        counted = {"cuda.launches": self._launches.begin()}
        if self._memory is not None:
            counted["cuda.memory"] = self._memory.begin(pair.mono_ns)
        for table in (table for table, some in counted.items() if some):
            reason = "the counts since the last rows of the previous daemon are unknown"
            self._sink.lost(Loss(self.name, table, "kernel", reason, pair.real_ns, pair.real_ns))
        self._next_memory = time.monotonic() + self._config.memory_interval_s
        self._thread.start()

    def finish(self) -> None:
        """Stops the thread, and sends the counts since its last round to the sink."""
        self._end_thread()
        self.round(self._clock.pair())

    def stop(self) -> None:
        """Stops the thread. The session decides whether the links stay."""
        self._end_thread()
        while self._files:
            os.close(self._files.popitem()[1])

    def _end_thread(self) -> None:
        self._stopped = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def slots(self) -> dict[int, str]:
        """Returns "PROGRAM FUNCTION" by slot: the function whose calls the slot counts, and its program."""
        return slots((COMPLETION, MEMORY, LAUNCHES))

    def interesting(self, path: bytes) -> bool:
        """Returns whether a mapped file can be libcudart, by its path."""
        return is_cudart(path)

    def attach(self, fd: int, path: bytes) -> int:
        """Attaches the probes to the library with descriptor ``fd``, for every process that maps it; the caller keeps
        ``fd``.

        Returns the number of new links: 0 if this or the previous daemon has made all links. Raises UnsupportedTarget
        for a file that is not libcudart, AttachError, PrivilegeError.
        """
        if not self.interesting(path):
            return 0
        identity = self._session.identity(fd)
        with self._attaching:
            missing = [group for group in self._wanted() if (identity, group.name) not in self._links]
            links = [link for group in missing for link in self._place(group, fd, identity)]
            # Without uprobe_multi, perf events do not keep the file in use, and a descriptor must not do so, either.
            if identity not in self._files and self._session.features.uprobe_multi:
                self._files[identity] = os.dup(fd)
        return sum(not link.adopted for link in links)

    def forget(self, identity: tuple[int, int]) -> None:
        """Drops the state of the file ``identity``, whose probes the session has detached."""
        with self._attaching:
            for key in [key for key in self._links if key[0] == identity]:
                del self._links[key]
            if (fd := self._files.pop(identity, None)) is not None:
                os.close(fd)

    def configure(self, config: CudaConfig) -> bool:
        """Applies changed options: attaches missing probes, and detaches probes that are no longer wanted. Raises
        AttachError, PrivilegeError.

        Returns True if ``attach`` has to be called again for a library that needs more probes: before Linux 6.6 this
        source keeps no descriptor of the library.
        """
        with self._attaching:
            self._config = config
            self._write_settings()
            wanted = {group.name for group in self._wanted()}
            for identity, name in [key for key in self._links if key[1] not in wanted]:
                for link in self._links.pop((identity, name)):
                    self._session.detach(link)
            failed: ProbingError | None = None
            for identity, fd in self._files.items():
                try:
                    for group in self._wanted():
                        if (identity, group.name) not in self._links:
                            self._place(group, fd, identity)
                except ProbingError as e:
                    # The other libraries still get their probes.
                    failed = failed or e
            if failed is not None:
                raise failed
            known = {identity for identity, _ in self._links}
            return any((identity, name) not in self._links for identity in known for name in wanted)

    def assemble_syncs(self, records: npt.NDArray[Any], pair: ClockPair) -> Mapping[str, pa.RecordBatch]:
        """Turns records of the ring ``cuda_syncs`` into a physical batch of ``cuda.syncs``."""
        if not len(records):
            return {}
        return {"cuda.syncs": sync_rows(records, pair, self._node, self._processes)}

    def tick(self) -> None:
        """Wakes the thread if there is something to read."""
        if self._links or self._ended:
            self._wake.set()

    def process_exited(self, process: Identity) -> None:
        """Queues ``process``: the next round writes its last rows, and then drops its state."""
        self._ended.append(process.key)

    def program_ended(self, pid: int, start_ns: int, mono_ns: int) -> None:
        """Queues a process whose program called exec at ``mono_ns``: the streams, events and memory of that program are
        gone. Does nothing if entries of the process were first seen after the exec, because these belong to the new
        program.
        """
        seen = self._seen.get((pid, start_ns))
        if seen is not None and seen < mono_ns:
            self._ended.append((pid, start_ns))

    def started(self, alive: Callable[[int, int], bool]) -> None:
        """Queues all processes in the maps that are not alive, as ``process_exited`` does. Most processes that use CUDA
        are never identified, so nobody reports their exit.
        """
        self._ended.extend(process for process in self._processes_now() if not alive(*process))

    def _processes_now(self) -> set[tuple[int, int]]:
        """Returns (pid, start_ns) of the processes with entries in the maps."""
        maps = self._session.maps
        found = processes_in(maps[_STREAMS]) | processes_in(maps[COUNTS])
        if self._memory is not None:
            # Each process with entries in the other maps of memory has an entry in this map.
            found |= processes_in(maps[COUNTED])
        pids, values = maps[_PROCESSES].items()
        return found | {(int(pid), int(value["start_ns"])) for pid, value in zip(pids, values, strict=True)}

    def close_rest(self) -> int:
        """Closes finished operations that a hit of a probe left open because it could not close so many. Returns the
        number of closed operations.
        """
        keys, _ = self._session.maps[_RESTS].items()
        return sum(self._close("cuda_close_rest", key) for key in keys)

    def give_up(self, mono_ns: int, after_ns: int = GIVE_UP_NS) -> int:
        """Closes operations on streams that nobody has queried for ``after_ns``. Returns the number of closed
        operations.
        """
        keys, states = self._session.maps[_STREAMS].items()
        waiting = keys[(states["asked"] == 0) & (states["oldest"] < states["next"])]
        before, self._unasked = self._unasked, {}
        closed = 0
        for key in waiting:
            since = self._unasked[key.tobytes()] = before.get(key.tobytes(), mono_ns)
            if mono_ns - since >= after_ns:
                closed += self._close("cuda_give_up", key)
        return closed

    def _close(self, program: str, key: npt.NDArray[Any]) -> int:
        context = _KEY.pack(int(key["object"]), int(key["start_ns"]), int(key["tgid"]))
        closed = 0
        for _ in range(_REST_RUNS):
            count = self._session.run_program(program, context)
            closed += count
            if not count:
                break
        return closed

    def round(self, pair: ClockPair, *, memory: bool = True) -> None:
        """Writes rows of the counters that have changed. For this source's thread, and for tests without a thread."""
        self._distrust_events(pair.mono_ns)
        self.close_rest()
        self.give_up(pair.mono_ns)
        ended = {self._ended.popleft() for _ in range(len(self._ended))}
        self._seen = {key: self._seen.get(key, pair.mono_ns) for key in self._processes_now() - ended}
        if self._config.launches:
            self._put("cuda.launches", self._launches.changed(pair))
            if lost := self._launches.lost():
                reason = "the map had no room to count the launches of more processes"
                self._sink.lost(Loss(self.name, "cuda.launches", "kernel", reason, pair.real_ns, pair.real_ns, lost))
        if self._memory is not None and (memory or ended):
            self._put("cuda.memory", self._memory.changed(pair))
            if lost := self._memory.lost():
                reason = "the maps had no room to follow more allocations"
                self._sink.lost(Loss(self.name, "cuda.memory", "kernel", reason, pair.real_ns, pair.real_ns, lost))
        if ended and (left := self._forget(ended)):
            reason = "more allocations changed than a report has rows, and their processes ended"
            self._sink.lost(Loss(self.name, "cuda.memory", "kernel", reason, pair.real_ns, pair.real_ns, left))

    def _run(self) -> None:
        while not self._stopped:
            self._wake.wait()
            self._wake.clear()
            try:
                due = time.monotonic() >= self._next_memory
                if due:
                    self._next_memory = time.monotonic() + self._config.memory_interval_s
                if time.monotonic() >= self._next_check:
                    self._next_check = time.monotonic() + _CHECK_S
                    self.started(is_alive)
                self.round(self._clock.pair(), memory=due)
            except Exception:  # an error with one process must not stop the rows of the other processes
                _log.exception("reading the CUDA maps failed")

    def _put(self, table: str, batch: pa.RecordBatch) -> None:
        if batch.num_rows:
            self._sink.put(table, batch)

    def _forget(self, ended: set[tuple[int, int]]) -> int:
        """Drops the state of processes that ended. Returns the number of their sums for which the last report had no
        room.
        """
        maps = self._session.maps
        for pid, start_ns in ended:
            value = maps[_PROCESSES].lookup(pid)
            if value is not None and int(value["start_ns"]) == start_ns:
                maps[_PROCESSES].delete(pid)
        for name in (_STREAMS, _RESTS, *_OF_PROGRAM):
            drop_processes(maps[name], ended)
        self._launches.forget(ended)
        return 0 if self._memory is None else self._memory.forget(ended)

    def _write_settings(self) -> None:
        self._session.maps["cuda_settings"].update(0, (self._void_before, int(self._config.syncs), EVENT_SLOTS))

    def _distrust_events(self, now: int) -> None:
        """If a probe of ``EVENT_SLOTS`` is off, tells the programs to ignore CUDA events recorded before ``now`` +
        _DISTRUST_NS, even after the probe is on again.

        While a probe is off, the programs ignore CUDA events without being told. The probe may stay off until the next
        round, so _DISTRUST_NS is longer than the time between two rounds.
        """
        budgets = self._session.maps["budgets"]
        if any(int(budgets.lookup(slot)["off_ns"]) for slot in EVENT_SLOTS):
            self._void_before = now + _DISTRUST_NS
            self._write_settings()

    def _chosen(self) -> list[Group]:
        groups = [COMPLETION]
        if self._config.memory and self._memory is not None:
            groups.append(MEMORY)
        if self._config.launches:
            groups.append(LAUNCHES)
        return groups

    def _wanted(self) -> list[Group]:
        """Loads the programs of the chosen groups. Returns the groups whose programs the kernel accepts."""
        chosen = self._chosen()
        if MEMORY in chosen:
            self._session.load_late(*OPTIONAL)
            if OPTIONAL[0] in self._session.refused:
                chosen.remove(MEMORY)
        return chosen

    def _place(self, group: Group, fd: int, identity: tuple[int, int]) -> list[Link]:
        links: list[Link] = []
        try:
            for place in placed(group, self._symbols(fd, group.patterns)):
                links += [self._link(group, place, fd)]
        except ProbingError as e:
            for link in links:
                self._session.detach(link)
            if group is not COMPLETION and isinstance(e, UnsupportedTarget):
                _log.warning("no rows of %s: %s", group.name, e.message)
                links = []
            else:
                raise
        self._links[identity, group.name] = links
        return links

    def _link(self, group: Group, place: Place, fd: int) -> Link:
        return self._session.attach_uprobe(
            place.program, fd, place.offsets, place.cookies, group.name, on_return=place.on_return
        )


def _programs(groups: Iterable[Group]) -> set[str]:
    return {
        program
        for group in groups
        for function in group.functions
        for program in (function.entry, function.returned)
        if program
    }
