"""Writes a timeline as files of PyTorch's profiler (Kineto), one for each rank, for Holistic Trace Analysis.

HTA reads kernels on streams, the calls that launched them, and ``ProfilerStep#N``. Kernels cannot be seen from the
host, so each operation whose end is known to within a tenth of its length is written as a kernel from start to end.
The name begins with ``ncclKernel``, by which HTA recognizes communication; name and category say "seen from the host".
https://github.com/facebookresearch/HolisticTraceAnalysis (0.5.0: hta/common/trace.py, hta/analyzers/straggler.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from probing.api.text import encoded as _bytes
from probing.client.export.files import file_name
from probing.client.timeline.coding import UNKNOWN, Ints, blocks, encoded, runs
from probing.client.timeline.facts import about
from probing.client.timeline.lines import chosen, content, integers, joined, quoted
from probing.client.timeline.model import SPANNING, Operations, Process
from probing.client.timeline.reading import Timeline

__all__ = ("write_kineto",)

CATEGORY = "seen_from_host"
# HTA reads rows without a stream as calls of the CPU, and rows on a stream as kernels.
_FIRST_STREAM = 7
_SHARPNESS = 10


def write_kineto(timeline: Timeline, directory: Path) -> list[Path]:
    """Writes a file for each rank into ``directory`` while rows are read; returns the paths of the files.

    Runs of the job after the first have directories of their own. Processes without a rank are left out. Raises the
    errors of the reads, and OSError.
    """
    files = _Files(timeline, directory)
    exact, called = timeline.names.timings.code("exact"), 0
    for rows in timeline.operations():
        kept = rows.taken(np.flatnonzero(_sharp(rows, exact)))
        files.unsharp += len(rows) - len(kept)
        for block in blocks(np.argsort(kept.process, kind="stable")):
            part = kept.taken(block)
            files.append(part.process, _operation_lines(timeline, part, called))
            called += len(part)
    steps = timeline.steps.taken(np.flatnonzero(timeline.steps.step >= 0))
    files.append(steps.process, _step_lines(steps.step, steps.begin - timeline.base, steps.end - timeline.base))
    return files.closed()


def _sharp(rows: Operations, exact: int) -> Any:
    """Returns for each operation whether its end is known to within a tenth of its length."""
    begin = np.where(rows.start != UNKNOWN, rows.start, rows.call)
    ended = (rows.done_hi != UNKNOWN) & (rows.done_hi != SPANNING)
    low = np.where(rows.timing == exact, rows.done_hi, rows.done_lo)
    return ended & (low != UNKNOWN) & ((rows.done_hi - low) <= (rows.done_hi - begin) // _SHARPNESS)


def _step_lines(step: Ints, begin: Ints, end: Ints) -> Any:
    return joined(
        '{"ph":"X","cat":"user_annotation","name":"ProfilerStep#',
        integers(step),
        '","pid":1,"tid":1,"ts":',
        integers(begin // 1000),
        ',"dur":',
        integers(end // 1000 - begin // 1000),
        ',"args":{}},\n',
    )


def _operation_lines(timeline: Timeline, rows: Operations, called: int) -> Any:
    """Returns two events for each operation: the call, and the operation as a kernel. ``called``: the number of calls
    that are already written.
    """
    names, base = timeline.names, timeline.base
    number = np.arange(called, called + len(rows)) + 1
    begin = np.maximum(np.where(rows.start != UNKNOWN, rows.start, rows.call), rows.call)
    # Times are whole µs, because HTA rounds fractions, and a call could then end before it begins.
    call_us, begin_us = (rows.call - base) // 1000, (begin - base) // 1000
    end_us = np.maximum(-(-(rows.done_hi - base) // 1000), begin_us + 1)
    ops = names.ops.entries.values
    comms = names.comms.values
    kinds, where = encoded(pa.array(rows.op << 16 | rows.comm))
    kernels = [quoted(_kernel(ops[kind >> 16], comms[kind & 0xFFFF].backend)) for kind in kinds]
    groups = [quoted(comm.name or comm.comm) for comm in comms]
    return joined(
        '{"ph":"X","cat":"cpu_op","name":',
        chosen([quoted(f"c10d::{op}") for op in ops], rows.op),
        ',"pid":1,"tid":1,"ts":',
        integers(call_us),
        ',"dur":1,"args":{"correlation":',
        integers(number),
        f'}}}},\n{{"ph":"X","cat":"{CATEGORY}","name":',
        chosen(kernels, where),
        ',"pid":0,"tid":',
        integers(rows.comm + _FIRST_STREAM),
        ',"ts":',
        integers(begin_us),
        ',"dur":',
        integers(end_us - begin_us),
        ',"args":{"device":0,"stream":',
        integers(rows.comm + _FIRST_STREAM),
        ',"correlation":',
        integers(number),
        ',"Collective name":',
        chosen([quoted(op) for op in ops], rows.op),
        ',"Group size":',
        integers(names.sizes()[rows.comm]),
        ',"Process Group Name":',
        chosen(groups, rows.comm),
        ',"bytes":',
        integers(rows.size),
        ',"seq":',
        integers(rows.seq),
        "}},\n",
    )


def _kernel(op: str, backend: str) -> str:
    """Returns the name of a kernel, such as ``ncclKernel_AllReduce (gloo, seen from the host)``."""
    camel = "".join(part.capitalize() for part in op.split("_"))
    return f"ncclKernel_{camel} ({backend}, seen from the host)"


class _Files:
    """The files of ranks. A file is open only while it is written to, because there may be thousands of files."""

    def __init__(self, timeline: Timeline, directory: Path) -> None:
        self.unsharp = 0
        self._timeline = timeline
        self._directory = directory
        self._paths: dict[int, Path] = {}
        self._taken: set[Path] = set()

    def append(self, process: Ints, lines: Any) -> None:
        """Appends ``lines``, which are sorted by ``process``."""
        starts, counts = runs(process)
        for first, last in zip(starts.tolist(), (starts + counts).tolist(), strict=True):
            index = int(process[first])
            if self._timeline.names.processes.values[index].rank is not None:
                with self._path(index).open("ab") as file:
                    file.write(content(lines[first:last]))

    def closed(self) -> list[Path]:
        """Ends all files, and returns their paths."""
        facts = {**dict(about(self._timeline)), "operations_without_a_sharp_end": self.unsharp}
        last = {"ph": "M", "name": "process_sort_index", "pid": 1, "tid": 0, "args": {"sort_index": 0}}
        for path in self._paths.values():
            with path.open("ab") as file:
                file.write(_bytes(json.dumps(last) + "\n],\n" + json.dumps({"otherData": facts})[1:] + "\n"))
        return list(self._paths.values())

    def _path(self, index: int) -> Path:
        if index not in self._paths:
            names = self._timeline.names
            process = names.processes.values[index]
            # A run that starts later goes into a directory of its own.
            run = "" if process.run == names.processes.values[0].run else f"run-{file_name(process.run)}"
            path = self._directory / run / f"rank-{process.rank}.json"
            if path in self._taken:
                path = path.with_name(f"rank-{process.rank}-pid-{process.pid}.json")
            if path in self._taken:
                # Two processes may have the same rank and pid: on two nodes, or after the pids of a node have wrapped.
                path = path.with_name(f"{path.stem}-{index}.json")
            path.parent.mkdir(exist_ok=True)
            self._paths[index] = path
            self._taken.add(path)
            path.write_bytes(self._head(process))
        return self._paths[index]

    def _head(self, process: Process) -> bytes:
        """Returns the first bytes of a file. HTA expects the rank within one line, with a space before the number."""
        size = max((comm.size for comm in self._timeline.names.comms.values), default=0)
        head = {
            "schemaVersion": 1,
            "distributedInfo": {"rank": process.rank, "world_size": size},
            "baseTimeNanoseconds": self._timeline.base,
            "seenFrom": "host",
        }
        first = {
            "ph": "M",
            "name": "process_name",
            "pid": 1,
            "tid": 0,
            "args": {"name": f"rank {process.rank} on {process.node}"},
        }
        return _bytes(json.dumps(head)[:-1] + ', "traceEvents": [\n' + json.dumps(first) + ",\n")
