"""The source of collectives: attaches the probes to gloo, NCCL and JAX, and turns their records into rows."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from probing.daemon.bpf.ring import checked_ring_size
from probing.daemon.bpf.session import Link, Session
from probing.daemon.clock import ClockPair
from probing.daemon.config import Config
from probing.daemon.context import Context
from probing.daemon.elf.symbols import SymbolFinder
from probing.daemon.nccl_uprobes.communicators import rows as communicators
from probing.daemon.nccl_uprobes.communicators.rows import Communicators
from probing.daemon.nccl_uprobes.layouts.finder import LayoutFinder
from probing.daemon.nccl_uprobes.layouts.gloo import GLOO_LAYOUTS
from probing.daemon.nccl_uprobes.layouts.nccl import NCCL_LAYOUTS
from probing.daemon.nccl_uprobes.operations.issuers import Issuers
from probing.daemon.nccl_uprobes.operations.open_operations import MAP, SHARE, OpenOperations, abandoned
from probing.daemon.nccl_uprobes.operations.rows import finished_rows, inflight_rows
from probing.daemon.nccl_uprobes.operations.symbols import LIBRARIES, NCCL, Library, library_of, place_probes
from probing.daemon.nccl_uprobes.records.operations import OperationDecoder, Operations
from probing.daemon.processes.liveness import is_alive
from probing.daemon.processes.parsers import symbols_by
from probing.daemon.processes.ranking import Membership
from probing.daemon.source import Identity, ProbedLibrary, ProbeSlot, Processes, ProcessKey, RingConsumer, Source
from probing.daemon.source_state import SourceState, Totals, first_of

__all__ = ("FIRST_OBJECT", "OBJECTS", "RING", "CollectivesSource")

OBJECTS = ("gloo", "nccl", "jax")
# The BPF object that is loaded at the start; the others are loaded later.
FIRST_OBJECT = OBJECTS[0]
RING = "collectives"
# The time between two searches for operations of processes that are gone, s.
_CHECK_S = 5.0
_MAX_ENDED = 16384
_log = logging.getLogger(__name__)


class CollectivesSource(Source):
    """The source of collectives. ``symbols`` finds symbols by pattern in the file at a descriptor; ``layouts`` examines
    builds of NCCL that the shipped table lacks. ``joined``: see ``Communicators``; ``issues``: ``changed`` of
    ``Issuers``.

    Only the draining thread may call ``assemble`` and ``assemble_communicators``, which wait for no other thread; the
    other methods are thread-safe.
    """

    name = "collectives"
    table = "comm.ops"
    objects = OBJECTS
    late_objects = OBJECTS
    files = tuple(file for library in LIBRARIES for file in library.files)
    awaited = True

    def __init__(
        self,
        session: Session,
        processes: Processes,
        node: str,
        symbols: SymbolFinder,
        layouts: LayoutFinder | None = None,
        joined: Callable[[int, int, Membership], None] | None = None,
        issues: Callable[[int, int, int], None] | None = None,
    ) -> None:
        self._session = session
        self._symbols = symbols
        self._open = OpenOperations(session)
        self._layouts = layouts
        self._node = node
        self._decoder = OperationDecoder(processes)
        self._live_decoder = OperationDecoder(processes)
        self.observers: list[Callable[[Operations, ClockPair], None]] = []
        """Called with the operations of each drain, by the thread that drains."""
        self._communicators = Communicators(node, processes, joined)
        self._joined = joined
        self._issuers = Issuers(issues or _nobody_asks)
        # Trainers whose rank is unknown.
        self._unranked: set[ProcessKey] = set()
        self._attached: dict[tuple[int, int], list[Link]] = {}
        self._attaching = threading.Lock()
        # Processes that ended since the last drain, and processes that ended before it. The draining thread drops their
        # state.
        self._ended: deque[tuple[int, int]] = deque(maxlen=_MAX_ENDED)
        self._leaving: list[tuple[int, int]] = []
        # Processes that were not alive at the last ``close_ended``, whether or not their exit was reported.
        self._gone: set[tuple[int, int]] = set()
        self._next_check = 0.0
        # The lock guards ``_live_decoder``.
        self._asking = threading.Lock()

    @classmethod
    def make(cls, context: Context) -> CollectivesSource:
        cache = Path(context.config.state_dir) / "nccl_layouts.json"
        layouts = LayoutFinder(context.parsers.files, context.session.maps["nccl_layouts"], cache)
        symbols = symbols_by(context.parsers.libraries)
        who = context.processes
        return cls(context.session, who, context.node, symbols, layouts, who.on_communicator, who.on_issuer)

    @classmethod
    def ring_sizes(cls, config: Config) -> Mapping[str, int]:
        return {RING: checked_ring_size("probes.ring_bytes", config.probes.ring_bytes)}

    @property
    def rings(self) -> Mapping[str, RingConsumer]:
        # The ring ``communicators`` is drained first: its events close operations, which the same drain must return
        # from the ring ``collectives``.
        return {
            communicators.RING: RingConsumer(self.assemble_communicators, "comm.communicators", identified=True),
            RING: RingConsumer(self.assemble, self.table, identified=True, open_map=MAP, abandoned=abandoned),
        }

    @property
    def libraries(self) -> Sequence[ProbedLibrary]:
        return (self,)

    @property
    def probe_slots(self) -> Mapping[int, ProbeSlot]:
        probes = {slot: ProbeSlot(name, RING, self.table) for slot, name in self.slots.items()}
        return probes | {slot: ProbeSlot("", RING, self.table, why) for slot, why in SHARE.items()}

    @property
    def live_tables(self) -> Mapping[str, Callable[[ClockPair], pa.RecordBatch]]:
        return {"comm.inflight": self.inflight}

    def start(self) -> None:
        """Writes the layouts into the map of the programs, and closes operations whose end can no longer be seen."""
        for index, gloo in enumerate(GLOO_LAYOUTS):
            self._session.maps["gloo_layouts"].update(index, gloo.pack())
        for index, nccl in enumerate(NCCL_LAYOUTS):
            self._session.maps["nccl_layouts"].update(index, nccl.pack())
        if self._session.blind:
            self.ends_missed(self._session.blind[1])
        if self._layouts is not None:
            self._layouts.start()

    def stop(self) -> None:
        """Leaves the links alone: the session keeps or ends them."""
        if self._layouts is not None:
            self._layouts.stop()

    def tick(self) -> None:
        """Closes operations of processes whose exit was not reported: the process was never read, or the event was
        lost. Closes operations that could not be closed before. Reports the communicators of operations that do not
        end.
        """
        self._report_open()
        self._open.close_missed()
        if time.monotonic() >= self._next_check:
            self._next_check = time.monotonic() + _CHECK_S
            self.close_ended(is_alive)

    def states(self, totals: Totals) -> list[SourceState]:
        off = [f"switched off, hit too often: {name}" for name in totals.probes_off]
        attached = first_of([f"{path} x{count}" for path, count in totals.attached.items()], ", ")
        unknown = first_of(sorted(set(self._layouts.reasons.values()))) if self._layouts is not None else ""
        return [
            totals.of(
                self.name,
                self.table,
                state="degraded" if off else "",
                reason=first_of([*off, *totals.refused]),
                detail=attached,
            ),
            totals.of(communicators.RING, "comm.communicators", reason=unknown),
        ]

    @property
    def slots(self) -> dict[int, str]:
        """Returns slot -> the program and the pattern of the probe whose hits the slot counts."""
        return {
            slot: f"{probe.program} {probe.pattern}{' return' if probe.on_return else ''}"
            for library in LIBRARIES
            for slot, probe in zip(library.slots, library.probes, strict=True)
        }

    def interesting(self, path: bytes) -> bool:
        """Returns whether a mapped file of this path can be libtorch_cpu, libnccl or JAX's library."""
        return library_of(path) is not None

    def attach(self, fd: int, path: bytes) -> int:
        """Attaches the probes to the library with descriptor ``fd``, for every process that maps it; the caller keeps
        ``fd``.

        Returns the number of new links: 0 if ``path`` is not one of the libraries, or if the file has the links
        already, perhaps from an earlier daemon. Raises UnsupportedTarget for a file that is damaged or lacks a needed
        function, AttachError, PrivilegeError.
        """
        library = library_of(path)
        if library is None:
            return 0
        placed = self._attach(library, fd)
        if library is NCCL and self._layouts is not None:
            self._layouts.attach(fd)
        return placed

    def _attach(self, library: Library, fd: int) -> int:
        identity = self._session.identity(fd)
        with self._attaching:
            if identity in self._attached:
                return 0
            links = self._attached[identity] = place_probes(self._session, self._symbols, library, fd, identity)
        return sum(not link.adopted for link in links)

    def forget(self, identity: tuple[int, int]) -> None:
        """Drops a file whose probes the session has detached."""
        with self._attaching:
            self._attached.pop(identity, None)

    def assemble(self, records: npt.NDArray[Any], pair: ClockPair) -> dict[str, pa.RecordBatch]:
        """Returns physical batches of comm.ops and comm.communicators from records of the ring ``collectives``."""
        batches: dict[str, pa.RecordBatch] = {}
        if len(records):
            operations = self._decoder.decode(records)
            batches["comm.ops"] = finished_rows(self._node, records, operations, pair)
            if (changed := self._communicators.follow(operations, pair)) is not None:
                batches[communicators.TABLE] = changed
            self._issuers.follow(records, (ProcessKey(*entity.process) for entity in operations.entities))
            for observe in self.observers:
                try:
                    observe(operations, pair)
                except Exception:  # a failing observer must not cost the rows, nor stop other observers
                    _log.exception("%d operations could not be observed", len(operations))
        self._forget_ended()
        return batches

    def assemble_communicators(self, records: npt.NDArray[Any], pair: ClockPair) -> dict[str, pa.RecordBatch]:
        """Returns a batch of ``comm.communicators`` from records of the ring ``communicators``.

        Closes the open operations of communicators that were destroyed or aborted; after an abort they count as failed.
        """
        self._open.close_communicators(records)
        return {communicators.TABLE: self._communicators.rows(records, pair)} if len(records) else {}

    def _forget_ended(self) -> None:
        # The ring may still hold records of a process that has ended, so the state of the process is dropped two drains
        # later.
        if self._leaving:
            self._communicators.forget(set(self._leaving))
        for key in self._leaving:
            self._issuers.forget(ProcessKey(*key))
        self._leaving = [self._ended.popleft() for _ in range(len(self._ended))]

    def inflight(self, pair: ClockPair) -> pa.RecordBatch:
        """Returns ``comm.inflight``: the operations that are open at ``pair``."""
        records = self._open.records()
        # Operations called after ``pair`` was taken would have a negative age.
        records = np.ascontiguousarray(records[records["t_call"] <= pair.mono_ns])
        with self._asking:
            return inflight_rows(self._node, records, self._live_decoder.decode(records), pair)

    def backends_of(self, pid: int, start_ns: int) -> frozenset[str]:
        """Returns the backends ("gloo", "nccl") of the operations that this process was seen to call."""
        return self._communicators.backends_of(pid, start_ns)

    def processes_of(self, comm: str) -> list[tuple[int, int]]:
        """Returns (pid, start_ns) of the processes that have a communicator of this name."""
        return self._communicators.processes_of(comm)

    def process_identified(self, process: Identity) -> None:
        if process.role == "trainer" and process.rank is None:
            self._unranked.add(process.key)
        else:
            self._unranked.discard(process.key)

    def process_exited(self, process: Identity) -> None:
        self._unranked.discard(process.key)
        self.close_process(*process.key)

    def program_ended(self, pid: int, start_ns: int, mono_ns: int) -> None:
        """Closes the open operations of a program that ended by exec."""
        self._communicators.forget_backends(pid, start_ns)
        self._open.close_before(mono_ns, pid)

    def _report_open(self) -> None:
        """Reports the communicators of the open operations of trainers without a rank. If the first operation of a
        trainer never ends, no record in the ring ever shows its communicator.
        """
        if self._joined is None or not self._unranked:
            return
        with self._asking:
            entities = self._live_decoder.decode(self._open.records()).entities
        for entity in entities:
            if ProcessKey(*entity.process) in self._unranked and (membership := entity.membership) is not None:
                self._joined(*entity.process, membership)

    def close_process(self, pid: int, start_ns: int) -> int:
        """Closes the open operations of a process that has ended; returns their number. Drops its state later."""
        closed = self._open.close_process(pid, start_ns)
        self._ended.append((pid, start_ns))
        return closed

    def started(self, alive: Callable[[int, int], bool]) -> None:
        self.close_ended(alive)

    def close_ended(self, alive: Callable[[int, int], bool]) -> int:
        """Closes the open operations of processes that are not ``alive(pid, start_ns)``; returns their number. Drops
        the state of these processes later.
        """
        gone = {key for key in self._communicators.processes() if not alive(*key)}
        self._ended.extend(gone - self._gone)
        self._gone = gone
        return self._open.close_ended(alive)

    def ends_missed(self, before_ns: int, pid: int | None = None) -> int:
        return self._open.close_before(before_ns, pid)


def _nobody_asks(_pid: int, _start_ns: int, _tid: int) -> None:
    pass
