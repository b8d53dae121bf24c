"""The source of collectives: places the probes on gloo and NCCL, and turns their records into rows."""

from __future__ import annotations

import struct
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from probing.api.errors import ProbingError
from probing.daemon.bpf.interfaces import Link, Session
from probing.daemon.bpf.ring_size import checked_ring_size
from probing.daemon.clock import ClockPair
from probing.daemon.config import Config
from probing.daemon.context import Context
from probing.daemon.elf.symbols import SymbolFinder
from probing.daemon.nccl_uprobes.communicators import rows as communicators
from probing.daemon.nccl_uprobes.communicators.rows import Communicators
from probing.daemon.nccl_uprobes.layouts.finder import LayoutFinder
from probing.daemon.nccl_uprobes.layouts.gloo import GLOO_LAYOUTS, gloo_layout_index
from probing.daemon.nccl_uprobes.layouts.nccl import NCCL_LAYOUTS
from probing.daemon.nccl_uprobes.operations.rows import finished_rows, inflight_rows
from probing.daemon.nccl_uprobes.operations.symbols import GLOO, NCCL, Library, Placement, library_of
from probing.daemon.nccl_uprobes.records.names import STATE_ABANDONED
from probing.daemon.nccl_uprobes.records.operations import OperationDecoder, Operations
from probing.daemon.processes.liveness import is_alive
from probing.daemon.processes.parsers import symbols_by
from probing.daemon.source import Identity, ProbedLibrary, ProbeSlot, Processes, RingConsumer, Source
from probing.daemon.source_state import SourceState, Totals, first_of

__all__ = ("OBJECTS", "RING", "CollectivesSource", "replaced")

OBJECTS = ("gloo", "nccl")
RING = "collectives"
# How often operations of processes that are gone are looked for, s.
_SWEEP_S = 5.0
# The cookie holds the slot, then a tag of the file or the index of its layout, then the operation of the probe.
_SLOT_BITS, _OPERATION_SHIFT = 16, 48
_ABANDON = struct.Struct("<QQQQ")
_CLOSE = struct.Struct("<QQQQQ")
# enum communicator_event of communicators.bpf.h
_DESTROYED, _ABORTED = 4, 5
_MAX_ENDED = 16384
_KEY = ("object", "position", "start_ns", "tgid")


class CollectivesSource(Source):
    """``symbols`` finds symbols by pattern in the file at a descriptor; ``layouts`` looks into builds of NCCL that the
    shipped table lacks.

    Only the draining thread may call ``assemble`` and ``assemble_communicators``, which wait for no other thread; the
    other methods are safe for several threads.
    """

    name = "collectives"
    table = "comm.ops"
    objects = OBJECTS
    files = (*GLOO.files, *NCCL.files)

    def __init__(
        self,
        session: Session,
        processes: Processes,
        node: str,
        symbols: SymbolFinder,
        layouts: LayoutFinder | None = None,
    ) -> None:
        self._session = session
        self._symbols = symbols
        self._layouts = layouts
        self._node = node
        self._decoder = OperationDecoder(processes)
        self._live_decoder = OperationDecoder(processes)
        self.observers: list[Callable[[Operations, ClockPair], None]] = []
        """Called with the operations of each drain, by the thread that drains."""
        self._communicators = Communicators(node, processes)
        self._attached: dict[tuple[int, int], list[Link]] = {}
        self._attaching = threading.Lock()
        # Used by the draining thread: processes that ended, and those that had ended at the drain before.
        self._ended: deque[tuple[int, int]] = deque(maxlen=_MAX_ENDED)
        self._leaving: list[tuple[int, int]] = []
        self._next_sweep = 0.0
        # Guards ``_live_decoder`` only.
        self._asking = threading.Lock()

    @classmethod
    def make(cls, context: Context) -> CollectivesSource:
        cache = Path(context.config.state_dir) / "nccl_layouts.json"
        layouts = LayoutFinder(context.parsers.files, context.session.maps["nccl_layouts"], cache)
        symbols = symbols_by(context.parsers.libraries)
        return cls(context.session, context.processes, context.node, symbols, layouts)

    @classmethod
    def ring_sizes(cls, config: Config) -> Mapping[str, int]:
        return {RING: checked_ring_size("probes.ring_bytes", config.probes.ring_bytes)}

    @property
    def rings(self) -> Mapping[str, RingConsumer]:
        # What happens to a communicator closes operations on it: those come out in the same drain.
        return {
            communicators.RING: RingConsumer(self.assemble_communicators, "comm.communicators", identified=True),
            RING: RingConsumer(
                self.assemble, self.table, identified=True, open_map="operations", abandoned=replaced
            ),
        }

    @property
    def libraries(self) -> Sequence[ProbedLibrary]:
        return (self,)

    @property
    def probe_slots(self) -> Mapping[int, ProbeSlot]:
        return {slot: ProbeSlot(name, RING, self.table) for slot, name in self.slots.items()}

    @property
    def live_tables(self) -> Mapping[str, Callable[[ClockPair], pa.RecordBatch]]:
        return {"comm.inflight": self.inflight}

    def start(self) -> None:
        """Give the programs the layouts, and close operations whose end can no longer be seen."""
        for index, gloo in enumerate(GLOO_LAYOUTS):
            self._session.maps["gloo_layouts"].update(index, gloo.pack())
        for index, nccl in enumerate(NCCL_LAYOUTS):
            self._session.maps["nccl_layouts"].update(index, nccl.pack())
        if self._session.blind:
            self.abandon_before(self._session.blind[1])
        if self._layouts is not None:
            self._layouts.start()

    def stop(self) -> None:
        """The links are the session's: it keeps or ends them."""
        if self._layouts is not None:
            self._layouts.stop()

    def tick(self) -> None:
        """Find processes of which no exit was reported: nobody could read them, or the event was lost."""
        if time.monotonic() >= self._next_sweep:
            self._next_sweep = time.monotonic() + _SWEEP_S
            self.sweep(is_alive)

    def states(self, totals: Totals) -> list[SourceState]:
        off = [f"switched off, hit too often: {name}" for name in totals.probes_off]
        attached = first_of([f"{path} x{count}" for path, count in totals.attached.items()], ", ")
        unknown = first_of(sorted(set(self._layouts.reasons.values()))) if self._layouts is not None else ""
        return [
            totals.of(
                self.name, self.table, state="degraded" if off else "", reason=first_of([*off, *totals.refused]),
                detail=attached,
            ),
            totals.of(communicators.RING, "comm.communicators", reason=unknown),
        ]  # fmt: skip

    @property
    def slots(self) -> dict[int, str]:
        """Slot -> the program and the pattern of the probe that is counted there."""
        return {
            slot: f"{probe.program} {probe.pattern}{' return' if probe.on_return else ''}"
            for library in (GLOO, NCCL)
            for slot, probe in zip(library.slots, library.probes, strict=True)
        }

    def interesting(self, path: bytes) -> bool:
        """Whether a mapped file of this path can be libtorch_cpu or libnccl."""
        return library_of(path) is not None

    def attach(self, fd: int, path: bytes) -> int:
        """Attaches the probes to the library open at ``fd``, for every process that maps it; the caller keeps ``fd``.

        Returns how many links are new: 0 where the file has them, also those adopted from an earlier daemon.
        Raises UnsupportedTarget for a file that is no such library, AttachError, PrivilegeError.
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
            links = self._place(library, fd, identity)
            self._attached[identity] = links
        return sum(not link.adopted for link in links)

    def forget(self, identity: tuple[int, int]) -> None:
        """Drops a file whose probes the session has detached."""
        with self._attaching:
            self._attached.pop(identity, None)

    def _place(self, library: Library, fd: int, identity: tuple[int, int]) -> list[Link]:
        symbols = self._symbols(fd, [*library.patterns, *library.marks])
        tag = _attachment(library, [symbol.name for symbol in symbols], identity)
        links: list[Link] = []
        try:
            for (program, on_return), placements in _by_program(library.placements(symbols)).items():
                offsets = [placement.offset for placement in placements]
                cookies = [_cookie(placement, tag) for placement in placements]
                attach = self._session.attach_uprobe
                links.append(attach(program, fd, offsets, cookies, library.name, on_return=on_return))
        except ProbingError:
            for link in links:
                self._session.detach(link)
            raise
        return links

    def assemble(self, records: npt.NDArray[Any], pair: ClockPair) -> dict[str, pa.RecordBatch]:
        """Records of the ring ``collectives`` -> physical batches of ``comm.ops`` and ``comm.communicators``."""
        batches: dict[str, pa.RecordBatch] = {}
        if len(records):
            operations = self._decoder.decode(records)
            batches["comm.ops"] = finished_rows(self._node, records, operations, pair)
            if (changed := self._communicators.follow(operations, pair)) is not None:
                batches[communicators.TABLE] = changed
            for observe in self.observers:
                observe(operations, pair)
        self._forget_ended()
        return batches

    def assemble_communicators(self, records: npt.NDArray[Any], pair: ClockPair) -> dict[str, pa.RecordBatch]:
        """Records of the ring ``communicators`` -> a batch of ``comm.communicators``.

        Closes the open operations of communicators that were destroyed or aborted; an abort makes them failed.
        """
        self._close(records[np.isin(records["event"], (_DESTROYED, _ABORTED))])
        return {communicators.TABLE: self._communicators.rows(records, pair)} if len(records) else {}

    def _forget_ended(self) -> None:
        # The ring may still hold records of a process that has ended: its state is dropped two drains later.
        for key in self._leaving:
            self._communicators.forget(*key)
        self._leaving = [self._ended.popleft() for _ in range(len(self._ended))]

    def _close(self, gone: npt.NDArray[Any]) -> None:
        if not len(gone):
            return
        ended = {(int(r["tgid"]), int(r["start_ns"]), int(r["comm"])): r for r in gone}
        keys, values = self._session.maps["operations"].items()
        chosen = np.flatnonzero(np.isin(values["comm"], gone["comm"]))
        for key, value in zip(keys[chosen], values[chosen], strict=True):
            record = ended.get((int(key["tgid"]), int(key["start_ns"]), int(value["comm"])))
            if record is not None and value["t_call"] <= record["t"]:
                aborted = int(record["event"] == _ABORTED)
                self._session.run_program("nccl_close", _CLOSE.pack(*(int(key[field]) for field in _KEY), aborted))

    def inflight(self, pair: ClockPair) -> pa.RecordBatch:
        """``comm.inflight``: the operations that are open now."""
        _, records = self._session.maps["operations"].items()
        # Operations called after ``pair`` was taken would have a negative age.
        records = np.ascontiguousarray(records[records["t_call"] <= pair.mono_ns])
        with self._asking:
            return inflight_rows(self._node, records, self._live_decoder.decode(records), pair)

    def backends_of(self, pid: int, start_ns: int) -> frozenset[str]:
        """Returns the backends ("gloo", "nccl") of the operations that were seen of this process."""
        return self._communicators.backends_of(pid, start_ns)

    def processes_of(self, comm: str) -> list[tuple[int, int]]:
        """(pid, start_ns) of the processes that have a communicator of this name."""
        return self._communicators.processes_of(comm)

    def process_exited(self, process: Identity) -> None:
        self.close_process(*process.key)

    def close_process(self, pid: int, start_ns: int) -> int:
        """Close the open operations of a process that has ended; returns how many there were."""
        closed = self._abandon(lambda keys, _: (keys["tgid"] == pid) & (keys["start_ns"] == start_ns))
        self._ended.append((pid, start_ns))
        return closed

    def sweep(self, alive: Callable[[int, int], bool]) -> int:
        """Closes the open operations of processes whose exit was not seen."""

        def ended(keys: npt.NDArray[Any], _: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
            processes, inverse = np.unique(keys[["tgid", "start_ns"]], return_inverse=True)
            gone = np.array([not alive(int(p["tgid"]), int(p["start_ns"])) for p in processes], bool)
            return gone[inverse]

        return self._abandon(ended)

    def ends_missed(self, before_ns: int, pid: int | None = None) -> None:
        self.abandon_before(before_ns, pid)

    def abandon_before(self, mono_ns: int, pid: int | None = None) -> int:
        """Closes operations called before ``mono_ns`` (by ``pid`` or all), whose end the probes may have missed."""
        return self._abandon(
            lambda keys, values: (values["t_call"] < mono_ns) & ((keys["tgid"] == pid) if pid is not None else True)
        )

    def _abandon(self, which: Callable[[npt.NDArray[Any], npt.NDArray[Any]], npt.NDArray[np.bool_]]) -> int:
        keys, values = self._session.maps["operations"].items()
        if not len(keys):
            return 0
        chosen = keys[which(keys, values)]
        return sum(
            self._session.run_program(
                "collectives_abandon", _ABANDON.pack(*(int(key[field]) for field in _KEY))
            )
            for key in chosen
        )


def replaced(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Returns the open operations of a layout that is replaced as abandoned ones: nobody sees their ends."""
    records = values.copy()
    records["state"] = STATE_ABANDONED
    return records


def _attachment(library: Library, marks: Iterable[str], identity: tuple[int, int]) -> int:
    """Returns the tag of the cookies: for gloo the index of the layout, for NCCL a hash of the file's identity."""
    if library is GLOO:
        return gloo_layout_index(marks)
    return zlib.crc32(repr(identity).encode())


def _cookie(placement: Placement, tag: int) -> int:
    return placement.operation << _OPERATION_SHIFT | tag << _SLOT_BITS | placement.slot


def _by_program(placements: Iterable[Placement]) -> dict[tuple[str, bool], list[Placement]]:
    grouped: dict[tuple[str, bool], list[Placement]] = {}
    for placement in placements:
        grouped.setdefault((placement.program, placement.on_return), []).append(placement)
    return grouped
