"""Makes rows of ``cuda.memory`` from the sums that ``cuda_memory.bpf.c`` keeps."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from probing.daemon.arrow import batch_of
from probing.daemon.clock import ClockPair
from probing.daemon.gpu.cuda.frames import Frames
from probing.daemon.gpu.cuda.maps import Maps, drop_process
from probing.daemon.gpu.cuda.symbols import MEMORY_KINDS, is_cudart
from probing.daemon.source import Identity, Processes

__all__ = ("MemoryRows",)

SUMS, LIVE, STACKS, LOST = "cuda_memory_sums", "cuda_memory_live", "cuda_memory_stacks", "cuda_memory_lost"
MAX_STACKS = 4096
# A row is half a kilobyte with its frames; a process that allocates from ever new stacks must not fill the log.
MAX_ROWS = 4096
_MOST = (1 << 63) - 1
_COUNTED = ("allocations", "frees", "bytes", "errors")
_Stack = tuple[int, int, int]


class MemoryRows:
    """Reports sums that have changed since the last report. For one thread; ``changed`` may wait for a reader."""

    def __init__(self, maps: Maps, node: str, processes: Processes, frames: Frames) -> None:
        self._maps = maps
        self._node = node
        self._processes = processes
        self._frames = frames
        self._reported: dict[bytes, npt.NDArray[Any]] = {}
        self._since = 0
        self._stacks: OrderedDict[_Stack, list[str]] = OrderedDict()
        self._lost = 0

    def begin(self, mono_ns: int) -> None:
        """Do not report what was counted before now: the daemon before this one may have."""
        keys, sums = self._maps[SUMS].items()
        self._reported = {key.tobytes(): row for key, row in zip(keys, sums, strict=True)}
        self._lost = self._lost_now()
        self._since = mono_ns

    def changed(self, pair: ClockPair) -> pa.RecordBatch:
        """Returns a row for each sum that has changed since the last call."""
        self._frames.begin_round()
        keys, sums = self._maps[SUMS].items()
        rows: list[dict[str, Any]] = []
        for key, now in zip(keys, sums, strict=True):
            before = self._reported.get(key.tobytes())
            if len(rows) < MAX_ROWS and (before is None or now.tobytes() != before.tobytes()):
                rows.append(self._row(key, now, before, pair))
                self._reported[key.tobytes()] = now
        self._since = pair.mono_ns
        return batch_of("cuda.memory", rows)

    def lost(self) -> int:
        """Returns how many allocations since the last call found the map full."""
        before, self._lost = self._lost, self._lost_now()
        return max(0, self._lost - before)

    def forget(self, pid: int, start_ns: int) -> None:
        """Drop a process that ended, after its last report."""
        for key in drop_process(self._maps[SUMS], pid, start_ns):
            self._reported.pop(key, None)
        drop_process(self._maps[LIVE], pid, start_ns)
        drop_process(self._maps[STACKS], pid, start_ns)
        self._frames.forget(pid, start_ns)

    def _row(
        self, key: npt.NDArray[Any], now: npt.NDArray[Any], before: npt.NDArray[Any] | None, pair: ClockPair
    ) -> dict[str, Any]:
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
            # The shift of a hostile size of 2^63 and more would not fit.
            "size_class": 1 << min(int(key["size_class"]), 62),
            "stack": stack,
            "caller": next((frame for frame in frames if not is_cudart(frame.encode())), None),
            "frames": frames,
            "interval_ns": pair.mono_ns - self._since,
            # Other threads count while the sums are read: a free may be seen before its allocation.
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
            self._stacks[key] = self._frames.name(pid, start_ns, addresses)
            while len(self._stacks) > MAX_STACKS:
                self._stacks.popitem(last=False)
        return self._stacks[key]

    def _lost_now(self) -> int:
        lost = self._maps[LOST].lookup(0)
        return int(lost["sums"].sum()) + int(lost["live"].sum())


def _signed(value: Any) -> int:
    return int(np.uint64(value).astype(np.int64))


def _more(now: Any, before: Any) -> int:
    """Returns the growth of a 64-bit counter, clamped: a hostile process may ask for sizes that fit no column."""
    return min((int(now) - int(before)) & 0xFFFF_FFFF_FFFF_FFFF, _MOST)
