"""A store of ``comm.ops`` for benchmarks of queries: a week of consecutive jobs, as sealed segments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from probing.api.tables import TABLES
from probing.daemon.store.files import SystemFiles
from probing.daemon.store.maintenance.sealing import made_segment
from probing.daemon.store.manifest import Edit, LoadedManifest, Manifest, Segment
from probing.daemon.store.segments.contents import split_by_date
from probing.daemon.store.segments.files import SegmentFile, segment_path
from probing.daemon.store.tasks.messages import Data, Made
from probing.daemon.store.tasks.segment_output import segment_steps

__all__ = ("DAYS", "START_NS", "WORST_ROW_BYTES", "job_at", "write_store")

START_NS = 1_794_873_600_000_000_000  # 2026-11-17
DAY_NS = 86_400_000_000_000
DAYS = 7
# The minimum size of a row with random numbers, in bytes, from which the number of rows of a large store is computed.
WORST_ROW_BYTES = 56
JOB_HOURS = 6
RANKS = 8
_OPS = TABLES["comm.ops"]
_NAMES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "barrier")
Numbers = npt.NDArray[np.int64]


def job_at(slot: int) -> str:
    """Returns the name of job number ``slot``. Two jobs begin in each 6 hours: an even and an odd number."""
    return f"train-{slot:03d}"


def write_store(root: Path, rows: int, segments: int, noise: bool, report: Callable[[str], None]) -> list[Segment]:
    """Writes a state directory with ``rows`` in ``segments`` of equal time. ``noise``: fill some columns with random
    numbers, which hardly compress.
    """
    files, made = SystemFiles(), list[Segment]()
    each = max(rows // segments, RANKS)
    for number in range(segments):
        low = START_NS + DAYS * DAY_NS * number // segments
        high = START_NS + DAYS * DAY_NS * (number + 1) // segments
        for date, day in split_by_date(_rows(each, low, high, number, noise), _OPS.sort_by):
            made.append(_write(files, root, date, number + 1, day))
        if (number + 1) % max(segments // 10, 1) == 0:
            report(f"{number + 1} of {segments} segments, {sum(s.size for s in made) / 1e9:.2f} GB")
    manifest = Manifest(files, root, "bench", "boot", LoadedManifest())
    manifest.commit(Edit(tuple(made), sealed_to=segments))
    manifest.close()
    return made


def _write(files: SystemFiles, root: Path, date: str, part: int, rows: pa.Table) -> Segment:
    file = SegmentFile(files, root, segment_path(_OPS.name, date, (part, part)))
    made: Made | None = None
    for step in segment_steps(_OPS.name, date, rows):
        if isinstance(step, Data):
            file.write(step.data)
        elif isinstance(step, Made):
            made = step
    assert made is not None
    file.finish(made.size, made.crc, set())
    return made_segment(_OPS.name, file.path, (part, part), made)


def _rows(count: int, low: int, high: int, seed: int, noise: bool) -> pa.Table:
    rng = np.random.default_rng(seed)
    ts = np.sort(rng.integers(low, high, count))
    rank = np.arange(count, dtype=np.int64) % RANKS
    slot = (ts - START_NS) // (JOB_HOURS * 3_600_000_000_000)
    # Two jobs of four ranks each run at a time; the second job changes three hours later than the first.
    late = (ts - START_NS + DAY_NS // 8) // (JOB_HOURS * 3_600_000_000_000)
    job = np.where(rank < RANKS // 2, slot * 2, late * 2 + 1)
    op = rng.integers(0, len(_NAMES), count)
    took = rng.lognormal(11, 1.5, count).astype(np.int64)
    columns = dict(_columns(count, rank, job, op, took))
    columns["ts"] = pa.array(ts).cast(pa.timestamp("ns"))
    if noise:
        for name in ("group_id", "launch_ns_after", "start_ns_after", "done_lo_ns", "step", "stream", "count"):
            values = rng.integers(0, 1 << 62, count)
            columns[name] = pa.array(values.astype(np.uint64) if name == "stream" else values)
    schema = _OPS.physical
    arrays = [columns.get(field.name, pa.nulls(count, field.type)) for field in schema]
    return pa.Table.from_arrays([a.cast(f.type) for a, f in zip(arrays, schema, strict=True)], schema=schema)


def _columns(count: int, rank: Numbers, job: Numbers, op: Numbers, took: Numbers) -> Iterator[tuple[str, pa.Array]]:  # type: ignore[type-arg]
    def named(codes: Numbers, names: list[str]) -> pa.Array:  # type: ignore[type-arg]
        return pa.DictionaryArray.from_arrays(pa.array(codes.astype(np.int32)), pa.array(names))

    zeros = np.zeros(count, np.int64)
    yield "node", named(zeros, ["n0"])
    yield "job", named(job, [job_at(i) for i in range(int(job.max()) + 1)])
    yield "run", named(zeros, ["0"])
    yield "pid", pa.array((4000 + rank).astype(np.int32))
    yield "start_ns", pa.array(10_000_000 * (rank + job))
    yield "tid", pa.array((4000 + rank).astype(np.int32))
    yield "rank", pa.array((rank % (RANKS // 2)).astype(np.int32))
    yield "comm", named(zeros, ["00c0ffee00c0ffee"])
    yield "comm_name", named(zeros, ["default_pg"])
    yield "comm_rank", pa.array((rank % (RANKS // 2)).astype(np.int32))
    yield "comm_size", pa.array(np.full(count, RANKS // 2, np.int32))
    yield "backend", named(zeros, ["nccl"])
    yield "seq", pa.array(np.arange(count, dtype=np.int64) // RANKS)
    yield "op", named(op, list(_NAMES))
    yield "dtype", named(zeros, ["bfloat16"])
    yield "count", pa.array(1 << (10 + op * 3))
    yield "bytes", pa.array(2 << (10 + op * 3))
    yield "redop", named(zeros, ["sum"])
    yield "timing_source", named(zeros, ["exact"])
    yield "state", named(zeros, ["done"])
    yield "step", pa.array(np.arange(count, dtype=np.int64) // 400)
    yield "start_ns_after", pa.array(took % 1000)
    yield "done_lo_ns", pa.array(took % 1000 + took)
    yield "done_hi_ns", pa.array(took % 1000 + took)
