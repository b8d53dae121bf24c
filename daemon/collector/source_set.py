"""Lists the sources of a collector, and joins their rings, libraries, probe slots and tables.

A source may ask ``Context.find`` for the sources above it in the list.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

import pyarrow as pa

from probing.api.errors import InternalError
from probing.daemon.clock import ClockPair
from probing.daemon.collector.row_buffer import RowBuffer
from probing.daemon.config import Config
from probing.daemon.context import Context, SourceType
from probing.daemon.gpu.cuda.source import CudaSource
from probing.daemon.gpu.nvml.source import NvmlSource
from probing.daemon.host.cpu.source import CpuSource
from probing.daemon.host.kernel_log.source import KernelLogSource
from probing.daemon.host.memory import ProcessMemorySource
from probing.daemon.host.node.source import NodeSource, SpaceSource
from probing.daemon.job_rows.source import JobRows
from probing.daemon.labels.source import Labels
from probing.daemon.logs.source import LogSource
from probing.daemon.nccl_uprobes.flight_recorder.watch import FlightRecorderWatch
from probing.daemon.nccl_uprobes.operations.source import CollectivesSource
from probing.daemon.nccl_uprobes.progress import JobProgress
from probing.daemon.nccl_uprobes.ras.witness import RasWitness
from probing.daemon.nccl_uprobes.steps.source import Steps
from probing.daemon.net.interfaces.source import InterfaceSource
from probing.daemon.net.rdma.qps import QueuePairs
from probing.daemon.net.rdma.source import RdmaPorts
from probing.daemon.net.tcp.source import TcpSource
from probing.daemon.python_stack.sampling.source import PythonSampler
from probing.daemon.python_stack.source import StacksOnDemand
from probing.daemon.python_stack.torch_modules.source import TorchModules
from probing.daemon.python_stack.values.watch import VariableWatch
from probing.daemon.source import Assemble, ProbedLibrary, ProbeSlot, Records, RingConsumer, Source
from probing.daemon.source_state import SourceState, Totals
from probing.daemon.user_probes.manager import UserProbes

__all__ = (
    "SOURCES",
    "SourceSet",
    "objects_of",
    "ring_sizes_of",
)

_log = logging.getLogger(__name__)


def objects_of(kinds: Sequence[SourceType]) -> tuple[list[str], list[str]]:
    """Returns the names of the BPF objects that sources require, and the names of optional objects."""
    return [name for kind in kinds for name in kind.objects], [name for kind in kinds for name in kind.optional_objects]


def ring_sizes_of(kinds: Sequence[SourceType], config: Config) -> dict[str, int]:
    """Returns the configured sizes of rings, bytes. Raises ConfigError."""
    return {ring: size for kind in kinds for ring, size in kind.ring_sizes(config).items()}


class SourceSet:
    """The sources, in the order in which they were built. Iterating yields the sources."""

    def __init__(self, buffer: RowBuffer) -> None:
        self._buffer = buffer
        self._sources: list[Source] = []

    def __iter__(self) -> Iterator[Source]:
        return iter(self._sources)

    def build(self, kinds: Sequence[SourceType], context: Context, undo: ExitStack) -> None:
        """Makes a source of each class in ``kinds``. ``undo`` stops the sources, the last source first."""
        for kind in kinds:
            source = kind.make(context)
            context.share(source)
            self.add(source)
            undo.callback(source.stop)

    def add(self, source: Source) -> None:
        for table, observer in source.observed_tables.items():
            self._buffer.observers[table].append(observer)
        self._buffer.loss_listeners.append(source.rows_lost)
        self._sources.append(source)

    @property
    def rings(self) -> dict[str, RingConsumer]:
        """Returns the consumer of each ring, in the order in which a cycle drains the rings."""
        return {
            ring: replace(consumer, assemble=self._observed(consumer.assemble))
            for source in self._sources
            for ring, consumer in source.rings.items()
        }

    @property
    def libraries(self) -> list[ProbedLibrary]:
        return [library for source in self._sources for library in source.libraries]

    @property
    def probe_slots(self) -> dict[int, ProbeSlot]:
        """Returns all probes by slot. Raises InternalError if two sources have the same slot."""
        found: dict[int, ProbeSlot] = {}
        for source in self._sources:
            for slot, probe in source.probe_slots.items():
                if slot in found:
                    raise InternalError(f"the probe slot {slot} is used by {found[slot].name} and {probe.name}")
                found[slot] = probe
        return found

    @property
    def live_tables(self) -> dict[str, Callable[[ClockPair], pa.RecordBatch]]:
        return {table: rows for source in self._sources for table, rows in source.live_tables.items()}

    def start(self) -> None:
        for source in self._sources:
            source.start()

    def settings_changed(self) -> list[ProbedLibrary]:
        """Notifies the sources of changed settings. Returns the libraries whose probes have to be attached again."""
        return [library for source in self._sources if source.settings_changed() for library in source.libraries]

    def paused(self) -> None:
        """Notifies the sources, before they start, that an earlier daemon paused the session."""
        for source in self._sources:
            source.pause(True)

    def pause(self, paused: bool, mono_ns: int) -> None:
        """Notifies the sources that the session was paused or resumed at ``mono_ns``. While probes are off, ends of
        operations are missed.
        """
        for source in self._sources:
            source.pause(paused)
        self.ends_missed(mono_ns)

    def ends_missed(self, before_ns: int, pid: int | None = None) -> None:
        for source in self._sources:
            source.ends_missed(before_ns, pid)

    def started(self, alive: Callable[[int, int], bool]) -> None:
        for source in self._sources:
            source.started(alive)

    def states(self, totals: Totals) -> list[SourceState]:
        """Returns the states of all sources. A source that raises when it is asked for them is reported as degraded."""
        states: list[SourceState] = []
        for source in self._sources:
            try:
                states += source.states(totals)
            except Exception as e:  # the watchdog would restart a collector that shows no state
                _log.exception("the source %s shows no state", source.name)
                states.append(SourceState(source.name, "degraded", f"{type(e).__name__} in its state"))
        return states

    def _observed(self, assemble: Assemble) -> Assemble:
        def assembled(records: Records, pair: ClockPair) -> Mapping[str, pa.RecordBatch]:
            batches = assemble(records, pair)
            for table, batch in batches.items():
                self._buffer.observe(table, batch, pair)
            return batches

        return assembled


SOURCES: tuple[SourceType, ...] = (
    CollectivesSource,
    Labels,
    JobProgress,
    CudaSource,
    NvmlSource,
    Steps,
    RasWitness,
    FlightRecorderWatch,
    StacksOnDemand,
    PythonSampler,
    VariableWatch,
    TorchModules,
    LogSource,
    JobRows,
    ProcessMemorySource,
    CpuSource,
    NodeSource,
    SpaceSource,
    KernelLogSource,
    TcpSource,
    InterfaceSource,
    RdmaPorts,
    QueuePairs,
    UserProbes,
)
