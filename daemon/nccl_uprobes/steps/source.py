"""Makes rows of ``train.steps`` from collectives, calls of the optimizer and watched variables.

A step is one repeat of the sequence of collectives that a process repeats (``steps.period``); its row is written when
the next repeat is complete. If the optimizer runs once for several repeats, these are micro-steps of one step
(``steps.arbiter``). Without a repeating sequence, a step lasts from the end of one run of the optimizer to the end of
the next (``steps.optimizer_steps``). At any time the steps of a process come from only one of these methods. Steps are
numbered from 0 on since a job was first seen, with the same numbers on all its ranks on this node; a watched variable
that holds the step number replaces these numbers. Phases without a period have no steps.

The Python sampler cannot show steps: it samples a thread a few times a second, misses most shorter runs of an
optimizer, and cannot tell whether a frame seen twice is one call or two. Uprobes cannot be set on Python functions,
either.

``wait_ns`` is the time that a rank waited for other ranks on its node (``steps.numbering``), since this node does not
know the times of ranks on other nodes.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from probing.daemon.arrow import batch_of
from probing.daemon.clock import ClockPair
from probing.daemon.context import Context
from probing.daemon.fairness import crowding
from probing.daemon.nccl_uprobes.operations.source import CollectivesSource
from probing.daemon.nccl_uprobes.records.operations import Operations
from probing.daemon.nccl_uprobes.steps import optimizer_probes
from probing.daemon.nccl_uprobes.steps.arbiter import Arbiter
from probing.daemon.nccl_uprobes.steps.collective_steps import Step, StepDetector
from probing.daemon.nccl_uprobes.steps.numbering import Calibration, JobSteps
from probing.daemon.nccl_uprobes.steps.operation_history import Texts, operations_by_process
from probing.daemon.nccl_uprobes.steps.optimizer_probes import OptimizerSource
from probing.daemon.nccl_uprobes.steps.optimizer_steps import OptimizerDetector, OptimizerStep
from probing.daemon.nccl_uprobes.steps.period import Period
from probing.daemon.processes.parsers import symbols_by
from probing.daemon.source import Identity, ProbedLibrary, ProbeSlot, Processes, RingConsumer, Sink, Source
from probing.daemon.source_state import SourceState, Totals, first_of

__all__ = ("Steps",)

_TABLE = "train.steps"
_MAX_PROCESSES = 128
# A process is dropped for another process of its owner only after this time without data, ns. Otherwise the ranks of a
# job with more than _MAX_PROCESSES ranks would replace each other all the time, and none would ever have a step.
_SILENT_NS = 60_000_000_000
# The number of ticks, 1 s each, after which a process that ended is dropped. Its last records may come after its exit,
# since its own reports and its open operations are read only then.
_LAST_TICKS = 5
# The maximum number of jobs without processes that are kept, 1.5 MB each. They are kept so that restarted ranks
# continue the numbering.
_MAX_IDLE_JOBS = 8
# The confidence in a step from readings of a variable: its begin and end are only as exact as the time between two
# readings.
_READING_CONFIDENCE = 0.5
_VARIABLE_CONFIDENCE = 0.95
# Steps that the optimizer shows, at most _MAX_WAITING, wait for _LATE_NS: operations of the same time are reported by
# then. If there are operations, the steps wait longer (_CHANCE_*): the operations show a period by then, or have none.
_MAX_WAITING = 4096
_LATE_NS = 3_000_000_000
_CHANCE_NS, _CHANCE_STEPS = 30_000_000_000, 16
# The largest step number that is accepted from a job. Numbers that are computed from a larger one may not fit into 64
# bits.
_MAX_STEP = 1 << 62
_Key = tuple[int, int]


@dataclass(slots=True)
class _Process:
    clock: StepDetector
    job: JobSteps
    # Whether ``job`` is the process's job; else it is a substitute until the process is identified.
    identified: bool
    number: int | None = None
    calibration: Calibration = field(default_factory=Calibration)
    # (time, value): the newest value of the variable, and the time at which it was first read.
    reading: tuple[int, int] | None = None
    why: tuple[Period, str] | None = None
    optimizer: OptimizerDetector = field(default_factory=OptimizerDetector)
    arbiter: Arbiter = field(default_factory=Arbiter)
    waiting: deque[OptimizerStep] = field(default_factory=lambda: deque(maxlen=_MAX_WAITING))
    # Whether only the optimizer shows the steps.
    alone: bool = False
    # The end of the last step that was reported.
    reported: int = 0
    # (time, step) of the last begin that the job reported; None: the job reports no steps.
    begun: tuple[int, int] | None = None
    owner: int | None = None
    # When the process last had data, CLOCK_MONOTONIC ns.
    seen: int = 0


class _Row(TypedDict, total=False):
    node: str
    ts: int
    job: str | None
    run: str | None
    pid: int
    start_ns: int
    rank: int | None
    step: int
    duration_ns: int
    comm_ns: int | None
    wait_ns: int | None
    ops: int | None
    source: str
    confidence: float
    why: str


class Steps(Source):
    """The source of ``train.steps``. Thread-safe.

    ``optimizer`` attaches the probes of optimizers; ``refused`` says why there are no probes.
    """

    name = "steps"
    table = _TABLE
    optional_objects = optimizer_probes.OBJECTS
    late_objects = optimizer_probes.OBJECTS

    def __init__(
        self,
        node: str,
        processes: Processes,
        sink: Sink,
        optimizer: OptimizerSource | None = None,
        refused: str = "",
    ) -> None:
        self._optimizer = optimizer
        self._refused = refused
        self._node = node
        self._identities = processes
        self._sink = sink
        self._texts = Texts()
        self._processes: OrderedDict[_Key, _Process] = OrderedDict()
        self._jobs: OrderedDict[Any, JobSteps] = OrderedDict()
        # The number of ticks until a process that ended is dropped.
        self._ended: dict[_Key, int] = {}
        # Whether a process was left out since the last exit.
        self._left_out = False
        self._lock = threading.Lock()

    @classmethod
    def make(cls, context: Context) -> Steps:
        optimizer = None
        refused = context.session.refused.get(optimizer_probes.OBJECTS[0])
        if refused is None:
            optimizer = OptimizerSource(context.session, symbols_by(context.parsers.libraries))
        reason = refused.message if refused is not None else ""
        steps = cls(context.node, context.processes, context.sink, optimizer, reason)
        context.find(CollectivesSource).observers.append(steps.observe)
        return steps

    @property
    def rings(self) -> Mapping[str, RingConsumer]:
        if self._optimizer is None:
            return {}
        return {optimizer_probes.RING: RingConsumer(self._assemble_optimizer, _TABLE)}

    @property
    def libraries(self) -> Sequence[ProbedLibrary]:
        return () if self._optimizer is None else (self._optimizer,)

    @property
    def probe_slots(self) -> Mapping[int, ProbeSlot]:
        slots = {} if self._optimizer is None else self._optimizer.slots
        return {slot: ProbeSlot(name, optimizer_probes.RING, _TABLE) for slot, name in slots.items()}

    @property
    def observed_tables(self) -> Mapping[str, Callable[[pa.RecordBatch, ClockPair], None]]:
        return {"python.training_metrics": self.observe_metric}

    def process_exited(self, process: Identity) -> None:
        with self._lock:
            self._ended[process.key] = _LAST_TICKS

    def tick(self) -> None:
        """Drops the state of processes that ended some ticks ago."""
        with self._lock:
            self._ended = {key: ticks - 1 for key, ticks in self._ended.items()}
            over = [key for key, ticks in self._ended.items() if ticks <= 0]
        for key in over:
            self.forget(*key)

    def program_ended(self, pid: int, start_ns: int, mono_ns: int) -> None:
        """Drops the state from before an exec: the period, and the fact that the job reports its steps. The state of
        the new program stays.
        """
        with self._lock:
            process = self._processes.get((pid, start_ns))
            if process is None:
                return
            if process.clock.newest < mono_ns:
                del self._processes[pid, start_ns]
            elif process.begun is not None and process.begun[0] < mono_ns:
                process.begun = None

    def states(self, totals: Totals) -> list[SourceState]:
        left_out = f"some processes have no steps: {_MAX_PROCESSES} other processes have data" if self._left_out else ""
        return [totals.of(self.name, _TABLE, reason=first_of([text for text in (self._refused, left_out) if text]))]

    def _assemble_optimizer(self, records: npt.NDArray[Any], pair: ClockPair) -> Mapping[str, pa.RecordBatch]:
        # No rows are returned: the rows of finished steps are sent to the sink directly.
        self.observe_optimizer(records, pair)
        return {}

    def observe(self, operations: Operations, pair: ClockPair) -> None:
        """Reads ``operations`` of any processes. Operations that are passed twice count once."""
        rows: list[_Row] = []
        with self._lock:
            by_process = []
            for key, own in operations_by_process(operations, self._texts).items():
                who = self._identities.identity(*key)
                process = self._process(key, who, pair.mono_ns)
                if process is not None:
                    process.job.waits.add(key[0], own)
                    by_process.append((key, who, process, own))
            # The operations of all ranks are added first, since the wait of a rank is computed from all of them.
            for key, who, process, own in by_process:
                rows += self._from_periods(key, who, process, process.clock.observe(own), pair)
        self._put(rows)

    def observe_optimizer(self, records: npt.NDArray[Any], pair: ClockPair) -> None:
        """Reads records of the ring ``optimizer_steps``. Records that are passed twice count once."""
        rows: list[_Row] = []
        with self._lock:
            owners = records[["tgid", "start_ns"]]
            for owner in np.unique(owners):
                key = int(owner["tgid"]), int(owner["start_ns"])
                who = self._identities.identity(*key)
                process = self._process(key, who, pair.mono_ns)
                if process is None:
                    continue
                steps = process.optimizer.observe(records[owners == owner])
                process.arbiter.ran(step.t_end for step in steps if step.sure)
                process.waiting.extend(steps)
                rows += self._from_periods(key, who, process, (), pair)
                rows += self._from_optimizer(key, who, process, pair)
        self._put(rows)

    def observe_metric(self, batch: pa.RecordBatch, pair: ClockPair) -> None:
        """Follows the column ``step`` of a batch of ``python.training_metrics``, which has the stored columns.

        A row named ``step`` says that the job begins a step; a row without a name is a reading of a variable.
        """
        rows: list[_Row] = []
        with self._lock:
            columns = [batch.column(name) for name in ("pid", "start_ns", "ts", "step", "name")]
            columns = [c.cast(pa.int64()) if pa.types.is_timestamp(c.type) else c for c in columns]
            for pid, start_ns, ts, value, name in zip(*(column.to_pylist() for column in columns), strict=True):
                if value is None or abs(value) > _MAX_STEP or name not in (None, "step"):
                    continue
                follow = self._from_variable if name is None else self._from_job
                rows += follow((pid, start_ns), ts - pair.mono_to_utc_ns, value, pair)
        self._put(rows)

    def forget(self, pid: int, start_ns: int) -> None:
        """Drops the state of a process."""
        with self._lock:
            self._ended.pop((pid, start_ns), None)
            self._processes.pop((pid, start_ns), None)
            self._left_out = False
            self._drop_idle_jobs()

    def _put(self, rows: list[_Row]) -> None:
        if rows:
            self._sink.put(_TABLE, batch_of(_TABLE, rows))

    def _process(self, key: _Key, who: Identity | None, now: int) -> _Process | None:
        """Returns the state of a process that has data at ``now`` (CLOCK_MONOTONIC ns); None if it is left out."""
        process = self._processes.get(key)
        if process is None:
            owner = who.owner if who is not None else None
            if len(self._processes) >= _MAX_PROCESSES and not self._make_room(owner, now):
                self._left_out = True
                return None
            job = self._job(key if who is None else (who.job, who.run))
            process = self._processes[key] = _Process(StepDetector(job.turn, job.waits.of), job, who is not None)
            process.owner = owner
        elif who is not None and not process.identified:
            process.job, process.identified, process.owner = self._job((who.job, who.run)), True, who.owner
            process.clock.turn, process.clock.waits = process.job.turn, process.job.waits.of
            process.number = None
        process.seen = now
        self._processes.move_to_end(key)
        return process

    def _make_room(self, owner: int | None, now: int) -> bool:
        """Drops a process of the owner with the most processes: the process whose last data is the oldest. If that
        owner is ``owner``, for whom a process is to be added, the dropped process must have been without data for
        _SILENT_NS. Returns whether a process was dropped.
        """
        crowds = crowding([*(process.owner for process in self._processes.values()), owner])
        key, process = next(each for each in self._processes.items() if each[1].owner == crowds)
        if crowds == owner and now - process.seen < _SILENT_NS:
            return False
        del self._processes[key]
        return True

    def _job(self, key: Any) -> JobSteps:
        job = self._jobs.get(key)
        if job is None:
            self._drop_idle_jobs()
            job = self._jobs[key] = JobSteps()
        self._jobs.move_to_end(key)
        return job

    def _drop_idle_jobs(self) -> None:
        """Drops the jobs without processes, except the _MAX_IDLE_JOBS that were used last."""
        used = {id(process.job) for process in self._processes.values()}
        idle = [key for key, job in self._jobs.items() if id(job) not in used]
        for key in idle[:-_MAX_IDLE_JOBS]:
            del self._jobs[key]

    def _from_periods(
        self, key: _Key, who: Identity | None, process: _Process, periods: Iterable[Step], pair: ClockPair
    ) -> list[_Row]:
        """Adds ``periods`` that have ended. Returns rows of the steps that are now certain."""
        rows: list[_Row] = []
        for step in process.arbiter.judge(periods, process.optimizer.promising):
            if process.alone and step.t_start < process.reported + _CHANCE_NS:
                continue
            process.alone = False
            process.waiting.clear()
            rows += self._numbered(key, who, process, step, pair)
        return rows

    def _from_optimizer(self, key: _Key, who: Identity | None, process: _Process, pair: ClockPair) -> list[_Row]:
        """Returns rows of the steps that only the optimizer shows."""
        waiting = process.waiting
        if not waiting:
            return []
        if not process.alone:
            if process.clock.newest >= waiting[0].t_start:
                if process.clock.period is not None:
                    waiting.clear()
                    return []
                if len(waiting) < _CHANCE_STEPS or waiting[-1].t_end - waiting[0].t_start < _CHANCE_NS:
                    return []
            elif waiting[0].t_end > pair.mono_ns - _LATE_NS:
                return []
            process.alone = True
        rows: list[_Row] = []
        while waiting:
            seen = waiting.popleft()
            if not seen.goes_on:
                process.number = None
            step = Step(seen.t_start, seen.t_end, 0, None, 1, seen.exact, seen.confidence, comm=-1, seq=-1, period=None)
            rows += self._numbered(key, who, process, step, pair, seen.why)
        return rows

    def _numbered(
        self, key: _Key, who: Identity | None, process: _Process, step: Step, pair: ClockPair, why: str = ""
    ) -> list[_Row]:
        process.number = number = process.job.number(step, process.number)
        process.calibration.ended(step.t_start, step.t_end, number)
        offset = process.calibration.offset
        if (number < 0 and offset is None) or step.t_start < process.reported or process.begun is not None:
            return []
        process.reported = step.t_end
        named = offset is not None
        source = "variable" if named else "collective_period"
        if not named and (step.period is None or step.periods > 1):
            source = "optimizer_frame"
        return [
            {
                **self._row(key, who, step.t_start, step.t_end, pair),
                "step": number + (offset or 0),
                "comm_ns": step.comm_ns,
                "wait_ns": step.wait_ns,
                "ops": step.ops if step.period is not None or process.clock.newest < 0 else None,
                "source": source,
                "confidence": max(step.confidence, _VARIABLE_CONFIDENCE) if named and step.exact else step.confidence,
                "why": ("counted by the variable step; " if named else "") + (why or self._why(key, process, step)),
            }
        ]

    def _from_variable(self, key: _Key, t: int, value: int, pair: ClockPair) -> list[_Row]:
        who = self._identities.identity(*key)
        process = self._process(key, who, pair.mono_ns)
        if process is None or (process.reading is not None and t < process.reading[0]):
            return []
        process.calibration.reading(t, value)
        before, process.reading = process.reading, (t, value)
        # If several steps lie between two readings, their times are unknown.
        sure = process.clock.period is not None or process.alone or process.begun is not None
        if before is None or value != before[1] + 1 or sure:
            return []
        process.reported = t
        return [
            {
                **self._row(key, who, before[0], t, pair),
                "step": before[1],
                "source": "variable",
                "confidence": _READING_CONFIDENCE,
                "why": "begin and end are the readings at which the variable step had changed",
            }
        ]

    def _from_job(self, key: _Key, t: int, value: int, pair: ClockPair) -> list[_Row]:
        """Returns a row of the step that ended when the job reported the begin of step ``value``. From then on, all
        other evidence of steps is ignored.
        """
        who = self._identities.identity(*key)
        process = self._process(key, who, pair.mono_ns)
        # Threads of a job may report begins out of the order of time.
        if process is None or (process.begun is not None and t < process.begun[0]):
            return []
        before, process.begun = process.begun, (t, value)
        if before is None or before[0] < process.reported:
            return []
        process.reported = t
        return [
            {
                **self._row(key, who, before[0], t, pair),
                "step": before[1],
                "source": "span",
                "confidence": 1.0,
                "why": "the job reported where its steps begin",
            }
        ]

    def _row(self, key: _Key, who: Identity | None, t_start: int, t_end: int, pair: ClockPair) -> _Row:
        return {
            "node": self._node,
            "ts": t_start + pair.mono_to_utc_ns,
            "job": who.job if who else None,
            "run": who.run if who else None,
            "pid": key[0],
            "start_ns": key[1],
            "rank": who.rank if who else None,
            "duration_ns": t_end - t_start,
        }

    def _why(self, key: _Key, process: _Process, step: Step) -> str:
        if step.period is None:
            return ""
        if process.why is None or process.why[0] is not step.period:
            process.why = step.period, _described(step.period, key, self._texts)
        if step.periods == 1:
            return process.why[1] + ("; the optimizer runs once in each repeat" if step.confirmed else "")
        return f"the optimizer runs once in {step.periods} repeats; in each of them {process.why[1]}"


def _described(period: Period, process: _Key, texts: Texts) -> str:
    """Returns a text such as "5 operations repeat (4 all_reduce of 3 sizes, 1 barrier), from all_reduce of 9 float32 on
    tp".
    """
    operations = [texts.names(process, kind) for kind in period.kinds.tolist()]
    counts = period.counts.tolist()
    parts = []
    for op, times in Counter(op for op, _, _ in operations).most_common():
        sizes = len({count for (name, _, _), count in zip(operations, counts, strict=True) if name == op})
        parts.append(f"{times} {op or 'unknown'}{f' of {sizes} sizes' if sizes > 1 else ''}")
    op, dtype, comm = operations[0]
    size = f" of {counts[0]} {dtype}" if dtype and counts[0] >= 0 else ""
    text = f"{len(operations)} operations repeat ({', '.join(parts)}), from {op or 'unknown'}{size}"
    text += f" on {comm}" if comm else ""
    if period.inner > 1:
        text += f"; {period.inner} micro-steps or layers repeat in it"
    if period.enclosing:
        text += f"; a few more bytes follow every {period.enclosing} repeats"
    return text + (f"; sizes of {len(period.varying)} kinds vary" if len(period.varying) else "")
