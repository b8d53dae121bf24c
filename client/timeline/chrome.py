"""Writes a timeline in Chrome's Trace Event Format, as a JSON object, which Perfetto's UI opens as well.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. A process of the trace stands for a
rank, or for a node with its counters. A thread of the trace stands for a communicator, the steps or a thread of a rank.
``ts`` is µs since ``baseTimeNanoseconds``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Mapping
from typing import IO, Any

import numpy as np
import pyarrow as pa

from probing.client.profile.model import Frame
from probing.client.timeline.coding import UNKNOWN, Ints, blocks, encoded, mixed, numbered, runs
from probing.client.timeline.drawing import COMMS, FLYING, MOST_LANES, POINT, SLICE, Drawn, Lanes, drawn
from probing.client.timeline.facts import about
from probing.client.timeline.lines import chosen, content, decimals, integers, joined, microseconds, quoted
from probing.client.timeline.model import Counters, Operations, Samples
from probing.client.timeline.reading import Timeline

__all__ = ("write_chrome",)

# Pids that the trace uses for entries other than ranks: for the findings, and for the first node.
_FINDINGS, _FIRST_NODE = 0, 1 << 24


def write_chrome(timeline: Timeline, sink: IO[bytes]) -> None:
    """Writes the trace of ``timeline`` to ``sink`` while rows are read. Raises the errors of the reads."""
    writer = _Writer(timeline, sink)
    writer.begin()
    writer.steps()
    for operations in timeline.operations():
        writer.operations(operations)
    for samples in timeline.samples():
        writer.samples(samples)
    for counters in timeline.counters():
        writer.counters(counters)
    writer.findings()
    writer.losses()
    writer.end()


class _Writer:
    def __init__(self, timeline: Timeline, sink: IO[bytes]) -> None:
        self._timeline = timeline
        self._names = timeline.names
        self._sink = sink
        self._lanes = Lanes(MOST_LANES)
        self._named: dict[Hashable, int] = {}
        self._threads: dict[int, int] = {}
        self._frames: dict[tuple[Frame, ...], int] = {}
        # The flows of the previous part, because the rows of one operation may lie in two parts.
        self._flows: Ints = np.zeros(0, np.int64)

    def begin(self) -> None:
        self._sink.write(
            f'{{"displayTimeUnit":"ms","baseTimeNanoseconds":{self._timeline.base},"traceEvents":[\n'.encode()
        )

    def end(self) -> None:
        """Writes the last event, without a comma behind it, and the facts that were counted while rows were read."""
        for index in range(len(self._names.processes)):
            self._process(index)
        last = {"ph": "M", "name": "process_name", "pid": _FINDINGS, "tid": 0, "args": {"name": "findings"}}
        frames = {str(number): frame for frame, number in _nested(self._frames)}
        rest = {"stackFrames": frames, "otherData": dict(about(self._timeline))}
        self._sink.write((json.dumps(last) + "\n],\n" + json.dumps(rest)[1:] + "\n").encode())

    def steps(self) -> None:
        rows = self._timeline.steps
        texts, where = _named(rows.step, lambda step: quoted("step" if step == UNKNOWN else f"step {step}"))
        line = joined(
            '{"ph":"X","cat":"step","name":',
            chosen(texts, where),
            *self._at(rows.process + 1, numbered(rows.process, self._steps), rows.begin),
            ',"dur":',
            microseconds(rows.end - rows.begin),
            ',"args":{"comm_ns":',
            integers(rows.comm_ns),
            ',"wait_ns":',
            integers(rows.wait_ns),
            "}},\n",
        )
        self._sink.write(content(line))

    def operations(self, rows: Operations) -> None:
        look = drawn(rows, *self._timeline.errors())
        track = rows.process * COMMS + rows.comm
        lanes = np.zeros(len(rows), np.int64)
        spread = np.flatnonzero(look.kind != POINT)
        lanes[spread] = self._lanes.of(track[spread], look.begin[spread], look.end[spread])
        look.kind = np.where(lanes < 0, POINT, look.kind)
        tid = numbered(track * MOST_LANES + np.maximum(lanes, 0), self._lane)
        for block in blocks(np.arange(len(rows))):
            part, shape, threads = rows.taken(block), look.taken(block), tid[block]
            for kind, head, tail in ((SLICE, "X", ""), (FLYING, "B", ""), (POINT, "i", ',"s":"t"')):
                if len(alike := np.flatnonzero(shape.kind == kind)):
                    self._operations_of(head, tail, part.taken(alike), shape.taken(alike), threads[alike])
            self._parts_of(part, shape, threads)
        self._flows_of(rows, look, tid)

    def _operations_of(self, head: str, tail: str, rows: Operations, look: Drawn, tid: Ints) -> None:
        duration = [',"dur":', microseconds(look.end - look.begin)] if head == "X" else []
        names = self._names
        line = joined(
            f'{{"ph":"{head}"{tail},"cat":"operation","name":',
            chosen([quoted(text) for text in names.ops.entries.values], rows.op),
            *self._at(rows.process + 1, tid, look.begin),
            *duration,
            ',"args":{"seq":',
            integers(rows.seq),
            ',"bytes":',
            integers(rows.size),
            ',"step":',
            integers(rows.step),
            *(
                piece
                for name, coder, codes in (
                    ("state", names.states, rows.state),
                    ("evidence", names.timings, rows.timing),
                    ("error", names.errors, rows.error),
                )
                for piece in (
                    f',"{name}":',
                    chosen([quoted(text) if text else "null" for text in coder.entries.values], codes),
                )
            ),
            "}},\n",
        )
        self._sink.write(content(line))

    def _parts_of(self, rows: Operations, look: Drawn, tid: Ints) -> None:
        """Writes the parts of operations: their waits, and the intervals in which the operations ended."""
        waits = np.flatnonzero((look.waited != UNKNOWN) & (look.kind != POINT))
        texts, where = _named(rows.last[waits], lambda process: quoted(f"waits for {self._names.label(process)}"))
        self._slices(
            "wait", chosen(texts, where), rows.process[waits], tid[waits], look.begin[waits], look.waited[waits]
        )
        open_ended = np.flatnonzero((look.doubt != UNKNOWN) & (look.kind == SLICE))
        name = quoted("ended between these times")
        spans = look.doubt[open_ended], look.end[open_ended]
        self._slices("doubt", name, rows.process[open_ended], tid[open_ended], *spans)

    def _slices(self, category: str, name: Any, process: Ints, tid: Ints, begin: Ints, end: Ints) -> None:
        if len(process):
            at = self._at(process + 1, tid, begin)
            head = f'{{"ph":"X","cat":"{category}","name":'
            self._sink.write(content(joined(head, name, *at, ',"dur":', microseconds(end - begin), "},\n")))

    def _flows_of(self, rows: Operations, look: Drawn, tid: Ints) -> None:
        """Writes a flow event for each rank of an operation. Its phase is ``s`` for the first rank, ``f`` for the last
        rank, else ``t``.
        """
        numbered = np.flatnonzero((rows.seq != UNKNOWN) & (self._names.sizes()[rows.comm] != 1))
        keys = mixed(rows.comm[numbered], rows.seq[numbered])
        order = np.argsort(keys, kind="stable")
        keys = keys[order]
        starts, counts = runs(keys)
        place = np.arange(len(order)) - np.repeat(starts, counts)
        chosen_rows = numbered[order]
        size = self._names.sizes()[rows.comm[chosen_rows]]
        begun = np.isin(keys, self._flows)
        phase = np.where((place == 0) & ~begun, 0, np.where((place == size - 1) & ~begun, 2, 1))
        phases = ['{"ph":"s"', '{"ph":"t"', '{"ph":"f","bp":"e"']
        line = joined(
            chosen(phases, phase),
            ',"cat":"operation","name":"operation","id":"',
            pa.array(keys.view(np.uint64)).cast(pa.string()),
            '"',
            *self._at(rows.process[chosen_rows] + 1, tid[chosen_rows], look.begin[chosen_rows]),
            "},\n",
        )
        self._sink.write(content(line))
        self._flows = keys[starts]

    def samples(self, rows: Samples) -> None:
        stacks = self._timeline.stacks(np.unique(rows.stack).tolist())
        names, where = _named(rows.stack, lambda stack: quoted(stacks[stack][-1].func))
        numbers = np.array([self._frame(stacks[stack]) for stack in encoded(pa.array(rows.stack))[0]], np.int64)
        process = np.array([thread.process for thread in self._names.threads.values], np.int64)[rows.thread]
        line = joined(
            '{"ph":"i","s":"t","cat":"sample","name":',
            chosen(names, where),
            *self._at(process + 1, numbered(rows.thread, self._python), rows.time),
            ',"sf":',
            integers(numbers[where]),
            ',"args":{"samples":',
            integers(rows.count),
            ',"duration_ns":',
            integers(rows.duration),
            ',"on_cpu":',
            integers(rows.on_cpu),
            "}},\n",
        )
        self._sink.write(content(line))

    def counters(self, rows: Counters) -> None:
        kinds = self._names.counters.values
        names = [quoted(f"{kind.device} {kind.name}") for kind in kinds]
        pids = np.array([self._node(kind.node) for kind in kinds], np.int64)
        units = [f',"args":{{{quoted(kind.unit)}:' for kind in kinds]
        line = joined(
            '{"ph":"C","name":',
            chosen(names, rows.counter),
            *self._at(pids[rows.counter], np.zeros(len(rows), np.int64), rows.time),
            chosen(units, rows.counter),
            decimals(rows.value),
            "}},\n",
        )
        self._sink.write(content(line))

    def findings(self) -> None:
        """Writes each finding as an asynchronous slice, and as a point at the ranks that it blames."""
        for number, finding in enumerate(self._timeline.findings):
            args = {"verdict": finding.verdict, "severity": finding.severity, "sentence": finding.sentence}
            end = self._timeline.end if finding.end is None else finding.end
            self._span("finding", finding.sentence, number, (_FINDINGS, 0), finding.begin, end, args)
            for process in self._names.of_ranks(finding.run, finding.ranks):
                event = {"ph": "i", "s": "p", "cat": "finding", "name": finding.verdict, "pid": process + 1, "tid": 0}
                self._event({**event, "ts": self._us(finding.begin), "args": args})

    def losses(self) -> None:
        """Writes each gap as an asynchronous slice of the process that it concerns, or of the whole node."""
        for number, (loss, process) in enumerate(self._timeline.losses_of_job()):
            pid = self._node(loss.node) if process is None else process + 1
            args = {"table": loss.table, "reason": loss.reason, "rows": loss.missing}
            name = f"rows may be missing: {loss.reason}"
            self._span("loss", name, number, (pid, 0), loss.begin, loss.end, args)

    def _span(
        self,
        category: str,
        name: str,
        number: int,
        where: tuple[int, int],
        begin: int,
        end: int,
        args: Mapping[str, Any],
    ) -> None:
        shared = {"cat": category, "name": name, "id": number, "pid": where[0], "tid": where[1]}
        self._event({"ph": "b", **shared, "ts": self._us(begin), "args": args})
        self._event({"ph": "e", **shared, "ts": self._us(max(begin, end))})

    def _event(self, event: Mapping[str, Any]) -> None:
        self._sink.write((json.dumps(event) + ",\n").encode())

    # Processes, threads, times.

    def _at(self, pid: Ints, tid: Ints, time: Ints) -> list[Any]:
        """Returns the pieces of a line that hold process, thread and time. In the line they follow the name."""
        ts = microseconds(np.maximum(time - self._timeline.base, 0))
        return [',"pid":', integers(pid), ',"tid":', integers(tid), ',"ts":', ts]

    def _us(self, ns: int) -> float:
        return max(0, ns - self._timeline.base) / 1000

    def _process(self, index: int) -> int:
        process = self._names.processes.values[index]
        order = -1 if process.rank is None else process.rank
        name = f"{self._names.label(index)} on {process.node}"
        return self._pid(index + 1, name, order, f"run {process.run}")

    def _node(self, node: str) -> int:
        pid = self._named.setdefault(("node", node), _FIRST_NODE + len(self._named))
        return self._pid(pid, f"node {node}", _FIRST_NODE, self._timeline.clock_text(node))

    def _pid(self, pid: int, name: str, order: int, labels: str) -> int:
        if pid not in self._threads:
            self._threads[pid] = 0
            for key, value in (("name", name), ("labels", labels), ("sort_index", order)):
                self._event({"ph": "M", "name": f"process_{key}", "pid": pid, "tid": 0, "args": {key: value}})
        return pid

    def _steps(self, process: int) -> int:
        return self._tid(("steps", process), process, "steps", 0)

    def _lane(self, key: int) -> int:
        process, comm = divmod(key // MOST_LANES, COMMS)
        return self._tid(("lane", key), process, self._names.title(comm), 10 + comm)

    def _python(self, index: int) -> int:
        thread = self._names.threads.values[index]
        name = f"Python, thread {thread.name} ({thread.tid})"
        return self._tid(("thread", index), thread.process, name, 1 if thread.trains else 2)

    def _tid(self, key: Hashable, process: int, name: str, order: int) -> int:
        if key not in self._named:
            pid = self._process(process)
            self._threads[pid] += 1
            tid = self._named[key] = self._threads[pid]
            for what, value in (("name", name), ("sort_index", order)):
                self._event({"ph": "M", "name": f"thread_{what}", "pid": pid, "tid": tid, "args": {what: value}})
        return self._named[key]

    def _frame(self, frames: tuple[Frame, ...]) -> int:
        """Returns the number of the innermost frame of ``frames``; numbers its callers, too."""
        number = 0
        for depth in range(1, len(frames) + 1):
            number = self._frames.setdefault(frames[:depth], len(self._frames) + 1)
        return number


def _nested(frames: Mapping[tuple[Frame, ...], int]) -> list[tuple[dict[str, str], int]]:
    """Returns the entries of stackFrames with their numbers; each entry names its caller."""
    entries = []
    for stack, number in frames.items():
        frame = stack[-1]
        where = f" ({frame.file}:{frame.lineno})" if frame.file else ""
        parent = {"parent": str(frames[stack[:-1]])} if len(stack) > 1 else {}
        entries.append(({"category": "Python", "name": f"{frame.func}{where}", **parent}, number))
    return entries


def _named(values: Ints, text_of: Callable[[int], str]) -> tuple[list[str], Ints]:
    """Returns a text for each distinct value, and for each row the index of its text."""
    distinct, where = encoded(pa.array(values))
    return [text_of(value) for value in distinct], where
