"""All that tells of collectives and of CUDA: operations, communicators, steps, and further witnesses of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy.typing as npt
import pyarrow as pa

from probing.api.errors import ProbingError
from probing.daemon.bpf.probe_slots import ProbeSlot
from probing.daemon.clock import ClockPair
from probing.daemon.collector.context import Shared
from probing.daemon.collector.libraries.probes import ProbedLibrary
from probing.daemon.collector.status import SourceState, some
from probing.daemon.collector.symbols import symbols_by
from probing.daemon.gpu.cuda import source as cuda
from probing.daemon.gpu.cuda.source import CudaSource
from probing.daemon.nccl_uprobes.communicators import rows as communicators
from probing.daemon.nccl_uprobes.flight_recorder.watch import FlightRecorderWatch
from probing.daemon.nccl_uprobes.layouts.finder import LayoutFinder
from probing.daemon.nccl_uprobes.operations import source
from probing.daemon.nccl_uprobes.operations.source import CollectivesSource
from probing.daemon.nccl_uprobes.operations.symbols import NCCL, library_of
from probing.daemon.nccl_uprobes.ras.witness import RasWitness
from probing.daemon.nccl_uprobes.steps import optimizer_probes as optimizer
from probing.daemon.nccl_uprobes.steps.optimizer_probes import OptimizerSource
from probing.daemon.nccl_uprobes.steps.source import Steps
from probing.daemon.processes.discovery import Discovery
from probing.daemon.processes.liveness import is_alive
from probing.daemon.source import Identity

__all__ = ("OBJECTS", "OPTIONAL", "RING", "CommunicationSources")

OBJECTS = (*source.OBJECTS, *cuda.OBJECTS)
OPTIONAL = (*cuda.OPTIONAL, *optimizer.OBJECTS)
RING = source.RING
# How often operations of processes that are gone are looked for, s.
SWEEP_S = 5.0
_Assemble = Callable[[npt.NDArray[Any], ClockPair], Mapping[str, pa.RecordBatch]]


class _Collectives:
    """The source of collectives as ``libraries.ProbedLibrary``: builds of NCCL that are not known are looked into."""

    def __init__(self, collectives: CollectivesSource, layouts: LayoutFinder) -> None:
        self._collectives = collectives
        self._layouts = layouts
        self.name = collectives.name
        self.files = collectives.files
        self.forget = collectives.forget

    def interesting(self, path: bytes) -> bool:
        return self._collectives.interesting(path)

    def attach(self, fd: int, path: bytes) -> int:
        placed = self._collectives.attach(fd, path)
        if library_of(path) is NCCL:
            self._layouts.attach(fd)
        return placed


class CommunicationSources:
    """Also a ``processes.announce.Listener``. ``collectives`` is the source of operations itself; ``look_again`` has
    the libraries of a source looked for once more."""

    def __init__(self, shared: Shared, processes: Discovery) -> None:
        node, session, readers, parsers = shared.node, shared.session, shared.readers, shared.parsers
        config, outbox, clock, changes = shared.config, shared.outbox, shared.clock, shared.changes
        state = Path(config.state_dir)
        self._config, self._changes, self._processes = config, changes, processes
        symbols = symbols_by(parsers.libraries)
        self.collectives = CollectivesSource(session, processes, node, symbols)
        self._layouts = LayoutFinder(parsers.files, session.maps["nccl_layouts"], state / "nccl_layouts.json")
        options = self._cuda_options
        self._cuda = CudaSource(session, processes, node, symbols, outbox, readers, clock, options)
        self._cuda_trouble = ""
        self._steps = Steps(node, processes, outbox)
        self.collectives.observers.append(self._steps.observe)
        self._refused = session.refused.get(optimizer.OBJECTS[0])
        self._optimizer = None if self._refused else OptimizerSource(session, symbols)
        self._ras = RasWitness(
            self._nccl_users, self._owners, readers, parsers.files, outbox, clock, node, port=config.nccl.ras_port,
            interval_s=lambda: config.nccl.ras_interval_s, enabled=lambda: config.nccl.ras,
        )  # fmt: skip
        self._flight = FlightRecorderWatch(
            processes, readers, parsers.files, outbox, clock, node,
            remembered=state / "flight_dumps.json", enabled=lambda: config.nccl.flight_recorder,
        )  # fmt: skip
        self._next_sweep = 0.0
        self.look_again: Callable[[str], None] = lambda _: None
        changes.listeners.append(self._settings_changed)
        # A watched variable numbers the steps.
        outbox.observers["python.training_metrics"] = lambda batch: self._steps.observe_metric(batch, clock.pair())

    @property
    def libraries(self) -> list[tuple[ProbedLibrary, str]]:
        """With the table whose rows are missing where a library could not be probed in time."""
        found: list[tuple[ProbedLibrary, str]] = [
            (_Collectives(self.collectives, self._layouts), "comm.ops"),
            (self._cuda, "cuda.syncs"),
        ]
        return [*found, (self._optimizer, "train.steps")] if self._optimizer else found

    @property
    def slots(self) -> dict[int, ProbeSlot]:
        own = {slot: ProbeSlot(name, RING, "comm.ops") for slot, name in self.collectives.slots.items()}
        own |= {slot: ProbeSlot(name, cuda.RING, "cuda.syncs") for slot, name in self._cuda.slots.items()}
        named = self._optimizer.slots if self._optimizer else {}
        return own | {slot: ProbeSlot(name, optimizer.RING, "train.steps") for slot, name in named.items()}

    @property
    def assemble(self) -> dict[str, _Assemble]:
        """By ring."""
        return {
            RING: self.collectives.assemble,
            communicators.RING: self.collectives.assemble_communicators,
            cuda.RING: self._cuda.assemble_syncs,
            **({optimizer.RING: self._optimizer_calls} if self._optimizer else {}),
        }

    @property
    def identified(self) -> tuple[str, ...]:
        """The rings whose rows name job and rank for good: their records wait until the process is identified."""
        return RING, communicators.RING, cuda.RING

    def _optimizer_calls(self, records: npt.NDArray[Any], pair: ClockPair) -> Mapping[str, pa.RecordBatch]:
        # Of the steps, only those that have ended are rows.
        self._steps.observe_optimizer(records, pair)
        return {}

    def start(self) -> None:
        """Before the libraries are looked for."""
        self.collectives.start()
        self._layouts.start()
        self._cuda.start()
        self._ras.start()
        self._flight.start()

    def close(self) -> None:
        self._flight.stop()
        self._ras.stop()
        self._cuda.stop()
        self._layouts.stop()

    def tick(self) -> None:
        """Once a second."""
        self._cuda.tick()
        # A process that nobody could read has ended without a word to us, and so has one whose exit was lost.
        if time.monotonic() >= self._next_sweep:
            self._next_sweep = time.monotonic() + SWEEP_S
            self.collectives.sweep(is_alive)

    def sweep(self) -> None:
        """Close what belongs to processes that ended while nobody looked."""
        self.collectives.sweep(is_alive)
        self._cuda.sweep(is_alive)

    def states(self, state: str, rows: Mapping[str, int], lost: Mapping[str, int]) -> list[SourceState]:
        unknown = some(sorted(set(self._layouts.reasons.values())))
        return [
            SourceState("communicators", state, unknown, rows["comm.communicators"], lost[communicators.RING]),
            SourceState("cuda", state, self._cuda_trouble, rows["cuda.syncs"], lost[cuda.RING]),
            SourceState("steps", state, self._refused.message if self._refused else "", rows["train.steps"]),
            _witness(self._ras, state, self._config.nccl.ras, rows["comm.ras"], lost),
            _witness(
                self._flight, state, self._config.nccl.flight_recorder, rows["python.torch_nccl_flight_record"], lost
            ),
        ]

    @property
    def _cuda_options(self) -> Any:
        values = {name: self._changes.value(f"cuda.{name}") for name in ("syncs", "memory", "launches")}
        return replace(self._config.cuda, **values)

    def _settings_changed(self) -> None:
        try:
            if self._cuda.configure(self._cuda_options):
                self.look_again(self._cuda.name)
            self._cuda_trouble = ""
        except ProbingError as e:
            self._cuda_trouble = e.message

    def _nccl_users(self) -> list[Identity]:
        return [i for i in self._processes.live() if "nccl" in self.collectives.backends_of(i.pid, i.start_ns)]

    def _owners(self, comm: str) -> Sequence[Identity]:
        found = (self._processes.identity(*process) for process in self.collectives.processes_of(comm))
        return [who for who in found if who is not None]

    # What processes do.

    def process_identified(self, who: Identity) -> None:
        self._flight.process_identified(who)

    def process_replaced(self, pid: int, start_ns: int) -> None:
        self._ras.process_replaced(pid, start_ns)
        self._flight.process_replaced(pid, start_ns)

    def process_exited(self, who: Identity) -> None:
        self.collectives.process_exited(who.pid, who.start_ns)
        self._cuda.process_exited(who.pid, who.start_ns)
        self._steps.forget(who.pid, who.start_ns)
        self._flight.process_exited(who)


def _witness(
    witness: RasWitness | FlightRecorderWatch, state: str, enabled: bool, rows: int, lost: Mapping[str, int]
) -> SourceState:
    detail = witness.detail if isinstance(witness, RasWitness) else ""
    reason = witness.reason if enabled else ""
    return SourceState(witness.name, state if enabled else "stopped", reason, rows, lost[witness.name], detail)
