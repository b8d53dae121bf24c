"""The source of samples: turns records of the programs (bpf/python.bpf.c) into rows with names and lines of code."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy.typing as npt
import pyarrow as pa

from probing.api.errors import CorruptTarget, InternalError, ProbingError, TargetTimeout
from probing.daemon.clock import ClockPair
from probing.daemon.config import Config
from probing.daemon.context import Context
from probing.daemon.processes.reader_pool import GRACE_S, ReaderPool
from probing.daemon.python_stack.sampling.codes import MAX_WANTED, CodeKey, WantedCode, unpack_codes
from probing.daemon.python_stack.sampling.decoder import Decoder
from probing.daemon.python_stack.sampling.enrolment import Enrolment
from probing.daemon.python_stack.sampling.line_index import line_index
from probing.daemon.python_stack.sampling.processes import NAME, KnownProcesses, Sampled
from probing.daemon.python_stack.sampling.programs import (
    FULL_SHARE,
    OBJECTS,
    REST_S,
    RING,
    SHARES,
    SamplingPrograms,
    refusal,
    ring_size,
)
from probing.daemon.python_stack.sampling.rows import SampleRows
from probing.daemon.python_stack.sampling.watch import SampledWatch, Settings
from probing.daemon.python_stack.stacks.requests import PythonStacks
from probing.daemon.source import Identity, ProbeSlot, Processes, ProcessKey, Refused, RingConsumer, Sink, Source
from probing.daemon.source_state import SourceState, Totals

__all__ = ("PythonSampler",)

ROLES = frozenset({"trainer", "data_loader"})
FETCH_S = 0.5
# The pause before the first visit of a process, after the daemon has started, s. Earlier visits would delay the
# daemon's first answer.
START_PAUSE_S = 1.0
# A reader that is blocked for this long is given up, s. A reader that only waits for a CPU is not given up: its target
# would be put in quarantine, and a diagnosis would get no stacks of the target.
PATIENCE_S = 0.25
_log = logging.getLogger(__name__)


class PythonSampler(Source):
    """The source of samples. Thread-safe, except ``assemble`` and ``ready``, which the thread that drains the ring
    ``python_samples`` calls.
    """

    name = NAME
    table = "python.samples"
    optional_objects = OBJECTS
    late_objects = OBJECTS

    def __init__(
        self,
        kernel: SamplingPrograms,
        readers: ReaderPool,
        runtimes: PythonStacks,
        processes: Processes,
        sink: Sink,
        node: str,
        settings: Settings,
        pause_s: float = 0.0,
    ) -> None:
        self._kernel = kernel
        self._readers = readers
        self._known = KnownProcesses(runtimes)
        enrolment = Enrolment(kernel, readers, self._known, self._checks, sink.lost)
        self._watch = SampledWatch(enrolment, self._known, settings, pause_s)
        self._rows = SampleRows(node, processes, self._known.find, sink)
        self._decoder: Decoder | None = None

    @classmethod
    def make(cls, context: Context) -> Source:
        refused = refusal(context.session, context.config.sampling.risk_freeze)
        if refused is not None:
            return Refused(cls.name, refused.message)
        value = context.settings.value

        def settings(process: Identity) -> tuple[int, bool]:
            return value("sampling.hz", process), value("sampling.off_cpu", process)

        runtimes = context.find(PythonStacks)
        programs = SamplingPrograms(context.session)
        return cls(
            programs,
            context.readers,
            runtimes,
            context.processes,
            context.sink,
            context.node,
            settings,
            START_PAUSE_S,
        )

    @classmethod
    def ring_sizes(cls, config: Config) -> Mapping[str, int]:
        return {RING: ring_size(config.sampling.ring_bytes)}

    @property
    def rings(self) -> Mapping[str, RingConsumer]:
        return {RING: RingConsumer(self.assemble, self.table, ready=self.ready, full_share=FULL_SHARE, rest_s=REST_S)}

    @property
    def probe_slots(self) -> Mapping[int, ProbeSlot]:
        return {slot: ProbeSlot("", self.name, self.table, why) for slot, why in SHARES.items()}

    def tick(self) -> None:
        """Reports threads that stay off the CPU, and starts sampling on CPUs that came online."""
        self._kernel.flush()
        self._kernel.refresh()

    def states(self, totals: Totals) -> list[SourceState]:
        reasons = [self._kernel.off_cpu_refused, self._kernel.clock_refused, self.reason]
        reason = "; ".join(reason for reason in reasons if reason)
        return [totals.of(self.name, self.table, reason=reason, detail=f"{self.sampled} processes")]

    def start(self) -> None:
        """Starts decoding the records that the ring already holds. Raises ProbingError if the programs' maps cannot be
        written.
        """
        self._watch.start()
        self._decoder = Decoder(self._kernel.ring, self._known.find, self._fetch, self._watch.unresolved)
        self._decoder.start()

    def started(self, alive: Callable[[int, int], bool]) -> None:  # noqa: ARG002
        """Visits processes from now on. Samples of processes that ended unseen are kept."""
        self._watch.begin()

    def stop(self) -> None:
        """Stops sampling. Records in the ring stay for the next daemon."""
        self._watch.stop()
        decoder, self._decoder = self._decoder, None
        if decoder is not None:
            decoder.stop()
        self._kernel.close()

    def assemble(self, records: npt.NDArray[Any], pair: ClockPair) -> dict[str, pa.RecordBatch]:
        """Turns records of the ring ``python_samples`` into batches of ``python.samples`` and ``python.stacks``."""
        return self._rows.assemble(records, pair)

    def ready(self) -> int:
        """Returns the position up to which the ring may be drained."""
        decoder = self._decoder
        return self._kernel.ring.position if decoder is None else decoder.ready()

    @property
    def sampled(self) -> int:
        """Returns the number of processes that are sampled now."""
        return self._watch.sampled

    @property
    def reason(self) -> str:
        """Why processes that should be sampled are not sampled, each reason with its pids; empty if all are sampled."""
        return self._watch.reason

    def settings_changed(self) -> bool:
        """Reads the settings of all processes again. Returns False."""
        self._watch.settings_changed()
        return False

    def process_identified(self, who: Identity) -> None:
        if who.role in ROLES:
            self._watch.watch(who)
        else:
            self._watch.leave(who.key)

    def process_replaced(self, pid: int, start_ns: int) -> None:
        self._watch.renew(ProcessKey(pid, start_ns))

    def process_exited(self, who: Identity) -> None:
        self._watch.leave(who.key)

    def _fetch(self, process: Sampled, codes: list[CodeKey]) -> None:
        """Reads code objects. Objects that are gone are given up; objects of a slow process are tried again later."""
        try:
            self._read(process, codes)
        except (TargetTimeout, InternalError):
            return
        except ProbingError as e:
            _log.debug("code of process %d cannot be read: %s", process.key[0], e.message)
            if isinstance(e, CorruptTarget):
                self._known.unprepare(process)
        process.codes.give_up(process.codes.missing(codes, time.monotonic()))

    def _checks(self, process: Sampled, addresses: Sequence[int]) -> dict[int, int]:
        return dict(self._read(process, [(address, None) for address in addresses]))

    def _read(self, process: Sampled, wanted: Sequence[WantedCode]) -> list[CodeKey]:
        """Reads and keeps the ``wanted`` code. Returns the keys of the code that was read. Raises ProbingError."""
        deadline = time.monotonic() + FETCH_S
        read: list[CodeKey] = []
        runtime, layout = self._known.prepared(process, FETCH_S)
        while wanted:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TargetTimeout(f"code of process {process.key[0]} could not be read in time")
            answer = self._readers.call(
                "codes",
                pid=process.key[0],
                start_ns=process.key[1],
                timeout=left + GRACE_S,
                patience=PATIENCE_S,
                runtime=runtime.to_dict(),
                wanted=wanted[:MAX_WANTED],
                timeout_ms=int(left * 500),
            )
            codes = unpack_codes(answer, layout.lines, line_index)
            process.codes.learn(codes)
            self._known.bound()
            read += codes
            wanted = wanted[max(1, int(answer.header["asked"])) :]
        return read
