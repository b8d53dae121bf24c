"""All that tells of the interpreters: stacks on demand, samples of them, native frames, and variables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy.typing as npt
import pyarrow as pa

from probing.daemon.bpf.probe_slots import ProbeSlot
from probing.daemon.clock import ClockPair
from probing.daemon.collector.context import Shared
from probing.daemon.collector.status import SourceState
from probing.daemon.processes.discovery import Discovery
from probing.daemon.python_stack.answers import StackAnswers
from probing.daemon.python_stack.native.source import NativeStacks
from probing.daemon.python_stack.sampling import programs as sampling
from probing.daemon.python_stack.sampling.source import PythonSampler
from probing.daemon.python_stack.source import PythonStacks
from probing.daemon.python_stack.values.source import Values
from probing.daemon.python_stack.values.watch import VariableWatch
from probing.daemon.source import Identity

__all__ = ("PythonSources",)

_Assemble = Callable[[npt.NDArray[Any], ClockPair], Mapping[str, pa.RecordBatch]]


class PythonSources:
    """Also a ``processes.announce.Listener``. ``follow`` is called before ``start``; without a sampler, what the kernel
    refuses is a reason in ``states``, and the rest works."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._changes = shared.changes
        self.stacks = PythonStacks(shared.readers, shared.parsers.stacks)
        self._native = NativeStacks(shared.readers, shared.parsers.stacks, self.stacks.prepare)
        self._values = Values(shared.readers, self.stacks.prepare)
        self._refused = sampling.refusal(shared.session, shared.config.sampling.risk_freeze)
        self._programs = None if self._refused else sampling.SamplingPrograms(shared.session)
        self._sampler: PythonSampler | None = None
        self._watch: VariableWatch | None = None
        self._answers: StackAnswers | None = None

    def follow(self, processes: Discovery) -> None:
        """Make the sources that ask who a process is."""
        shared = self._shared
        if self._programs is not None:
            self._sampler = PythonSampler(
                self._programs, shared.readers, self.stacks, processes, shared.outbox, shared.node, self._sampling_of
            )
            self._changes.listeners.append(self._sampler.settings_changed)
        self._watch = VariableWatch(
            self._values, shared.outbox, self._watching, processes, shared.clock, shared.node,
            interval_s=lambda: float(self._changes.value("variables.interval_s")),
        )  # fmt: skip
        self._changes.listeners.append(self._watch.settings_changed)

    def answers(self, processes: Discovery) -> StackAnswers:
        self._answers = StackAnswers(self._shared.node, processes, self.stacks, self._native, self._values)
        return self._answers

    def start(self) -> None:
        if self._sampler is not None:
            self._sampler.start()
        if self._watch is not None:
            self._watch.start()

    def close(self) -> None:
        if self._watch is not None:
            self._watch.stop()
        if self._sampler is not None:
            self._sampler.stop()
        if self._programs is not None:
            self._programs.close()
        if self._answers is not None:
            self._answers.close()
        self._values.close()
        self.stacks.close()

    def tick(self) -> None:
        """Once a second: threads that stay off the CPU are recorded, and CPUs that came online are sampled."""
        if self._programs is not None:
            self._programs.flush()
            self._programs.refresh()

    @property
    def slots(self) -> dict[int, ProbeSlot]:
        """What is counted under which number where a process has its share."""
        return {slot: ProbeSlot("", PythonSampler.name, "python.samples", why) for slot, why in sampling.SHARES.items()}

    @property
    def assemble(self) -> dict[str, _Assemble]:
        """By ring."""
        return {} if self._sampler is None else {sampling.RING: self._sampler.assemble}

    @property
    def ready(self) -> dict[str, Callable[[], int]]:
        """By ring: the position up to which it may be drained."""
        return {} if self._sampler is None else {sampling.RING: self._sampler.ready}

    def states(self, state: str, rows: Mapping[str, int], lost: Mapping[str, int]) -> list[SourceState]:
        failed = self._watch.reason if self._watch is not None else ""
        return [
            SourceState("python_stack", state),
            self._sampler_state(state, rows["python.samples"], lost[PythonSampler.name]),
            SourceState("variables", state, failed, rows["python.variables"], lost["variables"]),
        ]

    def _sampler_state(self, state: str, rows: int, lost: int) -> SourceState:
        if self._sampler is None or self._programs is None:
            reason = self._refused.message if self._refused else ""
            return SourceState(PythonSampler.name, "degraded", reason)
        reasons = [r for r in (self._programs.off_cpu_refused, self._programs.clock_refused, self._sampler.reason) if r]
        detail = f"{self._sampler.sampled} processes"
        return SourceState(PythonSampler.name, state, "; ".join(reasons), rows, lost, detail)

    def _sampling_of(self, who: Identity) -> tuple[int, bool]:
        return self._changes.value("sampling.hz", who), self._changes.value("sampling.off_cpu", who)

    def _watching(self, who: Identity) -> tuple[str, ...]:
        names: tuple[str, ...] = self._changes.value("variables.watch", who)
        return names

    # What processes do.

    def process_identified(self, who: Identity) -> None:
        if self._sampler is not None:
            self._sampler.process_identified(who)

    def process_replaced(self, pid: int, start_ns: int) -> None:
        self.stacks.forget(pid, start_ns)
        if self._sampler is not None:
            self._sampler.process_replaced(pid, start_ns)

    def process_exited(self, who: Identity) -> None:
        self.stacks.forget(who.pid, who.start_ns)
        self._changes.forget(who.pid, who.start_ns)
        if self._sampler is not None:
            self._sampler.process_exited(who)
