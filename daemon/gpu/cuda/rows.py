"""Makes rows of ``cuda.syncs``, ``cuda.launches`` and ``cuda.memory`` from the records and counters of the programs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from probing.api.tables.schema import Row
from probing.daemon import columns
from probing.daemon.arrow import batch_of
from probing.daemon.bpf.maps import Map
from probing.daemon.clock import ClockPair
from probing.daemon.fairness import in_turn
from probing.daemon.gpu.cuda.frames import Frames
from probing.daemon.gpu.cuda.symbols import MEMORY_KINDS, SYNC_OPS, is_cudart
from probing.daemon.source import Identity, Processes

__all__ = (
    "LaunchRows",
    "Maps",
    "MemoryRows",
    "drop_processes",
    "processes_in",
    "sync_rows",
)

Maps = Mapping[str, Map]
_Process = tuple[int, int]


def drop_processes(found: Map, ended: Collection[_Process]) -> list[bytes]:
    """Deletes the entries of processes from a map with tgid and start_ns in its keys. Returns the deleted keys.

    The map is read once, however many processes ended.
    """
    keys, _ = found.items()
    own = keys[np.isin(keys["tgid"], [pid for pid, _ in ended])]
    chosen = [key.tobytes() for key in own if (int(key["tgid"]), int(key["start_ns"])) in ended]
    for key in chosen:
        found.delete(key)
    return chosen


def processes_in(found: Map) -> set[_Process]:
    """Returns (pid, start_ns) of the processes with entries in a map with tgid and start_ns in its keys."""
    keys, _ = found.items()
    return {(int(key["tgid"]), int(key["start_ns"])) for key in keys}


COUNTS, COUNTS_LOST = "cuda_launches", "cuda_launches_lost"
_FIELDS = ("kernels", "graphs")


class LaunchRows:
    """Counts launches since the last report. For one thread."""

    def __init__(self, maps: Maps, node: str, processes: Processes) -> None:
        self._maps = maps
        self._node = node
        self._processes = processes
        self._reported: dict[_Process, tuple[int, int]] = {}
        self._lost = 0

    def begin(self) -> bool:
        """Starts the first interval: launches that were counted before now are not reported. Returns whether there were
        such launches.
        """
        self._lost = self._lost_now()
        pids, starts, counts = self._read()
        self._reported = {(int(p), int(s)): (int(k), int(g)) for p, s, (k, g) in zip(pids, starts, counts, strict=True)}
        return bool(self._reported)

    def changed(self, pair: ClockPair) -> pa.RecordBatch:
        """Returns a row for each process that launched anything since the last call."""
        pids, starts, counts = self._read()
        before = [self._reported.get((int(p), int(s)), (0, 0)) for p, s in zip(pids, starts, strict=True)]
        more = counts - np.array(before, np.int64).reshape(-1, 2)
        now = zip(pids, starts, counts, strict=True)
        self._reported |= {(int(p), int(s)): (int(k), int(g)) for p, s, (k, g) in now}
        chosen = more.any(axis=1)
        return self._rows(pids[chosen], starts[chosen], more[chosen], pair)

    def lost(self) -> int:
        """Returns the number of launches since the last call for which the map had no room."""
        before, self._lost = self._lost, self._lost_now()
        return max(0, self._lost - before)

    def forget(self, ended: Collection[_Process]) -> None:
        """Drops the state of processes that ended, after their last report."""
        drop_processes(self._maps[COUNTS], ended)
        for process in ended:
            self._reported.pop(process, None)

    def _lost_now(self) -> int:
        return int(self._maps[COUNTS_LOST].lookup(0).sum())

    def _read(self) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[np.int64]]:
        keys, values = self._maps[COUNTS].items()
        counts = np.stack([values[field].sum(axis=1).astype(np.int64) for field in _FIELDS], axis=1)
        return keys["tgid"], keys["start_ns"], counts

    def _rows(
        self, pids: npt.NDArray[Any], starts: npt.NDArray[Any], more: npt.NDArray[np.int64], pair: ClockPair
    ) -> pa.RecordBatch:
        who, which = columns.identities(self._processes, pids, starts)
        made = columns.identity_columns(self._node, who, which, pids, starts)
        made["ts"] = columns.times(np.full(len(pids), pair.real_ns, np.int64))
        made |= {field: columns.numbers(more[:, number]) for number, field in enumerate(_FIELDS)}
        return columns.batch("cuda.launches", made)


SUMS, LIVE, STACKS, LOST = "cuda_memory_sums", "cuda_memory_live", "cuda_memory_stacks", "cuda_memory_lost"
COUNTED = "cuda_memory_processes"
MAX_STACKS = 4096
# The maximum number of rows of a report, half a kilobyte each: a process that allocates with ever new stacks must not
# fill the log.
MAX_ROWS = 4096
_MOST = (1 << 63) - 1
_COUNTED = ("allocations", "frees", "bytes", "errors")
_Stack = tuple[int, int, int]


class MemoryRows:
    """Reports the sums of allocations that have changed since the last report. Belongs to one thread; ``changed``
    may wait until a reader answers.
    """

    def __init__(self, maps: Maps, node: str, processes: Processes, frames: Frames) -> None:
        self._maps = maps
        self._node = node
        self._processes = processes
        self._frames = frames
        self._reported: dict[bytes, npt.NDArray[Any]] = {}
        # The sums that changed, but were not in the last report.
        self._left: set[bytes] = set()
        self._since = 0
        self._stacks: OrderedDict[_Stack, list[str]] = OrderedDict()
        self._lost = 0

    def begin(self, mono_ns: int) -> bool:
        """Starts the first interval: allocations that were counted before now are not reported, since the previous
        daemon may have reported them. Returns whether there were such allocations.
        """
        keys, sums = self._maps[SUMS].items()
        self._reported = {key.tobytes(): row for key, row in zip(keys, sums, strict=True)}
        self._lost = self._lost_now()
        self._since = mono_ns
        return bool(self._reported)

    def changed(self, pair: ClockPair) -> pa.RecordBatch:
        """Returns a row for each sum that has changed since the last call, at most MAX_ROWS. If more sums changed, the
        processes take turns.
        """
        self._frames.begin_round()
        keys, sums = self._maps[SUMS].items()
        rows: list[Row] = []
        changed = [
            (key, now)
            for key, now in zip(keys, sums, strict=True)
            if (before := self._reported.get(key.tobytes())) is None or now.tobytes() != before.tobytes()
        ]
        turns = in_turn(changed, lambda one: (int(one[0]["tgid"]), int(one[0]["start_ns"])))
        self._left = {key.tobytes() for key, _ in turns[MAX_ROWS:]}
        for key, now in turns[:MAX_ROWS]:
            rows.append(self._row(key, now, self._reported.get(key.tobytes()), pair))
            self._reported[key.tobytes()] = now
        self._since = pair.mono_ns
        return batch_of("cuda.memory", rows)

    def lost(self) -> int:
        """Returns the number of allocations since the last call for which the maps had no room."""
        before, self._lost = self._lost, self._lost_now()
        return max(0, self._lost - before)

    def forget(self, ended: Collection[_Process]) -> int:
        """Drops the state of processes that ended, after their last report. Returns the number of sums for which that
        report had no room.
        """
        dropped = drop_processes(self._maps[SUMS], ended)
        for key in dropped:
            self._reported.pop(key, None)
        for name in (LIVE, STACKS, COUNTED):
            drop_processes(self._maps[name], ended)
        for process in ended:
            self._frames.forget(*process)
        return len(self._left.intersection(dropped))

    def _row(
        self, key: npt.NDArray[Any], now: npt.NDArray[Any], before: npt.NDArray[Any] | None, pair: ClockPair
    ) -> Row:
        pid, start_ns, stack = int(key["tgid"]), int(key["start_ns"]), int(key["stack"])
        who: Identity | None = self._processes.identity(pid, start_ns)
        frames = self._named(pid, start_ns, stack)
        counted = {name: _more(now[name], 0 if before is None else before[name]) for name in _COUNTED}
        return {
            "node": self._node,
            "ts": pair.real_ns,
            "job": who and who.job,
            "run": who and who.run,
            "pid": pid,
            "start_ns": start_ns,
            "rank": who.rank if who else None,
            "kind": MEMORY_KINDS.get(int(key["kind"])),
            # The column holds powers of two up to 2^62, and a hostile process may ask for any size.
            "size_class": 1 << min(int(key["size_class"]), 62),
            "stack": stack,
            "caller": next((frame for frame in frames if not is_cudart(frame.encode())), None),
            "frames": frames,
            "interval_ns": pair.mono_ns - self._since,
            # Other threads allocate while the sums are read. These sums can be negative, because a free may be seen
            # before its allocation.
            "live": _signed(now["live"]),
            "live_bytes": _signed(now["live_bytes"]),
            **counted,
        }

    def _named(self, pid: int, start_ns: int, stack: int) -> list[str]:
        key = (stack, start_ns, pid)
        if key not in self._stacks:
            value = self._maps[STACKS].lookup(key)
            raw = [] if value is None else value["frames"].tolist()
            addresses = raw[: raw.index(0)] if 0 in raw else raw
            frames = self._frames.name(pid, start_ns, addresses)
            if not self._frames.knows(pid, start_ns):
                return frames
            self._stacks[key] = frames
            while len(self._stacks) > MAX_STACKS:
                self._stacks.popitem(last=False)
        return self._stacks[key]

    def _lost_now(self) -> int:
        lost = self._maps[LOST].lookup(0)
        return int(lost["sums"].sum()) + int(lost["live"].sum())


def _signed(value: Any) -> int:
    return int(np.uint64(value).astype(np.int64))


def _more(now: Any, before: Any) -> int:
    """Returns the growth of a 64-bit counter, at most _MOST, the limit of the column: a hostile process may ask for any
    size.
    """
    return min((int(now) - int(before)) & 0xFFFF_FFFF_FFFF_FFFF, _MOST)


_EVENT = 2


def sync_rows(records: npt.NDArray[Any], pair: ClockPair, node: str, processes: Processes) -> pa.RecordBatch:
    """Returns a physical batch of ``cuda.syncs``; ``records`` are ``struct cuda_sync_record`` (cuda.bpf.c)."""
    pids, starts, kinds = records["tgid"], records["start_ns"], records["kind"]
    who, which = columns.identities(processes, pids, starts)
    operations, operation_of = np.unique(kinds, return_inverse=True)
    results, result_of = np.unique(records["result"], return_inverse=True)
    made = columns.identity_columns(node, who, which, pids, starts)
    made |= {
        "ts": columns.times(records["t"].astype(np.int64) + pair.mono_to_utc_ns),
        "tid": columns.numbers(records["tid"].astype(np.int32)),
        "op": columns.texts([SYNC_OPS.get(int(kind)) for kind in operations], operation_of),
        "stream": columns.numbers(records["stream"], records["stream_known"] == 0),
        "event": columns.numbers(records["event"], kinds != _EVENT),
        "duration_ns": columns.numbers(records["duration_ns"].astype(np.int64)),
        "error": columns.texts([f"cudaError {int(code)}" if code else None for code in results], result_of),
    }
    return columns.batch("cuda.syncs", made)
