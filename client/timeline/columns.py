"""Writes a timeline as columns that a browser maps as typed arrays: ``application/x-probing-columns``.

The bytes are: ``PRBCOLS1``; the length of the header (u32); the header (JSON, UTF-8); zeros up to a multiple of 8; and
the columns. The header has the ``offset`` of each column from the first column, a multiple of 8. All numbers are
little-endian. The header has

* ``from_ns`` and ``to_ns``, UTC ns as text; ``job``; ``notes``; ``left_out``, the number of missing rows by section;
  ``failures``, the parts that a node failed to answer, each with ``node`` and ``error``;
* ``sections``: for each section by name, the number of ``rows``, and the ``columns`` (``name``, ``type``, ``offset``).
  The docstrings of ``_Page.steps`` and of the methods after it name the columns. Times are µs since ``from_ns``; NaN:
  unknown;
* ``dictionaries``: lists to which columns refer by index: ``ranks`` (``rank``, ``node``, ``pid``, ``run``), ``comms``,
  ``comm_sizes``, ``ops``, ``states``, ``evidence``, ``errors``, ``frames``, ``stacks`` (indices of ``frames``,
  outermost first), ``threads``, ``counters`` (``node``, ``device``, ``name``, ``unit``), ``findings``;
* ``losses``: ``node``, ``rank``, ``pid``, ``from_us``, ``to_us``, ``table``, ``rows``, ``reason``;
* ``clocks``: ``node``, ``offset_ns``, ``bound_ns``; null: the clock was not measured.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any, TypeVar

import numpy as np
import numpy.typing as npt

from probing.api.text import encoded
from probing.client.profile.model import Frame
from probing.client.timeline.coding import UNKNOWN, Entries, Ints, Reals, shown
from probing.client.timeline.model import SPANNING, Columns, Counters, Operations, Samples
from probing.client.timeline.reading import Timeline

__all__ = ("MAGIC", "MIME", "MOST_ROWS", "write_columns")

MAGIC = b"PRBCOLS1"
MIME = "application/x-probing-columns"
MOST_ROWS = 1_000_000
"""The maximum number of rows of a section."""
_TYPES = {"f8": "f64", "f4": "f32", "i4": "i32", "u4": "u32", "u2": "u16", "u1": "u8"}
_MOST_FRAMES = 200_000
_MOST_FAILURES = 1_000
_Section = dict[str, npt.NDArray[Any]]
T = TypeVar("T", bound=Columns)


def write_columns(timeline: Timeline, sink: IO[bytes], most: int = MOST_ROWS) -> None:
    """Writes ``timeline`` to ``sink``, with the first ``most`` operations, samples and values of counters.

    Adds notes to ``timeline`` that say what is left out, and sets its counts to the numbers of written rows.
    """
    page = _Page(timeline, most)
    sections = {
        "steps": page.steps(),
        "ops": page.read("ops", "operations", timeline.operations(), Operations, page.operations),
        "samples": page.read("samples", "samples", timeline.samples(), Samples, page.samples),
        "counters": page.read("counters", "counter_values", timeline.counters(), Counters, page.counters),
        "findings": page.findings(),
    }
    described, offset = {}, 0
    for name, section in sections.items():
        columns = []
        for column, values in section.items():
            columns.append({"name": column, "type": _TYPES[values.dtype.str[1:]], "offset": offset})
            offset += _padded(values.nbytes)
        described[name] = {"rows": len(next(iter(section.values()))), "columns": columns}
    header = encoded(json.dumps({"sections": described, **page.header()}, allow_nan=False))
    sink.write(MAGIC + struct.pack("<I", len(header)) + header + bytes(-(12 + len(header)) % 8))
    for section in sections.values():
        for values in section.values():
            sink.write(values.tobytes() + bytes(-values.nbytes % 8))


def _padded(size: int) -> int:
    return size + -size % 8


class _Page:
    def __init__(self, timeline: Timeline, most: int) -> None:
        self._timeline = timeline
        self._names = timeline.names
        self._most = most
        self._left_out: dict[str, int] = {}
        self._frames: Entries[str] = Entries(_MOST_FRAMES, "(others)")
        self._stacks: dict[int, int] = {}
        self._stack_frames: list[list[int]] = []

    def read(
        self, name: str, counted: str, parts: Iterator[T], kind: type[T], columns: Callable[[T], _Section]
    ) -> _Section:
        """Returns the first rows of ``parts`` as a section. ``counted``: the key of the rows in ``Timeline.counts``."""
        sections, rows, before = [columns(kind.joined([]))], 0, self._timeline.unread()
        for part in parts:
            kept = part.taken(np.arange(min(len(part), self._most - rows)))
            sections.append(columns(kept))
            rows += len(kept)
            if rows == self._most:
                left = len(part) - len(kept) + self._timeline.unread() - before
                self._timeline.counts[counted] = rows
                if left > 0:
                    self._left_out[name] = left
                    self._timeline.notes.append(
                        f"only the first {rows:,} {counted.replace('_', ' ')} are shown, {left:,} are left out: "
                        "choose a shorter range, or a trace for Perfetto"
                    )
                break
        return {column: np.concatenate([section[column] for section in sections]) for column in sections[0]}

    def steps(self) -> _Section:
        """``rank`` (an index), ``step`` (-1: unknown), ``start``, ``end``, ``comm`` and ``wait`` (µs in the step)."""
        rows = self._timeline.steps
        return {
            "rank": rows.process.astype("<u4"),
            "step": _small(rows.step),
            "start": self._us(rows.begin),
            "end": self._us(rows.end),
            "comm": _real(rows.comm_ns, 1000).astype("<f4"),
            "wait": _real(rows.wait_ns, 1000).astype("<f4"),
        }

    def operations(self, rows: Operations) -> _Section:
        """``rank``, ``comm``, ``op``, ``state``, ``evidence``, ``error`` (indices), ``seq``, ``bytes``, ``step`` (-1:
        unknown), ``call``, ``start``, ``done_lo`` and ``done_hi``: the operation ended between these two, or has not
        ended if both are NaN."""
        # An operation with an unknown end gets its call as ``done_lo``, because two NaN mean that it has not ended.
        unseen = (rows.done_lo == UNKNOWN) & (rows.done_hi == UNKNOWN)
        return {
            "rank": rows.process.astype("<u4"),
            "comm": rows.comm.astype("<u2"),
            "op": rows.op.astype("<u2"),
            "seq": _real(rows.seq),
            "call": self._us(rows.call),
            "start": self._us(rows.start),
            "done_lo": self._us(np.where(unseen, rows.call, rows.done_lo)),
            "done_hi": self._us(np.where(rows.done_hi == SPANNING, UNKNOWN, rows.done_hi)),
            "bytes": _real(rows.size),
            "state": rows.state.astype("<u1"),
            "evidence": rows.timing.astype("<u1"),
            "error": rows.error.astype("<u2"),
            "step": _small(rows.step),
        }

    def samples(self, rows: Samples) -> _Section:
        """``rank``, ``thread``, ``stack`` and ``frame`` (the innermost of the stack), all indices; ``start``,
        ``duration`` (µs), ``count``, ``on_cpu`` (0 or 1)."""
        numbers, where = np.unique(rows.stack, return_inverse=True)
        frames = self._timeline.stacks(numbers.tolist())
        stacks = np.array([self._stack(stack, frames[stack]) for stack in numbers.tolist()], np.int64)
        inner = np.array([places[-1] for places in self._stack_frames], np.int64)
        of_thread = np.array([thread.process for thread in self._names.threads.values], np.int64)
        return {
            "rank": of_thread[rows.thread].astype("<u4"),
            "thread": rows.thread.astype("<u4"),
            "stack": stacks[where].astype("<u4"),
            "frame": inner[stacks[where]].astype("<u4"),
            "start": self._us(rows.time),
            "duration": (rows.duration / 1000).astype("<f4"),
            "count": np.minimum(rows.count, 2**32 - 1).astype("<u4"),
            "on_cpu": rows.on_cpu.astype("<u1"),
        }

    def counters(self, rows: Counters) -> _Section:
        """``counter`` (an index), ``time``, ``value``."""
        return {
            "counter": rows.counter.astype("<u4"),
            "time": self._us(rows.time),
            "value": rows.value.astype("<f8"),
        }

    def findings(self) -> _Section:
        """``start`` and ``end`` (NaN: the finding is open), in the order of the dictionary ``findings``."""
        findings = self._timeline.findings
        return {
            "start": self._us(np.array([finding.begin for finding in findings], np.int64)),
            "end": self._us(np.array([UNKNOWN if at is None else at for _, _, at, *_ in findings], np.int64)),
        }

    def header(self) -> dict[str, object]:
        timeline, names = self._timeline, self._names
        return {
            "job": shown(timeline.job),
            "from_ns": str(timeline.begin),
            "to_ns": str(timeline.end),
            "notes": timeline.notes,
            "left_out": self._left_out,
            "failures": [
                {"node": loss.node, "error": f"{loss.table}: {loss.reason}" if loss.table else loss.reason}
                for loss in timeline.unanswered[:_MOST_FAILURES]
            ],
            "dictionaries": {
                "ranks": [
                    {"rank": process.rank, "node": process.node, "pid": process.pid, "run": process.run}
                    for process in names.processes.values
                ],
                "comms": [comm.name or comm.comm for comm in names.comms.values],
                "comm_sizes": [comm.size for comm in names.comms.values],
                "ops": names.ops.entries.values,
                "states": names.states.entries.values,
                "evidence": names.timings.entries.values,
                "errors": names.errors.entries.values,
                "frames": self._frames.values,
                "stacks": self._stack_frames,
                "threads": [thread.name for thread in names.threads.values],
                "counters": [counter._asdict() for counter in names.counters.values],
                "findings": [
                    {name: value for name, value in finding._asdict().items() if name not in ("begin", "end")}
                    for finding in timeline.findings
                ],
            },
            "losses": [
                {
                    "node": loss.node,
                    "rank": None if process is None else names.processes.values[process].rank,
                    "pid": loss.pid,
                    "from_us": (loss.begin - timeline.begin) / 1000,
                    "to_us": (loss.end - timeline.begin) / 1000,
                    "table": loss.table,
                    "rows": loss.missing,
                    "reason": loss.reason,
                }
                for loss, process in timeline.losses_of_job()
            ],
            "clocks": [
                {"node": shown(clock.node), "offset_ns": clock.offset_ns, "bound_ns": clock.error_ns}
                for clock in timeline.clocks
            ],
        }

    def _stack(self, number: int, frames: Sequence[Frame]) -> int:
        if number not in self._stacks:
            self._stacks[number] = len(self._stack_frames)
            self._stack_frames.append([self._frames.index(_place(frame)) for frame in frames])
        return self._stacks[number]

    def _us(self, times: Ints) -> Reals:
        """Returns times as µs since the begin; within a day a double is exact to 16 ps."""
        return np.where(times == UNKNOWN, np.nan, (times - self._timeline.begin) / 1000).astype("<f8")


def _place(frame: Frame) -> str:
    where = "" if not frame.file else f" ({frame.file}:{frame.lineno})" if frame.lineno else f" ({frame.file})"
    return f"{frame.func}{where}"


def _small(values: Ints) -> npt.NDArray[np.int32]:
    return np.where((values < 0) | (values >= 2**31), -1, values).astype("<i4")


def _real(values: Ints, divisor: int = 1) -> Reals:
    return np.where(values == UNKNOWN, np.nan, values / divisor).astype("<f8")
