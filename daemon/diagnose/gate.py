"""Sums up the rows of ``comm.progress`` by job, each second: which jobs advance, and which of their ranks ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from probing.daemon.arrow_to_numpy import integers

__all__ = ("JobNow", "jobs_of")

_Ints = npt.NDArray[np.int64]
_Phases = dict[int, dict[tuple[str, int], None]]


@dataclass(frozen=True, slots=True)
class JobNow:
    """The progress of one run of a job on this node at ``now_ns``. Times are UTC ns.

    ``newest_ns``: when an operation of a rank was last called or ended; None: no operation was seen. ``usual_gap_ns``:
    the longest usual time between two calls of a rank. ``living`` and ``ended`` count ranks; ``failed``: ranks that
    ended by a signal or with an exit code other than 0. ``late``: the first operations of a rank were not recorded.
    ``world_size``: 0 if unknown. ``calls``: the number of recorded operations. While it grows, the job advances; a
    change of the clock does not affect this. ``owner``: the uid of the job's user. ``phases``: the labels ``phase`` of
    its ranks, each with the time at which a rank got it.
    """

    job: str
    run: str
    now_ns: int
    newest_ns: int | None
    usual_gap_ns: int | None
    living: int
    ended: int
    failed: int
    late: bool
    world_size: int
    calls: int
    owner: int | None = None
    phases: tuple[tuple[str, int], ...] = ()

    @property
    def key(self) -> tuple[str, str]:
        return self.job, self.run

    @property
    def alone(self) -> bool:
        """Whether the job is a single process that calls no collective."""
        return self.world_size <= 1 and self.living + self.ended <= 1 and self.newest_ns is None


def jobs_of(stream: bytes) -> list[JobNow]:
    """Returns the jobs in ``comm.progress``, an Arrow IPC stream."""
    with pa.ipc.open_stream(stream) as reader:
        batches = [batch for batch in reader if batch.num_rows]
    return [job for batch in batches for job in _jobs(batch)]


def _jobs(batch: pa.RecordBatch) -> list[JobNow]:
    names = list(zip(batch.column("job").to_pylist(), batch.column("run").to_pylist(), strict=True))
    index = {key: at for at, key in enumerate(dict.fromkeys(names))}
    which = np.array([index[key] for key in names], np.intp)
    column = {
        name: integers(batch.column(name))
        for name in (
            "pid",
            "start_ns",
            "last_call",
            "last_done",
            "longest_gap_ns",
            "attached",
            "ended",
            "exit_code",
            "signal",
            "world_size",
            "calls",
        )
    }
    # A process has a row for each communicator; these rows are adjacent.
    first = (np.diff(column["pid"], prepend=-1) != 0) | (np.diff(column["start_ns"], prepend=-1) != 0)
    over = column["ended"] >= 0
    newest = _most(which, len(index), np.maximum(column["last_call"], column["last_done"]))
    gaps = _most(which, len(index), np.where(over, -1, column["longest_gap_ns"]))
    sizes = _most(which, len(index), column["world_size"])
    living, ended, failed, late, calls = (
        np.bincount(which, chosen, len(index)).astype(int).tolist()
        for chosen in (
            first & ~over,
            first & over,
            first & over & ((column["exit_code"] > 0) | (column["signal"] > 0)),
            column["attached"] >= 0,
            column["calls"],
        )
    )
    now = int(integers(batch.column("ts"))[0])
    # A collector of the previous version sends no ``owner``.
    known = "owner" in batch.schema.names
    owners = dict(zip(which.tolist(), batch.column("owner").to_pylist() if known else (), strict=False))
    phases = _phases(which, batch, over)
    return [
        JobNow(
            str(job),
            str(run),
            now,
            _known(newest[at]),
            _known(gaps[at]),
            living[at],
            ended[at],
            failed[at],
            late[at] > 0,
            max(sizes[at], 0),
            calls[at],
            owners.get(at),
            tuple(phases.get(at, ())),
        )
        for (job, run), at in index.items()
    ]


def _phases(which: npt.NDArray[np.intp], batch: pa.RecordBatch, over: npt.NDArray[np.bool_]) -> _Phases:
    """Returns the labels ``phase`` of the living ranks of each job."""
    phases: _Phases = {}
    # A collector of the previous version sends no ``phase``.
    if "phase" in batch.schema.names and batch.column("phase").null_count < batch.num_rows:
        since = integers(batch.column("phase_since")).tolist()
        for at, name, begun, ended in zip(which, batch.column("phase").to_pylist(), since, over, strict=True):
            if name is not None and not ended:
                phases.setdefault(int(at), {}).setdefault((name, begun))
    return phases


def _most(which: npt.NDArray[np.intp], groups: int, values: _Ints) -> Sequence[int]:
    found = np.full(groups, -1, np.int64)
    np.maximum.at(found, which, values)
    most: list[int] = found.tolist()
    return most


def _known(value: int) -> int | None:
    return value if value >= 0 else None
