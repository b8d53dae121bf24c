"""Turns samples into rows, whole columns at a time; Python code runs once for each distinct stack of a thread.

A record is one ``struct python_sample`` (bpf/python.bpf.h). Equal stacks of a thread within a second are one row.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from probing.api.tables.schema import Row
from probing.daemon import columns
from probing.daemon.arrow import batch_of
from probing.daemon.clock import ClockPair
from probing.daemon.python_stack.sampling.codes import CodeKey
from probing.daemon.python_stack.sampling.processes import NAME, Sampled
from probing.daemon.source import Loss, Processes, ProcessKey, Sink

__all__ = ("GRID_NS", "UNRESOLVED", "SampleRows", "code_keys", "stack_id_of")

Array = npt.NDArray[Any]
Frames = list[tuple[str, str, int | None]]
# Values of enum python_sample_kind and python_sample_flags of bpf/python.bpf.h.
ON_CPU, OFF_CPU, UNRESOLVED = 1, 2, 3
CUT, FAULT, HOLDS_GIL, GIL_UNKNOWN = 1, 2, 4, 8
# Times are rounded down to this grid, ns. Equal stacks within a second are one row, so finer times would add little.
GRID_NS = 62_500_000
DIGITS = 5
_SECOND_NS = 1_000_000_000
_HOUR_NS = 3600 * _SECOND_NS
# Records that span at most this time are grouped as if they all fell into one second.
_ABOUT_A_SECOND_NS = 1_500_000_000
# The maximum time off the CPU of a record, ns (13 days). A longer time counts as this time.
_MAX_DURATION_NS = 1 << 50
_MAX_STACKS = 16_384
_MAX_WRITTEN = 65_536
# The maximum number of characters in the new stacks of a user in one drain. A limit is needed, because a stack can have
# a million characters. Usual stacks have a few thousand, and a drain has about two thousand samples.
_MAX_TEXT = 8 << 20
_UNKNOWN = ("?", "?", None)


def code_keys(record: Any) -> list[CodeKey]:
    """Returns (address, check) of each frame of one record, innermost first."""
    frames = record["frames"][: int(record["depth"])]
    return list(zip(frames["code"].tolist(), frames["check"].tolist(), strict=True))


def stack_id_of(frames: Frames, complete: bool) -> int:
    """Returns the first 8 bytes, little-endian, of the BLAKE2b hash of the frames, which is the same on all nodes.

    The texts contain no control characters, so NUL and newline separate them.
    """
    text = "".join(f"{func}\0{file}\0{'' if line is None else line}\n" for func, file, line in frames)
    digest = hashlib.blake2b((text if complete else text + "\0").encode()).digest()
    return int.from_bytes(digest[:8], "little")


class SampleRows:
    """Makes rows of ``python.samples`` and ``python.stacks`` of one node. For use by one thread.

    ``find`` returns the state of a process, ``processes`` its identity.
    """

    def __init__(self, node: str, processes: Processes, find: Callable[[ProcessKey], Sampled], sink: Sink) -> None:
        self._node = node
        self._processes = processes
        self._find = find
        self._sink = sink
        self._written: OrderedDict[int, int] = OrderedDict()
        self.undecoded = 0

    def assemble(self, records: Array, pair: ClockPair) -> dict[str, pa.RecordBatch]:
        """Returns batches of ``python.samples`` and ``python.stacks`` from ``records``. Losses go to the sink."""
        if not len(records):
            return {}
        self._lose_unresolved(records, pair)
        groups = _Groups(records)
        if not len(groups.first):
            return {}
        # Columns are copied one by one, since a record has 2 KB.
        first = {name: records[name][groups.first] for name in ("tgid", "start_ns", "tid", "kind", "flags")}
        keys = list(map(ProcessKey, first["tgid"].tolist(), first["start_ns"].tolist()))
        known = {key: self._find(key) for key in dict.fromkeys(keys)}
        stacks, rows, undecoded = self._stacks(records, groups, [known[key] for key in keys], pair)
        self._lose_undecoded(records, groups, undecoded, pair)
        batches = {"python.samples": self._samples(first, groups, keys, known, stacks, pair)}
        if rows:
            batches["python.stacks"] = batch_of("python.stacks", rows)
        return batches

    def _stacks(
        self, records: Array, groups: _Groups, processes: Sequence[Sampled], pair: ClockPair
    ) -> tuple[list[int], list[Row], list[bool]]:
        """Returns the stack_id of each group, rows of ``python.stacks``, and whether each group has undecoded code."""
        ids, undecoded, rows = [], [], []
        left: defaultdict[int | None, int] = defaultdict(lambda: _MAX_TEXT)
        too_long: Counter[int] = Counter()
        for index, hashed, cut, count, process in zip(
            groups.first.tolist(),
            groups.hashes.tolist(),
            groups.cut.tolist(),
            groups.count.tolist(),
            processes,
            strict=True,
        ):
            known, lacks = process.stacks.get((hashed, cut)), False
            stack_id = known
            if stack_id is None or self._due(stack_id, pair.real_ns):
                frames, lacks = _frames(records[index], process)
                size = sum(len(func) + len(file) for func, file, _ in frames)
                if fits := size <= left[process.owner]:
                    left[process.owner] -= size
                else:
                    too_long[process.key.pid] += count
                    frames, lacks = [_UNKNOWN] * len(frames), False
                made = stack_id_of(frames, not cut)
                if stack_id is None:
                    stack_id = made
                    if fits and not lacks:
                        _keep(process.stacks, (hashed, cut), stack_id, _MAX_STACKS)
                # The row of a known stack is written again after an hour. If some of its code was dropped meanwhile,
                # the frames decoded now have another id, so they are not written as the row of ``stack_id``.
                if made == stack_id and self._due(stack_id, pair.real_ns):
                    rows.append(self._row(stack_id, frames, not cut, pair))
            ids.append(stack_id)
            undecoded.append(lacks and known is None)
        for pid, count in too_long.items():
            reason = f"the new stacks of its user have more than {_MAX_TEXT:,} characters"
            self._sink.lost(Loss(NAME, "python.samples", "decode", reason, pair.real_ns, pair.real_ns, count, pid))
        return ids, rows, undecoded

    def _due(self, stack_id: int, now_ns: int) -> bool:
        before = self._written.get(stack_id)
        return before is None or now_ns - before >= _HOUR_NS

    def _row(self, stack_id: int, frames: Frames, complete: bool, pair: ClockPair) -> Row:
        _keep(self._written, stack_id, pair.real_ns, _MAX_WRITTEN)
        rows = [{"func": func, "file": file, "lineno": line} for func, file, line in frames]
        return {"node": self._node, "ts": pair.real_ns, "stack_id": stack_id, "complete": complete, "frames": rows}

    def _samples(
        self,
        first: dict[str, Array],
        groups: _Groups,
        keys: Sequence[ProcessKey],
        known: dict[ProcessKey, Sampled],
        stacks: Sequence[int],
        pair: ClockPair,
    ) -> pa.RecordBatch:
        who = [self._processes.identity(*key) or process.identity for key, process in known.items()]
        trains = np.array([one.trains if one else key.pid for one, key in zip(who, known, strict=True)])
        place = {key: index for index, key in enumerate(known)}
        which = np.array([place[key] for key in keys])
        on_cpu = first["kind"] == ON_CPU
        rate = np.array([known[key].rate for key in keys], np.int64)
        of_rate = groups.count * _SECOND_NS // np.maximum(rate, 1)
        flags = first["flags"]
        tids = first["tid"].tolist()
        ts = (groups.ktime + pair.mono_to_utc_ns) // GRID_NS * GRID_NS
        duration = np.where(on_cpu, of_rate, _rounded(groups.duration))
        made = columns.identity_columns(self._node, who, which, first["tgid"], first["start_ns"])
        made |= {
            "ts": columns.times(ts),
            "tid": columns.numbers(first["tid"].astype(np.int32)),
            "thread": pa.array([known[k].names.get(t) for k, t in zip(keys, tids, strict=True)], pa.string()),
            "trains": columns.flags(first["tid"] == trains[which]),
            "stack_id": columns.numbers(np.array(stacks, np.uint64)),
            "on_cpu": columns.flags(on_cpu),
            "gil": columns.flags(flags & HOLDS_GIL != 0, flags & GIL_UNKNOWN != 0),
            "count": columns.numbers(groups.count.astype(np.int64)),
            "duration_ns": columns.numbers(duration, on_cpu & (rate == 0)),
        }
        return columns.batch("python.samples", made)

    def _lose_unresolved(self, records: Array, pair: ClockPair) -> None:
        some = records[records["kind"] == UNRESOLVED]
        self._lose(some, "resolve", "threads whose Python state was not known yet", pair)

    def _lose_undecoded(self, records: Array, groups: _Groups, undecoded: list[bool], pair: ClockPair) -> None:
        if any(undecoded):
            some = records[groups.members(np.array(undecoded))]
            self.undecoded += len(some)
            self._lose(some, "decode", "code that was gone before it could be read", pair)

    def _lose(self, some: Array, stage: str, reason: str, pair: ClockPair) -> None:
        by_key: defaultdict[int, list[int]] = defaultdict(list)
        for pid, ktime in zip(some["tgid"].tolist(), some["ktime"].tolist(), strict=True):
            by_key[pid].append(ktime)
        for pid, times in by_key.items():
            since, until = (min(t, pair.mono_ns) + pair.mono_to_utc_ns for t in (min(times), max(times)))
            self._sink.lost(Loss(NAME, "python.samples", stage, reason, since, until, len(times), pid))


class _Groups:
    """Records with a stack, grouped by second, thread, kind and stack. Each array has an element for each group.
    ``first`` has the index of one record of each group.
    """

    def __init__(self, records: Array) -> None:
        taken = np.flatnonzero((records["kind"] == ON_CPU) | (records["kind"] == OFF_CPU))
        ktime = records["ktime"][taken].astype(np.int64)
        span = int(ktime.max() - ktime.min()) if len(taken) else 0
        second = (ktime - ktime.min()) // _SECOND_NS if span > _ABOUT_A_SECOND_NS else np.zeros(len(taken), np.int64)
        thread = records["tgid"][taken].astype(np.uint64) << np.uint64(32) | records["tid"][taken]
        cut = records["flags"][taken] & (CUT | FAULT) != 0
        gil = records["flags"][taken] & (HOLDS_GIL | GIL_UNKNOWN)
        how = records["kind"][taken].astype(np.uint32) << 16 | gil.astype(np.uint32) << 1 | cut
        columns = (second, how, records["hash"][taken], thread, records["start_ns"][taken])
        order = np.lexsort(columns)
        begins = np.flatnonzero(_begins(*(column[order] for column in columns)))
        self._sorted, self._begins = taken[order], begins
        self.first = self._sorted[begins]
        self.hashes = records["hash"][self.first]
        self.cut = cut[order][begins]
        self.count = np.diff(np.append(begins, len(order)))
        duration = np.minimum(records["duration_ns"][taken], _MAX_DURATION_NS).astype(np.int64)
        empty = np.zeros(0, np.int64)
        self.duration = np.add.reduceat(duration[order], begins) if len(begins) else empty
        self.ktime = np.minimum.reduceat(ktime[order], begins) if len(begins) else empty

    def members(self, chosen: npt.NDArray[np.bool_]) -> npt.NDArray[np.intp]:
        """Returns the indices of the records of the ``chosen`` groups."""
        members: npt.NDArray[np.intp] = self._sorted[np.repeat(chosen, self.count)]
        return members


def _rounded(numbers: Array) -> Array:
    """Returns non-negative ``numbers`` rounded to DIGITS significant binary digits. The error of each number is at most
    1 in 2^DIGITS, and the error of their sum is even smaller.
    """
    shift = np.maximum(np.frexp(numbers.astype(np.float64))[1] - DIGITS, 0)
    rounded: Array = (numbers + (1 << shift >> 1)) >> shift << shift
    return rounded


def _begins(*columns: Array) -> npt.NDArray[np.bool_]:
    """Returns a mask of the rows that differ from the previous row. ``columns`` are sorted."""
    begins = np.ones(len(columns[0]), bool)
    begins[1:] = False
    for column in columns:
        begins[1:] |= column[1:] != column[:-1]
    return begins


def _frames(record: Any, process: Sampled) -> tuple[Frames, bool]:
    """Returns the frames of a record, innermost first, and whether code of some frames is unknown."""
    lacks, frames = False, Frames()
    offsets = record["frames"]["offset"][: int(record["depth"])].tolist()
    for key, offset in zip(code_keys(record), offsets, strict=True):
        code = process.codes.get(key)
        if code is None:
            lacks = True
            frames.append(_UNKNOWN)
        else:
            frames.append((code.func, code.file, code.line(offset)))
    return frames, lacks


def _keep(kept: OrderedDict[Any, int], key: Any, value: int, limit: int) -> None:
    kept[key] = value
    kept.move_to_end(key)
    while len(kept) > limit:
        kept.popitem(last=False)
