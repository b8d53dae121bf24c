"""Training steps, from the operations that every rank repeats.

A step is the word of operations that a process makes again and again (``step_period``), told when the next one is
complete; where the optimizer is seen to run once for several of those, all of them (``step_arbiter``). Of a process
without such a word, it is what lies between the ends of two runs of the optimizer (``step_bursts``). The rows of a
process come from one of these at a time. Numbers count from 0 since a job was first seen, for all its ranks on this
node alike; where a watched variable names the step, its number takes over. What a job does without a period has no
steps.

The Python sampler is no source of steps: it looks at a thread some times a second, so an optimizer shorter than that is
mostly missed, and one frame seen twice may be one call or two. A uprobe cannot sit on a Python function either.

The time that a rank waited for the others is not told: it needs the times of ranks on other nodes.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from probing.daemon.arrow import batch_of
from probing.daemon.clock import ClockPair
from probing.daemon.nccl_uprobes.records.operations import Operations
from probing.daemon.nccl_uprobes.steps.arbiter import Arbiter
from probing.daemon.nccl_uprobes.steps.collective_steps import Step, StepClock
from probing.daemon.nccl_uprobes.steps.numbering import Calibration, JobSteps
from probing.daemon.nccl_uprobes.steps.operation_history import Texts, operations_by_process
from probing.daemon.nccl_uprobes.steps.optimizer_steps import OptimizerClock, OptimizerStep
from probing.daemon.nccl_uprobes.steps.period import Period
from probing.daemon.source import Identity, Processes, Sink

__all__ = ("Steps",)

_TABLE = "train.steps"
_MAX_PROCESSES = 128
_MAX_JOBS = 256
# Readings of a variable tell when a step began and ended to a reading's distance.
_READING_CONFIDENCE = 0.5
_VARIABLE_CONFIDENCE = 0.95
# Steps of the optimizer wait until operations would have been told as well; and, where there are operations, until
# these would have shown a period.
_MAX_WAITING = 4096
_LATE_NS = 3_000_000_000
_CHANCE_NS, _CHANCE_STEPS = 30_000_000_000, 16
_Key = tuple[int, int]


@dataclass(slots=True)
class _Process:
    clock: StepClock
    job: JobSteps
    # Whether the job is the one that the process belongs to, or stands in for it until that is known.
    identified: bool
    number: int | None = None
    calibration: Calibration = field(default_factory=Calibration)
    sighted: tuple[int, int] | None = None
    why: tuple[Period, str] | None = None
    optimizer: OptimizerClock = field(default_factory=OptimizerClock)
    arbiter: Arbiter = field(default_factory=Arbiter)
    waiting: deque[OptimizerStep] = field(default_factory=lambda: deque(maxlen=_MAX_WAITING))
    # Whether the optimizer tells the steps by itself.
    alone: bool = False
    # The end of the last row.
    told: int = 0


class Steps:
    """Gives rows of ``train.steps`` to ``sink``. Safe for several threads."""

    def __init__(self, node: str, processes: Processes, sink: Sink) -> None:
        self._node = node
        self._identities = processes
        self._sink = sink
        self._texts = Texts()
        self._processes: OrderedDict[_Key, _Process] = OrderedDict()
        self._jobs: OrderedDict[Any, JobSteps] = OrderedDict()
        self._lock = threading.Lock()

    def observe(self, operations: Operations, pair: ClockPair) -> None:
        """Follows ``operations`` of any processes. Operations that are passed twice count once."""
        rows: list[dict[str, Any]] = []
        with self._lock:
            for key, own in operations_by_process(operations, self._texts).items():
                who = self._identities.identity(*key)
                process = self._process(key, who)
                rows += self._periods(key, who, process, process.clock.observe(own), pair)
        self._put(rows)

    def observe_optimizer(self, records: npt.NDArray[Any], pair: ClockPair) -> None:
        """Take records of the ring ``optimizer_steps`` into account; such that come again change nothing."""
        rows: list[dict[str, Any]] = []
        with self._lock:
            owners = records[["tgid", "start_ns"]]
            for owner in np.unique(owners):
                key = int(owner["tgid"]), int(owner["start_ns"])
                who = self._identities.identity(*key)
                process = self._process(key, who)
                steps = process.optimizer.observe(records[owners == owner])
                process.arbiter.ran(step.t_end for step in steps if step.sure)
                process.waiting.extend(steps)
                rows += self._periods(key, who, process, (), pair)
                rows += self._alone(key, who, process, pair)
        self._put(rows)

    def observe_metric(self, batch: pa.RecordBatch, pair: ClockPair) -> None:
        """Take a physical batch of ``python.training_metrics`` into account: the values of variables named step."""
        rows: list[dict[str, Any]] = []
        with self._lock:
            columns = [batch.column(name) for name in ("pid", "start_ns", "ts", "step")]
            columns = [c.cast(pa.int64()) if pa.types.is_timestamp(c.type) else c for c in columns]
            for pid, start_ns, ts, value in zip(*(column.to_pylist() for column in columns), strict=True):
                if value is not None:
                    rows += self._sighted((pid, start_ns), ts - pair.mono_to_utc_ns, value, pair)
        self._put(rows)

    def forget(self, pid: int, start_ns: int) -> None:
        """The process has ended."""
        with self._lock:
            self._processes.pop((pid, start_ns), None)

    def _put(self, rows: list[dict[str, Any]]) -> None:
        if rows:
            self._sink.put(_TABLE, batch_of(_TABLE, rows))

    def _process(self, key: _Key, who: Identity | None) -> _Process:
        process = self._processes.get(key)
        if process is None:
            job = self._job(key if who is None else (who.job, who.run))
            process = self._processes[key] = _Process(StepClock(job.turn), job, who is not None)
            if len(self._processes) > _MAX_PROCESSES:
                self._processes.popitem(last=False)
        elif who is not None and not process.identified:
            process.job, process.identified = self._job((who.job, who.run)), True
            process.clock.turn = process.job.turn
            process.number = None
        self._processes.move_to_end(key)
        return process

    def _job(self, key: Any) -> JobSteps:
        job = self._jobs.setdefault(key, JobSteps())
        self._jobs.move_to_end(key)
        if len(self._jobs) > _MAX_JOBS:
            self._jobs.popitem(last=False)
        return job

    def _periods(
        self, key: _Key, who: Identity | None, process: _Process, periods: Iterable[Step], pair: ClockPair
    ) -> list[dict[str, Any]]:
        """Periods of the collectives that are over -> rows of the steps that they are or belong to."""
        rows: list[dict[str, Any]] = []
        for step in process.arbiter.judge(periods, process.optimizer.promising):
            if process.alone and step.t_start < process.told + _CHANCE_NS:
                continue
            process.alone = False
            process.waiting.clear()
            rows += self._counted(key, who, process, step, pair)
        return rows

    def _alone(
        self, key: _Key, who: Identity | None, process: _Process, pair: ClockPair
    ) -> list[dict[str, Any]]:
        """Rows of what only the optimizer tells."""
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
        rows: list[dict[str, Any]] = []
        while waiting:
            seen = waiting.popleft()
            if not seen.goes_on:
                process.number = None
            step = Step(
                seen.t_start, seen.t_end, 0, None, 1, seen.exact, seen.confidence, comm=-1, seq=-1, period=None
            )  # fmt: skip
            rows += self._counted(key, who, process, step, pair, seen.why)
        return rows

    def _counted(
        self, key: _Key, who: Identity | None, process: _Process, step: Step, pair: ClockPair, why: str = ""
    ) -> list[dict[str, Any]]:
        process.number = number = process.job.number(step, process.number)
        process.calibration.ended(step.t_start, step.t_end, number)
        offset = process.calibration.offset
        if (number < 0 and offset is None) or step.t_start < process.told:
            return []
        process.told = step.t_end
        named = offset is not None
        source = "variable" if named else "collective_period"
        if not named and (step.period is None or step.periods > 1):
            source = "optimizer_frame"
        return [
            {
                **self._row(key, who, step.t_start, step.t_end, pair),
                "step": number + (offset or 0),
                "comm_ns": step.comm_ns,
                "ops": step.ops if step.period is not None or process.clock.newest < 0 else None,
                "source": source,
                "confidence": max(step.confidence, _VARIABLE_CONFIDENCE) if named and step.exact else step.confidence,
                "why": ("counted by the variable step; " if named else "") + (why or self._why(process, step)),
            }
        ]

    def _sighted(self, key: _Key, t: int, value: int, pair: ClockPair) -> list[dict[str, Any]]:
        who = self._identities.identity(*key)
        process = self._process(key, who)
        process.calibration.sight(t, value)
        before, process.sighted = process.sighted, (t, value)
        # Where several steps lie between two readings, none of their times are known.
        if before is None or value != before[1] + 1 or process.clock.period is not None or process.alone:
            return []
        process.told = t
        return [
            {
                **self._row(key, who, before[0], t, pair),
                "step": before[1],
                "source": "variable",
                "confidence": _READING_CONFIDENCE,
                "why": "begin and end are the readings at which the variable step had changed",
            }
        ]

    def _row(self, key: _Key, who: Identity | None, t_start: int, t_end: int, pair: ClockPair) -> dict[str, Any]:
        return {
            "node": self._node,
            "ts": t_start + pair.mono_to_utc_ns,
            "job": who and who.job,
            "run": who and who.run,
            "pid": key[0],
            "start_ns": key[1],
            "rank": who and who.rank,
            "duration_ns": t_end - t_start,
        }

    def _why(self, process: _Process, step: Step) -> str:
        if step.period is None:
            return ""
        if process.why is None or process.why[0] is not step.period:
            process.why = step.period, _described(step.period, self._texts)
        if step.periods == 1:
            return process.why[1] + ("; the optimizer runs as often" if step.confirmed else "")
        return f"the optimizer runs once in {step.periods} repeats; in each of them {process.why[1]}"


def _described(period: Period, texts: Texts) -> str:
    """Such as: 5 operations repeat (4 all_reduce of 3 sizes, 1 barrier), from all_reduce of 9 float32 on default_pg."""
    words = [texts.words(kind) for kind in period.kinds.tolist()]
    counts = period.counts.tolist()
    parts = []
    for op, times in Counter(op for op, _, _ in words).most_common():
        sizes = len({count for (name, _, _), count in zip(words, counts, strict=True) if name == op})
        parts.append(f"{times} {op or 'unknown'}{f' of {sizes} sizes' if sizes > 1 else ''}")
    op, dtype, comm = words[0]
    size = f" of {counts[0]} {dtype}" if dtype and counts[0] >= 0 else ""
    text = f"{len(words)} operations repeat ({', '.join(parts)}), from {op or 'unknown'}{size}"
    text += f" on {comm}" if comm else ""
    if period.inner > 1:
        text += f"; {period.inner} micro-steps or layers repeat in it"
    if period.enclosing:
        text += f"; every {period.enclosing} of them a few bytes more"
    return text + (f"; sizes of {len(period.varying)} kinds vary" if len(period.varying) else "")
