"""Writes a timeline as a Perfetto trace, with tracks for nodes, their ranks, and the communicators of the ranks.

An operation is a slice from its call to the time when it was certainly done. Inner slices show how long the operation
waited for the rank that called last, and the interval in which the operation ended. A flow joins the slices of one
operation on all ranks. docs/timeline.md says what is shown, and how certain it is.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import IO

import numpy as np

from probing.client.timeline.coding import UNKNOWN, Coder, Ints, blocks, numbered
from probing.client.timeline.drawing import COMMS, FLYING, MOST_LANES, POINT, Lanes, drawn
from probing.client.timeline.facts import about
from probing.client.timeline.model import Counters, Operations, Samples
from probing.client.timeline.packets import Filling, Hole, Part, Template, fixed, message, number, text
from probing.client.timeline.reading import Timeline
from probing.client.timeline.tracks import ANNOTATIONS, CATEGORIES, NAMES, TEXTS, Trace, in_trace

__all__ = ("write_perfetto",)

_BEGIN, _END, _INSTANT, _COUNTER = 1, 2, 3, 4
_LAST_NS = 2**62
# The order of the tracks of a node: processes without a rank first, counters last.
_NO_RANK, _BELOW_RANKS = -1, 1 << 30
_TIMES = {"at", "begin", "doubt", "end", "waited"}


def write_perfetto(timeline: Timeline, sink: IO[bytes]) -> None:
    """Writes the trace of ``timeline`` to ``sink`` while rows are read. Raises the errors of the reads."""
    writer = _Writer(timeline, Trace(sink, timeline.begin))
    writer.steps()
    for operations in timeline.operations():
        writer.operations(operations)
    for samples in timeline.samples():
        writer.samples(samples)
    for counters in timeline.counters():
        writer.counters(counters)
    writer.findings()
    writer.losses()
    writer.processes()
    writer.trace.attributes(about(timeline))


class _Writer:
    def __init__(self, timeline: Timeline, trace: Trace) -> None:
        self.trace = trace
        self._timeline = timeline
        self._names = timeline.names
        self._templates: dict[Hashable, Template] = {}
        self._lanes = Lanes(MOST_LANES)

    def steps(self) -> None:
        rows = self._timeline.steps
        # A step ends when the next step begins. Intervals of ``Lanes`` include their ends, so each step loses 1 ns.
        lanes = Lanes(1).of(rows.process, rows.begin, rows.end - 1)
        rows = rows.taken(np.flatnonzero(lanes == 0))
        columns: Filling = {
            "track": numbered(rows.process, self._steps_of),
            "name": numbered(rows.step, lambda step: self._name("step" if step == UNKNOWN else f"step {step}")),
            "begin": rows.begin,
            "end": rows.end,
            "comm_ns": rows.comm_ns,
            "wait_ns": rows.wait_ns,
        }
        pattern = (rows.comm_ns != UNKNOWN) * 2 + (rows.wait_ns != UNKNOWN)
        for shape in np.unique(pattern).tolist():
            template = self._template(("step", shape), partial(self._step, shape >= 2, shape % 2 == 1))
            self._write(template, columns, np.flatnonzero(pattern == shape))

    def operations(self, rows: Operations) -> None:
        look = drawn(rows, *self._timeline.errors())
        track = rows.process * COMMS + rows.comm
        lanes = np.zeros(len(rows), np.int64)
        spread = np.flatnonzero(look.kind != POINT)
        lanes[spread] = self._lanes.of(track[spread], look.begin[spread], look.end[spread])
        columns: Filling = {
            "track": numbered(track * MOST_LANES + np.maximum(lanes, 0), self._lane),
            "name": self._coded(NAMES, self._names.ops)[rows.op],
            "begin": look.begin,
            "end": look.end,
            "waited": look.waited,
            "doubt": look.doubt,
            "for": numbered(np.where(look.waited != UNKNOWN, rows.last, -1), self._waits_for),
            "flow": _flow(rows.comm, rows.seq),
            "seq": rows.seq,
            "bytes": rows.size,
            "step": rows.step,
            "state": self._coded(TEXTS, self._names.states)[rows.state],
            "evidence": self._coded(TEXTS, self._names.timings)[rows.timing],
            "error": self._coded(TEXTS, self._names.errors)[rows.error],
        }
        kind = np.where(lanes < 0, POINT, look.kind)
        failed = rows.error != self._names.errors.code("")
        present = [*(columns[name] != UNKNOWN for name in ("waited", "doubt", "seq", "bytes", "step")), failed]
        pattern = sum((flag.astype(np.int64) << place for place, flag in enumerate(present)), kind << len(present))
        for shape in np.unique(pattern).tolist():
            flags = [bool(shape >> place & 1) for place in range(len(present))]
            template = self._operation(int(shape) >> len(present), *flags)
            self._write(template, columns, np.flatnonzero(pattern == shape))

    def samples(self, rows: Samples) -> None:
        stacks = self._timeline.stacks(np.unique(rows.stack).tolist())
        numbers = {key: self.trace.stack([self.trace.frame(*f) for f in frames]) for key, frames in stacks.items()}
        columns: Filling = {
            "track": numbered(rows.thread, self._thread),
            "name": numbered(rows.stack, lambda stack: self._name(stacks[stack][-1].func)),
            "stack": numbered(rows.stack, numbers.__getitem__),
            "at": rows.time,
            "weight": rows.duration.astype(np.float64),
            "samples": rows.count,
            "duration_ns": rows.duration,
            "on_cpu": rows.on_cpu,
        }
        self._write(self._template("sample", self._sample), columns, np.arange(len(rows)))

    def counters(self, rows: Counters) -> None:
        columns: Filling = {"track": numbered(rows.counter, self._counter), "at": rows.time, "value": rows.value}
        template = self._template("counter", lambda: [_event("at", _COUNTER, fixed(44, "value"))])
        self._write(template, columns, np.arange(len(rows)))

    def findings(self) -> None:
        """Writes each finding as a slice, and as a point on the tracks of the ranks that it blames."""
        for place, finding in enumerate(self._timeline.findings):
            track = self.trace.track(("finding", place), "findings", order=-1)
            until = self._timeline.end if finding.end is None else finding.end
            texts = {"verdict": finding.verdict, "severity": finding.severity, "sentence": finding.sentence}
            self._span("finding", track, finding.sentence, finding.begin, until, texts)
            for process in self._names.of_ranks(finding.run, finding.ranks):
                self._span("finding", self._process(process), finding.verdict, finding.begin, None, texts)

    def losses(self) -> None:
        """Writes each gap as a slice of the process that it concerns, or of the whole node."""
        for place, (loss, process) in enumerate(self._timeline.losses_of_job()):
            parent = self._node(loss.node) if process is None else self._process(process)
            track = self.trace.track(("loss", place), "rows may be missing", parent, order=-2)
            missing = "not known" if loss.missing is None else str(loss.missing)
            texts = {"table": loss.table, "reason": loss.reason, "rows": missing}
            self._span("loss", track, loss.reason, loss.begin, loss.end, texts)

    def processes(self) -> None:
        """Writes the tracks of all processes, including processes that have no row."""
        for index in range(len(self._names.processes)):
            self._process(index)

    # Templates of the packets that a row becomes.

    def _operation(self, kind: int, *flags: bool) -> Template:
        return self._template(("operation", kind, *flags), lambda: self._packets_of_operation(kind, *flags))

    def _packets_of_operation(
        self, kind: int, waited: bool, doubt: bool, seq: bool, size: bool, step: bool, failed: bool
    ) -> list[list[Part]]:
        parts = [self._category("operation"), number(10, Hole("name", 4)), self._text("state"), self._text("evidence")]
        parts += [fixed(47, "flow"), self._number("seq")] if seq else []
        parts += [self._number("bytes")] if size else []
        parts += [self._number("step")] if step else []
        parts += [self._text("error")] if failed else []
        if kind == POINT:
            return [_event("begin", _INSTANT, *parts)]
        packets = [_event("begin", _BEGIN, *parts)]
        if waited:
            name = number(10, Hole("for", 4))
            packets += [_event("begin", _BEGIN, self._category("wait"), name), _event("waited", _END)]
        if doubt:
            name = number(10, self._name("ended between these times"))
            packets += [_event("doubt", _BEGIN, self._category("doubt"), name), _event("end", _END)]
        return packets if kind == FLYING else [*packets, _event("end", _END)]

    def _step(self, *flags: bool) -> list[list[Part]]:
        named = [self._number(name) for name, flag in zip(("comm_ns", "wait_ns"), flags, strict=True) if flag]
        begin = _event("begin", _BEGIN, self._category("step"), number(10, Hole("name", 4)), *named)
        return [begin, _event("end", _END)]

    def _sample(self) -> list[list[Part]]:
        named = [self._number(name) for name in ("samples", "duration_ns", "on_cpu")]
        stack = [number(10, Hole("name", 4)), number(56, Hole("stack", 4)), fixed(57, "weight")]
        return [_event("at", _INSTANT, self._category("sample"), *stack, *named)]

    def _template(self, key: Hashable, packets: Callable[[], list[list[Part]]]) -> Template:
        if key not in self._templates:
            self._templates[key] = Template(*packets())
        return self._templates[key]

    def _category(self, name: str) -> list[Part]:
        return number(3, self.trace.interned(CATEGORIES, name))

    def _number(self, name: str) -> list[Part]:
        return message(4, number(1, self.trace.interned(ANNOTATIONS, name)), number(4, Hole(name, 10)))

    def _text(self, name: str) -> list[Part]:
        return message(4, number(1, self.trace.interned(ANNOTATIONS, name)), number(17, Hole(name, 4)))

    def _write(self, template: Template, columns: Filling, rows: Ints) -> None:
        for chosen in blocks(rows):
            block = {name: values[chosen] for name, values in columns.items()}
            for name in _TIMES & block.keys():
                block[name] = np.clip(block[name], 0, _LAST_NS)
            self.trace.write(template.filled(len(chosen), block).tobytes())

    def _span(
        self, category: str, track: int, name: str, begin: int, end: int | None, texts: Mapping[str, str]
    ) -> None:
        """Writes a slice; if ``end`` is None, a point."""
        named = [
            message(4, number(1, self.trace.interned(ANNOTATIONS, key)), text(6, value)) for key, value in texts.items()
        ]
        kind = _INSTANT if end is None else _BEGIN
        parts = [self._category(category), number(10, self._name(name)), *named]
        packets = [_event("begin", kind, *parts)] + ([] if end is None else [_event("end", _END)])
        columns: Filling = {"track": np.array([track]), "begin": np.array([begin])}
        columns["end"] = np.array([begin if end is None else max(begin, end)])
        self._write(Template(*packets), columns, np.arange(1))

    # Tracks and names.

    def _node(self, node: str) -> int:
        return self.trace.track(("node", node), f"node {node}", order=1, about=self._timeline.clock_text(node))

    def _process(self, index: int) -> int:
        process = self._names.processes.values[index]
        order = _NO_RANK if process.rank is None else process.rank
        label, run = self._names.label(index), f"run {process.run}"
        return self.trace.track(("process", index), label, self._node(process.node), order=order, about=run)

    def _steps_of(self, process: int) -> int:
        return self.trace.track(("steps", process), "steps", self._process(process))

    def _lane(self, key: int) -> int:
        """Returns the track of a lane. ``key`` combines process, communicator and lane."""
        process, comm = divmod(key // MOST_LANES, COMMS)
        name, identity = self._names.title(comm), self._names.comms.values[comm].comm
        return self.trace.track(("lane", key), name, self._process(process), order=10 + comm, about=identity)

    def _thread(self, index: int) -> int:
        thread = self._names.threads.values[index]
        name = f"Python, thread {thread.name} ({thread.tid})"
        order = 1 if thread.trains else 2
        return self.trace.track(("thread", index), name, self._process(thread.process), order=order)

    def _counter(self, index: int) -> int:
        node, device, name, unit = self._names.counters.values[index]
        return self.trace.track(("counter", index), f"{device} {name}", self._node(node), order=_BELOW_RANKS, unit=unit)

    def _waits_for(self, process: int) -> int:
        return 0 if process < 0 else self._name(f"waits for {self._names.label(process)}")

    def _name(self, name: str) -> int:
        return self.trace.interned(NAMES, name)

    def _coded(self, kind: int, coder: Coder) -> Ints:
        """Returns the number of each text of ``coder`` in the trace."""
        texts = coder.entries.values
        return np.array([self.trace.interned(kind, text or "not known") for text in texts], np.int64)


def _event(at: str, kind: int, *parts: list[Part]) -> list[Part]:
    """Returns the packet of a TrackEvent. ``at`` names the column of its time."""
    return in_trace(number(8, Hole(at, 9)), message(11, number(9, kind), number(11, Hole("track", 5)), *parts))


def _flow(comm: Ints, seq: Ints) -> Ints:
    """Returns the number of each operation: the same on all ranks, never 0, and unique for a seq below 2**47."""
    return (comm + 1 << 47) | seq & (1 << 47) - 1
