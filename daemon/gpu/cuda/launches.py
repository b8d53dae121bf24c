"""Makes rows of ``cuda.launches`` from the counters of the programs, one for each process and CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from probing.daemon import columns
from probing.daemon.clock import ClockPair
from probing.daemon.gpu.cuda.maps import Maps
from probing.daemon.source import Processes

__all__ = ("LaunchRows",)

COUNTS = "cuda_launches"
_FIELDS = ("kernels", "graphs")


class LaunchRows:
    """Counts launches since the last report. For one thread."""

    def __init__(self, maps: Maps, node: str, processes: Processes) -> None:
        self._maps = maps
        self._node = node
        self._processes = processes
        self._reported: dict[tuple[int, int], tuple[int, int]] = {}

    def begin(self) -> None:
        """Do not report launches that were counted before now."""
        pids, starts, counts = self._read()
        self._reported = {(int(p), int(s)): (int(k), int(g)) for p, s, (k, g) in zip(pids, starts, counts, strict=True)}

    def changed(self, pair: ClockPair) -> pa.RecordBatch:
        """Returns a row for each process that launched anything since the last call."""
        pids, starts, counts = self._read()
        before = [self._reported.get((int(p), int(s)), (0, 0)) for p, s in zip(pids, starts, strict=True)]
        more = counts - np.array(before, np.int64).reshape(-1, 2)
        now = zip(pids, starts, counts, strict=True)
        self._reported |= {(int(p), int(s)): (int(k), int(g)) for p, s, (k, g) in now}
        chosen = more.any(axis=1)
        return self._rows(pids[chosen], starts[chosen], more[chosen], pair)

    def forget(self, pid: int, start_ns: int) -> None:
        self._reported.pop((pid, start_ns), None)
        value = self._maps[COUNTS].lookup(pid)
        # Another process may have the pid already.
        if value is not None and int(value["start_ns"].max()) == start_ns:
            self._maps[COUNTS].delete(pid)

    def _read(self) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[np.int64]]:
        pids, values = self._maps[COUNTS].items()
        counts = np.stack([values[field].sum(axis=1).astype(np.int64) for field in _FIELDS], axis=1)
        return pids.reshape(-1), values["start_ns"].max(axis=1), counts

    def _rows(
        self, pids: npt.NDArray[Any], starts: npt.NDArray[Any], more: npt.NDArray[np.int64], pair: ClockPair
    ) -> pa.RecordBatch:
        who, which = columns.identities(self._processes, pids, starts)
        made = columns.identity_columns(self._node, who, which, pids, starts)
        made["ts"] = columns.times(np.full(len(pids), pair.real_ns, np.int64))
        made |= {field: columns.numbers(more[:, number]) for number, field in enumerate(_FIELDS)}
        return columns.batch("cuda.launches", made)
